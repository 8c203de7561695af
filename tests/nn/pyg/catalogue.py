"""Every convolution, aggregation, norm and jumping knowledge of torch_geometric, in a model of 5 columns to 3.

A convolution with other arguments than x and edge_index gets them from x and edge_attr: positions are columns of x,
types are signs of a column of edge_attr.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch_geometric.nn as pyg
from torch import Tensor
from torch.nn import Linear, ModuleList

from tests.nn.pyg.zoo import DEGREES, EDGE_DIM, HIDDEN, IN, MODULES, OUT, Two, mlp, normed, two

Factory = Callable[[], torch.nn.Module]
Call = Callable[[Any, Tensor, Tensor, Tensor], Tensor]
"""(convolution, x, edge_index, edge_attr) → output."""


class Called(torch.nn.Module):
    """A convolution called by a function, and a SAGEConv that reads its output."""

    def __init__(self, conv: torch.nn.Module, call: Call, channels: int = HIDDEN) -> None:
        super().__init__()
        self.conv, self.call = conv, call
        self.last = pyg.SAGEConv(channels, OUT)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        return self.last(torch.relu(self.call(self.conv, x, edge_index, edge_attr)), edge_index)


def called(make: Callable[[], torch.nn.Module], call: Call, channels: int = HIDDEN) -> Factory:
    return lambda: Called(make(), call, channels)


def edge_types(edge_attr: Tensor) -> Tensor:
    return (edge_attr[:, 0] > 0).long() + (edge_attr[:, 1] > 0).long()


def typed(conv: Any, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
    return conv(x, edge_index, edge_types(edge_attr))  # type: ignore[no-any-return]


def with_attributes(conv: Any, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
    return conv(x, edge_index, edge_attr)  # type: ignore[no-any-return]


def signed(conv: Any, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
    is_positive = edge_attr[:, 0] > 0
    return conv(x, edge_index[:, is_positive], edge_index[:, ~is_positive])  # type: ignore[no-any-return]


def with_positions(conv: Any, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
    return conv(x, x[:, :3], edge_index)  # type: ignore[no-any-return]


def with_normals(conv: Any, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
    normals = torch.nn.functional.normalize(x[:, 2:], dim=-1)
    return conv(x, x[:, :3], normals, edge_index)  # type: ignore[no-any-return]


def with_first_rows(conv: Any, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
    return conv(torch.tanh(x), x, edge_index)  # type: ignore[no-any-return]


def of_two_layers(conv: Any, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
    return conv(torch.stack([x, torch.tanh(x)], 1), edge_index)  # type: ignore[no-any-return]


def with_all_types(conv: Any, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
    return conv(x, edge_index, (x[:, 0] > 0).long(), edge_types(edge_attr), edge_attr)  # type: ignore[no-any-return]


def of_colours(conv: Any, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
    return conv((x[:, 0] > 0).long(), edge_index).view(-1, 1).to(x.dtype) + x  # type: ignore[no-any-return]


def of_a_mesh(conv: Any, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
    """The first four in-edges of every node that has so many."""
    dst = edge_index[1]
    count = torch.zeros(x.size(0), dtype=torch.long).scatter_add_(0, dst, torch.ones_like(dst))
    place = torch.arange(dst.numel()) - (count.cumsum(0) - count)[dst]
    return conv(x, edge_index[:, (place < 4) & (count[dst] >= 4)])  # type: ignore[no-any-return]


NODE = "node"
RELATIONS = [(NODE, "likes", NODE), (NODE, "knows", NODE)]
METADATA = ([NODE], RELATIONS)


def of_relations(conv: Any, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
    is_first = edge_attr[:, 0] > 0
    edges = dict(zip(RELATIONS, (edge_index[:, is_first], edge_index[:, ~is_first]), strict=True))
    return conv({NODE: x}, edges)[NODE]  # type: ignore[no-any-return]


def sage(kind: tuple[str, str, str]) -> pyg.MessagePassing:
    return pyg.SAGEConv((IN, IN), HIDDEN)


def performer() -> pyg.GPSConv:
    """A GPSConv whose projection does not depend on the number of threads that build it."""
    conv = pyg.GPSConv(IN, pyg.SAGEConv(IN, IN), attn_type="performer")
    matrix = conv.attn.fast_attn.projection_matrix
    matrix.copy_(torch.linspace(-1, 1, matrix.numel()).view_as(matrix))
    return conv


SCALERS = ["identity", "amplification", "attenuation"]

CONVOLUTIONS: dict[str, Factory] = {
    "SimpleConv": lambda: Two(pyg.SimpleConv("mean", "cat"), pyg.SAGEConv(2 * IN, OUT)),
    "GCNConv": two(pyg.GCNConv, "edge_weight"),
    "ChebConv": two(lambda i, o: pyg.ChebConv(i, o, K=3), "edge_weight"),
    "SAGEConv": two(lambda i, o: pyg.SAGEConv(i, o, normalize=True, project=True)),
    "GraphConv": MODULES["GraphConv"],
    "GatedGraphConv": MODULES["GatedGraphConv"],
    "ResGatedGraphConv": two(lambda i, o: pyg.ResGatedGraphConv(i, o, edge_dim=EDGE_DIM), "edge_attr"),
    "GATConv": two(lambda i, o: pyg.GATConv(i, o, heads=2, concat=False, edge_dim=EDGE_DIM), "edge_attr"),
    "GATv2Conv": two(lambda i, o: pyg.GATv2Conv(i, o, heads=2, concat=False, edge_dim=EDGE_DIM), "edge_attr"),
    "TransformerConv": MODULES["TransformerConv"],
    "AGNNConv": MODULES["AGNNConv"],
    "TAGConv": MODULES["TAGConv"],
    "GINConv": lambda: Two(pyg.GINConv(mlp(IN, HIDDEN), train_eps=True), pyg.GINConv(mlp(HIDDEN, OUT))),
    "GINEConv": MODULES["GINEConv"],
    "ARMAConv": two(lambda i, o: pyg.ARMAConv(i, o, num_stacks=2, num_layers=2), "edge_weight"),
    "SGConv": two(lambda i, o: pyg.SGConv(i, o, K=2), "edge_weight"),
    "SSGConv": two(lambda i, o: pyg.SSGConv(i, o, alpha=0.1, K=2), "edge_weight"),
    "APPNP": MODULES["APPNP"],
    "MFConv": MODULES["MFConv"],
    "RGCNConv": called(lambda: pyg.RGCNConv(IN, HIDDEN, 3, num_bases=2), typed),
    "FastRGCNConv": called(lambda: pyg.FastRGCNConv(IN, HIDDEN, 3, num_bases=2), typed),
    "RGATConv": called(lambda: pyg.RGATConv(IN, HIDDEN, 3, num_bases=2), typed),
    "SignedConv": called(lambda: pyg.SignedConv(IN, HIDDEN // 2, first_aggr=True), signed),
    "DNAConv": called(lambda: pyg.DNAConv(IN), of_two_layers, IN),
    "PointNetConv": called(lambda: pyg.PointNetConv(mlp(IN + 3, HIDDEN), mlp(HIDDEN, HIDDEN)), with_positions),
    "GMMConv": two(lambda i, o: pyg.GMMConv(i, o, dim=EDGE_DIM, kernel_size=2), "edge_attr"),
    "NNConv": MODULES["NNConv"],
    "CGConv": called(lambda: pyg.CGConv(IN, EDGE_DIM), with_attributes, IN),
    "EdgeConv": lambda: Two(pyg.EdgeConv(mlp(2 * IN, HIDDEN)), pyg.EdgeConv(mlp(2 * HIDDEN, OUT))),
    "PPFConv": called(lambda: pyg.PPFConv(mlp(IN + 4, HIDDEN), mlp(HIDDEN, HIDDEN)), with_normals),
    "FeaStConv": MODULES["FeaStConv"],
    "PointTransformerConv": called(lambda: pyg.PointTransformerConv(IN, HIDDEN), with_positions),
    "HypergraphConv": two(pyg.HypergraphConv),
    "LEConv": MODULES["LEConv"],
    "PNAConv": two(
        lambda i, o: pyg.PNAConv(i, o, ["mean", "max", "std"], SCALERS, DEGREES, edge_dim=EDGE_DIM), "edge_attr"
    ),
    "ClusterGCNConv": MODULES["ClusterGCNConv"],
    "GENConv": MODULES["GENConv"],
    "GCN2Conv": called(lambda: pyg.GCN2Conv(IN, 0.1, 0.5, 1), with_first_rows, IN),
    "WLConv": called(pyg.WLConv, of_colours, IN),
    "WLConvContinuous": lambda: Two(pyg.WLConvContinuous(), pyg.SAGEConv(IN, OUT)),
    "FiLMConv": called(lambda: pyg.FiLMConv(IN, HIDDEN, 3), typed),
    "SuperGATConv": two(pyg.SuperGATConv),
    "FAConv": called(lambda: pyg.FAConv(IN), with_first_rows, IN),
    "EGConv": lambda: Two(
        pyg.EGConv(IN, HIDDEN, ["symnorm", "max", "std"], 4), pyg.SAGEConv(HIDDEN, OUT)
    ),
    "PDNConv": two(lambda i, o: pyg.PDNConv(i, o, EDGE_DIM, HIDDEN), "edge_attr"),
    "GeneralConv": MODULES["GeneralConv"],
    "HGTConv": called(lambda: pyg.HGTConv(IN, HIDDEN, METADATA, heads=2), of_relations),
    "HEATConv": called(lambda: pyg.HEATConv(IN, HIDDEN, 2, 3, 4, EDGE_DIM, 4), with_all_types),
    "HeteroConv": called(lambda: pyg.HeteroConv({kind: sage(kind) for kind in RELATIONS}), of_relations),
    "HANConv": called(lambda: pyg.HANConv(IN, HIDDEN, METADATA, heads=2), of_relations),
    "LGConv": lambda: Two(pyg.LGConv(), pyg.SAGEConv(IN, OUT)),
    "PointGNNConv": called(
        lambda: pyg.PointGNNConv(mlp(IN, 3), mlp(IN + 3, HIDDEN), mlp(HIDDEN, IN)), with_positions, IN
    ),
    "GPSConv": lambda: Two(pyg.GPSConv(IN, pyg.SAGEConv(IN, IN)), pyg.SAGEConv(IN, OUT)),
    "AntiSymmetricConv": lambda: Two(pyg.AntiSymmetricConv(IN, num_iters=2), pyg.SAGEConv(IN, OUT)),
    "DirGNNConv": MODULES["DirGNNConv"],
    "MixHopConv": MODULES["MixHopConv"],
    "MeshCNNConv": called(
        lambda: pyg.MeshCNNConv(IN, HIDDEN, ModuleList(Linear(IN, HIDDEN) for _ in range(5))), of_a_mesh
    ),
}  # fmt: skip

NEEDS_LIBRARY = {
    "CuGraphSAGEConv": "pylibcugraphops",
    "CuGraphGATConv": "pylibcugraphops",
    "CuGraphRGCNConv": "pylibcugraphops",
    "FusedGATConv": "dgNN",
    "GravNetConv": "torch-cluster",
    "DynamicEdgeConv": "torch-cluster",
    "XConv": "torch-cluster",
    "SplineConv": "torch-spline-conv",
    "PANConv": "torch-sparse",
}
"""Convolutions that plain torch_geometric does not run on a CPU."""

VARIANTS: dict[str, Factory] = {
    "GCNConv, cached": two(lambda i, o: pyg.GCNConv(i, o, cached=True), "edge_weight"),
    "SGConv, cached": two(lambda i, o: pyg.SGConv(i, o, K=2, cached=True)),
    "SAGEConv, target to source": two(lambda i, o: pyg.SAGEConv(i, o, flow="target_to_source")),
    "GCNConv, target to source": two(lambda i, o: pyg.GCNConv(i, o, flow="target_to_source"), "edge_weight"),
    "GCNConv, improved, not normalized": lambda: Two(
        pyg.GCNConv(IN, HIDDEN, improved=True), pyg.GCNConv(HIDDEN, OUT, normalize=False), ("edge_weight",)
    ),
    "RGCNConv, blocks": called(lambda: pyg.RGCNConv(IN, 2 * IN, 3, num_blocks=IN), typed, 2 * IN),
    "GATConv, fill by sum": two(
        lambda i, o: pyg.GATConv(i, o, edge_dim=EDGE_DIM, fill_value="add", residual=True), "edge_attr"
    ),
    "GATConv, no self-loops": two(lambda i, o: pyg.GATConv(i, o, add_self_loops=False)),
    "GENConv, power mean": two(lambda i, o: pyg.GENConv(i, o, aggr="powermean", learn_p=True, msg_norm=True)),
    "GPSConv, performer": lambda: Two(performer(), pyg.SAGEConv(IN, OUT)),
}


def aggregated(make: Callable[[], Any], channels: int = HIDDEN) -> Factory:
    """Two SimpleConv-like layers around an aggregation of HIDDEN columns to ``channels``."""

    def build() -> torch.nn.Module:
        enter = pyg.SAGEConv(IN, HIDDEN)
        steps = [
            (enter, "x, edge_index -> x"),
            (pyg.SimpleConv(make()), "x, edge_index -> x"),
            (pyg.SAGEConv(channels, OUT), "x, edge_index -> x"),
        ]
        return pyg.Sequential("x, edge_index", steps)

    return build


def _multi(mode: str) -> Factory:
    channels = 3 * HIDDEN if mode == "cat" else HIDDEN
    kwargs = {"in_channels": HIDDEN, "out_channels": HIDDEN, "num_heads": 2} if mode == "attn" else None
    return aggregated(lambda: pyg.MultiAggregation(["mean", "max", "std"], mode=mode, mode_kwargs=kwargs), channels)


AGGREGATIONS: dict[str, Factory] = {
    **{f"MultiAggregation, {mode}": _multi(mode) for mode in ("cat", "sum", "attn")},
    "SumAggregation": aggregated(pyg.SumAggregation),
    "MeanAggregation": aggregated(pyg.MeanAggregation),
    "MaxAggregation": aggregated(pyg.MaxAggregation),
    "MinAggregation": aggregated(pyg.MinAggregation),
    "MulAggregation": aggregated(pyg.MulAggregation),
    "VarAggregation": aggregated(pyg.VarAggregation),
    "StdAggregation": aggregated(pyg.StdAggregation),
    "SoftmaxAggregation": aggregated(lambda: pyg.SoftmaxAggregation(learn=True)),
    "PowerMeanAggregation": aggregated(lambda: pyg.PowerMeanAggregation(p=2.0, learn=True)),
    "MedianAggregation": aggregated(pyg.MedianAggregation),
    "QuantileAggregation": aggregated(lambda: pyg.QuantileAggregation(0.3)),
    "LSTMAggregation": aggregated(lambda: pyg.LSTMAggregation(HIDDEN, HIDDEN)),
    "GRUAggregation": aggregated(lambda: pyg.GRUAggregation(HIDDEN, HIDDEN)),
    "Set2Set": aggregated(lambda: pyg.Set2Set(HIDDEN, 2), 2 * HIDDEN),
    "DegreeScalerAggregation": aggregated(
        lambda: pyg.DegreeScalerAggregation(["mean", "max"], SCALERS, DEGREES, train_norm=True), 6 * HIDDEN
    ),
    "SortAggregation": aggregated(lambda: pyg.SortAggregation(3), 3 * HIDDEN),
    "GraphMultisetTransformer": aggregated(lambda: pyg.GraphMultisetTransformer(HIDDEN, 2, heads=2)),
    "AttentionalAggregation": aggregated(lambda: pyg.AttentionalAggregation(Linear(HIDDEN, 1))),
    "EquilibriumAggregation": aggregated(lambda: pyg.EquilibriumAggregation(HIDDEN, HIDDEN, [8], grad_iter=2)),
    "MLPAggregation": aggregated(lambda: pyg.MLPAggregation(HIDDEN, HIDDEN, 6, num_layers=1)),
    "DeepSetsAggregation": aggregated(lambda: pyg.DeepSetsAggregation(Linear(HIDDEN, HIDDEN), Linear(HIDDEN, HIDDEN))),
    "SetTransformerAggregation": aggregated(lambda: pyg.SetTransformerAggregation(HIDDEN, heads=2)),
    "LCMAggregation": aggregated(lambda: pyg.LCMAggregation(HIDDEN, HIDDEN)),
    "VariancePreservingAggregation": aggregated(pyg.VariancePreservingAggregation),
    "PatchTransformerAggregation": aggregated(lambda: pyg.PatchTransformerAggregation(HIDDEN, HIDDEN, 2, HIDDEN)),
}


class Normed(torch.nn.Module):
    """A norm between two convolutions, called with a function of (norm, x, neighbours' rows)."""

    def __init__(self, norm: torch.nn.Module, call: Callable[[Any, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.norm, self.last, self.call = pyg.SAGEConv(IN, IN), norm, pyg.SAGEConv(IN, OUT), call

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.last(self.call(self.norm, x, self.first(x, edge_index)), edge_index)


def by_sign(norm: Any, x: Tensor, out: Tensor) -> Tensor:
    return norm(out, (x[:, 0] > 0).long())  # type: ignore[no-any-return]


NORMS: dict[str, Factory] = {
    "BatchNorm": lambda: normed(pyg.BatchNorm(HIDDEN)),
    "HeteroBatchNorm": lambda: Normed(pyg.HeteroBatchNorm(IN, 2), by_sign),
    "InstanceNorm": lambda: normed(pyg.InstanceNorm(HIDDEN, affine=True, track_running_stats=True)),
    "LayerNorm, graph": lambda: normed(pyg.LayerNorm(HIDDEN)),
    "LayerNorm, node": lambda: normed(pyg.LayerNorm(HIDDEN, mode="node")),
    "HeteroLayerNorm": lambda: Normed(pyg.HeteroLayerNorm(IN, 2), by_sign),
    "GraphNorm": lambda: normed(pyg.GraphNorm(HIDDEN)),
    "GraphSizeNorm": lambda: normed(pyg.GraphSizeNorm()),
    "PairNorm": lambda: normed(pyg.PairNorm()),
    "PairNorm, of nodes": lambda: normed(pyg.PairNorm(scale_individually=True)),
    "MeanSubtractionNorm": lambda: normed(pyg.MeanSubtractionNorm()),
    "MessageNorm": lambda: Normed(pyg.MessageNorm(learn_scale=True), lambda norm, x, out: norm(x, out)),
    "DiffGroupNorm": lambda: normed(pyg.DiffGroupNorm(HIDDEN, 2)),
}

JUMPS: dict[str, Factory] = {
    f"JumpingKnowledge, {mode}": lambda mode=mode: pyg.GraphSAGE(IN, HIDDEN, 3, OUT, jk=mode)
    for mode in ("last", "cat", "max", "lstm")
}

MODELS = {name: MODULES[name] for name in MODULES if not name.endswith("Conv") and name not in CONVOLUTIONS}

TABLE = {
    "Convolutions": CONVOLUTIONS,
    "Convolutions with other options": VARIANTS,
    "Aggregations": AGGREGATIONS,
    "Norms": NORMS,
    "Jumping knowledge": JUMPS,
    "Models": MODELS,
}
ALL: dict[str, Factory] = {name: make for group in TABLE.values() for name, make in group.items()}

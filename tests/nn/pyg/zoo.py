"""torch_geometric models and hand-written modules, none of them written for gnnfleet: 5 input columns, 3 outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch_geometric.nn as pyg
from torch import Tensor
from torch.nn import BatchNorm1d, Linear, ReLU, Sequential
from torch_geometric.utils import add_self_loops, degree, remove_self_loops, scatter, softmax

IN, HIDDEN, OUT, EDGE_DIM = 5, 8, 3, 3
DEGREES = torch.tensor([8, 3, 4, 8, 9, 10, 8, 5, 3, 2])


class MessageMLP(pyg.MessagePassing):
    """An MLP of both ends and the edge in every message, and several aggregations."""

    def __init__(self, in_channels: int, out_channels: int, aggr: tuple[str, ...] = ("mean", "max", "std")) -> None:
        super().__init__(aggr=list(aggr), node_dim=0)
        self.mlp = Sequential(Linear(2 * in_channels + EDGE_DIM, 16), ReLU(), Linear(16, out_channels))
        self.post = Linear(len(aggr) * out_channels, out_channels)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        return self.post(self.propagate(edge_index, x=x, edge_attr=edge_attr))

    def message(self, x_i: Tensor, x_j: Tensor, edge_attr: Tensor) -> Tensor:
        return self.mlp(torch.cat([x_i, x_j - x_i, edge_attr], -1))


class Attention(pyg.MessagePassing):
    """A softmax by destination, self-loops handled by the module, and an update."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__(aggr="add")
        self.query, self.key, self.value = (Linear(in_channels, out_channels) for _ in range(3))
        self.out = Linear(in_channels + out_channels, out_channels)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        edge_index, _ = remove_self_loops(edge_index)
        edge_index, _ = add_self_loops(edge_index, num_nodes=x.size(0))
        return self.propagate(edge_index, q=self.query(x), k=self.key(x), v=self.value(x), x=x)

    def message(self, q_i: Tensor, k_j: Tensor, v_j: Tensor, index: Tensor, ptr: Any, size_i: int) -> Tensor:
        return softmax((q_i * k_j).sum(-1, keepdim=True), index, ptr, size_i) * v_j

    def update(self, out: Tensor, x: Tensor) -> Tensor:
        return self.out(torch.cat([out, x], 1))


class Scattered(torch.nn.Module):
    """No MessagePassing: rows by edge_index, sums over destinations and over sources."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.lin = Linear(in_channels, out_channels)

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor) -> Tensor:
        row, col = edge_index
        scale = degree(col, x.size(0), dtype=x.dtype).clamp(min=1).pow(-0.5)
        norm = (scale[row] * edge_weight * scale[col]).view(-1, 1)
        h = self.lin(x)
        out = scatter(norm * h[row], col, dim=0, dim_size=x.size(0), reduce="sum")
        return torch.tanh(out) + scatter(norm * h[col], row, dim=0, dim_size=x.size(0), reduce="sum")


class Mixed(torch.nn.Module):
    """Three kinds of convolutions with residuals, norms, jumping knowledge and a skip of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = Linear(IN, HIDDEN)
        self.convs = torch.nn.ModuleList(
            [
                pyg.SAGEConv(HIDDEN, HIDDEN),
                pyg.GATv2Conv(HIDDEN, HIDDEN // 2, heads=2, edge_dim=EDGE_DIM),
                MessageMLP(HIDDEN, HIDDEN),
            ]
        )
        self.norms = torch.nn.ModuleList(
            [BatchNorm1d(HIDDEN), pyg.BatchNorm(HIDDEN), pyg.LayerNorm(HIDDEN, mode="node")]
        )
        self.jump = pyg.JumpingKnowledge("lstm", HIDDEN, 3)
        self.out = Linear(HIDDEN + IN, OUT)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        h, outputs = self.enter(x), []
        for index, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            out = conv(h, edge_index) if index == 0 else conv(h, edge_index, edge_attr)
            h = h + torch.relu(norm(out))
            outputs.append(h)
        return self.out(torch.cat([self.jump(outputs), x], 1))


class Two(torch.nn.Module):
    """Two convolutions that get some of the edge inputs."""

    def __init__(self, first: torch.nn.Module, second: torch.nn.Module, inputs: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.first, self.second, self.inputs = first, second, inputs

    def forward(
        self, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None = None, edge_attr: Tensor | None = None
    ) -> Tensor:
        values = {"edge_weight": edge_weight, "edge_attr": edge_attr}
        inputs = {name: values[name] for name in self.inputs}
        return self.second(torch.relu(self.first(x, edge_index, **inputs)), edge_index, **inputs)


def two(make: Callable[[int, int], torch.nn.Module], *inputs: str) -> Callable[[], torch.nn.Module]:
    return lambda: Two(make(IN, HIDDEN), make(HIDDEN, OUT), inputs)


def mlp(in_channels: int, out_channels: int) -> Sequential:
    return Sequential(Linear(in_channels, HIDDEN), ReLU(), Linear(HIDDEN, out_channels))


def normed(norm: torch.nn.Module) -> torch.nn.Module:
    """Two convolutions with a norm between them."""
    first, second = pyg.SAGEConv(IN, HIDDEN), pyg.SAGEConv(HIDDEN, OUT)
    steps = [(first, "x, edge_index -> x"), (norm, "x -> x"), (second, "x, edge_index -> x")]
    return pyg.Sequential("x, edge_index", steps)


MODULES: dict[str, Callable[[], torch.nn.Module]] = {
    "GraphSAGE": lambda: pyg.GraphSAGE(IN, HIDDEN, 3, OUT),
    "GraphSAGE max, jk cat, batch norm": lambda: pyg.GraphSAGE(IN, HIDDEN, 3, OUT, aggr="max", jk="cat", norm="batch"),
    "GCN": lambda: pyg.GCN(IN, HIDDEN, 3, OUT),
    "GCN jk lstm, batch norm": lambda: pyg.GCN(IN, HIDDEN, 3, OUT, jk="lstm", norm="BatchNorm"),
    "GAT": lambda: pyg.GAT(IN, HIDDEN, 3, OUT, heads=2),
    "GAT edges": lambda: pyg.GAT(IN, HIDDEN, 2, OUT, heads=2, edge_dim=EDGE_DIM),
    "GATv2": lambda: pyg.GAT(IN, HIDDEN, 2, OUT, heads=2, v2=True, edge_dim=EDGE_DIM),
    "GIN batch norm": lambda: pyg.GIN(IN, HIDDEN, 3, OUT, norm="batch_norm"),
    "PNA": lambda: pyg.PNA(
        IN, HIDDEN, 2, OUT, aggregators=["mean", "min", "max", "std", "var"],
        scalers=["identity", "amplification", "attenuation"], deg=DEGREES, edge_dim=EDGE_DIM,
    ),
    "EdgeCNN": lambda: pyg.EdgeCNN(IN, HIDDEN, 2, OUT),
    "message MLP": two(MessageMLP, "edge_attr"),
    "attention": two(Attention),
    "scattered": two(Scattered, "edge_weight"),
    "mixed": Mixed,
    "TransformerConv": two(
        lambda i, o: pyg.TransformerConv(i, o, heads=2, concat=False, edge_dim=EDGE_DIM), "edge_attr"
    ),
    "GeneralConv": two(lambda i, o: pyg.GeneralConv(i, o, in_edge_channels=EDGE_DIM, attention=True), "edge_attr"),
    "GENConv": two(lambda i, o: pyg.GENConv(i, o, edge_dim=EDGE_DIM, learn_t=True), "edge_attr"),
    "NNConv": two(lambda i, o: pyg.NNConv(i, o, Linear(EDGE_DIM, i * o)), "edge_attr"),
    "CGConv": lambda: Two(pyg.CGConv(IN, EDGE_DIM), pyg.CGConv(IN, EDGE_DIM), ("edge_attr",)),
    "GINEConv": lambda: Two(
        pyg.GINEConv(mlp(IN, HIDDEN), edge_dim=EDGE_DIM),
        pyg.GINEConv(mlp(HIDDEN, OUT), edge_dim=EDGE_DIM),
        ("edge_attr",),
    ),
    "ResGatedGraphConv": two(lambda i, o: pyg.ResGatedGraphConv(i, o)),
    "GraphConv": two(lambda i, o: pyg.GraphConv(i, o), "edge_weight"),
    "TAGConv": two(lambda i, o: pyg.TAGConv(i, o, K=3), "edge_weight"),
    "SGConv": two(lambda i, o: pyg.SGConv(i, o, K=2)),
    "ChebConv": two(lambda i, o: pyg.ChebConv(i, o, K=3)),
    "ARMAConv": two(lambda i, o: pyg.ARMAConv(i, o, num_stacks=2, num_layers=2)),
    "APPNP": lambda: Two(pyg.SAGEConv(IN, OUT), pyg.APPNP(3, 0.1)),
    "GatedGraphConv": lambda: Two(pyg.GatedGraphConv(HIDDEN, 2), pyg.SAGEConv(HIDDEN, OUT)),
    "MixHopConv": lambda: Two(pyg.MixHopConv(IN, HIDDEN), pyg.SAGEConv(3 * HIDDEN, OUT)),
    "AGNNConv": lambda: Two(pyg.AGNNConv(), pyg.SAGEConv(IN, OUT)),
    "EGConv": lambda: Two(pyg.EGConv(IN, HIDDEN, num_heads=4), pyg.EGConv(HIDDEN, 4, num_heads=4)),
    "LEConv": two(lambda i, o: pyg.LEConv(i, o), "edge_weight"),
    "ClusterGCNConv": two(lambda i, o: pyg.ClusterGCNConv(i, o)),
    "FeaStConv": two(lambda i, o: pyg.FeaStConv(i, o, heads=2)),
    "MFConv": two(lambda i, o: pyg.MFConv(i, o)),
    "DirGNNConv": two(lambda i, o: pyg.DirGNNConv(pyg.SAGEConv(i, o))),
    "graph norm": lambda: pyg.GraphSAGE(IN, HIDDEN, 2, OUT, norm="graph_norm"),
    "pair norm": lambda: pyg.GraphSAGE(IN, HIDDEN, 2, OUT, norm="pair_norm"),
    "layer norm of the graph": lambda: pyg.GraphSAGE(IN, HIDDEN, 2, OUT, norm="layer_norm"),
    "mean subtraction norm": lambda: normed(pyg.MeanSubtractionNorm()),
    "graph size norm": lambda: normed(pyg.GraphSizeNorm()),
    "instance norm": lambda: pyg.GraphSAGE(IN, HIDDEN, 2, OUT, norm="instance_norm"),
    "Sequential": lambda: pyg.Sequential(
        "x, edge_index",
        [
            (pyg.GCNConv(IN, HIDDEN), "x, edge_index -> x"), ReLU(inplace=True),
            (pyg.GATConv(HIDDEN, HIDDEN), "x, edge_index -> h"), (lambda a, b: a + b, "x, h -> x"), Linear(HIDDEN, OUT),
        ],
    ),
}  # fmt: skip

REFUSED: dict[str, Callable[[], torch.nn.Module]] = {
    "SuperGATConv": two(lambda i, o: pyg.SuperGATConv(i, o, edge_sample_ratio=0.8)),
    "GraphUNet": lambda: pyg.GraphUNet(IN, HIDDEN, OUT, depth=2),
    "GPSConv, attention dropout": lambda: Two(
        pyg.GPSConv(IN, None, attn_kwargs={"dropout": 0.5}), pyg.SAGEConv(IN, OUT)
    ),
}


def build(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    return (MODULES | REFUSED)[name]().double().train()

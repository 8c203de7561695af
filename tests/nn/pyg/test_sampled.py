"""Sums of torch_geometric modules over sampled neighbours are scaled; batch norm takes rows that a layer computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor

from gnnfleet.errors import ConfigError
from gnnfleet.graph.sampling.sampler import NeighborSampler
from gnnfleet.graph.views.local import LocalView
from gnnfleet.nn.pyg.module import PygModule
from gnnfleet.ops.csr import CSR
from tests.equivalence.spread import KEY, plain_graph
from tests.nn.pyg.outcomes import build
from tests.nn.pyg.zoo import IN, MODULES, OUT, two

SEEDS = torch.tensor([3, 17, 25, 40, 51, 8])


def features() -> Tensor:
    x = plain_graph().single_nodes.x
    assert x is not None
    return x.double()


def model_of(make: Callable[[], torch.nn.Module]) -> PygModule:
    model = PygModule(build(make))
    model.split(plain_graph())
    assert not model.reason_whole
    return model


def drawn_twice() -> LocalView:
    """Every edge twice, as a sample of twice the degree: scaled sums, means and maxima are those of the graph."""
    view = LocalView.of_graph(plain_graph()).with_step(key=KEY, training=False)
    ((kind, edges),) = view.relations.items()
    order = torch.arange(edges.structure.num_edges).repeat_interleave(2)
    structure = CSR(edges.structure.indptr * 2, edges.structure.col[order], edges.structure.num_cols)
    scale = torch.full((edges.structure.num_rows,), 0.5, dtype=torch.float64)
    return replace(view, relations={kind: edges.select(structure, order, lambda: scale)})


@pytest.mark.parametrize(
    "name",
    [
        "GraphSAGE", "GraphSAGE max, jk cat, batch norm", "GCN", "GIN batch norm", "EdgeCNN", "message MLP",
        "TransformerConv", "GeneralConv", "GENConv", "NNConv", "CGConv", "GINEConv", "ResGatedGraphConv", "GraphConv",
        "LEConv",
    ],
)  # fmt: skip
def test_results_do_not_change_if_every_neighbor_is_drawn_twice(name: str) -> None:
    model, x = model_of(MODULES[name]).eval(), features()
    expected = model(LocalView.of_graph(plain_graph()).with_step(training=False), x)
    torch.testing.assert_close(model(drawn_twice(), x), expected, rtol=1e-10, atol=1e-10)


def test_a_sampled_sum_equals_a_sum_by_hand() -> None:
    model, x = model_of(lambda: pyg.GraphConv(IN, OUT)), features()
    (view,) = NeighborSampler(plain_graph(), [2]).blocks({"node": SEEDS}, KEY)
    edges, (relation,) = view.edge_list(), view.relations.values()
    degree = torch.bincount(plain_graph().single_edges.dst(), minlength=60)[SEEDS]
    assert edges.weight is not None and bool((degree > 2).any())
    total = torch.zeros(len(SEEDS), IN, dtype=torch.float64)
    for src, dst, weight in zip(*edges.index.tolist(), edges.weight.double(), strict=True):
        drawn = int(relation.structure.indptr.diff()[dst])
        total[dst] += weight * x[view.node_ids[src]] * float(degree[dst]) / drawn
    conv: torch.nn.Module = model.module
    expected = conv.lin_rel(total) + conv.lin_root(x[SEEDS])  # type: ignore[operator]
    torch.testing.assert_close(model(view, x[view.node_ids]), expected, rtol=1e-12, atol=1e-12)


def test_the_mean_of_many_samples_of_gcn_is_that_of_all_neighbors() -> None:
    model, x = model_of(lambda: pyg.GCNConv(IN, OUT)), features()
    expected = model(LocalView.of_graph(plain_graph()), x)[SEEDS].detach()
    sampler, draws = NeighborSampler(plain_graph(), [3]), []
    for step in range(150):
        (view,) = sampler.blocks({"node": SEEDS}, replace(KEY, step=step))
        draws.append(model(view, x[view.node_ids]).detach())
    sample = torch.stack(draws)
    error = (sample.mean(0) - expected).abs() / (sample.std(0) / len(draws) ** 0.5 + 1e-9)
    assert float(error.max()) < 4.5 and float(error.mean()) < 1.2


@pytest.mark.parametrize("name", ["EGConv", "PNA sum"])
def test_sums_that_cannot_be_scaled_are_refused(name: str) -> None:
    sums = two(lambda i, o: pyg.SAGEConv(i, o, aggr=["mean", "sum"]))
    model, x = model_of(MODULES.get(name, sums)), features()
    views = NeighborSampler(plain_graph(), [2, 2]).blocks({"node": SEEDS}, KEY)
    with pytest.raises(ConfigError, match=r"Conv combines messages in its own way.*fanouts of −1"):
        model(views, x[views[0].node_ids])


def test_batch_norm_in_a_convolution_takes_destinations_only() -> None:
    linear, norm = torch.nn.Linear(IN, OUT), torch.nn.BatchNorm1d(OUT)
    model, x = model_of(lambda: pyg.GINConv(torch.nn.Sequential(linear, norm))), features()
    (view,) = NeighborSampler(plain_graph(), [-1]).blocks({"node": SEEDS}, KEY)
    edges = plain_graph().single_edges.edge_index().long()
    rows = pyg.GINConv(linear)(x, edges)[SEEDS]
    expected = torch.nn.functional.batch_norm(rows, None, None, training=True)
    torch.testing.assert_close(model(view, x[view.node_ids]), expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(norm.running_mean, 0.1 * rows.mean(0), rtol=1e-10, atol=1e-10)

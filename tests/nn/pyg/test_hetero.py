"""Unchanged heterogeneous torch_geometric modules equal plain torch_geometric: outputs, gradients, buffers."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor
from torch.nn import BatchNorm1d, Dropout, Linear, ModuleDict
from torch_geometric.data import HeteroData

import gnnfleet as gf
from gnnfleet.comm.world import World
from gnnfleet.errors import ConfigError
from gnnfleet.graph.graph import EdgeType, Graph, validated_edges, validated_nodes
from gnnfleet.graph.views.local import LocalView
from gnnfleet.nn.pyg.module import PygModule
from gnnfleet.sharded.module_check import check_parts
from tests.equivalence.spread import KEY, cut_graph, open_view, related_graph
from tests.ranks import RankPool

IN, HIDDEN, OUT, EDGE_DIM = 4, 8, 3, 2
COUNTS = {"a": 30, "b": 20, "c": 6}
RELATIONS = [("a", "to", "b", 80), ("b", "back", "a", 70), ("a", "like", "a", 90), ("c", "on", "b", 15)]
RELATIONS += [("b", "off", "c", 9), ("c", "never", "a", 0)]
METADATA = (list(COUNTS), [(src, name, dst) for src, name, dst, _ in RELATIONS])


def graph_of_types() -> Graph:
    """Three node types; weights and features of edges within and between types, a relation without edges."""
    random = torch.Generator().manual_seed(1)
    nodes, edges = {}, {}
    for kind, count in COUNTS.items():
        x = torch.randn(count, IN, generator=random)
        label = {"y": torch.arange(count) % OUT, "split": torch.arange(count) % 3} if kind == "a" else {}
        nodes[kind] = validated_nodes(count, x=x, **label)
    for src, name, dst, count in RELATIONS:
        index = torch.stack([torch.randint(0, COUNTS[kind], (count,), generator=random) for kind in (src, dst)])
        weight, attr = torch.rand(count, generator=random) + 0.1, torch.randn(count, EDGE_DIM, generator=random)
        sizes = {"num_src": COUNTS[src], "num_dst": COUNTS[dst]}
        edges[EdgeType(src, name, dst)] = validated_edges(index, **sizes, weight=weight, attr=attr)
    return Graph.of(nodes, edges)


class Convs(torch.nn.Module):
    """Convolutions per relation, twice, with norms per type between them."""

    def __init__(self) -> None:
        super().__init__()
        first = {kind: pyg.SAGEConv(IN, HIDDEN) for kind in METADATA[1]}
        first["a", "like", "a"] = pyg.GCNConv(IN, HIDDEN)
        second = {
            kind: pyg.GATv2Conv(HIDDEN, HIDDEN // 2, heads=2, add_self_loops=False, edge_dim=EDGE_DIM)
            for kind in METADATA[1]
        }
        self.first, self.second = pyg.HeteroConv(first, "mean"), pyg.HeteroConv(second, "max")
        self.norms = ModuleDict({kind: BatchNorm1d(HIDDEN) for kind in COUNTS})
        self.graph_norm = pyg.LayerNorm(HIDDEN, mode="graph")
        self.out = Linear(HIDDEN, OUT)

    def forward(self, x_dict: Any, edge_index_dict: Any, edge_attr_dict: Any) -> Any:
        x_dict = self.first(x_dict, edge_index_dict)
        x_dict = {kind: torch.relu(self.norms[kind](x)) for kind, x in x_dict.items()}
        x_dict = self.second(x_dict, edge_index_dict, edge_attr_dict=edge_attr_dict)
        return {kind: self.out(self.graph_norm(x)) for kind, x in x_dict.items()}


class Transformers(torch.nn.Module):
    """Layers over all types, of one kind."""

    def __init__(self, make: Callable[[Any, int], torch.nn.Module]) -> None:
        super().__init__()
        self.enter = pyg.HeteroDictLinear(dict.fromkeys(COUNTS, IN), HIDDEN)
        self.layers = torch.nn.ModuleList([make(HIDDEN, HIDDEN), make(HIDDEN, HIDDEN)])
        self.out = Linear(HIDDEN, OUT)

    def forward(self, x_dict: Any, edge_index_dict: Any) -> Any:
        x_dict = {kind: x.relu() for kind, x in self.enter(x_dict).items()}
        for layer in self.layers:
            x_dict = layer(x_dict, edge_index_dict)
        return self.out(x_dict["a"])


class Own(torch.nn.Module):
    """Relations in a loop, sums per type, dropout of rows and of attention."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.enter = ModuleDict({kind: Linear(IN, HIDDEN) for kind in COUNTS})
        names = ["_".join(kind) for kind in METADATA[1]]
        attention = {"add_self_loops": False, "dropout": dropout}
        self.attend = ModuleDict({name: pyg.GATConv(HIDDEN, HIDDEN, **attention) for name in names})
        self.sum = ModuleDict({name: pyg.GraphConv(HIDDEN, HIDDEN, aggr="mean") for name in names})
        self.dropout, self.out = Dropout(dropout), Linear(HIDDEN, OUT)

    def forward(self, x_dict: Any, edge_index_dict: Any, edge_weight_dict: Any) -> Any:
        h = {kind: self.dropout(self.enter[kind](x)) for kind, x in x_dict.items()}
        rows = {kind: [x] for kind, x in h.items()}
        for kind, index in edge_index_dict.items():
            name, ends = "_".join(kind), (h[kind[0]], h[kind[2]])
            total = self.sum[name](ends, index, edge_weight_dict[kind])
            rows[kind[2]].append(self.dropout(total) + self.attend[name](ends, index))
        return self.out(self.dropout(torch.relu(sum(rows["a"]))))


class Relations(torch.nn.Module):
    """Relational convolutions on one node type."""

    def __init__(self, kind: Callable[..., torch.nn.Module]) -> None:
        super().__init__()
        self.first, self.second = kind(IN, HIDDEN, 4, num_bases=2), kind(HIDDEN, OUT, 4)

    def forward(self, x: Tensor, edge_index: Tensor, edge_type: Tensor) -> Tensor:
        return self.second(self.first(x, edge_index, edge_type).relu(), edge_index, edge_type)


def gat() -> torch.nn.Module:
    return pyg.GAT(
        (IN, IN), HIDDEN, 2, OUT, v2=True, heads=2, add_self_loops=False, norm="batch_norm", edge_dim=EDGE_DIM
    )


MODULES: dict[str, Callable[[], torch.nn.Module]] = {
    "HeteroConv": Convs,
    "to_hetero GraphSAGE": lambda: pyg.to_hetero(pyg.GraphSAGE(IN, HIDDEN, 2, OUT, jk="cat"), METADATA, "mean"),
    "to_hetero GAT": lambda: pyg.to_hetero(gat(), METADATA),
    "HGTConv": lambda: Transformers(lambda i, o: pyg.HGTConv(i, o, METADATA, heads=2)),
    "HANConv": lambda: Transformers(lambda i, o: pyg.HANConv(i, o, METADATA, heads=2)),
    "own": Own,
    "RGCNConv": lambda: Relations(pyg.RGCNConv),
    "FastRGCNConv": lambda: Relations(pyg.FastRGCNConv),
}


def build(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    return MODULES[name]().double().train()


def graph_for(name: str) -> Graph:
    return related_graph() if "RGCN" in name else graph_of_types()


def outcome(module: torch.nn.Module, out: Any, x: dict[str, Tensor], ids: dict[str, Tensor]) -> dict[str, Any]:
    """Run backward; everything that must be equal, rows with their store ids."""
    out = out if isinstance(out, dict) else {next(iter(x)): out}
    factor = torch.randn(64, OUT, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    total = torch.stack([(rows * factor[ids[kind]]).sum() for kind, rows in out.items()]).sum()
    total.backward()
    grads = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in module.named_parameters()}
    x_grads = {kind: torch.zeros_like(rows) if rows.grad is None else rows.grad for kind, rows in x.items()}
    return {
        "rows": {
            **{f"out of {kind}": (ids[kind], rows.detach()) for kind, rows in out.items()},
            **{f"x of {kind}": (ids[kind], rows) for kind, rows in x_grads.items()},
        },
        "parameters": grads,
        "buffers": {name: b.clone() for name, b in module.named_buffers() if b.is_floating_point()},
    }


def features(graph: Graph, ids: dict[str, Tensor]) -> dict[str, Tensor]:
    return {kind: graph.nodes[kind].x.double()[rows].requires_grad_() for kind, rows in ids.items()}  # type: ignore[union-attr]


def plain(name: str) -> dict[str, Any]:
    """The module as torch_geometric runs it."""
    graph, module = graph_for(name), build(name)
    ids = {kind: torch.arange(nodes.count) for kind, nodes in graph.nodes.items()}
    x = features(graph, ids)
    indices = {tuple(kind): edges.edge_index() for kind, edges in graph.edges.items()}
    if "RGCN" in name:
        numbers = [torch.full((index.shape[1],), number) for number, index in enumerate(indices.values())]
        return outcome(module, module(x["node"], torch.cat([*indices.values()], 1), torch.cat(numbers)), x, ids)
    inputs: dict[str, Any] = {"x_dict": x, "edge_index_dict": indices}
    for data in ("weight", "attr"):
        inputs[f"edge_{data}_dict"] = {tuple(kind): getattr(e, data).double() for kind, e in graph.edges.items()}
    names = [*inspect.signature(module.forward).parameters]
    inputs = {argument: inputs[key] for key in inputs if (argument := key if key in names else key[:-5]) in names}
    return outcome(module, module(**inputs), x, ids)


def on_view(view: Any, name: str, module: torch.nn.Module | None = None) -> dict[str, Any]:
    module = module or build(name)
    ids = {kind: view.for_type(kind).node_ids for kind in view.node_types}
    x = features(graph_for(name), ids)
    return outcome(module, PygModule(module)(view, x if len(x) > 1 else next(iter(x.values()))), x, ids)


def on_rank(world: World, path: str, names: list[str]) -> dict[str, dict[str, Any]]:
    return {name: on_view(open_view(world, path, 1, 1), name) for name in names}


def joined(outcomes: list[dict[str, Any]]) -> dict[str, Any]:
    """Rows in store order, gradients of parameters summed."""
    first = outcomes[0]
    rows = {}
    for name in first["rows"]:
        ids, values = zip(*(one["rows"][name] for one in outcomes), strict=True)
        rows[name] = (torch.arange(len(torch.cat(ids))), torch.cat(values)[torch.argsort(torch.cat(ids))])
    grads = {name: torch.stack([one["parameters"][name] for one in outcomes]).sum(0) for name in first["parameters"]}
    return {"rows": rows, "parameters": grads, "buffers": first["buffers"]}


def assert_equal(actual: dict[str, Any], expected: dict[str, Any], name: str) -> None:
    assert actual["rows"].keys() == expected["rows"].keys()
    for key, (_, value) in expected["rows"].items():
        torch.testing.assert_close(
            actual["rows"][key][1], value, rtol=1e-10, atol=1e-10, msg=f"{name}, {key}: {{}}".format
        )
    for group in ("parameters", "buffers"):
        for key, value in expected[group].items():
            torch.testing.assert_close(
                actual[group][key], value, rtol=1e-10, atol=1e-10, msg=f"{name}, {key}: {{}}".format
            )


@pytest.mark.parametrize("name", MODULES)
def test_a_module_on_a_view_of_the_whole_graph_equals_torch_geometric(name: str) -> None:
    assert_equal(on_view(LocalView.of_graph(graph_for(name)).with_step(key=KEY), name), plain(name), name)


@pytest.mark.parametrize(("size", "cut"), [(2, "random"), (3, "edgeless")])
def test_modules_on_parts_equal_torch_geometric(pool: RankPool, tmp_path: Path, size: int, cut: str) -> None:
    typed = cut_graph(graph_of_types(), size, cut, tmp_path / "typed")
    related = cut_graph(related_graph(), size, cut, tmp_path / "related")
    relational = [name for name in MODULES if "RGCN" in name]
    outcomes = pool.run(size, on_rank, str(typed), [name for name in MODULES if name not in relational])
    for rank, more in zip(outcomes, pool.run(size, on_rank, str(related), relational), strict=True):
        rank.update(more)
    for name in MODULES:
        assert_equal(joined([rank[name] for rank in outcomes]), plain(name), name)


def dropped(view: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    return on_view(view, "own", Own(0.4).double().train())


def dropped_on_rank(world: World, path: str) -> dict[str, Any]:
    return dropped(open_view(world, path, 1, 1))


def test_dropout_draws_by_the_ids_of_the_node_type(pool: RankPool, tmp_path: Path) -> None:
    graph = graph_of_types()
    expected = dropped(LocalView.of_graph(graph).with_step(key=KEY, layer=1))
    without = dropped(LocalView.of_graph(graph).with_step(key=KEY, training=False))
    assert not torch.allclose(expected["rows"]["out of a"][1], without["rows"]["out of a"][1])
    path = cut_graph(graph, 2, "random", tmp_path / "parts")
    assert_equal(joined(pool.run(2, dropped_on_rank, str(path))), expected, "dropout")


MODEL_FILE = """
import torch
import torch_geometric.nn as pyg


class Typed(torch.nn.Module):
    def __init__(self, metadata, hidden, out_channels):
        super().__init__()
        self.first = pyg.HeteroConv({kind: pyg.SAGEConv((-1, -1), hidden) for kind in metadata[1]})
        self.norms = torch.nn.ModuleDict({kind: torch.nn.BatchNorm1d(hidden) for kind in metadata[0]})
        self.dropout = torch.nn.Dropout(0.3)
        self.second, self.out = pyg.HGTConv(-1, hidden, metadata, heads=2), pyg.Linear(-1, out_channels)

    def forward(self, x_dict, edge_index_dict):
        x_dict = self.first(x_dict, edge_index_dict)
        x_dict = {kind: self.dropout(torch.relu(self.norms[kind](x))) for kind, x in x_dict.items()}
        return {kind: self.out(x) for kind, x in self.second(x_dict, edge_index_dict).items()}


def typed(config, graph, out_channels):
    return Typed(graph.metadata(), config.hidden, out_channels)


def unconverted(config, graph, out_channels):
    return pyg.GraphSAGE(4, config.hidden, 2, out_channels)


def related(config, graph, out_channels):
    return pyg.RGCNConv(4, out_channels, len(graph.edges))
"""


@pytest.fixture(scope="module")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "mine.py"
    path.write_text(MODEL_FILE)
    return path


def hetero_data() -> HeteroData:
    data = HeteroData()
    for kind, nodes in graph_of_types().nodes.items():
        data[kind].x = nodes.x
    data["a"].y = torch.arange(COUNTS["a"]) % OUT
    for kind, edges in graph_of_types().edges.items():
        data[tuple(kind)].edge_index = edges.edge_index()
    return data


def trained(data: Any, model: str, **options: Any) -> gf.Record:
    settings = {"epochs": 4, "seed": 1, "lr": 0.01, "split": "0.6/0.2/0.2", **options}
    return gf.train(data, model={"name": model, "hidden": 8}, **settings)


def test_hetero_data_is_trained_resumed_and_queried(model_file: Path, tmp_path: Path) -> None:
    model, data, run = f"{model_file}:typed", hetero_data(), tmp_path / "run"
    trained(data, model, epochs=2, run_dir=run)
    local = trained(data, model, run_dir=run, resume=True)
    spread = trained(data, model, strategy="sar", workers=2)
    assert spread.metrics["train_loss"] == pytest.approx(local.metrics["train_loss"], rel=1e-5)
    assert spread.metrics["test"] == local.metrics["test"]
    assert spread.predict() == local.predict()


def test_relations_of_one_node_type_come_as_edge_type(model_file: Path) -> None:
    assert trained(related_graph(), f"{model_file}:related", epochs=1).metrics["train_loss"] > 0


@pytest.mark.parametrize(
    ("factory", "changes", "message"),
    [
        (
            "unconverted",
            {},
            r"takes one node type and one edge type: this graph has 3 and 6\. Use torch_geometric\.nn\.to",
        ),
        ("typed", {"strategy": "pipe", "workers": 2}, "runs layers one by one"),
        ("typed", {"strategy": "macrobatch"}, "runs layers one by one"),
        ("typed", {"x": None}, "nodes of type b have no features, and Typed needs x: import"),
    ],
)
def test_other_runs_are_refused(model_file: Path, factory: str, changes: dict[str, Any], message: str) -> None:
    data = hetero_data()
    if "x" in changes:
        del data["b"].x
        data["b"].num_nodes = COUNTS["b"]
    options = {name: value for name, value in changes.items() if name != "x"}
    with pytest.raises(ConfigError, match=message):
        trained(data, f"{model_file}:{factory}", **options)


def test_draws_for_rows_of_an_unknown_type_are_refused() -> None:
    class Sorted(Own):
        def forward(self, x_dict: Any, edge_index_dict: Any, edge_weight_dict: Any) -> Any:
            x_dict = {kind: self.dropout(x.sort(0).values) for kind, x in x_dict.items()}
            return super().forward(x_dict, edge_index_dict, edge_weight_dict)

    view = LocalView.of_graph(graph_of_types()).with_step(key=KEY)
    with pytest.raises(ConfigError, match="rows whose node type is unknown: apply dropout to rows of x_dict"):
        on_view(view, "own", Sorted(0.4).double())


class Centred(Own):
    def forward(self, x_dict: Any, edge_index_dict: Any, edge_weight_dict: Any) -> Any:
        x_dict = {kind: x - x.mean(0) if len(x) else x for kind, x in x_dict.items()}
        return super().forward(x_dict, edge_index_dict, edge_weight_dict)


def test_the_self_check_runs_on_a_typed_graph() -> None:
    check_parts(PygModule(build("own").float()), graph_of_types())
    with pytest.raises(ConfigError, match=r"Centred on 2 parts of a graph differs .* in the output of a"):
        check_parts(PygModule(Centred()), graph_of_types())

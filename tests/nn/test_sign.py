"""sign: hops equal dense matrix powers; every strategy trains on them exactly; a step sends gradients alone."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from gnnfleet.comm.collectives import sum_gradients, sum_over_ranks
from gnnfleet.comm.world import World
from gnnfleet.config.resolve import resolve
from gnnfleet.errors import ConfigError
from gnnfleet.graph.graph import Graph
from gnnfleet.graph.partition.partitioned_graph import Partition
from gnnfleet.graph.store import open_store, save_store
from gnnfleet.graph.views.local import LocalView
from gnnfleet.launch.tma_subgraph import make_local_training
from gnnfleet.nn import ModelConfig, build_model, load_model, save_model
from gnnfleet.nn.sign import SignModel
from gnnfleet.training.build import RankContext, build
from tests.equivalence.spread import cut_graph, plain_graph, related_graph, typed_graph
from tests.ranks import RankPool


def without_features(graph: Graph, *kinds: str) -> Graph:
    nodes = {kind: replace(table, x=None) if kind in kinds else table for kind, table in graph.nodes.items()}
    return Graph.of(nodes, graph.edges)


def input_of(graph: Graph) -> Any:
    """Features as strategies pass them to a model."""
    x = {kind: torch.empty(n.count, 0).double() if n.x is None else n.x.double() for kind, n in graph.nodes.items()}
    return x if len(x) > 1 else next(iter(x.values()))


GRAPHS = {
    "plain": plain_graph,
    "related": related_graph,
    "typed": lambda: without_features(typed_graph(), "a", "c"),
}


def model_of(graph: Graph, **settings: Any) -> SignModel:
    model = build_model(ModelConfig(**{"name": "sign", "hidden": 8, "norm": "layer", **settings}), graph).double()
    assert isinstance(model, SignModel)
    return model


def features(graph: Graph) -> dict[str, Tensor]:
    """Features of a type, or those that stand in for them."""
    tables = {}
    for kind, nodes in graph.nodes.items():
        if nodes.x is not None:
            tables[kind] = nodes.x.double()
            continue
        degree = torch.zeros(nodes.count, dtype=torch.float64)
        for name, edges in graph.edges.items():
            if name.dst == kind:
                src, dst = edges.edge_index()
                keep = (src != dst) if name.src == kind else torch.ones_like(src, dtype=torch.bool)
                degree.index_add_(0, dst[keep], torch.ones(int(keep.sum()), dtype=torch.float64))
        tables[kind] = torch.stack([torch.ones_like(degree), torch.log(1 + degree)], 1)
    return tables


def dense_hops(graph: Graph, hops: int, target: str) -> dict[str, Tensor]:
    """{name of the path: rows}, from dense adjacency matrices."""
    x, matrices = features(graph), {}
    for name, edges in graph.edges.items():
        src, dst = edges.edge_index()
        matrix = torch.zeros(graph.nodes[name.dst].count, graph.nodes[name.src].count, dtype=torch.float64)
        if len(graph.edges) > 1:
            weight = torch.ones(len(src)) if edges.weight is None else edges.weight
            total = torch.zeros(len(matrix), dtype=torch.float64).index_add_(0, dst, weight.double().abs())
            matrix.index_put_((dst, src), weight.double() / total[dst], accumulate=True)
            matrices[name] = matrix
            continue
        gcn_norm = pytest.importorskip("torch_geometric.nn.conv.gcn_conv").gcn_norm
        index, weight = gcn_norm(torch.stack([src, dst]), edges.weight.double(), graph.nodes[name.dst].count)
        matrices[name] = matrix.index_put_((index[1], index[0]), weight, accumulate=True)
    out = {}
    for length in range(1, hops + 1):
        for path in product(graph.edges, repeat=length):
            if path[-1].dst == target and all(a.dst == b.src for a, b in pairwise(path)):
                rows = x[path[0].src]
                for name in path:
                    rows = matrices[name] @ rows
                out[":".join([path[0].src, *(part for name in path for part in name[1:])])] = rows
    return out


@pytest.mark.parametrize(("name", "hops"), [("plain", 3), ("related", 2), ("typed", 3)])
def test_hops_are_products_of_dense_matrices(name: str, hops: int) -> None:
    """Also in parts of columns, with tables in files, and with the features that stand in for missing ones."""
    graph = GRAPHS[name]()
    target = graph.labelled_type or "node"
    model, view = model_of(graph, hops=hops), LocalView.of_graph(graph)
    x = input_of(graph)
    expected = dense_hops(graph, hops, target)
    if graph.nodes[target].x is None:
        expected |= {f"{target}::{target}": features(graph)[target]}
    for memory in (4 << 30, 1 << 11):
        model.table_memory = memory
        tables = {str(kind): rows for kind, rows in model.precompute(view, x).items()}
        assert tables.keys() == expected.keys() and len(tables) > 2
        for path, rows in tables.items():
            assert_close(rows, expected[path], rtol=1e-10, atol=1e-12, msg=path)


MODELS: list[dict[str, Any]] = [
    {"hops": 2, "norm": "layer", "input_dropout": 0.2},
    {"hops": 2, "norm": "batch", "layers": 2, "input_norm": "sum", "act": "elu"},  # ReLU has a kink at constant columns
    {"hops": 1, "layers": 1},
]


def settings_of(model: dict[str, Any], **strategy: Any) -> dict[str, Any]:
    return {
        "model": {"name": "sign", "hidden": 8, "dropout": 0.4, **model},
        "train": {"lr": 0.02, "weight_decay": 1e-3, "optimizer": "sgd" if model.get("norm") == "batch" else "adam"},
        "precision": "float64",
        "seed": 5,
        "strategy": strategy,
    }


def fit(graph: Graph, settings: dict[str, Any], context: RankContext | None = None) -> dict[str, Any]:
    """Gradients of every step, and outputs after two epochs."""
    strategy = build(graph, resolve(settings), context=context).strategy
    outcome: dict[str, Any] = {}
    for epoch in range(2):
        for record in strategy.train_epoch(epoch):
            grads = {name: weight.grad.clone() for name, weight in strategy.model.named_parameters()}
            outcome[f"{epoch}.{record.step}"] = {"loss": torch.tensor(record.loss).double(), **grads}
    prediction = strategy.predict(embeddings=True)
    outcome["end"] = {
        **{name: tensor.clone() for name, tensor in strategy.model.state_dict().items()},
        "test": torch.tensor([strategy.evaluate("test")[key] for key in ("loss", "accuracy")]),
        **({"logits": prediction.logits, "embeddings": prediction.embeddings} if len(prediction.logits) else {}),
    }
    strategy.close()
    return outcome


def fit_on_rank(world: World, store: str, parts: str, settings: list[dict[str, Any]]) -> list[dict[str, Any]]:
    context = RankContext(world, Partition.open(parts).shard(world.rank))
    return [fit(open_store(store), case, context) for case in settings]


@pytest.mark.parametrize(("name", "size"), [("plain", 2), ("related", 2), *(("typed", n) for n in (1, 2, 3))])
def test_ranks_give_the_gradients_and_rows_of_one_process(pool: RankPool, tmp_path: Path, name: str, size: int) -> None:
    """sar in full batches, macrobatch in batches of rows; macrobatch refuses batch norm on several ranks."""
    graph = save_store(GRAPHS[name](), tmp_path / "store")
    cut_graph(graph, size, "random", tmp_path / "parts")
    cases = [(model, "sar", {}) for model in MODELS]
    cases += [(model, "macrobatch", {"batch": 12}) for model in MODELS if model.get("norm") != "batch"]
    settings = [settings_of(model, name=strategy, **options) for model, strategy, options in cases]
    ranks = pool.run(size, fit_on_rank, str(tmp_path / "store"), str(tmp_path / "parts"), settings)
    for index, (model, strategy, options) in enumerate(cases):
        expected = fit(graph, settings_of(model, name="local", **options))
        for rank, outcomes in enumerate(ranks):
            actual = outcomes[index]
            assert actual.keys() == expected.keys() and len(actual) > 2
            for step, tensors in actual.items():
                for key, tensor in tensors.items():
                    label = f"{strategy} {model} rank {rank}, step {step}: {key}"
                    assert_close(tensor, expected[step][key], rtol=1e-10, atol=1e-12, msg=label)


def count_bytes(world: World, store: str, parts: str) -> list[tuple[int, int]]:
    """(bytes of an epoch of a strategy, bytes of its sums of gradients, losses and items)."""
    counted = []
    context = RankContext(world, Partition.open(parts).shard(world.rank))
    for strategy, batch in (("sar", {}), ("macrobatch", {"batch": 7, "prefetch": 0})):
        settings = settings_of({"norm": "layer"}, name=strategy, **batch)
        run = build(open_store(store), resolve(settings), context=context).strategy
        for epoch in range(2):  # the first one may set up
            before = world.traffic.bytes_sent
            steps = len(list(run.train_epoch(epoch)))
        sent = world.traffic.bytes_sent - before
        before = world.traffic.bytes_sent
        for _ in range(steps):
            sum_gradients(world, run.model.parameters())
            sum_over_ranks(world, torch.zeros((), dtype=torch.float64))  # the loss
        if strategy == "sar":
            sum_over_ranks(world, torch.zeros((), dtype=torch.int64))  # the number of items
        # A macrobatch requests no rows: 8 bytes and a count by node type for each other rank.
        kinds, exchanges = len(context.shard.node_types), int(run.epoch_metrics().get("relays", 0))
        requests = 8 * (1 + kinds) * (world.size - 1) * exchanges
        counted.append((sent, world.traffic.bytes_sent - before + requests))
    return counted


@pytest.mark.parametrize("name", GRAPHS)
def test_a_step_sends_gradients_alone(pool: RankPool, tmp_path: Path, name: str) -> None:
    cut_graph(save_store(GRAPHS[name](), tmp_path / "store"), 3, "random", tmp_path / "parts")
    for of_rank in pool.run(3, count_bytes, str(tmp_path / "store"), str(tmp_path / "parts")):
        for sent, gradients in of_rank:
            assert sent == gradients > 0


def test_a_trainer_of_tma_has_the_hops_of_the_whole_graph() -> None:
    graph = GRAPHS["typed"]()
    config = resolve({**settings_of({"hops": 2}, name="tma", full=True), "workers": 2})
    nodes = {kind: torch.arange(0, table.count, 2) for kind, table in graph.nodes.items()}
    local = make_local_training(graph, config, 0, nodes)
    model = local.strategy.model
    for name, rows in model.precompute(LocalView.of_graph(graph), input_of(graph)).items():
        assert_close(local.strategy._aggregated[name], rows[nodes["a"]], rtol=0, atol=0)
    assert all(record.count for record in local.strategy.train_epoch(0))


def test_refusals_say_what_to_do() -> None:
    graph = plain_graph()
    link = {"task": "link", "split": "0.8/0.1/0.1", "link": {"exclude": "disjoint:0.3"}}
    for settings, message in (
        (settings_of({"embedding": 4}, name="local"), "leave out model.embedding"),
        ({**settings_of({}, name="local"), **link}, "set link.exclude=none"),
        (settings_of({"hops": 9}, name="local"), "lower model.hops"),
    ):
        with pytest.raises(ConfigError, match=message):
            build(related_graph() if "hops" in settings["model"] else graph, resolve(settings))
    with pytest.raises(ConfigError, match="use sar"):
        resolve(settings_of({}, name="pipe")).strategy.check_model(model_of(graph))


def test_a_saved_model_and_a_link_model(tmp_path: Path) -> None:
    model, view = model_of(typed_graph(), hops=2, dropout=0.0), LocalView.of_graph(typed_graph())
    x = input_of(typed_graph())
    save_model(model, tmp_path / "model.safetensors")
    loaded = load_model(tmp_path / "model.safetensors")
    assert torch.equal(loaded(view, x), model(view, x))
    settings = {**settings_of({"hops": 2}, name="local"), "task": "link", "split": "0.8/0.1/0.1"}
    strategy = build(plain_graph(), resolve({**settings, "link": {"exclude": "none"}})).strategy
    assert [record.loss > 0 for record in strategy.train_epoch(0)] and strategy.evaluate("val")["count"]

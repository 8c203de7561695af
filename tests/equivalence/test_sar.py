"""sar equals local for every model and partition: losses, metrics, final weights and predictions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor

from gnnfleet.comm.world import World
from gnnfleet.config.resolve import resolve
from gnnfleet.errors import PartitionError
from gnnfleet.graph.graph import Graph
from gnnfleet.graph.partition.partitioned_graph import Partition
from gnnfleet.graph.store import open_store, save_store
from gnnfleet.inference import predict as prediction
from gnnfleet.strategies.protocol import IDS_SUFFIX, SHARDED
from gnnfleet.training.build import RankContext, build
from tests.equivalence.spread import bare_graph, cut_graph, plain_graph, related_graph, typed_graph
from tests.ranks import RankPool, with_shm_transport

EPOCHS = 3
MODELS: list[dict[str, Any]] = [
    {"name": "gcn", "input_dropout": 0.3},
    {"name": "gcn", "norm": "batch"},
    {"name": "sage", "norm": "layer", "input_norm": "standardize"},
    {"name": "sage", "edge_features": False},
    {"name": "sage", "norm": "batch", "aggr": "max"},
    {"name": "sage", "aggr": "pool", "embedding": 4},
    {"name": "gcn", "embedding": 4, "input_dropout": 0.3},
    {"name": "gat", "heads": 2, "edge_features": False},
    {"name": "gat", "heads": 2, "edge_features": True, "norm": "batch"},
    {"name": "gatv2", "heads": 2},
    {"name": "gin", "norm": "batch"},
    {"name": "gcn2", "layers": 4},
    {"name": "res+", "norm": "batch"},
]
TYPED: list[dict[str, Any]] = [
    {"name": "rgcn", "input_norm": "standardize"},
    {"name": "rgcn", "norm": "batch", "bases": 2},
    {"name": "hetero-sage", "norm": "layer", "residual": True},
    {"name": "hetero-gat", "heads": 2, "input_dropout": 0.3},
    {"name": "hgt", "heads": 2, "norm": "batch", "act": "elu", "attention_dropout": 0.3},
]
HETERO_GIN = {"name": "hetero-gin", "norm": "batch", "train_eps": True}
GRAPHS = {
    "plain": (plain_graph, MODELS),
    "typed": (typed_graph, TYPED),
    "bare": (bare_graph, [{"name": "rgcn"}, {"name": "hgt", "heads": 2}, {"name": "hetero-sage", "embedding": 3}]),
    "related": (related_graph, [{"name": "rgcn", "bases": 1}, {"name": "hetero-gatv2", "heads": 2}, HETERO_GIN]),
}


LINKS: dict[str, dict[str, Any]] = {
    "dot": {"link": {"negatives": 2, "ranking": "sampled"}},
    "mlp": {"link": {"decoder": "mlp", "dropout": 0.3, "negative_mode": "shared", "negatives": 5, "l2": 0.1}},
    "given": {"link": {"loss": "softmax", "negatives": 3, "ranking": "given"}},
    "typed": {"model": {"name": "hgt", "act": "elu"}, "link": {"reverse": "none"}},
}


def run_settings(model: dict[str, Any], **strategy: Any) -> dict[str, Any]:
    base = {"hidden": 8, "layers": 3, "dropout": 0.4}
    # A bias before batch norm has a gradient of rounding errors only, which Adam scales to full steps.
    optimizer = "sgd" if model.get("norm") == "batch" else "adam"
    train = {"lr": 0.02, "weight_decay": 1e-3, "clip": 1.0, "optimizer": optimizer}
    return {"model": {**base, **model}, "train": train, "precision": "float64", "seed": 5, "strategy": strategy}


def fit(graph: Graph, settings: dict[str, Any], context: RankContext | None = None) -> dict[str, Any]:
    """Train some epochs with evaluations in between; return losses, metrics, weights and predictions."""
    strategy = build(graph, resolve(settings), context=context).strategy
    losses, metrics = [], []
    for epoch in range(EPOCHS):
        losses += [(record.loss, record.count) for record in strategy.train_epoch(epoch)]
        if epoch != 1:
            metrics.append(strategy.evaluate("val"))
    prediction = strategy.predict(embeddings=True)
    outcome = {
        "losses": torch.tensor(losses, dtype=torch.float64),
        "metrics": metrics,
        "test": strategy.evaluate("test"),
        "weights": {name: tensor.clone() for name, tensor in strategy.state_dict()["model"].items()},
        "sharded": {name: tensor.clone() for name, tensor in strategy.state_dict().get(SHARDED, {}).items()},
        "logits": prediction.logits,
        "embeddings": prediction.embeddings,
    }
    strategy.close()
    return outcome


def every_model(world: World, store: str, parts: str, name: str, options: dict[str, Any]) -> list[dict[str, Any]]:
    world = with_shm_transport(world) if world.size == 3 else world  # other sizes use sockets
    context = RankContext(world, Partition.open(parts).shard(world.rank))
    return [fit(open_store(store), run_settings(model, name="sar", **options), context) for model in GRAPHS[name][1]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("stores")
    for name, (make, _) in GRAPHS.items():
        save_store(make(), path / name)
    return path


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, list[dict[str, Any]]]:
    return {
        name: [fit(open_store(folder / name), run_settings(model, name="local", order="store")) for model in models]
        for name, (_, models) in GRAPHS.items()
    }


def join_sharded(outcomes: list[dict[str, Any]]) -> dict[str, Any]:
    """Outcome of the first rank, with the learnable rows of all ranks in store order."""
    first = dict(outcomes[0])
    sharded = first.pop("sharded")
    for name in [key.removesuffix(IDS_SUFFIX) for key in sharded if key.endswith(IDS_SUFFIX)]:
        ids = torch.cat([outcome["sharded"][name + IDS_SUFFIX] for outcome in outcomes])
        assert sorted(ids.tolist()) == list(range(len(ids))), "every node has one owner"
        rows = torch.cat([outcome["sharded"][name] for outcome in outcomes])
        first["weights"] = {**first["weights"], name: torch.empty_like(rows).index_copy_(0, ids, rows)}
    return first


def check_close(actual: Any, expected: Any, label: str) -> None:
    """Compare tensors and numbers in nested dictionaries and lists."""
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys(), label
        for key in expected:
            check_close(actual[key], expected[key], f"{label} {key}")
    elif isinstance(expected, list):
        for index, (item, expected_item) in enumerate(zip(actual, expected, strict=True)):
            check_close(item, expected_item, f"{label} {index}")
    elif isinstance(expected, Tensor):
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10, msg=lambda m: f"{label}: {m}")
    else:
        assert actual == pytest.approx(expected, rel=1e-10), label


LAYOUTS = [(1, "random", 1, 1), (2, "mincut", 1, 1), (3, "random", 1, 1), (4, "mincut", 2, 1)]
LAYOUTS += [(3, "edgeless", 2, 0), (4, "empty", 4, 1)]


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize(("size", "method", "group", "prefetch"), LAYOUTS)
def test_training_equals_local(
    pool: RankPool, folder: Path, expected: Any, name: str, size: int, method: str, group: int, prefetch: int
) -> None:
    parts = folder / f"{name}-{size}-{method}"
    cut_graph(open_store(folder / name), size, method, parts)
    options = {"group": group, "prefetch": prefetch}
    ranks = pool.run(size, every_model, str(folder / name), str(parts), name, options)
    for index, model in enumerate(GRAPHS[name][1]):
        label = f"{model}"
        check_close(join_sharded([outcomes[index] for outcomes in ranks]), join_sharded([expected[name][index]]), label)
        for rank in range(1, size):
            other = ranks[rank][index]
            for key in ("losses", "metrics", "test"):
                check_close(other[key], ranks[0][index][key], f"{label} rank {rank}")
            assert not len(other["logits"]) and not len(other["embeddings"]), "the first rank predicts"
            for key, tensor in ranks[0][index]["weights"].items():
                assert torch.equal(other["weights"][key], tensor), f"{label}: {key} differs between ranks"


def graph_with_held_out_edges(make: Any) -> Graph:
    """Build a graph with held-out edges, and negatives for them."""
    graph, random = make(), torch.Generator().manual_seed(8)
    edges = {}
    for edge_type, table in graph.edges.items():
        counts = graph.nodes[edge_type.src].count, graph.nodes[edge_type.dst].count
        pairs = {
            name: torch.stack([torch.randint(0, count, (number,), generator=random) for count in counts])
            for name, number in (("val", 7), ("test", 5), ("val_neg", 30), ("test_neg", 30))
            if make is plain_graph or not name.endswith("neg")
        }
        edges[edge_type] = replace(table, links=pairs)
    return Graph.of(graph.nodes, edges)


def link_settings(case: str, **strategy: Any) -> dict[str, Any]:
    case_settings = LINKS[case]
    settings = run_settings({"name": "sage", "embedding": 3, **case_settings.get("model", {})}, **strategy)
    return {**settings, "task": "link", "link": {"eval_negatives": 6, "exclude": "none", **case_settings["link"]}}


def every_link(world: World, folder: str, parts: dict[str, str], names: list[str]) -> list[dict[str, Any]]:
    outcomes = []
    for name in names:
        store = "linked-typed" if name == "typed" else "linked"
        context = RankContext(world, Partition.open(parts[store]).shard(world.rank))
        outcomes.append(fit(open_store(f"{folder}/{store}"), link_settings(name, name="sar"), context))
    return outcomes


@pytest.mark.parametrize("size", [1, 2, 3])
def test_link_prediction_equals_local(pool: RankPool, folder: Path, size: int) -> None:
    parts = {}
    for store, make in (("linked", plain_graph), ("linked-typed", typed_graph)):
        graph = save_store(graph_with_held_out_edges(make), folder / store, overwrite=True)
        parts[store] = str(cut_graph(graph, size, "random", folder / f"{store}-{size}"))
    names = list(LINKS)
    ranks = pool.run(size, every_link, str(folder), parts, names)
    for index, name in enumerate(names):
        store = "linked-typed" if name == "typed" else "linked"
        expected = fit(open_store(folder / store), link_settings(name, name="local", order="store"))
        check_close(join_sharded([outcomes[index] for outcomes in ranks]), join_sharded([expected]), name)
        for other in ranks[1:]:
            for key, tensor in ranks[0][index]["weights"].items():
                assert torch.equal(other[index]["weights"][key], tensor), f"{name}: {key} differs between ranks"
            check_close(other[index]["metrics"], expected["metrics"], name)


def build_error(world: World, store: str, parts: str) -> str:
    context = RankContext(world, Partition.open(parts).shard(world.rank))
    try:
        build(open_store(store), resolve(run_settings({"name": "sage"}, name="sar")), context=context)
    except PartitionError as error:
        return str(error)
    return ""


def test_parts_of_another_graph_are_refused(pool: RankPool, folder: Path) -> None:
    graph = Graph(torch.zeros(2, 3, dtype=torch.int64), num_nodes=40)
    parts = cut_graph(graph, 2, "random", folder / "other")
    for text in pool.run(2, build_error, str(folder / "plain"), str(parts)):
        assert "expected parts of a graph of 340 edges, found 3" in text


def write_in_small_blocks(world: World, store: str, parts: str | None, path: str) -> int:
    """Write predictions in blocks of 16 rows."""
    prediction.ROWS_AT_ONCE = 16
    context = None if parts is None else RankContext(world, Partition.open(parts).shard(world.rank))
    settings = run_settings({"name": "gat", "heads": 2}, name="local" if parts is None else "sar")
    built = build(open_store(store), resolve(settings), context=context)
    list(built.strategy.train_epoch(0))
    return prediction.write_predictions(built, Path(path), logits=True, embeddings=True)


def test_the_first_rank_writes_the_predictions_of_local(
    pool: RankPool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prediction, "ROWS_AT_ONCE", 16)
    parts = str(cut_graph(open_store(folder / "plain"), 3, "random", folder / "predicted"))
    rows = pool.run(3, write_in_small_blocks, str(folder / "plain"), parts, str(folder / "sar.parquet"))
    assert rows == [60, 0, 0]
    write_in_small_blocks(World(), str(folder / "plain"), None, str(folder / "local.parquet"))
    actual, expected = (pq.read_table(folder / f"{name}.parquet") for name in ("sar", "local"))
    assert actual.schema == expected.schema and actual["id"] == expected["id"]
    assert actual["prediction"] == expected["prediction"]
    for column in ("probability", "logits", "embedding"):
        values = [torch.tensor(table[column].to_pylist()) for table in (actual, expected)]
        torch.testing.assert_close(*values)


def losses_of_all_models(world: World, store: str, parts: str | None, precision: str) -> list[float]:
    context = None if parts is None else RankContext(world, Partition.open(parts).shard(world.rank))
    losses = []
    for model in MODELS:
        settings = run_settings(model, name="local" if parts is None else "sar") | {"precision": precision}
        strategy = build(open_store(store), resolve(settings), context=context).strategy
        losses += [record.loss for epoch in range(2) for record in strategy.train_epoch(epoch)]
    return losses


@pytest.mark.parametrize(("precision", "tolerance"), [("float32", 1e-4), ("bf16", 0.05)])
def test_other_precisions_are_close(pool: RankPool, folder: Path, precision: str, tolerance: float) -> None:
    parts = str(cut_graph(open_store(folder / "plain"), 2, "mincut", folder / "rounded"))
    expected = losses_of_all_models(World(), str(folder / "plain"), None, precision)
    for losses in pool.run(2, losses_of_all_models, str(folder / "plain"), parts, precision):
        assert losses == pytest.approx(expected, rel=tolerance)


def test_training_with_rows_cached_for_backward_equals_local(pool: RankPool, folder: Path, expected: Any) -> None:
    parts = str(cut_graph(open_store(folder / "plain"), 3, "random", folder / "kept"))
    ranks = pool.run(3, every_model, str(folder / "plain"), parts, "plain", {"cache_for_backward": True, "group": 2})
    for index, model in enumerate(MODELS):
        check_close(
            join_sharded([outcomes[index] for outcomes in ranks]), join_sharded([expected["plain"][index]]), f"{model}"
        )


def train_with_wire_dtype(world: World, store: str, parts: str, wire: str) -> list[tuple[list[float], float, int]]:
    """Losses, validation loss of the first weights, and bytes of the steps, by model."""
    outcomes = []
    for model in MODELS:
        context = RankContext(world, Partition.open(parts).shard(world.rank))
        strategy = build(
            open_store(store), resolve(run_settings(model, name="sar", wire_dtype=wire)), context=context
        ).strategy
        first = strategy.evaluate("val")["loss"]
        before = world.traffic.bytes_sent
        losses = [record.loss for epoch in range(4) for record in strategy.train_epoch(epoch)]
        outcomes.append((losses, first, world.traffic.bytes_sent - before))
    return outcomes


@pytest.mark.parametrize(("wire", "tolerance"), [("bf16", 0.03), ("int8", 0.06)])
def test_compressed_rows_give_close_losses_and_exact_evaluation(
    pool: RankPool, folder: Path, wire: str, tolerance: float
) -> None:
    parts = str(cut_graph(open_store(folder / "plain"), 2, "mincut", folder / "wire"))
    exact, compressed = (
        pool.run(2, train_with_wire_dtype, str(folder / "plain"), parts, dtype)[0] for dtype in ("exact", wire)
    )
    for model, (losses, first, sent), (exact_losses, exact_first, exact_sent) in zip(
        MODELS, compressed, exact, strict=True
    ):
        assert first == exact_first, "evaluation is exact"
        assert losses == pytest.approx(exact_losses, rel=tolerance), model
        assert losses != exact_losses and sent < 0.7 * exact_sent, model


def packages(path: Path) -> Graph:
    """Debian packages; a dependency has its kind as features, and a weight by kind."""
    data = np.load(path)
    kind = torch.from_numpy(data["edge_type"]).long()
    features = torch.nn.functional.one_hot(kind).float()
    split = torch.from_numpy(np.select([data["train_mask"], data["val_mask"]], [0, 1], 2))
    x, y = (torch.from_numpy(data[name]) for name in ("x", "y"))
    index, weight = torch.from_numpy(data["edge_index"]).long(), torch.tensor([1.0, 0.5, 0.25])[kind]
    return Graph(index, x=x[:, :32].float(), y=y, split=split, edge_weight=weight, edge_attr=features)


def one_step(world: World, store: str, parts: str | None, settings: dict[str, Any]) -> dict[str, Any]:
    context = None if parts is None else RankContext(world, Partition.open(parts).shard(world.rank))
    strategy = build(open_store(store), resolve(settings), context=context).strategy
    losses = [record.loss for record in strategy.train_epoch(0)]
    weights = {name: tensor.clone() for name, tensor in strategy.state_dict()["model"].items()}
    return {"losses": losses, "weights": weights, "test": strategy.evaluate("test")["loss"]}


def test_attention_with_edge_data_on_a_real_graph(pool: RankPool, shared_data: Path, tmp_path: Path) -> None:
    graph = save_store(packages(shared_data / "static/debian_bookworm.npz"), tmp_path / "store")
    parts = str(cut_graph(graph, 3, "random", tmp_path / "parts"))
    settings = run_settings({"name": "gat", "heads": 2, "layers": 2}, name="sar")
    expected = one_step(
        World(), str(tmp_path / "store"), None, settings | {"strategy": {"name": "local", "order": "store"}}
    )
    assert expected["weights"]["convs.0.lin_edge.weight"].shape[1] == 4
    for outcome in pool.run(3, one_step, str(tmp_path / "store"), parts, settings):
        check_close(outcome, expected, "gat")

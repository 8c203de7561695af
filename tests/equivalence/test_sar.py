"""sar equals local: losses, metrics, final weights and predictions, for every model, however the graph is cut."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

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
from tests.equivalence.spread import cut_graph, plain_graph, related_graph, typed_graph
from tests.ranks import Crew, with_shelf

EPOCHS = 3
MODELS: list[dict[str, Any]] = [
    {"name": "gcn", "input_dropout": 0.3},
    {"name": "gcn", "norm": "batch"},
    {"name": "sage", "norm": "layer"},
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
TYPED: list[dict[str, Any]] = [{"name": "rgcn"}, {"name": "rgcn", "norm": "batch", "bases": 2}]
GRAPHS = {
    "plain": (plain_graph, MODELS),
    "typed": (typed_graph, TYPED),
    "related": (related_graph, [{"name": "rgcn", "bases": 1}]),
}


LINKS: dict[str, dict[str, Any]] = {
    "dot": {"link": {"negatives": 2, "ranking": "sampled"}},
    "mlp": {"link": {"decoder": "mlp", "dropout": 0.3, "negative_mode": "shared", "negatives": 5, "l2": 0.1}},
    "given": {"link": {"loss": "softmax", "negatives": 3, "ranking": "given"}},
    "typed": {"model": {"name": "rgcn"}, "link": {"reverse": "none"}},
}


def words(model: dict[str, Any], **strategy: Any) -> dict[str, Any]:
    base = {"hidden": 8, "layers": 3, "dropout": 0.4}
    # A bias before batch norm has no gradient but rounding, which Adam blows up to steps of full size.
    optimizer = "sgd" if model.get("norm") == "batch" else "adam"
    train = {"lr": 0.02, "weight_decay": 1e-3, "clip": 1.0, "optimizer": optimizer}
    return {"model": {**base, **model}, "train": train, "precision": "float64", "seed": 5, "strategy": strategy}


def trained(graph: Graph, tree: dict[str, Any], here: RankContext | None = None) -> dict[str, Any]:
    """A few epochs with evaluations in between, and everything that can be asked after."""
    strategy = build(graph, resolve(tree), context=here).strategy
    losses, metrics = [], []
    for epoch in range(EPOCHS):
        losses += [(record.loss, record.count) for record in strategy.train_epoch(epoch)]
        if epoch != 1:
            metrics.append(strategy.evaluate("val"))
    prediction = strategy.predict(embeddings=True)
    found = {
        "losses": torch.tensor(losses, dtype=torch.float64),
        "metrics": metrics,
        "test": strategy.evaluate("test"),
        "weights": {name: tensor.clone() for name, tensor in strategy.state_dict()["model"].items()},
        "own": {name: tensor.clone() for name, tensor in strategy.state_dict().get(SHARDED, {}).items()},
        "logits": prediction.logits,
        "embeddings": prediction.embeddings,
    }
    strategy.close()
    return found


def every_model(world: World, store: str, parts: str, name: str, knobs: dict[str, Any]) -> list[dict[str, Any]]:
    world = with_shelf(world) if world.size == 3 else world  # the others through sockets
    here = RankContext(world, Partition.open(parts).shard(world.rank))
    return [trained(open_store(store), words(model, name="sar", **knobs), here) for model in GRAPHS[name][1]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("stores")
    for name, (make, _) in GRAPHS.items():
        save_store(make(), path / name)
    return path


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, list[dict[str, Any]]]:
    return {
        name: [trained(open_store(folder / name), words(model, name="local", order="store")) for model in models]
        for name, (_, models) in GRAPHS.items()
    }


def gathered(found: list[dict[str, Any]]) -> dict[str, Any]:
    """What the first rank found, with learnable rows put together in store order from all ranks."""
    first = dict(found[0])
    own = first.pop("own")
    for name in [key.removesuffix(IDS_SUFFIX) for key in own if key.endswith(IDS_SUFFIX)]:
        ids = torch.cat([one["own"][name + IDS_SUFFIX] for one in found])
        assert sorted(ids.tolist()) == list(range(len(ids))), "every node has one owner"
        rows = torch.cat([one["own"][name] for one in found])
        first["weights"] = {**first["weights"], name: torch.empty_like(rows).index_copy_(0, ids, rows)}
    return first


def close(found: Any, wanted: Any, what: str) -> None:
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys(), what
        for key in wanted:
            close(found[key], wanted[key], f"{what} {key}")
    elif isinstance(wanted, list):
        for place, (one, other) in enumerate(zip(found, wanted, strict=True)):
            close(one, other, f"{what} {place}")
    elif isinstance(wanted, Tensor):
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10, msg=lambda m: f"{what}: {m}")
    else:
        assert found == pytest.approx(wanted, rel=1e-10), what


WAYS = [(1, "random", 1, 1), (2, "mincut", 1, 1), (3, "random", 1, 1), (4, "mincut", 2, 1)]
WAYS += [(3, "edgeless", 2, 0), (4, "empty", 4, 1)]


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize(("size", "how", "group", "prefetch"), WAYS)
def test_equals_local(
    crew: Crew, folder: Path, expected: Any, name: str, size: int, how: str, group: int, prefetch: int
) -> None:
    parts = folder / f"{name}-{size}-{how}"
    cut_graph(open_store(folder / name), size, how, parts)
    knobs = {"group": group, "prefetch": prefetch}
    found = crew.run(size, every_model, str(folder / name), str(parts), name, knobs)
    for place, model in enumerate(GRAPHS[name][1]):
        label = f"{model}"
        close(gathered([one[place] for one in found]), gathered([expected[name][place]]), label)
        for rank in range(1, size):
            other = found[rank][place]
            for key in ("losses", "metrics", "test"):
                close(other[key], found[0][place][key], f"{label} rank {rank}")
            assert not len(other["logits"]) and not len(other["embeddings"]), "the first rank predicts"
            for key, tensor in found[0][place]["weights"].items():
                assert torch.equal(other["weights"][key], tensor), f"{label}: {key} differs between ranks"


def linked(make: Any) -> Graph:
    """Held-out edges, and negatives for them."""
    graph, random = make(), torch.Generator().manual_seed(8)
    edges = {}
    for kind, table in graph.edges.items():
        counts = graph.nodes[kind.src].count, graph.nodes[kind.dst].count
        pairs = {
            name: torch.stack([torch.randint(0, count, (number,), generator=random) for count in counts])
            for name, number in (("val", 7), ("test", 5), ("val_neg", 30), ("test_neg", 30))
            if make is plain_graph or not name.endswith("neg")
        }
        edges[kind] = replace(table, links=pairs)
    return Graph.of(graph.nodes, edges)


def link_words(case: str, **strategy: Any) -> dict[str, Any]:
    more = LINKS[case]
    tree = words({"name": "sage", "embedding": 3, **more.get("model", {})}, **strategy)
    return {**tree, "task": "link", "link": {"eval_negatives": 6, "exclude": "none", **more["link"]}}


def every_link(world: World, folder: str, parts: dict[str, str], names: list[str]) -> list[dict[str, Any]]:
    found = []
    for name in names:
        store = "linked-typed" if name == "typed" else "linked"
        here = RankContext(world, Partition.open(parts[store]).shard(world.rank))
        found.append(trained(open_store(f"{folder}/{store}"), link_words(name, name="sar"), here))
    return found


@pytest.mark.parametrize("size", [1, 2, 3])
def test_links_equal_local(crew: Crew, folder: Path, size: int) -> None:
    parts = {}
    for store, make in (("linked", plain_graph), ("linked-typed", typed_graph)):
        graph = save_store(linked(make), folder / store, overwrite=True)
        parts[store] = str(cut_graph(graph, size, "random", folder / f"{store}-{size}"))
    names = list(LINKS)
    found = crew.run(size, every_link, str(folder), parts, names)
    for place, name in enumerate(names):
        store = "linked-typed" if name == "typed" else "linked"
        wanted = trained(open_store(folder / store), link_words(name, name="local", order="store"))
        close(gathered([one[place] for one in found]), gathered([wanted]), name)
        for other in found[1:]:
            for key, tensor in found[0][place]["weights"].items():
                assert torch.equal(other[place]["weights"][key], tensor), f"{name}: {key} differs between ranks"
            close(other[place]["metrics"], wanted["metrics"], name)


def wrong_parts(world: World, store: str, parts: str) -> str:
    here = RankContext(world, Partition.open(parts).shard(world.rank))
    try:
        build(open_store(store), resolve(words({"name": "sage"}, name="sar")), context=here)
    except PartitionError as error:
        return str(error)
    return ""


def test_parts_of_another_graph_are_refused(crew: Crew, folder: Path) -> None:
    graph = Graph(torch.zeros(2, 3, dtype=torch.int64), num_nodes=40)
    parts = cut_graph(graph, 2, "random", folder / "other")
    for text in crew.run(2, wrong_parts, str(folder / "plain"), str(parts)):
        assert "expected parts of a graph of 340 edges, found 3" in text


def predicted(world: World, store: str, parts: str | None, path: str) -> int:
    """Write predictions in pieces of a few rows."""
    prediction.ROWS_AT_ONCE = 16
    here = None if parts is None else RankContext(world, Partition.open(parts).shard(world.rank))
    tree = words({"name": "gat", "heads": 2}, name="local" if parts is None else "sar")
    built = build(open_store(store), resolve(tree), context=here)
    list(built.strategy.train_epoch(0))
    return prediction.write_predictions(built, Path(path), logits=True, embeddings=True)


def test_the_first_rank_writes_what_local_writes(crew: Crew, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prediction, "ROWS_AT_ONCE", 16)
    parts = str(cut_graph(open_store(folder / "plain"), 3, "random", folder / "predicted"))
    rows = crew.run(3, predicted, str(folder / "plain"), parts, str(folder / "sar.parquet"))
    assert rows == [60, 0, 0]
    predicted(World(), str(folder / "plain"), None, str(folder / "local.parquet"))
    found, wanted = (pq.read_table(folder / f"{name}.parquet") for name in ("sar", "local"))
    assert found.schema == wanted.schema and found["id"] == wanted["id"]
    assert found["prediction"] == wanted["prediction"]
    for column in ("probability", "logits", "embedding"):
        values = [torch.tensor(table[column].to_pylist()) for table in (found, wanted)]
        torch.testing.assert_close(*values)


def rounded(world: World, store: str, parts: str | None, precision: str) -> list[float]:
    here = None if parts is None else RankContext(world, Partition.open(parts).shard(world.rank))
    losses = []
    for model in MODELS:
        tree = words(model, name="local" if parts is None else "sar") | {"precision": precision}
        strategy = build(open_store(store), resolve(tree), context=here).strategy
        losses += [record.loss for epoch in range(2) for record in strategy.train_epoch(epoch)]
    return losses


@pytest.mark.parametrize(("precision", "share"), [("float32", 1e-4), ("bf16", 0.05)])
def test_other_precisions_are_close(crew: Crew, folder: Path, precision: str, share: float) -> None:
    parts = str(cut_graph(open_store(folder / "plain"), 2, "mincut", folder / "rounded"))
    wanted = rounded(World(), str(folder / "plain"), None, precision)
    for found in crew.run(2, rounded, str(folder / "plain"), parts, precision):
        assert found == pytest.approx(wanted, rel=share)


def test_rows_kept_for_backward(crew: Crew, folder: Path, expected: Any) -> None:
    parts = str(cut_graph(open_store(folder / "plain"), 3, "random", folder / "kept"))
    found = crew.run(3, every_model, str(folder / "plain"), parts, "plain", {"cache_for_backward": True, "group": 2})
    for place, model in enumerate(MODELS):
        close(gathered([one[place] for one in found]), gathered([expected["plain"][place]]), f"{model}")


def on_wire(world: World, store: str, parts: str, wire: str) -> list[tuple[list[float], float, int]]:
    """Losses, what evaluation finds of the first weights, and bytes of the steps."""
    found = []
    for model in MODELS:
        here = RankContext(world, Partition.open(parts).shard(world.rank))
        strategy = build(open_store(store), resolve(words(model, name="sar", wire_dtype=wire)), context=here).strategy
        first = strategy.evaluate("val")["loss"]
        before = world.traffic.bytes_sent
        losses = [record.loss for epoch in range(4) for record in strategy.train_epoch(epoch)]
        found.append((losses, first, world.traffic.bytes_sent - before))
    return found


@pytest.mark.parametrize(("wire", "share"), [("bf16", 0.03), ("int8", 0.06)])
def test_rounded_on_the_wire(crew: Crew, folder: Path, wire: str, share: float) -> None:
    parts = str(cut_graph(open_store(folder / "plain"), 2, "mincut", folder / "wire"))
    exact, rounded = (crew.run(2, on_wire, str(folder / "plain"), parts, word)[0] for word in ("exact", wire))
    for model, (losses, first, sent), (wanted, known, whole) in zip(MODELS, rounded, exact, strict=True):
        assert first == known, "evaluation is exact"
        assert losses == pytest.approx(wanted, rel=share), model
        assert losses != wanted and sent < 0.7 * whole, model

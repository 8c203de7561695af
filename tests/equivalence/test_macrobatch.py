"""macrobatch equals sampled local: blocks, losses, final weights and predictions, however the graph is cut; and bit by
bit whatever shares a relay, is kept from one to the next, or is made ahead."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from gnnfleet.comm.halo_exchange import RingExchange
from gnnfleet.comm.world import World
from gnnfleet.config.resolve import resolve
from gnnfleet.errors import ConfigError
from gnnfleet.graph.graph import Graph
from gnnfleet.graph.partition.partitioned_graph import Partition
from gnnfleet.graph.sampling.sampler import NeighborSampler
from gnnfleet.graph.store import open_store, save_store
from gnnfleet.ops.draws import DrawKey
from gnnfleet.sharded.full_batch.ring_view import RingView
from gnnfleet.sharded.sampling.dist_sampler import DistNeighborSampler
from gnnfleet.strategies.macrobatch.fetch import BatchSampler
from gnnfleet.training.build import RankContext, build
from tests.equivalence.spread import cut_graph, plain_graph, related_graph, typed_graph
from tests.equivalence.test_sar import close, linked
from tests.ranks import Crew, with_shelf

EPOCHS = 2
FANOUTS = [4, 3, 2]
MODELS: list[dict[str, Any]] = [
    {"name": "gcn", "input_dropout": 0.3},
    {"name": "sage", "norm": "layer"},
    {"name": "sage", "aggr": "max"},
    {"name": "gat", "heads": 2, "edge_features": True, "attention_dropout": 0.3},
    {"name": "gatv2", "heads": 2},
]
TYPED: list[dict[str, Any]] = [{"name": "rgcn"}]
GRAPHS = {
    "plain": (plain_graph, MODELS),
    "typed": (typed_graph, TYPED),
    "related": (related_graph, [{"name": "rgcn", "bases": 2}]),
}


def words(model: dict[str, Any], **strategy: Any) -> dict[str, Any]:
    base = {"hidden": 8, "layers": 3, "dropout": 0.4}
    train = {"lr": 0.02, "weight_decay": 1e-3, "clip": 1.0}
    knobs = {"fanouts": FANOUTS, "batch": 7, "cache_inputs": False, **strategy}
    return {"model": {**base, **model}, "train": train, "precision": "float64", "seed": 5, "strategy": knobs}


def trained(graph: Graph, tree: dict[str, Any], here: RankContext | None = None) -> dict[str, Any]:
    strategy = build(graph, resolve(tree), context=here).strategy
    losses = [
        (record.loss, record.count, record.step) for epoch in range(EPOCHS) for record in strategy.train_epoch(epoch)
    ]
    found = {
        "losses": torch.tensor(losses, dtype=torch.float64),
        "test": strategy.evaluate("test"),
        "weights": {name: tensor.clone() for name, tensor in strategy.state_dict()["model"].items()},
        "logits": strategy.predict().logits,
    }
    strategy.close()
    return found


def here_of(world: World, parts: str) -> RankContext:
    return RankContext(world, Partition.open(parts).shard(world.rank))


def every_model(world: World, store: str, parts: str, name: str, knobs: dict[str, Any]) -> list[dict[str, Any]]:
    world = with_shelf(world) if world.size == 3 else world  # the others through sockets
    here = here_of(world, parts)
    return [trained(open_store(store), words(model, name="macrobatch", **knobs), here) for model in GRAPHS[name][1]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("stores")
    for name, (make, _) in GRAPHS.items():
        save_store(make(), path / name)
    return path


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, list[dict[str, Any]]]:
    return {
        name: [trained(open_store(folder / name), words(model, name="local")) for model in models]
        for name, (_, models) in GRAPHS.items()
    }


def only_first_predicts(found: list[dict[str, Any]]) -> None:
    for one in found[1:]:
        assert not len(one.pop("logits"))
        close(one, {key: value for key, value in found[0].items() if key != "logits"}, "rank")


WAYS = [(1, "random", 2), (2, "mincut", 1), (4, "mincut", 100), (3, "edgeless", 3), (4, "empty", 2)]


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize(("size", "how", "together"), WAYS)
def test_equals_local(
    crew: Crew,
    folder: Path,
    tmp_path: Path,
    expected: dict[str, list[dict[str, Any]]],
    size: int,
    how: str,
    together: int,
    name: str,
) -> None:
    parts = cut_graph(open_store(folder / name), size, how, tmp_path / "parts")
    found = crew.run(size, every_model, str(folder / name), str(parts), name, {"batches_per_fetch": together})
    for place, wanted in enumerate(expected[name]):
        one = [of_rank[place] for of_rank in found]
        only_first_predicts(one)
        close(one[0], wanted, f"{name} {GRAPHS[name][1][place]}")


KNOBS: list[dict[str, Any]] = [
    {"batches_per_fetch": 1},
    {"batches_per_fetch": 3},
    {"batches_per_fetch": "auto"},
    {"batches_per_fetch": "auto", "buffer": 20_000},
    {"batches_per_fetch": 2, "prefetch": 1},
    {"batches_per_fetch": 2, "features_in_memory": False},
    {"batches_per_fetch": 1, "cache": 300, "policy": "static"},
    {"batches_per_fetch": 2, "cache": 500, "policy": "score"},
    {"batches_per_fetch": 2, "cache": 500, "policy": "belady"},
    {"batches_per_fetch": 1, "cache": 100_000, "policy": "belady", "cache_lookahead": 3, "prefetch": 2},
]


def every_way(world: World, store: str, parts: str, model: dict[str, Any]) -> list[dict[str, Any]]:
    here = here_of(world, parts)
    found = []
    for place, knobs in enumerate(KNOBS):
        torch.set_num_threads(1 + place % 2)
        found.append(trained(open_store(store), words(model, name="macrobatch", **knobs), here))
    torch.set_num_threads(1)
    return found


@pytest.mark.parametrize(("size", "model"), [(2, {"name": "gat", "heads": 2}), (3, {"name": "sage", "embedding": 3})])
def test_the_same_bits_however_rows_come(
    crew: Crew, folder: Path, tmp_path: Path, size: int, model: dict[str, Any]
) -> None:
    """Batches per relay, rows kept, relays ahead and threads change nothing."""
    parts = str(cut_graph(open_store(folder / "plain"), size, "random", tmp_path / "parts"))
    for found in crew.run(size, every_way, str(folder / "plain"), parts, model):
        for knobs, one in zip(KNOBS, found, strict=True):
            assert torch.equal(one["losses"], found[0]["losses"]), knobs
            for name, tensor in one["weights"].items():
                assert torch.equal(tensor, found[0]["weights"][name]), (knobs, name)


def from_disk(world: World, store: str, parts: str) -> dict[str, Any]:
    tree = words({"name": "sage"}, name="macrobatch", batches_per_fetch=2, features_in_memory=False)
    return trained(open_store(store), tree, here_of(world, parts))


def test_half_precision_that_does_not_stay_in_memory(crew: Crew, folder: Path, tmp_path: Path) -> None:
    graph = plain_graph()
    assert graph.single_nodes.x is not None
    save_store(graph.with_nodes("node", x=graph.single_nodes.x.to(torch.bfloat16)), tmp_path / "half")
    parts = cut_graph(open_store(tmp_path / "half"), 2, "random", tmp_path / "parts")
    found = crew.run(2, from_disk, str(tmp_path / "half"), str(parts))
    close(found[0], trained(open_store(tmp_path / "half"), words({"name": "sage"}, name="local")), "half")


def test_no_batch_outlives_its_steps(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the collector of circles: on a large graph it would come too late."""
    parts = str(cut_graph(open_store(folder / "plain"), 1, "random", tmp_path / "parts"))
    tree = words({"name": "gcn"}, name="macrobatch", batches_per_fetch=2)
    strategy: Any = build(open_store(folder / "plain"), resolve(tree), context=here_of(World(), parts)).strategy
    seen = list[Any]()
    sample = BatchSampler.sample

    def sample_and_watch(self: BatchSampler, batches: Any) -> Any:
        sampled = sample(self, batches)
        seen.extend(weakref.ref(batch) for batch in sampled)
        return sampled

    monkeypatch.setattr(BatchSampler, "sample", sample_and_watch)
    gc.collect()
    gc.disable()
    try:
        steps = len(list(strategy.train_epoch(0)))
        assert len(seen) == steps > 2
        assert [one for one in seen if one() is not None] == []
    finally:
        gc.enable()


CACHED = [{"name": "sage"}, {"name": "gcn"}, {"name": "gin"}]


def with_cached_inputs(world: World, folder: str, parts: dict[str, str], strategy: str) -> list[dict[str, Any]]:
    cases = [("plain", model) for model in CACHED] + [("typed", {"name": "rgcn"})]
    found = []
    for name, model in cases:
        here = here_of(world, parts[name]) if parts else None
        tree = words(model, name=strategy, cache_inputs=True)
        found.append(trained(open_store(f"{folder}/{name}"), tree, here))
    return found


@pytest.mark.parametrize("size", [3])
def test_cached_inputs_equal_those_of_local(crew: Crew, folder: Path, tmp_path: Path, size: int) -> None:
    parts = {
        name: str(cut_graph(open_store(folder / name), size, "random", tmp_path / name)) for name in ("plain", "typed")
    }
    wanted = with_cached_inputs(World(), str(folder), {}, "local")
    found = crew.run(size, with_cached_inputs, str(folder), parts, "macrobatch")
    for place, one in enumerate(wanted):
        close(found[0][place], one, f"cached {place}")


SPLIT: list[dict[str, Any]] = [
    {"name": "gcn", "edge_weight": True},
    {"name": "sage", "norm": "layer"},
    {"name": "sage", "aggr": "max", "layers": 1},
]


def by_columns(world: World, store: str, parts: str | None, strategy: str) -> list[dict[str, Any]]:
    here, found = None if parts is None else here_of(world, parts), []
    for place, model in enumerate(SPLIT):
        fanouts = FANOUTS[: model.get("layers", 3)]
        knobs = {"split": "columns", "batches_per_fetch": 1 + place, "prefetch": place % 2} if parts else {}
        found.append(trained(open_store(store), words(model, name=strategy, fanouts=fanouts, **knobs), here))
    return found


@pytest.mark.parametrize(("size", "how"), [(1, "random"), (2, "mincut"), (3, "empty"), (4, "random")])
def test_features_split_by_column(crew: Crew, folder: Path, tmp_path: Path, size: int, how: str) -> None:
    """The same blocks and the same training; no feature travels after the start."""
    store = str(folder / "plain")
    wanted = by_columns(World(), store, None, "local")
    found = crew.run(
        size, by_columns, store, str(cut_graph(open_store(store), size, how, tmp_path / "p")), "macrobatch"
    )
    for place, one in enumerate(wanted):
        close(found[0][place], one, f"{SPLIT[place]}")


BY_RELATION = {"a:to:b": [2, 1], "b:back:a": [0, 3], "a:like:a": [2, 2], "a:hate:a": [-1, 1], "c:on:b": [1, 1]}


def drawn_blocks(world: World, store: str, parts: str, name: str, count: int, fanouts: Any) -> dict[str, Any]:
    """The blocks of some batches, some of them empty on some ranks, and what was sent for them."""
    graph = open_store(store)
    view = RingView.open(here_of(world, parts).shard, RingExchange(world))  # type: ignore[arg-type]
    sampler = DistNeighborSampler(view, RingExchange(world, world.size, 0), fanouts)
    before = world.traffic.rounds
    random = torch.Generator().manual_seed(world.rank)
    kind = "node" if name != "typed" else "a"
    seeds = [torch.randperm(graph.nodes[kind].count, generator=random)[: 5 * (m % 3)] for m in range(count)]
    keys = [DrawKey(3, 1, step) for step in range(count)]
    found = sampler.blocks([({kind: ids}, key) for ids, key in zip(seeds, keys, strict=True)])
    rounds = world.traffic.rounds - before
    whole = NeighborSampler(graph, fanouts)
    for ids, key, one in zip(seeds, keys, found, strict=True):
        for got, want in zip(one.views, whole.blocks({kind: ids}, key), strict=True):
            assert got.layer == want.layer and got.key == want.key
            for node_type, rows in want.nodes.items():
                assert torch.equal(got.nodes[node_type].node_ids, rows.node_ids)
                assert got.nodes[node_type].num_dst == rows.num_dst
                reached = one.nodes[node_type]
                everywhere = torch.cat([reached.rows, *reached.remote_rows])
                assert torch.equal(everywhere.sort().values, torch.arange(reached.count))
            for edge_type, relation in want.relations.items():
                mine = got.relations[edge_type]
                assert torch.equal(mine.structure.indptr, relation.structure.indptr)
                assert torch.equal(mine.structure.col, relation.structure.col)
                assert torch.equal(mine.edge_ids, relation.edge_ids)
                for one_side, other in ((mine.weight, relation.weight), (mine.attr, relation.attr)):
                    assert (one_side is None) == (other is None)
                    assert one_side is None or torch.equal(one_side, other)  # type: ignore[arg-type]
                if relation.sampling_scale is not None:
                    assert mine.sampling_scale is not None and torch.equal(
                        mine.sampling_scale(), relation.sampling_scale()
                    )
    return {"rounds": rounds}


@pytest.mark.parametrize(("size", "how"), [(1, "random"), (2, "mincut"), (3, "empty"), (4, "random")])
def test_blocks_are_those_of_one_process(crew: Crew, folder: Path, tmp_path: Path, size: int, how: str) -> None:
    """And cost two rounds per hop, however many batches."""
    for name in GRAPHS:
        parts = str(cut_graph(open_store(folder / name), size, how, tmp_path / name))
        for count in (1, 4):
            found = crew.run(size, drawn_blocks, str(folder / name), parts, name, count, FANOUTS)
            assert [one["rounds"] for one in found] == [0 if size == 1 else 2 * len(FANOUTS)] * size
    fanouts = {tuple(word.split(":")): counts for word, counts in BY_RELATION.items()} | {("b", "never", "c"): [1, 1]}
    crew.run(size, drawn_blocks, str(folder / "typed"), str(tmp_path / "typed"), "typed", 3, fanouts)


LINKS: dict[str, dict[str, Any]] = {
    "batch": {"link": {"negatives": 2, "exclude": "batch"}},
    "none": {"link": {"decoder": "mlp", "dropout": 0.3, "negative_mode": "shared", "negatives": 5, "exclude": "none"}},
    "disjoint": {"link": {"negatives": 1, "exclude": "disjoint:0.5"}},
    "pair": {"model": {"embedding": 3}, "link": {"negative_mode": "pair", "exclude": "batch", "l2": 0.1}},
    "typed": {"model": {"name": "rgcn"}, "link": {"reverse": "none", "exclude": "batch"}},
    "few": {  # batches of which some ranks have nothing
        "batch": 5,
        "link": {"decoder": "mlp", "negative_mode": "shared", "negatives": 4, "exclude": "none", "l2": 0.1},
    },
}


def link_words(case: str, **strategy: Any) -> dict[str, Any]:
    more = LINKS[case]
    tree = words(
        {"name": "sage", "layers": 2, **more.get("model", {})},
        fanouts=[3, 2],
        **{"batch": more.get("batch", 50), **strategy},
    )
    return {**tree, "task": "link", "link": {"eval_negatives": 6, "ranking": "sampled", **more["link"]}}


def every_link(world: World, folder: str, parts: dict[str, str], strategy: str) -> list[dict[str, Any]]:
    found = []
    for name in LINKS:
        store = "linked-typed" if name == "typed" else "linked"
        here = here_of(world, parts[store]) if parts else None
        strategy_words = {"batches_per_fetch": 2} if parts else {}
        tree = link_words(name, name=strategy, **strategy_words)
        strategy_made = build(open_store(f"{folder}/{store}"), resolve(tree), context=here).strategy
        losses = [(record.loss, record.count) for epoch in range(EPOCHS) for record in strategy_made.train_epoch(epoch)]
        found.append({"losses": torch.tensor(losses), "test": strategy_made.evaluate("test")})
    return found


def test_links_equal_local(crew: Crew, folder: Path) -> None:
    """Edge seeds, negatives among all nodes, and the edges of the whole batch hidden, not of the rank's share."""
    for store, make in (("linked", plain_graph), ("linked-typed", typed_graph)):
        save_store(linked(make), folder / store)
    wanted = every_link(World(), str(folder), {}, "local")
    for size in (2, 3):
        stores = ("linked", "linked-typed")
        parts = {
            store: str(cut_graph(open_store(folder / store), size, "random", folder / f"{store}-{size}"))
            for store in stores
        }
        for found in crew.run(size, every_link, str(folder), parts, "macrobatch"):
            for name, one, other in zip(LINKS, found, wanted, strict=True):
                close(one, other, name)


def refused(world: World, store: str, parts: str, model: dict[str, Any], knobs: dict[str, Any]) -> str:
    try:
        build(open_store(store), resolve(words(model, name="macrobatch", **knobs)), context=here_of(world, parts))
    except ConfigError as error:
        return str(error)
    return ""


def test_what_cannot_be_is_refused(crew: Crew, folder: Path, tmp_path: Path) -> None:
    parts = str(cut_graph(open_store(folder / "plain"), 2, "random", tmp_path / "parts"))
    cases: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({"name": "sage", "norm": "batch"}, {}, "batch norm"),
        ({"name": "sage"}, {"fanouts": [3, 2]}, "one number per layer, 3; found 2"),
        ({"name": "gat"}, {"cache_inputs": True}, "does not allow strategy.cache_inputs"),
        ({"name": "gat"}, {"split": "columns"}, "supports sage and gcn"),
        (
            {"name": "sage"},
            {"split": "columns", "cache": 1000},
            "strategy.cache has no effect with strategy.split=columns",
        ),
    ]
    for model, knobs, text in cases:
        for said in crew.run(2, refused, str(folder / "plain"), parts, model, knobs):
            assert text in said


def on_hosts(world: World, hosts: list[list[int]]) -> World:
    """Ranks that share memory with those of their own host only."""
    world = with_shelf(world)
    assert world.shm is not None
    mine = next(ranks for ranks in hosts if world.rank in ranks)
    world.shm.pids = [pid if q in mine else None for q, pid in enumerate(world.shm.pids)]
    world.shm.readers = [pid if q in mine else None for q, pid in enumerate(world.shm.readers)]
    return world


def kept_by_host(world: World, store: str, parts: str, hosts: list[list[int]], name: str) -> list[Any]:
    world = on_hosts(world, hosts)
    here, found = here_of(world, parts), []
    for cache, policy in ((0, "belady"), (1500, "belady"), (1500, "score"), (10**6, "static")):
        knobs = {"batches_per_fetch": 2, "cache": cache, "policy": policy, "cache_lookahead": 1}
        strategy: Any = build(
            open_store(store), resolve(words(GRAPHS[name][1][0], name="macrobatch", **knobs)), context=here
        )
        strategy = strategy.strategy
        losses = [record.loss for epoch in range(2) for record in strategy.train_epoch(epoch)]
        stats, kept = strategy.stats, strategy.fetcher.host_cache
        slots = 0 if kept is None else sum(s.cache.capacity for s in kept.slots.values())
        found.append((losses, stats.rows_requested, stats.hits, stats.fetched_bytes, slots))
    return found


@pytest.mark.parametrize(("hosts", "name"), [([[0, 1], [2, 3]], "plain"), ([[0, 1, 2], [3]], "typed")])
def test_workers_of_a_machine_keep_rows_together(
    crew: Crew, folder: Path, tmp_path: Path, hosts: list[list[int]], name: str
) -> None:
    parts = str(cut_graph(open_store(folder / name), 4, "random", tmp_path / "parts"))
    ranks = crew.run(4, kept_by_host, str(folder / name), parts, hosts, name)
    for found in ranks:
        assert all(losses == found[0][0] for losses, *_ in found)
        assert found[0][2] == 0 and all(hits > 0 for _, _, hits, *_ in found[1:]), "rows were there"
    for cell in range(1, 4):
        plain, kept = (sum(found[which][3] for found in ranks) for which in (0, cell))
        assert kept < plain, "less travels than without"
        for host in hosts:
            assert len({ranks[rank][cell][4] for rank in host}) == 1, "workers of a machine share slots"

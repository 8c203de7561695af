"""macrobatch equals sampled local for every partition: blocks, losses, final weights and predictions.

Batches per fetch, caches and prefetching change no bit.
"""

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
from tests.equivalence.test_sar import check_close, graph_with_held_out_edges
from tests.ranks import RankPool, with_shm_transport

EPOCHS = 2
FANOUTS = [4, 3, 2]
MODELS: list[dict[str, Any]] = [
    {"name": "gcn", "input_dropout": 0.3},
    {"name": "sage", "norm": "layer"},
    {"name": "sage", "aggr": "max"},
    {"name": "gat", "heads": 2, "edge_features": True, "attention_dropout": 0.3},
    {"name": "gatv2", "heads": 2},
    {"name": "gin"},
    {"name": "res+", "norm": "layer"},
]
TYPED: list[dict[str, Any]] = [{"name": "rgcn"}, {"name": "hetero-sage"}, {"name": "hgt", "heads": 2}]
GRAPHS = {
    "plain": (plain_graph, MODELS),
    "typed": (typed_graph, TYPED),
    "related": (related_graph, [{"name": "rgcn", "bases": 2}]),
}


def run_settings(model: dict[str, Any], **strategy: Any) -> dict[str, Any]:
    base = {"hidden": 8, "layers": 3, "dropout": 0.4}
    train = {"lr": 0.02, "weight_decay": 1e-3, "clip": 1.0}
    sampling = {"fanouts": FANOUTS, "batch": 7, "cache_inputs": False, **strategy}
    return {"model": {**base, **model}, "train": train, "precision": "float64", "seed": 5, "strategy": sampling}


def fit(graph: Graph, settings: dict[str, Any], context: RankContext | None = None) -> dict[str, Any]:
    strategy = build(graph, resolve(settings), context=context).strategy
    losses = [
        (record.loss, record.count, record.step) for epoch in range(EPOCHS) for record in strategy.train_epoch(epoch)
    ]
    outcome = {
        "losses": torch.tensor(losses, dtype=torch.float64),
        "test": strategy.evaluate("test"),
        "weights": {name: tensor.clone() for name, tensor in strategy.state_dict()["model"].items()},
        "logits": strategy.predict().logits,
    }
    strategy.close()
    return outcome


def rank_context(world: World, parts: str) -> RankContext:
    return RankContext(world, Partition.open(parts).shard(world.rank))


def every_model(world: World, store: str, parts: str, name: str, options: dict[str, Any]) -> list[dict[str, Any]]:
    world = with_shm_transport(world) if world.size == 3 else world  # other sizes use sockets
    context = rank_context(world, parts)
    return [
        fit(open_store(store), run_settings(model, name="macrobatch", **options), context) for model in GRAPHS[name][1]
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("stores")
    for name, (make, _) in GRAPHS.items():
        save_store(make(), path / name)
    return path


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, list[dict[str, Any]]]:
    return {
        name: [fit(open_store(folder / name), run_settings(model, name="local")) for model in models]
        for name, (_, models) in GRAPHS.items()
    }


def check_only_first_predicts(outcomes: list[dict[str, Any]]) -> None:
    for outcome in outcomes[1:]:
        assert not len(outcome.pop("logits"))
        check_close(outcome, {key: value for key, value in outcomes[0].items() if key != "logits"}, "rank")


LAYOUTS = [(1, "random", 2), (2, "mincut", 1), (4, "mincut", 100), (3, "edgeless", 3), (4, "empty", 2)]


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize(("size", "method", "batches_per_fetch"), LAYOUTS)
def test_training_equals_local(
    pool: RankPool,
    folder: Path,
    tmp_path: Path,
    expected: dict[str, list[dict[str, Any]]],
    size: int,
    method: str,
    batches_per_fetch: int,
    name: str,
) -> None:
    parts = cut_graph(open_store(folder / name), size, method, tmp_path / "parts")
    options = {"batches_per_fetch": batches_per_fetch}
    ranks = pool.run(size, every_model, str(folder / name), str(parts), name, options)
    for index, expected_outcome in enumerate(expected[name]):
        outcomes = [of_rank[index] for of_rank in ranks]
        check_only_first_predicts(outcomes)
        check_close(outcomes[0], expected_outcome, f"{name} {GRAPHS[name][1][index]}")


OPTIONS: list[dict[str, Any]] = [
    {"batches_per_fetch": 1},
    {"batches_per_fetch": 3},
    {"batches_per_fetch": "auto"},
    {"batches_per_fetch": "auto", "buffer": 20_000},
    {"batches_per_fetch": 2, "prefetch": 1},
    {"batches_per_fetch": 2, "features_in_memory": False},
    {"batches_per_fetch": 1, "cache": 300, "policy": "score"},
    {"batches_per_fetch": 2, "cache": 500, "policy": "score"},
    {"batches_per_fetch": 2, "cache": 500, "policy": "belady"},
    {"batches_per_fetch": 1, "cache": 100_000, "policy": "belady", "cache_lookahead": 3, "prefetch": 2},
]


def train_with_all_options(world: World, store: str, parts: str, model: dict[str, Any]) -> list[dict[str, Any]]:
    context = rank_context(world, parts)
    outcomes = []
    for index, options in enumerate(OPTIONS):
        torch.set_num_threads(1 + index % 2)
        outcomes.append(fit(open_store(store), run_settings(model, name="macrobatch", **options), context))
    torch.set_num_threads(1)
    return outcomes


@pytest.mark.parametrize(("size", "model"), [(2, {"name": "gat", "heads": 2}), (3, {"name": "sage", "embedding": 3})])
def test_fetching_options_change_no_bit(
    pool: RankPool, folder: Path, tmp_path: Path, size: int, model: dict[str, Any]
) -> None:
    """Batches per fetch, caches, prefetching and threads change nothing."""
    parts = str(cut_graph(open_store(folder / "plain"), size, "random", tmp_path / "parts"))
    for outcomes in pool.run(size, train_with_all_options, str(folder / "plain"), parts, model):
        for options, outcome in zip(OPTIONS, outcomes, strict=True):
            assert torch.equal(outcome["losses"], outcomes[0]["losses"]), options
            for name, tensor in outcome["weights"].items():
                assert torch.equal(tensor, outcomes[0]["weights"][name]), (options, name)


def train_from_disk(world: World, store: str, parts: str) -> dict[str, Any]:
    settings = run_settings({"name": "sage"}, name="macrobatch", batches_per_fetch=2, features_in_memory=False)
    return fit(open_store(store), settings, rank_context(world, parts))


def test_half_precision_features_read_from_disk_equal_local(pool: RankPool, folder: Path, tmp_path: Path) -> None:
    graph = plain_graph()
    assert graph.single_nodes.x is not None
    save_store(graph.with_nodes("node", x=graph.single_nodes.x.to(torch.bfloat16)), tmp_path / "half")
    parts = cut_graph(open_store(tmp_path / "half"), 2, "random", tmp_path / "parts")
    outcomes = pool.run(2, train_from_disk, str(tmp_path / "half"), str(parts))
    expected = fit(open_store(tmp_path / "half"), run_settings({"name": "sage"}, name="local"))
    check_close(outcomes[0], expected, "half")


def test_no_batch_outlives_its_steps(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the garbage collector off: on a large graph it would run too late."""
    parts = str(cut_graph(open_store(folder / "plain"), 1, "random", tmp_path / "parts"))
    settings = run_settings({"name": "gcn"}, name="macrobatch", batches_per_fetch=2)
    strategy: Any = build(
        open_store(folder / "plain"), resolve(settings), context=rank_context(World(), parts)
    ).strategy
    references = list[Any]()
    sample = BatchSampler.sample

    def sample_and_watch(self: BatchSampler, batches: Any) -> Any:
        sampled = sample(self, batches)
        references.extend(weakref.ref(batch) for batch in sampled)
        return sampled

    monkeypatch.setattr(BatchSampler, "sample", sample_and_watch)
    gc.collect()
    gc.disable()
    try:
        steps = len(list(strategy.train_epoch(0)))
        assert len(references) == steps > 2
        assert [reference for reference in references if reference() is not None] == []
    finally:
        gc.enable()


CACHED = [{"name": "sage", "edge_features": False}, {"name": "gcn"}, {"name": "gin", "edge_features": False}]


def train_with_cached_inputs(world: World, folder: str, parts: dict[str, str], strategy: str) -> list[dict[str, Any]]:
    cases = [("plain", model) for model in CACHED] + [("typed", {"name": "rgcn"})]
    outcomes = []
    for name, model in cases:
        context = rank_context(world, parts[name]) if parts else None
        settings = run_settings(model, name=strategy, cache_inputs=True)
        outcomes.append(fit(open_store(f"{folder}/{name}"), settings, context))
    return outcomes


@pytest.mark.parametrize("size", [3])
def test_cached_inputs_equal_those_of_local(pool: RankPool, folder: Path, tmp_path: Path, size: int) -> None:
    parts = {
        name: str(cut_graph(open_store(folder / name), size, "random", tmp_path / name)) for name in ("plain", "typed")
    }
    expected = train_with_cached_inputs(World(), str(folder), {}, "local")
    ranks = pool.run(size, train_with_cached_inputs, str(folder), parts, "macrobatch")
    for index, outcome in enumerate(expected):
        check_close(ranks[0][index], outcome, f"cached {index}")


SPLIT: list[dict[str, Any]] = [
    {"name": "gcn", "edge_weight": True},
    {"name": "sage", "norm": "layer", "edge_features": False},
    {"name": "sage", "aggr": "max", "layers": 1, "edge_features": False},
]


def train_with_column_split(world: World, store: str, parts: str | None, strategy: str) -> list[dict[str, Any]]:
    context, outcomes = None if parts is None else rank_context(world, parts), []
    for index, model in enumerate(SPLIT):
        fanouts = FANOUTS[: model.get("layers", 3)]
        options = {"split": "columns", "batches_per_fetch": 1 + index, "prefetch": index % 2} if parts else {}
        outcomes.append(fit(open_store(store), run_settings(model, name=strategy, fanouts=fanouts, **options), context))
    return outcomes


@pytest.mark.parametrize(("size", "method"), [(1, "random"), (2, "mincut"), (3, "empty"), (4, "random")])
def test_training_with_features_split_by_column_equals_local(
    pool: RankPool, folder: Path, tmp_path: Path, size: int, method: str
) -> None:
    """Blocks and training are the same; no feature is sent after the start."""
    store = str(folder / "plain")
    expected = train_with_column_split(World(), store, None, "local")
    parts = str(cut_graph(open_store(store), size, method, tmp_path / "parts"))
    ranks = pool.run(size, train_with_column_split, store, parts, "macrobatch")
    for index, outcome in enumerate(expected):
        check_close(ranks[0][index], outcome, f"{SPLIT[index]}")


BY_RELATION = {"a:to:b": [2, 1], "b:back:a": [0, 3], "a:like:a": [2, 2], "a:hate:a": [-1, 1], "c:on:b": [1, 1]}


def compare_blocks(world: World, store: str, parts: str, name: str, count: int, fanouts: Any) -> int:
    """Compare blocks of some batches, of which some ranks have none, with local; return the rounds."""
    graph = open_store(store)
    view = RingView.open(rank_context(world, parts).shard, RingExchange(world))  # type: ignore[arg-type]
    sampler = DistNeighborSampler(view, RingExchange(world, world.size, 0), fanouts)
    before = world.traffic.rounds
    random = torch.Generator().manual_seed(world.rank)
    seed_type = "node" if name != "typed" else "a"
    seeds = [torch.randperm(graph.nodes[seed_type].count, generator=random)[: 5 * (m % 3)] for m in range(count)]
    keys = [DrawKey(3, 1, step) for step in range(count)]
    batches = sampler.blocks([({seed_type: ids}, key) for ids, key in zip(seeds, keys, strict=True)])
    rounds = world.traffic.rounds - before
    local_sampler = NeighborSampler(graph, fanouts)
    for ids, key, batch in zip(seeds, keys, batches, strict=True):
        for view, expected in zip(batch.views, local_sampler.blocks({seed_type: ids}, key), strict=True):
            assert view.layer == expected.layer and view.key == expected.key
            for node_type, rows in expected.nodes.items():
                assert torch.equal(view.nodes[node_type].node_ids, rows.node_ids)
                assert view.nodes[node_type].num_dst == rows.num_dst
                sampled = batch.nodes[node_type]
                all_rows = torch.cat([sampled.rows, *sampled.remote_rows])
                assert torch.equal(all_rows.sort().values, torch.arange(sampled.count))
            for edge_type, expected_relation in expected.relations.items():
                check_relation(view.relations[edge_type], expected_relation)
    return rounds


def check_relation(relation: Any, expected: Any) -> None:
    assert torch.equal(relation.structure.indptr, expected.structure.indptr)
    assert torch.equal(relation.structure.col, expected.structure.col)
    assert torch.equal(relation.edge_ids, expected.edge_ids)
    for tensor, expected_tensor in ((relation.weight, expected.weight), (relation.attr, expected.attr)):
        assert (tensor is None) == (expected_tensor is None)
        assert tensor is None or torch.equal(tensor, expected_tensor)
    if expected.sampling_scale is not None:
        assert relation.sampling_scale is not None
        assert torch.equal(relation.sampling_scale(), expected.sampling_scale())


@pytest.mark.parametrize(("size", "method"), [(1, "random"), (2, "mincut"), (3, "empty"), (4, "random")])
def test_blocks_equal_those_of_one_process(
    pool: RankPool, folder: Path, tmp_path: Path, size: int, method: str
) -> None:
    """They need two rounds per hop for any number of batches."""
    for name in GRAPHS:
        parts = str(cut_graph(open_store(folder / name), size, method, tmp_path / name))
        for count in (1, 4):
            rounds = pool.run(size, compare_blocks, str(folder / name), parts, name, count, FANOUTS)
            assert rounds == [0 if size == 1 else 2 * len(FANOUTS)] * size
    fanouts = {tuple(key.split(":")): counts for key, counts in BY_RELATION.items()} | {("b", "never", "c"): [1, 1]}
    pool.run(size, compare_blocks, str(folder / "typed"), str(tmp_path / "typed"), "typed", 3, fanouts)


LINKS: dict[str, dict[str, Any]] = {
    "batch": {"link": {"negatives": 2, "exclude": "batch"}},
    "none": {"link": {"decoder": "mlp", "dropout": 0.3, "negative_mode": "shared", "negatives": 5, "exclude": "none"}},
    "disjoint": {"link": {"negatives": 1, "exclude": "disjoint:0.5"}},
    "pair": {"model": {"embedding": 3}, "link": {"negative_mode": "pair", "exclude": "batch", "l2": 0.1}},
    "typed": {"model": {"name": "rgcn"}, "link": {"reverse": "none", "exclude": "batch"}},
    "few": {  # batches without edges on some ranks
        "batch": 5,
        "link": {"decoder": "mlp", "negative_mode": "shared", "negatives": 4, "exclude": "none", "l2": 0.1},
    },
}


def link_settings(case: str, **strategy: Any) -> dict[str, Any]:
    case_settings = LINKS[case]
    settings = run_settings(
        {"name": "sage", "layers": 2, **case_settings.get("model", {})},
        fanouts=[3, 2],
        **{"batch": case_settings.get("batch", 50), **strategy},
    )
    return {**settings, "task": "link", "link": {"eval_negatives": 6, "ranking": "sampled", **case_settings["link"]}}


def every_link(world: World, folder: str, parts: dict[str, str], strategy: str) -> list[dict[str, Any]]:
    outcomes = []
    for name in LINKS:
        store = "linked-typed" if name == "typed" else "linked"
        context = rank_context(world, parts[store]) if parts else None
        options = {"batches_per_fetch": 2} if parts else {}
        settings = link_settings(name, name=strategy, **options)
        built = build(open_store(f"{folder}/{store}"), resolve(settings), context=context).strategy
        losses = [(record.loss, record.count) for epoch in range(EPOCHS) for record in built.train_epoch(epoch)]
        outcomes.append({"losses": torch.tensor(losses), "test": built.evaluate("test")})
    return outcomes


def test_link_prediction_equals_local(pool: RankPool, folder: Path) -> None:
    """Negatives are drawn from all nodes, and the edges of the whole batch are masked, not only those of the rank."""
    for store, make in (("linked", plain_graph), ("linked-typed", typed_graph)):
        save_store(graph_with_held_out_edges(make), folder / store)
    expected = every_link(World(), str(folder), {}, "local")
    for size in (2, 3):
        stores = ("linked", "linked-typed")
        parts = {
            store: str(cut_graph(open_store(folder / store), size, "random", folder / f"{store}-{size}"))
            for store in stores
        }
        for outcomes in pool.run(size, every_link, str(folder), parts, "macrobatch"):
            for name, outcome, expected_outcome in zip(LINKS, outcomes, expected, strict=True):
                check_close(outcome, expected_outcome, name)


def config_error(world: World, store: str, parts: str, model: dict[str, Any], options: dict[str, Any]) -> str:
    try:
        config = resolve(run_settings(model, name="macrobatch", **options))
        build(open_store(store), config, context=rank_context(world, parts))
    except ConfigError as error:
        return str(error)
    return ""


def test_unsupported_options_are_refused(pool: RankPool, folder: Path, tmp_path: Path) -> None:
    parts = str(cut_graph(open_store(folder / "plain"), 2, "random", tmp_path / "parts"))
    cases: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({"name": "sage", "norm": "batch"}, {}, "batch norm"),
        ({"name": "sage"}, {"fanouts": [3, 2]}, "one number per layer, 3; found 2"),
        ({"name": "gat"}, {"cache_inputs": True}, "does not allow strategy.cache_inputs"),
        ({"name": "sage"}, {"split": "columns"}, "without edge features in sage"),
        (
            {"name": "sage", "edge_features": False},
            {"split": "columns", "cache": 1000},
            "strategy.cache has no effect with strategy.split=columns",
        ),
    ]
    for model, options, text in cases:
        for message in pool.run(2, config_error, str(folder / "plain"), parts, model, options):
            assert text in message


def with_hosts(world: World, hosts: list[list[int]]) -> World:
    """Restrict shared memory to ranks of the same host."""
    world = with_shm_transport(world)
    assert world.shm is not None
    host = next(ranks for ranks in hosts if world.rank in ranks)
    world.shm.pids = [pid if q in host else None for q, pid in enumerate(world.shm.pids)]
    world.shm.readers = [pid if q in host else None for q, pid in enumerate(world.shm.readers)]
    return world


def train_with_host_cache(world: World, store: str, parts: str, hosts: list[list[int]], name: str) -> list[Any]:
    world = with_hosts(world, hosts)
    context, outcomes = rank_context(world, parts), []
    for cache, policy in ((0, "belady"), (1500, "belady"), (1500, "score"), (10**6, "score")):
        options = {"batches_per_fetch": 2, "cache": cache, "policy": policy, "cache_lookahead": 1}
        config = resolve(run_settings(GRAPHS[name][1][0], name="macrobatch", **options))
        strategy: Any = build(open_store(store), config, context=context).strategy
        losses = [record.loss for epoch in range(2) for record in strategy.train_epoch(epoch)]
        stats, host_cache = strategy.stats, strategy.fetcher.host_cache
        slots = 0 if host_cache is None else sum(cache.capacity for cache in host_cache.caches.values())
        outcomes.append((losses, stats.rows_requested, stats.hits, stats.fetched_bytes, slots))
    return outcomes


@pytest.mark.parametrize(("hosts", "name"), [([[0, 1], [2, 3]], "plain"), ([[0, 1, 2], [3]], "typed")])
def test_workers_of_a_host_share_a_row_cache(
    pool: RankPool, folder: Path, tmp_path: Path, hosts: list[list[int]], name: str
) -> None:
    parts = str(cut_graph(open_store(folder / name), 4, "random", tmp_path / "parts"))
    ranks = pool.run(4, train_with_host_cache, str(folder / name), parts, hosts, name)
    for outcomes in ranks:
        assert all(losses == outcomes[0][0] for losses, *_ in outcomes)
        assert outcomes[0][2] == 0 and all(hits > 0 for _, _, hits, *_ in outcomes[1:]), "rows are cached"
    for index in range(1, 4):
        uncached, cached = (sum(outcomes[position][3] for outcomes in ranks) for position in (0, index))
        assert cached < uncached, "fewer bytes than without a cache"
        for host in hosts:
            assert len({ranks[rank][index][4] for rank in host}) == 1, "workers of a host share slots"

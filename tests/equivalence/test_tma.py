"""tma: one trainer equals the plain loop, averaging every step of SGD equals averaging gradients, rounds of a fixed
number of steps give the same bits every time, and trainers that are late or lost are left out."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from gnnfleet.comm.message_store import MessageStore
from gnnfleet.config.resolve import resolve
from gnnfleet.config.schema import RunConfig
from gnnfleet.errors import ConfigError, ExchangeError
from gnnfleet.graph.graph import Graph, validated_edges
from gnnfleet.graph.partition.node_assignment import ClusterMap, NodeAssignment
from gnnfleet.graph.store import open_store, save_store
from gnnfleet.launch import tma_subgraph
from gnnfleet.launch.tma_subgraph import make_local_training
from gnnfleet.strategies.job import PRECISIONS
from gnnfleet.strategies.tma.config import TmaConfig
from gnnfleet.strategies.tma.protocol import RunMessages, RunState
from gnnfleet.strategies.tma.trainer import Trainer
from gnnfleet.training.build import RankContext, build
from gnnfleet.training.partition_cache import ensure_clusters, trained_graph
from tests.equivalence.spread import plain_graph, typed_graph
from tests.equivalence.test_estimates import estimates_of
from tests.equivalence.test_sar import graph_with_held_out_edges as linked

BATCH = 7


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("stores")
    graphs = {"plain": plain_graph(), "typed": typed_graph(), "linked": linked(plain_graph)}
    for name, graph in graphs.items():
        save_store(graph, folder / name)
    return {name: folder / name for name in graphs}


def run_config(strategy: dict[str, Any], **more: Any) -> RunConfig:
    model = {"name": "sage", "hidden": 8, "layers": 2, "dropout": 0.3, **more.pop("model", {})}
    train = {"lr": 0.02, "clip": 1.0, "epochs": 3, **more.pop("train", {})}
    return resolve({"model": model, "train": train, "precision": "float64", "seed": 5, "strategy": strategy, **more})


def tma(**options: Any) -> dict[str, Any]:
    return {"name": "tma", "fanouts": [3, 2], "batch": BATCH, "cache_inputs": False, "give_up": 30, **options}


def assignment_of(graph: Graph, config: RunConfig) -> NodeAssignment:
    path = ensure_clusters(graph, trained_graph(graph, config), config)
    clusters = None if path is None else ClusterMap.open(path)
    name = "" if path is None else path.name
    return NodeAssignment({kind: table.count for kind, table in graph.nodes.items()}, clusters, config.seed, name)


@contextmanager
def trainers_in_threads(
    store: Path, config: RunConfig, *, folder: Path | None = None, only: Sequence[int] | None = None
) -> Iterator[Any]:
    """The coordinator's strategy, with trainers in threads of this process."""
    graph = open_store(store)
    server, assignment = MessageStore.serve(), assignment_of(graph, config)
    strategy: Any = build(graph, config, context=RankContext(message_store=server, assignment=assignment)).strategy
    errors: list[BaseException] = []

    def run_trainer(index: int) -> None:
        try:
            torch.set_num_threads(1)
            trainer = Trainer(
                config.strategy,  # type: ignore[arg-type]
                index,
                server.reconnect(),
                assignment,
                lambda nodes: make_local_training(graph, config, index, nodes),
                dtype=PRECISIONS[config.precision],
                folder=None if folder is None else folder / str(index),
            )
            trainer.run(lambda text: errors.append(RuntimeError(text)))
        except BaseException as error:
            RunMessages(server.reconnect()).write_exit(index)
            errors.append(error)

    indices = range(config.workers) if only is None else only
    threads = [threading.Thread(target=run_trainer, args=(index,), daemon=True) for index in indices]
    for thread in threads:
        thread.start()
    try:
        yield strategy
    except Exception as error:
        raise errors[0] if errors else error from error
    finally:
        strategy.close()
        RunMessages(server).write_state(RunState(0, 0, done=True))
        for thread in threads:
            thread.join(20)
    assert not errors, errors


def messages_of(strategy: Any) -> RunMessages:
    return RunMessages(strategy._job.context.message_store)


def weights_of(strategy: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in strategy.state_dict()["model"].items()}


def state_of(strategy: Any) -> dict[str, dict[str, torch.Tensor]]:
    return {part: {n: t.clone() for n, t in tensors.items()} for part, tensors in strategy.state_dict().items()}


def rounds(strategy: Any, first: int, last: int) -> list[Any]:
    return [record for number in range(first, last) for record in strategy.train_epoch(number)]


CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("plain", {}, {}),
    ("plain", {"full": True, "batch": 0}, {"model": {"name": "gcn"}}),
    ("plain", {}, {"model": {"embedding": 3}}),
    ("typed", {}, {"model": {"name": "rgcn"}}),
    ("typed", {}, {"model": {"name": "hgt", "heads": 2, "attention_dropout": 0.3}}),
    ("linked", {"batch": 50}, {"task": "link", "link": {"negatives": 2, "eval_negatives": 6, "ranking": "sampled"}}),
]


@pytest.mark.parametrize(
    ("scheme", "name", "options", "more"),
    [("super" if index % 2 else "random", *case) for index, case in enumerate(CASES)],
)
def test_one_trainer_is_the_plain_loop(
    stores: dict[str, Path], scheme: str, name: str, options: dict[str, Any], more: dict[str, Any]
) -> None:
    """Bit for bit; a round with as many steps as an epoch is an epoch."""
    local = {"name": "local", "cache_inputs": False, "batch": options.get("batch", BATCH)}
    local |= {} if options.get("full") else {"fanouts": [3, 2]}
    plain: Any = build(open_store(stores[name]), run_config(local, **more)).strategy
    epochs = [list(plain.train_epoch(epoch)) for epoch in range(3)]
    config = run_config(tma(scheme=scheme, steps=len(epochs[0]), **options), **more)
    with trainers_in_threads(stores[name], config) as strategy:
        records = rounds(strategy, 0, 3)
        assert strategy.evaluate("test") == plain.evaluate("test")
        for key, tensor in weights_of(strategy).items():
            assert torch.equal(tensor, plain.state_dict()["model"][key]), key
    for record, steps in zip(records, epochs, strict=True):
        assert record.steps == len(steps) and record.count == sum(step.count for step in steps)
        assert record.loss == pytest.approx(sum(step.loss * step.count for step in steps) / record.count, rel=1e-12)


@pytest.mark.parametrize("scheme", ["random", "super", "psgd-pa"])
def test_averaging_every_step_averages_gradients(stores: dict[str, Path], scheme: str) -> None:
    train = {"optimizer": "sgd", "momentum": 0.0, "weight_decay": 0.0, "lr": 0.1, "clip": 0.0}
    options = {"scheme": scheme, "steps": 1, "full": True, "batch": 0}
    config = run_config(tma(**options), workers=3, train=train)
    graph = open_store(stores["plain"])
    nodes = [assignment_of(graph, config).nodes_of(i, 3) for i in range(3)]
    trainers: list[Any] = [make_local_training(graph, config, i, nodes[i]).strategy for i in range(3)]
    theta = {name: t.clone() for name, t in trainers[0].state_dict()["model"].items()}
    for epoch in range(3):
        before = theta
        grads = []
        for trainer in trainers:
            trainer.load_state_dict({"model": before, "optimizer": {}})
            list(trainer.train_epoch(epoch))
            grads.append({name: (before[name] - t) / 0.1 for name, t in trainer.state_dict()["model"].items()})
        theta = {name: before[name] - 0.1 * sum(grad[name] for grad in grads) / 3 for name in before}
    with trainers_in_threads(stores["plain"], config) as strategy:
        rounds(strategy, 0, 3)
        for name, tensor in weights_of(strategy).items():
            torch.testing.assert_close(tensor, theta[name], rtol=1e-9, atol=1e-12)


OPTIONS: list[dict[str, Any]] = [
    {"scheme": "random"},
    {"scheme": "super", "weighting": "edges"},
    {"scheme": "llcg", "weighting": "steps", "optimizer": "reset"},
    {"scheme": "super"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: options["scheme"])
def test_rounds_of_fixed_steps_give_the_same_bits_every_time(stores: dict[str, Path], options: dict[str, Any]) -> None:
    config = run_config(tma(steps=2, **options), workers=3, train={"epochs": 4})
    records, weights = [], []
    for _ in range(2):
        with trainers_in_threads(stores["plain"], config) as strategy:
            records.append([(r.loss, r.count, r.steps) for r in rounds(strategy, 0, 4)])
            weights.append(weights_of(strategy))
    assert records[0] == records[1]
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())


@pytest.mark.parametrize(
    ("options", "model"),
    [
        ({}, {"embedding": 3}),
        ({"scheme": "llcg", "correction": 3}, {}),
        ({"weighting": "edges"}, {"embedding": 3}),
    ],
)
def test_a_resumed_run_gives_the_same_bits(
    stores: dict[str, Path], tmp_path: Path, options: dict[str, Any], model: dict[str, Any]
) -> None:
    """Coordinator and trainers are restarted after two rounds; trainers read their checkpoints."""
    config = run_config(tma(steps=2, **options), workers=2, train={"epochs": 5}, model=model)
    with trainers_in_threads(stores["plain"], config, folder=tmp_path / "uninterrupted") as strategy:
        rounds(strategy, 0, 5)
        expected = weights_of(strategy)
    with trainers_in_threads(stores["plain"], config, folder=tmp_path / "resumed") as strategy:
        rounds(strategy, 0, 2)
        state = state_of(strategy)
    with trainers_in_threads(stores["plain"], config, folder=tmp_path / "resumed") as strategy:
        strategy.load_state_dict(state)
        rounds(strategy, 2, 5)
        assert all(torch.equal(t, expected[name]) for name, t in weights_of(strategy).items())


def test_a_run_resumes_with_another_partition(stores: dict[str, Path], tmp_path: Path) -> None:
    """Optimizer state of embedding rows starts anew: it is of other nodes than a trainer has now."""
    options, model = tma(steps=2), {"embedding": 3}
    with trainers_in_threads(stores["plain"], run_config(options, workers=2, model=model), folder=tmp_path) as strategy:
        rounds(strategy, 0, 2)
        state = state_of(strategy)
    resumed = []
    for folder in (tmp_path, tmp_path / "nothing"):  # with checkpoints of trainers, and without
        config = run_config(options, workers=2, model=model, partition="random", train={"optimizer": "adam"})
        with trainers_in_threads(stores["plain"], config, folder=folder) as strategy:
            strategy.load_state_dict(state)
            rounds(strategy, 2, 3)
            resumed.append(weights_of(strategy))
    assert all(bool(torch.isfinite(tensor).all()) for tensor in resumed[0].values() if tensor.is_floating_point())
    assert not torch.equal(*(next(iter(weights.values())) for weights in resumed)), "optimizer state of weights is kept"


def test_a_lost_connection_changes_nothing(stores: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer that loses its connection while it sends an update sends it again. No step is repeated."""
    config, weights, failures = run_config(tma(steps=2), workers=2), [], []
    write = MessageStore.write

    def lossy(self: MessageStore, key: str, *rest: Any) -> None:
        write(self, key, *rest)  # it arrived, but the trainer does not know
        if key.startswith("update/1/1/") and key not in failures:
            failures.append(key)
            raise ExchangeError("lost")

    for broken in (False, True):
        if broken:
            monkeypatch.setattr(MessageStore, "write", lossy)
        with trainers_in_threads(stores["plain"], config) as strategy:
            rounds(strategy, 0, 3)
            weights.append(weights_of(strategy))
    assert sorted(failures) == ["update/1/1/0", "update/1/1/1"]
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())


def test_prefetched_batches_have_the_remote_rows_of_their_round(
    stores: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Remote rows come with every round; results do not depend on how early batches are prepared."""
    link = {"eval_negatives": 6, "ranking": "sampled"}
    config = run_config(tma(steps=2, remote_negatives=4, batch=20), workers=2, task="link", link=link)
    weights, plain = [], TmaConfig.local_settings
    for ahead in (0, 2):
        monkeypatch.setattr(
            TmaConfig, "local_settings", lambda self, layers, n=ahead: {**plain(self, layers), "prefetch": n}
        )
        with trainers_in_threads(stores["linked"], config) as strategy:
            rounds(strategy, 0, 3)
            weights.append(weights_of(strategy))
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())


def test_traffic_is_one_copy_of_the_weights_each_way(stores: dict[str, Path]) -> None:
    """Per trainer; embedding rows and remote rows are counted separately."""
    cases: list[tuple[dict[str, Any], int, bool]] = [
        ({}, 0, False),
        ({"embedding": 3}, 0, False),
        ({}, 4, True),
        ({"embedding": 3}, 4, True),
    ]
    for model, remote, links in cases:
        more = {"task": "link", "link": {"eval_negatives": 6, "ranking": "sampled"}} if links else {}
        config = run_config(tma(steps=2, remote_negatives=remote, scheme="super"), workers=3, model=model, **more)
        with trainers_in_threads(stores["linked" if links else "plain"], config) as strategy:
            rounds(strategy, 0, 2)
            metrics, model_now = strategy.epoch_metrics(), strategy.state_dict()["model"]
            sent = strategy._job.world.traffic.bytes_sent + sum(
                report["bytes_sent"] for report in strategy.external_workers
            )
        if not links:
            (estimate,) = estimates_of(stores["plain"], config.model_dump(mode="json"))
            assert 2 * estimate.bytes == sent
        size = sum(t.numel() for name, t in model_now.items() if "embeddings" not in name) * 8
        assert metrics["megabytes_up"] == metrics["megabytes_down"] == 3 * size / 1e6 and metrics["trainers"] == 3
        rows = sum(t.numel() for name, t in model_now.items() if "embeddings" in name) * 8
        width = open_store(stores["plain"]).single_nodes.x.shape[1]  # type: ignore[union-attr]
        width += model.get("embedding", 0)
        assert metrics["megabytes_beside"] == pytest.approx((rows + 3 * remote * width * 8) / 1e6)


def test_without_a_quorum_the_run_ends(stores: dict[str, Path]) -> None:
    """At once if the missing trainers have exited, else after ``give_up`` seconds."""
    for options, text in (
        ({"give_up": 60}, "and no other trainer is left"),
        ({"give_up": 2, "silence": 0.5}, "for 2 s"),
    ):
        config = run_config(tma(steps=2, quorum=2, deadline=1, **options), workers=2)
        with trainers_in_threads(stores["plain"], config, only=[0]) as strategy:
            if options["give_up"] == 60:
                messages_of(strategy).write_exit(1)
            with pytest.raises(ExchangeError, match=rf"1 of the 2 trainers it needs: trainer 1 missing, {text}"):
                rounds(strategy, 0, 3)


def test_the_nodes_of_a_lost_trainer_are_reassigned_to_the_others(stores: dict[str, Path]) -> None:
    config = run_config(tma(steps=2, deadline=1), workers=3, train={"epochs": 4})
    with trainers_in_threads(stores["plain"], config, only=[0, 2]) as strategy:
        rounds(strategy, 0, 1)
        first = strategy.epoch_metrics()["kept_edges"]
        messages_of(strategy).write_exit(1)
        rounds(strategy, 1, 4)
        assert strategy.epoch_metrics()["kept_edges"] > first and strategy.epoch_metrics()["trainers"] == 2


def split_of(graph: Graph, count: int) -> Graph:
    """The graph with ``count`` training nodes and one validation node."""
    split = torch.full((1, graph.num_nodes), -1, dtype=torch.int8)
    split[0, :count], split[0, count] = 0, 1
    return graph.with_nodes("node", split=split)


ODD: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("few", {}, {}),
    ("few", {"full": True, "batch": 0}, {}),
    ("few", {"scheme": "random"}, {"model": {"norm": "batch"}}),
    ("typed", {"scheme": "random"}, {"model": {"name": "rgcn", "embedding": 3}}),
    ("linked", {"scheme": "llcg", "batch": 20}, {"task": "link", "model": {"embedding": 3}}),
    ("linked", {"remote_negatives": 3, "batch": 20}, {"task": "link", "link": {"exclude": "disjoint:0.01"}}),
    ("sparse", {"batch": 1}, {"task": "link"}),
]


@pytest.mark.parametrize(("name", "options", "more"), ODD)
def test_trainers_without_items_send_empty_updates(
    stores: dict[str, Path], tmp_path: Path, name: str, options: dict[str, Any], more: dict[str, Any]
) -> None:
    """Partitions without training items, without nodes of a type or without edges to predict are legal."""
    if name == "few":
        save_store(split_of(plain_graph(), 2), tmp_path / name)
    if name == "sparse":
        graph = linked(plain_graph)
        ((kind, edges),) = graph.edges.items()
        count, ends = graph.num_nodes, torch.tensor([[0, 1, 2], [1, 0, 3]])
        few = validated_edges(ends, num_src=count, num_dst=count, links=dict(edges.links))
        save_store(Graph.of(graph.nodes, {kind: few}), tmp_path / name)
    if more.get("task") == "link":
        more = {**more, "link": {"eval_negatives": 6, "ranking": "sampled", **more.get("link", {})}}
    config = run_config(tma(steps=2, **options), workers=4, **more)
    with trainers_in_threads(tmp_path / name if name in ("few", "sparse") else stores[name], config) as strategy:
        records = rounds(strategy, 0, 3)
        assert strategy.epoch_metrics()["trainers"] == 4 and all(math.isfinite(record.loss) for record in records)
        assert all(bool(torch.isfinite(t).all()) for t in weights_of(strategy).values() if t.is_floating_point())
        assert math.isfinite(strategy.evaluate("val")["loss"])


def test_the_baseline_that_sees_the_whole_graph_is_macrobatch() -> None:
    config = run_config(tma(scheme="ggs"), workers=3).strategy
    assert config.name == "macrobatch" and config.model_dump(exclude_defaults=True) == {
        "batch": 21, "batches_per_fetch": 1, "fanouts": (3, 2), "cache_inputs": False
    }  # fmt: skip


def test_options_that_exclude_each_other_are_refused(stores: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match="more trainers than --workers 2"):
        run_config(tma(quorum=3), workers=2)
    config = run_config(tma(remote_negatives=3))
    with pytest.raises(ConfigError, match="adds negative links"), trainers_in_threads(stores["plain"], config):
        pass


def test_every_round_by_the_clock_has_steps(stores: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if building a subgraph takes longer than a round."""

    def slowly(*args: Any) -> Any:
        time.sleep(0.15)
        return tma_subgraph.make_local_training(*args)

    monkeypatch.setattr(f"{__name__}.make_local_training", slowly)
    with trainers_in_threads(stores["plain"], run_config(tma(interval=0.02, deadline=20), workers=2)) as strategy:
        records = rounds(strategy, 0, 3)
    assert all(record.steps >= 2 and record.count and record.loss > 0 for record in records)


def test_trainers_remove_checkpoints_before_the_newest_of_the_run(stores: dict[str, Path], tmp_path: Path) -> None:
    config = run_config(tma(steps=2), workers=2, train={"epochs": 6})
    with trainers_in_threads(stores["plain"], config, folder=tmp_path) as strategy:
        rounds(strategy, 0, 2)
        messages_of(strategy).write_checkpointed(2)
        rounds(strategy, 2, 6)
    for index in range(2):
        remaining = sorted(int(path.stem) for path in (tmp_path / str(index)).glob("*.safetensors"))
        assert remaining == [2, 3, 4, 5, 6]

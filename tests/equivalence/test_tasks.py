"""Class weights, several labels, values with gaps, clipping and all metrics: every strategy equals local."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gnnfleet.comm.world import World
from gnnfleet.config.resolve import resolve
from gnnfleet.graph.graph import Graph
from gnnfleet.graph.partition.partitioned_graph import Partition
from gnnfleet.graph.store import open_store, save_store
from gnnfleet.launch.tma_subgraph import make_local_training
from gnnfleet.training.build import RankContext, build
from tests.equivalence.spread import NODES, cut_graph, plain_graph
from tests.equivalence.test_pipe import chunked
from tests.equivalence.test_sar import check_close, fit
from tests.equivalence.test_tma import assignment_of, rounds, trainers_in_threads, weights_of
from tests.ranks import RankPool

CLASS_METRICS = ["macro_f1", "accuracy", "balanced_accuracy", "micro_f1"]
TASKS: dict[str, dict[str, Any]] = {
    "classes": {"class_weights": "balanced", "metric": CLASS_METRICS, "label_smoothing": 0.1},
    "labels": {"class_weights": [0.5, 3.0, 1.0], "metric": ["ap", "roc_auc", "macro_f1", "accuracy"]},
    "value": {"metric": ["r2", "mae", "rmse"]},
    "values": {"loss": "huber", "metric": ["rmse", "r2"]},
}


def graph_of(task: str) -> Graph:
    graph, random = plain_graph(), torch.Generator().manual_seed(4)
    if task == "classes":
        y = torch.where(torch.rand(NODES, generator=random) < 0.2, -1, graph.single_nodes.y.clamp(max=1) * 2)  # type: ignore[union-attr]
    elif task == "labels":
        y = torch.randint(-1, 2, (NODES, 3), generator=random).to(torch.int8)
    else:
        y = 50 + 8 * torch.randn(NODES, 1 if task == "value" else 2, generator=random)
        y[torch.rand(y.shape, generator=random) < 0.2] = torch.nan
        y = y[:, 0] if task == "value" else y
    return graph.with_nodes("node", y=y)


def settings_of(task: str, **strategy: Any) -> dict[str, Any]:
    model = {"name": "sage", "hidden": 8, "layers": 2, "dropout": 0.4}
    # Gradients are larger than the clip, and SGD follows their length.
    train = {"lr": 0.3, "clip": 0.05, "optimizer": "sgd", "epochs": 3, **TASKS[task]}
    return {"model": model, "train": train, "precision": "float64", "seed": 5, "strategy": strategy}


SAMPLED = {"fanouts": [3, 2], "batch": 7, "cache_inputs": False}


def fit_parts(world: World, folder: str, parts: dict[str, str]) -> list[list[dict[str, Any]]]:
    outcomes = []
    for task, path in parts.items():
        context = RankContext(world, Partition.open(path).shard(world.rank))
        graph = open_store(f"{folder}/{task}")
        strategies: list[dict[str, Any]] = [{"name": "sar"}, {"name": "macrobatch", **SAMPLED}]
        outcomes.append([fit(graph, settings_of(task, **strategy), context) for strategy in strategies])
    return outcomes


def fit_stages(world: World, folder: str, partitions: int) -> list[dict[str, Any]]:
    outcomes = []
    for task in TASKS:
        settings = settings_of(task, name="pipe", graph_parallel=partitions, chunks=partitions)
        graph = open_store(f"{folder}/{task}")
        context = chunked(graph, world, partitions, partitions)
        outcomes.append(fit(graph, settings | {"workers": world.size}, context))
    return outcomes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tasks")
    for task in TASKS:
        save_store(graph_of(task), path / task)
    return path


def local(folder: Path, task: str, **options: Any) -> dict[str, Any]:
    return fit(open_store(folder / task), settings_of(task, name="local", **options))


def check_outcome(actual: dict[str, Any], expected: dict[str, Any], label: str) -> None:
    for key in ("losses", "metrics", "test", "weights", *(("logits",) if len(actual["logits"]) else ())):
        check_close(actual[key], expected[key], f"{label} {key}")


def test_partitioned_training_equals_local(pool: RankPool, folder: Path) -> None:
    size = 3
    stores = {task: folder / f"{task}-{size}" for task in TASKS}
    for task, path in stores.items():
        cut_graph(open_store(folder / task), size, "edgeless", path)
    ranks = pool.run(size, fit_parts, str(folder), {task: str(path) for task, path in stores.items()})
    for index, task in enumerate(TASKS):
        expected = [local(folder, task, order="store"), local(folder, task, **SAMPLED)]
        assert set(TASKS[task]["metric"]) <= expected[0]["test"].keys()
        assert ("per_class" in expected[0]["test"]) == (task in ("classes", "labels"))
        for rank, outcomes in enumerate(ranks):
            for actual, reference in zip(outcomes[index], expected, strict=True):
                check_outcome(actual, reference, f"{task} rank {rank}")


@pytest.mark.parametrize(("size", "partitions"), [(2, 1), (2, 2)])
def test_stages_equal_local(pool: RankPool, folder: Path, size: int, partitions: int) -> None:
    ranks = pool.run(size, fit_stages, str(folder), partitions)
    for index, task in enumerate(TASKS):
        check_outcome(ranks[0][index], local(folder, task, order="store"), task)


@pytest.mark.parametrize("task", TASKS)
def test_one_trainer_equals_local_and_several_have_the_same_loss(folder: Path, task: str) -> None:
    """A round is an epoch here, also of the learning rate."""
    graph, schedule = open_store(folder / task), {"schedule": "step", "step_size": 1, "gamma": 0.5}
    plain: Any = build(graph, resolve(settings_of(task, name="local", **SAMPLED))).strategy
    for epoch in range(3):
        plain.set_learning_rate(0.3 * 0.5**epoch)
        list(plain.train_epoch(epoch))
    settings = settings_of(task, name="tma", scheme="random", steps=plain.steps_per_epoch, give_up=30, **SAMPLED)
    settings["train"] |= schedule
    config = resolve(settings)
    with trainers_in_threads(folder / task, config) as strategy:
        rounds(strategy, 0, 3)
        assert strategy.evaluate("test") == plain.evaluate("test")
        for key, tensor in weights_of(strategy).items():
            assert torch.equal(tensor, plain.state_dict()["model"][key]), key
    several = config.model_copy(update={"workers": 2})
    assignment = assignment_of(graph, several)
    for index in range(2):
        trainer: Any = make_local_training(graph, several, index, assignment.nodes_of(index, 2)).strategy
        assert trainer._job.task.head == plain._job.task.head, "weights and units of all training labels"

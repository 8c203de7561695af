"""What a round of ``tma`` takes: weights there and back; steps on the subgraph of a trainer's own nodes."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from gnnfleet.comm.collectives import gather_rows, sum_over_ranks
from gnnfleet.comm.world import World
from gnnfleet.graph.sampling.batches import count_batches
from gnnfleet.graph.subgraph import induced_graph
from gnnfleet.nn.embedding import NodeEmbedding
from gnnfleet.strategies.estimates import Forecast, Outlook
from gnnfleet.strategies.job import PRECISIONS, Job
from gnnfleet.strategies.step_costs import (
    EDGE,
    Drawn,
    Weights,
    draw_blocks,
    evaluation_bytes,
    feature_bytes,
    keeps_aggregate,
    step_tensors,
)
from gnnfleet.strategies.tma.averaging import Layout
from gnnfleet.strategies.tma.config import SCHEMES, TmaConfig
from gnnfleet.strategies.tma.trainer import Alone
from gnnfleet.tasks.node import NodeTask


def foresee(config: TmaConfig, outlook: Outlook) -> list[Forecast]:
    """For every scheme, or the one that is asked for."""
    names = [config.scheme] if "scheme" in config.model_fields_set else list(SCHEMES)
    schemes = [config.model_copy(update={"scheme": scheme}) for scheme in names]
    steps = [_step(scheme, outlook) for scheme in schemes]
    tried = _tried(schemes, outlook) if outlook.tried is not None and max(steps) <= LONG else {}
    return [
        _scheme(scheme, outlook, step, tried.get(scheme.partitioner, 0.0))
        for scheme, step in zip(schemes, steps, strict=True)
    ]


def _step(config: TmaConfig, outlook: Outlook) -> float:
    """Seconds of a step of a trainer, by the paces of layers."""
    pace, trainer = outlook.together, _first(config, outlook)
    if not config.full:
        return pace.sampled(trainer.blocks.loads) + pace.draw * trainer.blocks.amount
    graph, model = trainer.job.graph, trainer.job.model
    return pace.walk([(float(graph.num_nodes), float(graph.num_edges))] * model.num_layers) + pace.step


def _tried(schemes: Sequence[TmaConfig], outlook: Outlook) -> dict[str, float]:
    """{how nodes are cut: seconds of a step, as all trainers found together}."""
    assert outlook.tried is not None
    by = {scheme.partitioner: scheme for scheme in schemes}  # those that are cut alike train alike
    return {name: float(said["step"]) for name, said in zip(by, outlook.tried(list(by.values())), strict=True)}


def _first(config: TmaConfig, outlook: Outlook) -> _Trainer:
    found: _Trainer = outlook.once(f"trainer {config.partitioner}", lambda: _trainer(config, outlook))
    return found


def _scheme(config: TmaConfig, outlook: Outlook, foreseen: float, tried: float) -> Forecast:
    job, pace, workers, trainer = outlook.job, outlook.together, outlook.workers, _first(config, outlook)
    step = tried or foreseen
    how = f" (tried; foreseen were {foreseen:.2g} s)" if tried else ""
    steps = count_batches(trainer.items, config.batch)
    # Weights go down and come up again while nobody trains; corrections are made meanwhile.
    packed = _packed(job)
    beside = 2 * packed / pace.bandwidth * workers + LETTER + config.correction_steps * _correction(config, outlook)
    a_round = beside + (config.steps * step if config.steps else config.interval)
    made = config.steps if config.steps else max(1.0, (config.interval - beside) / step)
    learnt = Weights.of(job.model).rows
    return Forecast(
        words={**config.model_dump(exclude_defaults=True, exclude={"scheme"}), "name": "tma", "scheme": config.scheme},
        kind="approximate",
        workers=workers,
        memory=max(trainer.memory, _coordinator_memory(outlook)),
        bytes=workers * (2 * packed + _moments(config, job)) + learnt,
        rounds=1,
        seconds=a_round,
        passes=made / steps,
        steps=int(made * workers),
        is_walk=False,
        reasons=(
            f"{trainer.kept:.0%} of the edges are inside parts",
            f"a step takes {step:.2g} s{how}, so a round has {made:.0f} of each trainer",
        ),
    )


LONG, TIMED, WARM, LEAST = 1.0, 1.5, 2, 3
"""Seconds of a step that is not tried; seconds of steps that are timed, steps before them, steps at least."""


def rehearse(alone: Alone, world: World) -> dict[str, Any]:
    """Seconds of a step of the slowest trainer, while all of them make steps; 0 where nobody has anything to do."""
    walk = _forever(alone)
    sum_over_ranks(world, torch.zeros(1))
    began, made = time.perf_counter(), -WARM
    for _ in walk:
        made += 1
        if made == 0:
            began = time.perf_counter()
        if made >= LEAST and time.perf_counter() - began > TIMED:
            break
    each = (time.perf_counter() - began) / made if made > 0 else 0.0
    slowest = torch.cat(gather_rows(world, torch.tensor([each]))).max()
    alone.strategy.close()
    return {"step": float(slowest)}


def _forever(alone: Alone) -> Iterator[Any]:
    epoch = 0
    while alone.items(epoch):
        yield from alone.strategy.steps(epoch)
        epoch += 1


LETTER = 0.05
"""Seconds from the end of a round to the beginning of the next: trainers look for news that often."""


def _packed(job: Job) -> int:
    """Bytes of the weights as they travel."""
    names = [name for name, _ in job.model.named_parameters(remove_duplicate=False)]
    rows = tuple(name for name in names if _is_learnt(job, name))
    return Layout.of(job.model.state_dict(), PRECISIONS[job.precision], without=rows, parameters=names).nbytes


def _moments(config: TmaConfig, job: Job) -> int:
    """Bytes of what the optimizer remembers, where that is averaged too."""
    if config.optimizer != "average":
        return 0
    numbers = [each.numel() for name, each in job.model.named_parameters() if not _is_learnt(job, name)]
    adam = job.train.optimizer != "sgd"
    each = [2 * count + 1 if adam else count * bool(job.train.momentum) for count in numbers]
    return sum(each) * PRECISIONS[job.precision].itemsize


def _is_learnt(job: Job, name: str) -> bool:
    module = job.model.get_submodule(name.rpartition(".")[0])
    return isinstance(module, NodeEmbedding)


@dataclass(frozen=True, eq=False)
class _Trainer:
    """The first of them."""

    job: Job  # its subgraph
    items: int
    blocks: Drawn
    memory: float
    kept: float  # the share of edges that all of them keep


def _trainer(config: TmaConfig, outlook: Outlook) -> _Trainer:
    job = outlook.job
    own = outlook.deal(config).own(0, outlook.workers)
    graph = induced_graph(job.graph, own)
    task = job.task
    if isinstance(task, NodeTask):
        task = replace(task, nodes=graph.nodes[task.target])
    kept = graph.num_edges * outlook.workers / max(1, job.graph.num_edges)
    part = replace(job, graph=graph, task=task)
    # Targets of a subgraph have other numbers: of links the blocks are those of the whole graph, which are larger.
    seen = part if isinstance(task, NodeTask) else job
    items, given = seen.task.trained(job.seed, 0), keeps_aggregate(part, config.cache_inputs)
    some = items if len(items) else torch.arange(1)
    blocks = draw_blocks(seen, some, config.batch, fanouts=config.fanouts, given=given, replace=config.replace)
    count = len(items) if seen is part else len(items) // outlook.workers
    tensors = step_tensors(seen, blocks.views[0], given=given) + blocks.structure
    return _Trainer(part, max(1, count), blocks, _trainer_memory(part, outlook, tensors, given), kept)


def _correction(config: TmaConfig, outlook: Outlook) -> float:
    """Seconds of a step on the whole graph."""
    if not config.correction_steps:
        return 0.0
    job, pace = outlook.job, outlook.alone
    given = keeps_aggregate(job, config.cache_inputs)
    items = job.task.trained(job.seed, 0)
    blocks = draw_blocks(job, items, config.batch, fanouts=config.fanouts, given=given)
    return pace.sampled(blocks.loads) + pace.draw * blocks.amount


def _trainer_memory(part: Job, outlook: Outlook, tensors: float, given: bool) -> float:
    itemsize = PRECISIONS[part.precision].itemsize
    held = 2 * feature_bytes(part.graph) + given * 2 * feature_bytes(part.graph, itemsize)
    held += part.graph.num_edges * EDGE * 2
    share = part.graph.num_nodes / max(1, outlook.job.graph.num_nodes)
    return outlook.together.resident + held + tensors + Weights.of(part.model).state(share)


def _coordinator_memory(outlook: Outlook) -> float:
    job = outlook.job
    held = 2 * feature_bytes(job.graph) + job.graph.num_edges * EDGE
    return outlook.together.resident + held + evaluation_bytes(job, job.graph.num_nodes) + Weights.of(job.model).state()

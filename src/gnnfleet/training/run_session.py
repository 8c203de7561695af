"""A built run from its start or checkpoint to its record, on every rank: training, final evaluation, measurements.

Rank 0 reads and writes files, talks to the user, and broadcasts what it read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from safetensors.torch import load as tensors_from_bytes
from safetensors.torch import save as tensors_to_bytes
from torch import Tensor

from gnnfleet.comm.collectives import all_gather_rows, broadcast_bytes, broadcast_json
from gnnfleet.comm.world import World
from gnnfleet.config.schema import RunConfig
from gnnfleet.ops.buffers import unpooled
from gnnfleet.report.memory import own_rss, peak_rss, peak_tensors, rss
from gnnfleet.report.metrics import MetricsFile, MetricsSink, TensorBoard
from gnnfleet.report.progress import show_epochs
from gnnfleet.report.remarks import print_note
from gnnfleet.report.run_record import RunRecord, versions
from gnnfleet.strategies.protocol import State, Strategy
from gnnfleet.tasks.base import PER_CLASS, Scores
from gnnfleet.tasks.node import NodeTask
from gnnfleet.training.build import BuiltRun
from gnnfleet.training.checkpoint import TrainState, has_rank_local, load_rank_local, load_sharded
from gnnfleet.training.loop import LoopConfig, fit
from gnnfleet.training.outcome import judge_run
from gnnfleet.training.phase_profiler import PhaseProfiler
from gnnfleet.training.run_dir import RunDirectory
from gnnfleet.training.trace_files import write_spans, write_trace


@dataclass(frozen=True)
class ResumePoint:
    """Start of a run: epoch 0, or a checkpoint."""

    progress: TrainState
    state: State | None = None
    best: State | None = None


def find_resume_point(
    directory: RunDirectory | None, world: World, ids: Mapping[str, Tensor] | None = None
) -> ResumePoint:
    """Collective. The start of a run. Rank 0 reads; other ranks read files only for rows they own (``ids``)."""
    if directory is None:
        return ResumePoint(TrainState())
    start = read_resume_point(directory) if world.is_first else ResumePoint(TrainState())
    ids = ids or {}
    if world.size == 1 and start.state is None:
        return start
    last, has_last = directory.checkpoint("last"), start.state is not None
    has_local = has_last and has_rank_local(last, world.size)
    summary = broadcast_json(
        world, {"position": asdict(start.progress), "last": has_last, "best": bool(start.best), "rank_local": has_local}
    )
    if not summary["last"]:
        return start
    state = {**broadcast_state(world, start.state), **load_sharded(last, rank=world.rank, ids=ids)}
    if summary["rank_local"]:
        state |= load_rank_local(last, world.rank)
    best = None
    if summary["best"]:
        sharded = load_sharded(directory.checkpoint("best"), rank=world.rank, ids=ids)
        best = {**broadcast_state(world, start.best), **sharded}
    return ResumePoint(TrainState(**summary["position"]), state, best)


def read_resume_point(directory: RunDirectory) -> ResumePoint:
    """The part of a resume point that all ranks share; raises RunError for a damaged checkpoint."""
    last = directory.load("last")
    if last is None:
        return ResumePoint(TrainState())
    state, position = last
    best = directory.load("best")
    if best is not None and best[1].best_epoch == position.best_epoch:
        return ResumePoint(position, state, best[0])
    # A kill between the two writes leaves a best that is newer than last. The best before it is overwritten, so
    # the search for the best epoch starts again; training that is deterministic finds the same one.
    return ResumePoint(replace(position, evaluated=0, best_epoch=0, best_metric=None, best_loss=None), state)


def broadcast_state(world: World, state: State | None) -> State:
    """Collective. The state of rank 0; the others pass None."""
    if world.size == 1:
        assert state is not None
        return state
    flat = None
    if world.is_first:
        assert state is not None
        flat = tensors_to_bytes({f"{part}/{name}": t for part, tensors in state.items() for name, t in tensors.items()})
    received: State = {}
    for key, tensor in tensors_from_bytes(broadcast_bytes(world, flat)).items():
        part, _, name = key.partition("/")
        received.setdefault(part, {})[name] = tensor
    return received


def run_session(
    built: BuiltRun, config: RunConfig, directory: RunDirectory | None, *, start: ResumePoint, quiet: bool
) -> RunRecord:
    """Collective. Train from ``start`` and evaluate; the strategy then holds the best weights."""
    after_build = rss()
    uncounted = built.world.uncounted()
    if start.state is not None:
        built.strategy.load_state_dict(start.state)
    traces = config.report.trace and directory is not None
    built.world.clock.spans = [] if traces else None
    with _open_profiler(built, directory, start) as profiler:
        position, rows = _fit(built, config, directory, start, profiler, quiet=quiet or not uncounted.is_first)
        pages = built.strategy.artifacts()
        other_metrics = {split: _evaluate(built, split) for split in ("val", "test")}
        per_class = {split: metrics.pop(PER_CLASS, None) for split, metrics in other_metrics.items()}["test"]
        scores = {split: metrics.pop(built.task.metric) for split, metrics in other_metrics.items()}
        profiler.report()
    traffic, memory = _measure_ranks(built, config, after_build)
    record = RunRecord(
        strategy=config.strategy.name,
        workers=config.workers,
        model=config.model.label,
        seed=config.seed,
        epochs=position.epoch,
        steps=position.step,
        seconds_per_epoch=[row["seconds"] for row in rows],
        metrics={
            "train_loss": rows[-1]["train_loss"] if rows else None,
            **scores,
            "name": built.task.metric,
            "best_epoch": position.best_epoch,
            **({"beside": other_metrics} if any(other_metrics.values()) else {}),
            **({PER_CLASS: per_class} if per_class else {}),
        },
        traffic=traffic,
        memory=memory,
        run_dir=None if directory is None else str(directory.path),
        versions=versions(),
    )
    if uncounted.is_first:
        remark, failed = judge_run(built.task, config, rows, record.metrics)
        record = replace(record, failure=remark if failed else "")
        if remark:
            (print_note if directory is None else directory.log)(remark, quiet=quiet or failed)
    if directory is not None and traces:
        if config.spec.execution == "supervised":
            write_spans(built.world.clock, directory.path, "coordinator")
        else:
            write_trace(uncounted, directory.path)
    if directory is not None and uncounted.is_first:
        directory.finish(record.as_json(), pages)
    return record


@contextmanager
def _open_profiler(built: BuiltRun, directory: RunDirectory | None, start: ResumePoint) -> Iterator[PhaseProfiler]:
    """Profiler of all ranks; rank 0 writes ranks.jsonl."""
    if directory is None:
        yield PhaseProfiler()
        return
    if not built.world.is_first:
        yield PhaseProfiler(built.world, built.strategy.external_workers)
        return
    with closing(MetricsFile(directory.path / "ranks.jsonl", epochs=start.progress.epoch)) as file:
        external = built.strategy.external_workers
        yield PhaseProfiler(built.world, external, rows=file, totals=directory.append_rank_rows)


def _fit(
    built: BuiltRun,
    config: RunConfig,
    directory: RunDirectory | None,
    start: ResumePoint,
    profiler: PhaseProfiler,
    *,
    quiet: bool,
) -> tuple[TrainState, list[dict[str, Any]]]:
    """Run the training loop; returns the final position and the metrics of all epochs of the run."""
    sinks: list[MetricsSink] = []
    earlier: list[dict[str, Any]] = []
    uncounted = built.world.uncounted()
    with ExitStack() as stack:
        if directory is not None and uncounted.is_first:
            if config.report.tensorboard:
                sinks.append(TensorBoard(directory.path / "tensorboard"))
            file = MetricsFile(directory.metrics, epochs=start.progress.epoch)
            earlier = file.rows
            sinks.append(file)
        for sink in sinks:
            stack.callback(sink.close)
        loop = LoopConfig(
            train=config.train,
            metric=built.task.metric,
            other_metrics=built.task.head.metrics[1:] if isinstance(built.task, NodeTask) else (),
            validates=built.has("val"),
            **({} if directory is None else {"save": directory.save}),
            sinks=sinks,
            display=stack.enter_context(show_epochs(config.train.epochs, quiet=quiet)),
            broadcast=lambda message: broadcast_json(uncounted, message),
            profiler=profiler,
        )
        position, rows = fit(built.strategy, loop, start=start.progress, best=start.best)
    return position, [*earlier, *rows]


def _measure_ranks(
    built: BuiltRun, config: RunConfig, after_build: int
) -> tuple[Mapping[str, list[int]], Mapping[str, list[int]]]:
    """Collective. Traffic and memory, one number per rank each."""
    sent = built.world.traffic
    figures = {"bytes_sent": sent.bytes_sent, "rounds": sent.rounds}
    figures |= {"peak_rss": peak_rss(), "rss_growth": max(0, peak_rss() - after_build), "own_rss": own_rss()}
    if config.report.memory and config.spec.execution != "supervised":
        figures["peak_tensors"] = _measure_peak_tensors(built.strategy, config.train.epochs)
    rows = torch.cat(all_gather_rows(built.world.uncounted(), torch.tensor([list(figures.values())]))).tolist()
    by_name = {name: [row[i] for row in rows] for i, name in enumerate(figures)}
    for worker in built.strategy.external_workers:
        for name, values in by_name.items():
            values.append(int(worker.get(name, 0)))
    traffic = {name: by_name.pop(name) for name in ("bytes_sent", "rounds")}
    return traffic, by_name


def _evaluate(built: BuiltRun, split: str) -> Scores:
    """All metrics of a split; None for a metric without a value, as on an empty split."""
    metrics: Scores = built.strategy.evaluate(split) if built.has(split) else {built.task.metric: math.nan}
    report = {PER_CLASS: named_report(built, metrics.pop(PER_CLASS))} if PER_CLASS in metrics else {}
    values = {name: value for name, value in metrics.items() if name not in ("loss", "count")}
    return {**{name: None if math.isnan(value) else value for name, value in values.items()}, **report}


def named_report(built: BuiltRun, report: Scores) -> Scores:
    """A report per class with the names of the classes."""
    return {"classes": list(built.nodes.classes) or list(range(len(report["support"]))), **report}


def _measure_peak_tensors(strategy: Strategy, epoch: int) -> int:
    """Peak tensor memory of one more epoch, whose effect on the weights is undone."""
    before = {
        part: {name: t.detach().clone() for name, t in tensors.items()}
        for part, tensors in strategy.state_dict().items()
    }
    with unpooled():
        highest = peak_tensors(lambda: list(strategy.train_epoch(epoch)))
    strategy.load_state_dict(before)
    return highest

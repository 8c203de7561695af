"""A built run from its start to its record, on every rank: where it begins, the loop, what is measured at the end.

The first rank reads and writes files and talks to the user; the others hear from it what it read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import torch

from gnnfleet.comm.collectives import all_gather_rows, broadcast_json
from gnnfleet.config.schema import RunConfig
from gnnfleet.ops.buffers import unpooled
from gnnfleet.report.epochs import show_epochs
from gnnfleet.report.memory import own_rss, peak_rss, peak_tensors, rss
from gnnfleet.report.metrics import MetricsFile, MetricsSink, TensorBoard
from gnnfleet.report.remarks import print_note
from gnnfleet.report.run_record import RunRecord, versions
from gnnfleet.strategies.protocol import Strategy
from gnnfleet.tasks.link import LinkTask
from gnnfleet.training.build import BuiltRun
from gnnfleet.training.loop import LoopConfig, NoCheckpoints, Outcome, fit
from gnnfleet.training.phase_profiler import PhaseProfiler, RankProfiler
from gnnfleet.training.resume import ResumePoint
from gnnfleet.training.run_dir import RunDirectory
from gnnfleet.training.trace_files import write_spans, write_trace


def run_session(
    built: BuiltRun, config: RunConfig, directory: RunDirectory | None, *, start: ResumePoint, quiet: bool
) -> RunRecord:
    """Train from ``start`` and measure; the strategy then holds the best weights."""
    after_build = rss()
    aside = built.world.uncounted()
    if start.state is not None:
        built.strategy.load_state_dict(start.state)
    traces = config.report.trace and directory is not None
    built.world.clock.spans = [] if traces else None
    with _measuring(built, directory, start) as meter:
        outcome, rows = _fit(built, config, directory, start, meter, quiet=quiet or not aside.is_first)
        pages = built.strategy.artifacts()
        measured = {split: _measured(built, split) for split in ("val", "test")}
        scores = {split: found.pop(built.task.metric) for split, found in measured.items()}
        meter.report()
    traffic, memory = _measure_ranks(built, config, after_build)
    record = RunRecord(
        strategy=config.strategy.name,
        workers=config.workers,
        model=config.model.label,
        seed=config.seed,
        epochs=outcome.position.epoch,
        steps=outcome.position.step,
        seconds_per_epoch=[row["seconds"] for row in rows],
        metrics={
            "train_loss": rows[-1]["train_loss"] if rows else None,
            **scores,
            "name": built.task.metric,
            "best_epoch": outcome.position.best_epoch,
            **({"beside": measured} if any(measured.values()) else {}),
        },
        traffic=traffic,
        memory=memory,
        run_dir=None if directory is None else str(directory.path),
        versions=versions(),
    )
    if aside.is_first and (text := _model_collapsed(built, config, rows)) is not None:
        directory.log(text, quiet=quiet) if directory is not None else print_note(text, quiet=quiet)
    if directory is not None and traces:
        if config.spec.execution == "supervised":
            write_spans(built.world.clock, directory.path, "coordinator")
        else:
            write_trace(aside, directory.path)
    if directory is not None and aside.is_first:
        directory.finish(record.as_json(), pages)
    return record


@contextmanager
def _measuring(built: BuiltRun, directory: RunDirectory | None, start: ResumePoint) -> Iterator[PhaseProfiler]:
    """What measures the time of all ranks; the first one writes it down."""
    if directory is None:
        yield PhaseProfiler()
        return
    if not built.world.is_first:
        yield RankProfiler(built.world, built.strategy)
        return
    with closing(MetricsFile(directory.path / "ranks.jsonl", epochs=start.progress.epoch)) as file:
        yield RankProfiler(built.world, built.strategy, rows=file, totals=directory.append_rank_rows)


def _fit(
    built: BuiltRun,
    config: RunConfig,
    directory: RunDirectory | None,
    start: ResumePoint,
    meter: PhaseProfiler,
    *,
    quiet: bool,
) -> tuple[Outcome, list[dict[str, Any]]]:
    """The outcome, and the rows of all epochs of the run."""
    sinks: list[MetricsSink] = []
    earlier: list[dict[str, Any]] = []
    aside = built.world.uncounted()
    with ExitStack() as stack:
        if directory is not None and aside.is_first:
            if config.report.tensorboard:
                sinks.append(TensorBoard(directory.path / "tensorboard"))
            file = MetricsFile(directory.metrics, epochs=start.progress.epoch)
            earlier = file.rows
            sinks.append(file)
        for sink in sinks:
            stack.callback(sink.close)
        plan = LoopConfig(
            train=config.train,
            metric=built.task.metric,
            validates=built.has("val"),
            checkpoints=directory or NoCheckpoints(),
            sinks=sinks,
            display=stack.enter_context(show_epochs(config.train.epochs, quiet=quiet)),
            broadcast=lambda word: broadcast_json(aside, word),
            profiler=meter,
        )
        outcome = fit(built.strategy, plan, start=start.progress, best=start.best)
    return outcome, [*earlier, *outcome.rows]


def _model_collapsed(built: BuiltRun, config: RunConfig, rows: list[dict[str, Any]]) -> str | None:
    """A model that tells links from nothing any more ends like any other; its numbers alone do not say so."""
    tied = built.task.tied_val_metric if isinstance(built.task, LinkTask) else None
    last = next((row["val"] for row in reversed(rows) if row.get("val") is not None), None)
    # Candidates in a random order would come to more than ties do, so what is as low is no model that learns slowly.
    if tied is None or last is None or not math.isclose(last, tied, rel_tol=0.01):
        return None
    return (
        f"all candidates score alike, or nearly so, in the last evaluation (val {built.task.metric} {last:.3g}): try a "
        f"smaller train.lr (now {config.train.lr:g}), or scale the features"
    )


def _measure_ranks(
    built: BuiltRun, config: RunConfig, after_build: int
) -> tuple[Mapping[str, list[int]], Mapping[str, list[int]]]:
    """Traffic and memory, one number per rank each."""
    sent = built.world.traffic
    own = {"bytes_sent": sent.bytes_sent, "rounds": sent.rounds}
    own |= {"peak_rss": peak_rss(), "rss_growth": max(0, peak_rss() - after_build), "own_rss": own_rss()}
    if config.report.memory and config.spec.execution != "supervised":
        own["peak_tensors"] = _peak(built.strategy, config.train.epochs)
    rows = torch.cat(all_gather_rows(built.world.uncounted(), torch.tensor([list(own.values())]))).tolist()
    found = {word: [row[place] for row in rows] for place, word in enumerate(own)}
    for other in built.strategy.external_workers:
        for word, each in found.items():
            each.append(int(other.get(word, 0)))
    traffic = {word: found.pop(word) for word in ("bytes_sent", "rounds")}
    return traffic, found


def _measured(built: BuiltRun, split: str) -> dict[str, float | None]:
    """The metric of a split and what is measured beside it; None where it has no nodes or a metric no value."""
    found = built.strategy.evaluate(split) if built.has(split) else {built.task.metric: math.nan}
    values = {name: value for name, value in found.items() if name not in ("loss", "count")}
    return {name: None if math.isnan(value) else value for name, value in values.items()}


def _peak(strategy: Strategy, epoch: int) -> int:
    """Highest tensor memory of one more epoch, whose effect is taken back."""
    before = {
        part: {name: t.detach().clone() for name, t in tensors.items()}
        for part, tensors in strategy.state_dict().items()
    }
    with unpooled():
        highest = peak_tensors(lambda: list(strategy.train_epoch(epoch)))
    strategy.load_state_dict(before)
    return highest

"""A built run from its start to its record, on every rank: where it begins, the loop, what is measured at the end.

The first rank reads and writes files and talks to the user; the others hear from it what it read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import torch

from gnnfleet.comm.collectives import agree, gather_rows
from gnnfleet.comm.world import beside
from gnnfleet.config.schema import RunConfig
from gnnfleet.ops.buffers import unpooled
from gnnfleet.report.epochs import show_epochs
from gnnfleet.report.memory import own_rss, peak_rss, peak_tensors, rss
from gnnfleet.report.metrics import MetricsFile, Sink, TensorBoard
from gnnfleet.report.remarks import remark
from gnnfleet.report.run_record import RunRecord, versions
from gnnfleet.strategies.protocol import Strategy
from gnnfleet.tasks.link import LinkTask
from gnnfleet.training.build import Built
from gnnfleet.training.loop import KeepNothing, Outcome, Plan, fit
from gnnfleet.training.phase_profiler import Meter, NoMeter, RankMeter
from gnnfleet.training.resume import Start
from gnnfleet.training.run_dir import RunDirectory
from gnnfleet.training.trace_files import leave_spans, write_trace


def run_course(
    built: Built, config: RunConfig, directory: RunDirectory | None, *, start: Start, quiet: bool
) -> RunRecord:
    """Train from ``start`` and measure; the strategy then holds the best weights."""
    after_build = rss()
    aside = beside(built.world)
    if start.state is not None:
        built.strategy.load_state_dict(start.state)
    traces = config.report.trace and directory is not None
    built.world.clock.trace = [] if traces else None
    with _measuring(built, directory, start) as meter:
        outcome, rows = _fit(built, config, directory, start, meter, quiet=quiet or not aside.is_first)
        pages = built.strategy.pages()
        measured = {split: _measured(built, split) for split in ("val", "test")}
        scores = {split: found.pop(built.task.metric) for split, found in measured.items()}
        meter.tell()
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
    if aside.is_first and (text := _died(built, config, rows)) is not None:
        directory.say(text, quiet=quiet) if directory is not None else remark(text, quiet=quiet)
    if directory is not None and traces:
        if config.strategy.comes_and_goes:
            leave_spans(built.world.clock, directory.path, "coordinator")
        else:
            write_trace(aside, directory.path)
    if directory is not None and aside.is_first:
        directory.finish(record.as_json(), pages)
    return record


@contextmanager
def _measuring(built: Built, directory: RunDirectory | None, start: Start) -> Iterator[Meter]:
    """What measures the time of all ranks; the first one writes it down."""
    if directory is None:
        yield NoMeter()
        return
    aside = beside(built.world)
    if not aside.is_first:
        yield RankMeter(built.world, aside, built.strategy)
        return
    with closing(MetricsFile(directory.path / "ranks.jsonl", epochs=start.position.epoch)) as file:
        yield RankMeter(built.world, aside, built.strategy, rows=file, totals=directory.note_ranks)


def _fit(
    built: Built, config: RunConfig, directory: RunDirectory | None, start: Start, meter: Meter, *, quiet: bool
) -> tuple[Outcome, list[dict[str, Any]]]:
    """The outcome, and the rows of all epochs of the run."""
    sinks: list[Sink] = []
    earlier: list[dict[str, Any]] = []
    aside = beside(built.world)
    with ExitStack() as stack:
        if directory is not None and aside.is_first:
            if config.report.tensorboard:
                sinks.append(TensorBoard(directory.path / "tensorboard"))
            file = MetricsFile(directory.metrics, epochs=start.position.epoch)
            earlier = file.rows
            sinks.append(file)
        for sink in sinks:
            stack.callback(sink.close)
        plan = Plan(
            train=config.train,
            metric=built.task.metric,
            validates=built.has("val"),
            keeper=directory or KeepNothing(),
            sinks=sinks,
            display=stack.enter_context(show_epochs(config.train.epochs, quiet=quiet)),
            agree=lambda word: agree(aside, word),
            meter=meter,
        )
        outcome = fit(built.strategy, plan, start=start.position, best=start.best)
    return outcome, [*earlier, *outcome.rows]


def _died(built: Built, config: RunConfig, rows: list[dict[str, Any]]) -> str | None:
    """A model that tells links from nothing any more ends like any other; its numbers alone do not say so."""
    tied = built.task.tied if isinstance(built.task, LinkTask) else None
    last = next((row["val"] for row in reversed(rows) if row.get("val") is not None), None)
    # Candidates in a random order would come to more than ties do, so what is as low is no model that learns slowly.
    if tied is None or last is None or not math.isclose(last, tied, rel_tol=0.01):
        return None
    return (
        f"all candidates score alike, or nearly so, in the last evaluation (val {built.task.metric} {last:.3g}): try a "
        f"smaller train.lr (now {config.train.lr:g}), or scale the features"
    )


def _measure_ranks(
    built: Built, config: RunConfig, after_build: int
) -> tuple[Mapping[str, list[int]], Mapping[str, list[int]]]:
    """Traffic and memory, one number per rank each."""
    sent = built.world.traffic
    own = {"bytes_sent": sent.bytes_sent, "rounds": sent.rounds}
    own |= {"peak_rss": peak_rss(), "rss_growth": max(0, peak_rss() - after_build), "own_rss": own_rss()}
    if config.report.memory and not config.strategy.comes_and_goes:
        own["peak_tensors"] = _peak(built.strategy, config.train.epochs)
    rows = torch.cat(gather_rows(beside(built.world), torch.tensor([list(own.values())]))).tolist()
    found = {word: [row[place] for row in rows] for place, word in enumerate(own)}
    for other in built.strategy.elsewhere:
        for word, each in found.items():
            each.append(int(other.get(word, 0)))
    traffic = {word: found.pop(word) for word in ("bytes_sent", "rounds")}
    return traffic, found


def _measured(built: Built, split: str) -> dict[str, float | None]:
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
        highest = peak_tensors(lambda: list(strategy.steps(epoch)))
    strategy.load_state_dict(before)
    return highest

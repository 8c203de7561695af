"""Which strategy for this graph, model and cluster: forecasts of all of them, what fits, and what is recommended.

Nothing of what is trained is kept. Cuts that strategies need are made and kept in the store, as ``train`` would; layers
are timed on a piece of the graph, by one process and by all workers at once, or with a bandwidth that is given for
workers that have a machine like this one each. Where all workers are here, epochs that are short are tried.
"""

from __future__ import annotations

import difflib
import tempfile
from collections.abc import Container, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from gnnfleet.comm.world import World
from gnnfleet.config.resolve import resolve
from gnnfleet.config.schema import RunConfig, SettingsTree
from gnnfleet.errors import ConfigError, GnnfleetError, first_line
from gnnfleet.graph.events.event_stream import is_event_graph
from gnnfleet.graph.graph import Graph
from gnnfleet.graph.partition.chunk_layout import open_chunk_layouts
from gnnfleet.graph.partition.node_assignment import ClusterMap, NodeAssignment
from gnnfleet.graph.partition.partitioned_graph import Partition
from gnnfleet.graph.store import save_store
from gnnfleet.nn.config import TEMPORAL_MODELS
from gnnfleet.nn.custom_model import annotate_model_errors
from gnnfleet.planner.profiler import SamplingProbe, profile_machine
from gnnfleet.planner.remote_profile import (
    NETWORK_LATENCY,
    as_separate_machines,
    profile_workers,
    run_epoch_trials,
    run_event_layout_trials,
    run_strategy_trials,
)
from gnnfleet.planner.trial_runs import TrialOutcome, TrialRun, apply_trials, run_trial, trial_candidates, trial_length
from gnnfleet.report.memory import memory_limit
from gnnfleet.report.progress import Progress, make_progress
from gnnfleet.report.remarks import print_note
from gnnfleet.strategies.config import StrategyConfig
from gnnfleet.strategies.estimates import CostEstimate, MachineProfile, PlanningContext
from gnnfleet.strategies.registry import AUTO, all_specs, estimate_costs
from gnnfleet.strategies.sampling_options import DEFAULT_BATCH
from gnnfleet.strategies.step_costs import WeightBytes
from gnnfleet.strategies.temporal.estimate import EventPlanningContext, EventTrialResult
from gnnfleet.strategies.temporal.schedule import ParallelLayout
from gnnfleet.training.build import RankContext, ValidatedRun, make_job, validate, validate_events
from gnnfleet.training.partition_cache import ensure_clusters, ensure_layouts, ensure_partition, ensure_placement
from gnnfleet.units import format_size

EVENTS = "temporal"
"""The strategy for streams of events: planned where they are trained on, and no other there."""

GOALS = {"exact": "exact full batch", "sampled": "sampled batches", "any": "all"}
ON_EVENTS = {"exact": "exact arrangements", "sampled": "sampled arrangements", "any": "all arrangements"}
"""The same where there is one strategy, and no full batch."""


@dataclass(frozen=True)
class StrategyPlan:
    """Forecasts, the fastest first; ``refused`` are those that cannot be done, with the reason in words."""

    fits: tuple[CostEstimate, ...]
    refused: tuple[CostEstimate, ...]
    goal: str
    best: CostEstimate | None
    why: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        return {
            "goal": self.goal,
            "recommended": None
            if self.best is None
            else {"strategy": dict(self.best.words), "workers": self.best.workers},
            "why": list(self.why),
            "fits": [{**asdict(each), "seconds_per_pass": each.seconds_per_pass} for each in self.fits],
            "refused": [asdict(each) for each in self.refused],
        }


def is_auto_strategy(words: Mapping[str, Any]) -> bool:
    """Whether the words of a run leave the strategy to a plan."""
    strategy = words.get("strategy")
    return (strategy.get("name") if isinstance(strategy, Mapping) else strategy) == AUTO


def choose_strategy(graph: Graph, words: Mapping[str, Any], *, quiet: bool) -> tuple[SettingsTree, StrategyPlan]:
    """The words of a run with what a plan recommends in place of ``auto``; raises ConfigError where nothing fits."""
    plan = make_plan(graph, words, quiet=quiet)
    if plan.best is None:
        raise ConfigError("; ".join(plan.why))
    return {**words, "strategy": dict(plan.best.words), "workers": plan.best.workers}, plan


def make_plan(
    graph: Graph,
    words: Mapping[str, Any],
    *,
    bandwidth: float | None = None,
    only: Sequence[str] = (),
    quiet: bool = True,
) -> StrategyPlan:
    """Of a run with these words, whose group ``strategy`` may have words of any strategy, and ``goal``."""
    given = words.get("strategy", {})
    own = dict(given) if isinstance(given, Mapping) else {}
    own.pop("name", None)
    goal = str(own.pop("goal", "sampled" if "fanouts" in own else "exact"))
    if goal not in GOALS:
        raise ConfigError(f"strategy.goal={goal}: expected {', '.join(GOALS)}")
    on_events = _is_on_events(graph, words, only)
    configs, cannot = _configs(words, own, only, on_events=on_events)
    taken = {word for config in configs for word in type(config.strategy).model_fields}
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gnnfleet-")))
        stored = graph if graph.store is not None else save_store(graph, scratch / "store")
        base = configs[0] if on_events else resolve({**_without_strategy(words), "strategy": {"name": "sar"}})
        stack.enter_context(annotate_model_errors(base.model.file))
        progress = stack.enter_context(make_progress(quiet))
        planner: _StrategyPlanner | _EventStrategyPlanner
        if on_events:
            planner = _EventStrategyPlanner(stored, base, bandwidth, scratch, progress)
        else:
            planner = _StrategyPlanner(stored, base, _among(taken, own), bandwidth, scratch, progress, quiet)
        every = [forecast for config in configs for forecast in planner.estimates(config)]
        if isinstance(planner, _StrategyPlanner) and bandwidth is None:
            every = planner.with_trials(every, words)
    return _recommend([*every, *cannot], base.memory, goal, on_events=on_events)


def _is_on_events(graph: Graph, words: Mapping[str, Any], only: Sequence[str]) -> bool:
    """Whether a stream is what would be trained on: as strategy, model or task say, or else as the graph is."""
    if only:
        if EVENTS in only and len(set(only)) > 1:
            raise ConfigError(f"{EVENTS} trains on events and the others on nodes or links: plan it by itself")
        return EVENTS in only
    model = words.get("model", {})
    name = model.get("name") if isinstance(model, Mapping) else model
    if name is not None or "task" in words:
        return name in TEMPORAL_MODELS or words.get("task") == "edge"
    return is_event_graph(graph)


def _without_strategy(words: Mapping[str, Any]) -> SettingsTree:
    return {key: value for key, value in words.items() if key != "strategy"}


def _configs(
    words: Mapping[str, Any], own: Mapping[str, Any], only: Sequence[str], *, on_events: bool
) -> tuple[list[RunConfig], list[CostEstimate]]:
    """A config of every strategy, each with those of the words that it knows; of those that refuse one, why."""
    specs = {name: spec for name, spec in all_specs().items() if spec.estimate is not None}
    able = {name: spec.config for name, spec in specs.items() if on_events == (spec.input == "events")}
    known = {key for kind in able.values() for key in kind.model_fields}
    for word in own:
        if word not in known:
            near = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
            raise ConfigError(f"no strategy has a setting {word!r}" + (f": did you mean {near[0]}?" if near else ""))
    for name in only:
        if name not in able:
            raise ConfigError(f"no forecast of a strategy {name!r}; this version has {', '.join(able)}")
    workers, found, cannot = words.get("workers", 1), list[RunConfig](), list[CostEstimate]()
    if only and workers == 1 and not on_events and "local" not in only:
        raise ConfigError(f"with one worker only local is planned, found {', '.join(only)}: pass --workers")
    errors: list[ConfigError] = []
    for name, kind in able.items():
        if (only and name not in only) or (name not in ("local", EVENTS) and workers == 1):
            continue
        tree = {**_without_strategy(words), "strategy": {"name": name, **_among(kind.model_fields, own)}}
        if name == "local":
            tree = {**tree, "workers": 1, "partition": None}
        try:
            found.append(resolve(tree))
        except ConfigError as error:
            errors.append(error)
            on = tree.get("workers", 1)
            cannot.append(CostEstimate(words={"name": name}, kind="exact", workers=on, memory=0.0, refused=str(error)))
    if not found:
        raise errors[0]
    return found, cannot


def _among(known: Container[str], words: Mapping[str, Any]) -> SettingsTree:
    return {key: value for key, value in words.items() if key in known}


class _StrategyPlanner:
    """What forecasts are made from, each thing made when it is first asked for."""

    def __init__(
        self,
        graph: Graph,
        base: RunConfig,
        own: Mapping[str, Any],
        bandwidth: float | None,
        scratch: Path,
        progress: Progress,
        quiet: bool,
    ) -> None:
        self.graph, self.base, self.bandwidth, self.scratch = graph, base, bandwidth, scratch
        self.progress, self.quiet = progress, quiet
        self.draw = SamplingProbe(own.get("fanouts"), own.get("batch") or DEFAULT_BATCH)
        self.checked: ValidatedRun = validate(graph, base)

    def estimates(self, config: RunConfig) -> list[CostEstimate]:
        """Of a strategy; one that says why it cannot be done where that is so."""
        try:
            self.progress.stage(f"forecast of {config.strategy.name}")
            return estimate_costs(config.strategy, self.context)
        except ConfigError as error:
            words = {"name": config.strategy.name}
            return [CostEstimate(words=words, kind="exact", workers=config.workers, memory=0.0, refused=str(error))]

    def with_trials(self, every: Sequence[CostEstimate], words: Mapping[str, Any]) -> list[CostEstimate]:
        """Forecasts again, with the seconds of epochs that were tried."""
        room = min(memory_limit(), self.base.memory or memory_limit())
        chosen = trial_candidates(every, {1: room, self.base.workers: min(room, memory_limit() / self.base.workers)})
        found: dict[int, TrialOutcome] = {}
        several = [each for each in chosen if each.workers > 1]
        for each in chosen:
            if each.workers == 1:
                self.progress.stage(f"trial of {estimate_label(each)}")
                found[id(each)] = self._took_alone(each, self._trial(each, words))
        if several:
            took = self._took(several, [self._trial(each, words) for each in several])
            found |= {id(each): seconds for each, seconds in zip(several, took, strict=True)}
        return apply_trials(every, found)

    def _took(self, several: Sequence[CostEstimate], trials: Sequence[TrialRun]) -> list[TrialOutcome]:
        """All in one launch, for starting workers takes as long as a trial; each by itself where that one dies."""
        names = [each.name for each in several] if len(several) > 1 else [estimate_label(each) for each in several]
        self.progress.stage(f"trial of {', '.join(dict.fromkeys(names))}")
        try:
            return run_epoch_trials(self.graph, self.base, trials, scratch=self.scratch)
        except GnnfleetError as error:
            if len(several) == 1:
                return [self._failed(several[0], error)]
            return [self._took([each], [trial])[0] for each, trial in zip(several, trials, strict=True)]

    def _took_alone(self, forecast: CostEstimate, trial: TrialRun) -> TrialOutcome:
        try:
            return run_trial(self.graph, trial)
        except (GnnfleetError, RuntimeError, MemoryError) as error:  # torch says so when there is no memory
            return self._failed(forecast, error)

    def _failed(self, forecast: CostEstimate, error: Exception) -> str:
        why = f"a trial of it failed: {first_line(error)}"
        print_note(f"{estimate_label(forecast)}: {why}", quiet=self.quiet)
        return why

    def _trial(self, forecast: CostEstimate, words: Mapping[str, Any]) -> TrialRun:
        tree = {**_without_strategy(words), "strategy": dict(forecast.words), "workers": forecast.workers}
        config = resolve(tree if forecast.workers > 1 else {**tree, "partition": None})
        cut = ensure_placement(self.graph, self.checked.graph, config, progress=self.progress, quiet=self.quiet)
        length = trial_length(forecast)
        assert length is not None and self.graph.store is not None
        below = None if cut is None else str(cut.relative_to(self.graph.store.path))
        return TrialRun(config.model_dump(mode="json"), below, forecast.steps, *length)

    @cached_property
    def context(self) -> PlanningContext:
        job = make_job(self.checked, self.base, RankContext(progress=self.progress))
        partition = ensure_partition(
            self.graph, self.checked.graph, self.base, progress=self.progress, quiet=self.quiet
        )
        shards = [Partition.open(partition).shard(part) for part in range(self.base.workers)]
        self.progress.stage("rehearsal")
        alone = profile_machine(World(), job, shards[0], self.draw)
        return PlanningContext(
            job=job,
            single_profile=alone,
            shared_profile=self._together(alone, partition),
            overlaps=self.bandwidth is not None,
            parts=lambda: shards,
            assignment=self._deal,
            layouts=lambda config: open_chunk_layouts(self._cut(config)),
            run_trials=None if self.bandwidth is not None else self._tried,
        )

    def _together(self, alone: MachineProfile, partition: Path) -> MachineProfile:
        workers = self.base.workers
        if workers == 1:
            return alone
        least = workers * alone.base_memory
        if self.bandwidth is None and least > memory_limit():
            raise ConfigError(
                f"{workers} workers on this machine take {format_size(least)} before they begin, it has "
                f"{format_size(memory_limit())}: say --bandwidth where each has a machine of its own"
            )
        if self.bandwidth is not None:
            return as_separate_machines(alone, workers, self.bandwidth, WeightBytes.of(self.checked.model).nbytes)
        return profile_workers(self.graph, self.base, partition, self.draw, scratch=self.scratch)

    def _tried(self, strategies: Sequence[StrategyConfig]) -> list[dict[str, Any]]:
        configs = [self.base.model_copy(update={"strategy": strategy}) for strategy in strategies]
        cuts = [
            self._cut(each.strategy) if each.spec.placement == "chunks" else self._clusters(each)
            for each in configs
        ]
        self.progress.stage(f"trial of {strategies[0].name}")
        try:
            return run_strategy_trials(self.graph, configs, cuts, scratch=self.scratch)
        except ConfigError:
            raise
        except GnnfleetError as error:  # the others can be planned without this one
            raise ConfigError(f"a rehearsal of it failed: {first_line(error)}") from error

    def _cut(self, strategy: StrategyConfig) -> Path:
        config = self.base.model_copy(update={"strategy": strategy})
        return ensure_layouts(self.graph, self.checked.graph, config, progress=self.progress, quiet=self.quiet)

    def _clusters(self, config: RunConfig) -> Path | None:
        return ensure_clusters(self.graph, self.checked.graph, config, progress=self.progress, quiet=self.quiet)

    def _deal(self, strategy: StrategyConfig) -> NodeAssignment:
        config = self.base.model_copy(update={"strategy": strategy})
        path = self._clusters(config)
        counts = {kind: table.count for kind, table in self.graph.nodes.items()}
        return NodeAssignment(counts, None if path is None else ClusterMap.open(path), config.seed)


class _EventStrategyPlanner:
    """The same for a stream of events."""

    def __init__(
        self, graph: Graph, base: RunConfig, bandwidth: float | None, scratch: Path, progress: Progress
    ) -> None:
        self.graph, self.base, self.bandwidth, self.scratch, self.progress = graph, base, bandwidth, scratch, progress
        validate_events(graph, base)

    def estimates(self, config: RunConfig) -> list[CostEstimate]:
        return estimate_costs(
            config.strategy, EventPlanningContext(config.workers, self._rehearsed, self.bandwidth, NETWORK_LATENCY)
        )

    def _rehearsed(self, workers: int, shapes: Sequence[ParallelLayout]) -> list[EventTrialResult]:
        self.progress.stage(f"rehearsal of {workers}")
        strategy = self.base.strategy.model_copy(
            update={"batch_parallel": "auto", "epoch_parallel": "auto", "memory_parallel": "auto"}
        )
        config = self.base.model_copy(update={"workers": workers, "strategy": strategy})
        return run_event_layout_trials(self.graph, config, shapes, scratch=self.scratch)


def _recommend(
    every: Sequence[CostEstimate], memory: int | None, goal: str, *, on_events: bool = False
) -> StrategyPlan:
    fits: list[CostEstimate] = []
    refused: list[CostEstimate] = []
    for each in every:
        if not each.refused and memory is not None and each.memory > memory:
            text = f"needs {format_size(each.memory)}, {format_size(each.memory - memory)} more than --memory"
            each = replace(each, refused=text)
        (refused if each.refused else fits).append(each)
    fits.sort(key=lambda each: (each.seconds_per_pass, each.memory))
    best, why = _fastest_of_goal(fits, goal, ON_EVENTS[goal] if on_events else GOALS[goal])
    if best is None and memory is not None and refused:
        least = min((each for each in refused if each.memory), key=lambda each: each.memory, default=None)
        more = "" if least is None else f"; the least that any needs is {format_size(least.memory)} ({least.name})"
        why = (f"nothing fits into --memory {format_size(memory)}{more}: take more workers or more memory",)
    return StrategyPlan(tuple(fits), tuple(refused), goal, best, why)


def _fastest_of_goal(fits: Sequence[CostEstimate], goal: str, what: str) -> tuple[CostEstimate | None, tuple[str, ...]]:
    """The fastest of the kind that is asked for, in words ``what``, else the fastest of all that fit."""
    asked = [each for each in fits if goal == "any" or each.kind == goal]
    best = next(iter(asked or fits), None)
    if best is None:
        return None, ("no strategy can train this",)
    why = [f"{estimate_label(best)}: the fastest of {what} that fit, {seconds_text(best)}"]
    if not asked:
        why = [f"{estimate_label(best)}: of {what} nothing fits; the fastest of the others, {seconds_text(best)}"]
    why += best.reasons
    other = next((each for each in (asked or fits) if each.name != best.name), None)
    if other is not None:
        why.append(f"next is {estimate_label(other)}: {seconds_text(other)}, {format_size(other.memory)}")
    return best, tuple(why)


def estimate_label(forecast: CostEstimate) -> str:
    """The strategy and its words, for people."""
    words = [f"{key}={_short(value)}" for key, value in forecast.words.items() if key != "name"]
    return " ".join([forecast.name, *words])


def _short(value: Any) -> str:
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(str, value)) + "]"
    return str(value).lower() if isinstance(value, bool) else str(value)


def seconds_text(forecast: CostEstimate) -> str:
    return f"{forecast.seconds_per_pass:.3g} s per epoch"

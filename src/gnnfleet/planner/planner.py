"""Recommend a strategy for a graph, a model and a number of workers.

Every strategy estimates the epochs of its candidate settings. Short epochs are then tried on this machine, unless each
worker has a machine of its own (``--bandwidth``). Partitions, clusters and chunks are made and stored as by ``train``.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from gnnfleet.config.resolve import overlay, resolve, unflatten
from gnnfleet.config.schema import RunConfig, SettingsTree
from gnnfleet.errors import ConfigError, GnnfleetError, first_line, suggest
from gnnfleet.graph.events.event_stream import is_event_graph
from gnnfleet.graph.graph import Graph
from gnnfleet.graph.partition.chunk_layout import open_chunk_layouts
from gnnfleet.graph.partition.node_assignment import ClusterMap, NodeAssignment
from gnnfleet.graph.partition.partitioned_graph import Partition
from gnnfleet.graph.store import save_store
from gnnfleet.nn.config import TEMPORAL_MODELS
from gnnfleet.nn.custom_model import annotate_model_errors
from gnnfleet.nn.unused_data import describe_unused
from gnnfleet.planner.profiler import profile_machine
from gnnfleet.planner.trial_runs import (
    WARMUP_STEPS,
    TrialRun,
    apply_trials,
    launch_trials,
    run_trial,
    trial_candidates,
    trial_length,
)
from gnnfleet.report.memory import memory_limit
from gnnfleet.report.progress import Progress, make_progress
from gnnfleet.report.remarks import print_note
from gnnfleet.strategies.config import StrategyConfig
from gnnfleet.strategies.estimates import CostEstimate, EventPlanningContext, PlanningContext, TrialTiming
from gnnfleet.strategies.registry import AUTO, all_specs, estimate_costs, find_spec
from gnnfleet.strategies.sampling_options import DEFAULT_BATCH, FanoutOption
from gnnfleet.training.auto_defaults import with_auto_defaults
from gnnfleet.training.build import RankContext, ValidatedRun, make_event_job, make_job, validate
from gnnfleet.training.module_execution import check_strategy, settle_execution
from gnnfleet.training.partition_cache import ensure_clusters, ensure_layouts, ensure_partition, ensure_placement
from gnnfleet.units import format_size

GRAPH_GOALS = {"exact": "exact full-batch strategies", "sampled": "sampled strategies", "any": "all strategies"}
EVENT_GOALS = {"exact": "exact layouts", "sampled": "sampled layouts", "any": "all layouts"}
"""What a goal selects among, on graphs and on event streams."""

EVENT_TIMED_STEPS = 12
"""Timed steps of a trial on events, in the middle of the stream."""


@dataclass(frozen=True)
class StrategyPlan:
    """Estimates that fit, fastest first; ``refused`` are those that do not fit or cannot train."""

    fits: tuple[CostEstimate, ...]
    refused: tuple[CostEstimate, ...]
    goal: str
    best: CostEstimate | None
    reasons: tuple[str, ...]
    remarks: tuple[str, ...] = ()  # data that the model does not use

    def as_json(self) -> dict[str, Any]:
        best = self.best
        return {
            "goal": self.goal,
            "recommended": best and {"strategy": dict(best.settings), "workers": best.workers},
            "why": list(self.reasons),
            "remarks": list(self.remarks),
            "fits": [{**asdict(estimate), "seconds_per_pass": estimate.seconds_per_pass} for estimate in self.fits],
            "refused": [asdict(estimate) for estimate in self.refused],
        }


def is_auto_strategy(settings: Mapping[str, Any]) -> bool:
    """True if the settings of a run leave the strategy to a plan."""
    strategy = settings.get("strategy")
    return (strategy.get("name") if isinstance(strategy, Mapping) else strategy) == AUTO


def choose_strategy(graph: Graph, settings: Mapping[str, Any], *, quiet: bool) -> tuple[SettingsTree, StrategyPlan]:
    """The settings of a run with the recommended strategy instead of ``auto``; raises ConfigError if nothing fits."""
    settings = with_auto_defaults(graph, settings, for_all=True, quiet=quiet)
    plan = make_plan(graph, settings, quiet=quiet)
    if plan.best is None:
        raise ConfigError("; ".join(plan.reasons))
    chosen: SettingsTree = {**settings, "strategy": dict(plan.best.settings), "workers": plan.best.workers}
    budget = chosen.pop("memory", None)
    if budget is not None:
        options = find_spec(str(plan.best.settings["name"])).memory_settings
        chosen = overlay(unflatten(dict.fromkeys(options, budget)), chosen)
    return chosen, plan


def make_plan(
    graph: Graph,
    settings: Mapping[str, Any],
    *,
    bandwidth: float | None = None,
    only: Sequence[str] = (),
    quiet: bool = True,
) -> StrategyPlan:
    """Plan a run. The group ``strategy`` of its settings may have ``goal`` and options of any strategy."""
    group = settings.get("strategy", {})
    options = {key: value for key, value in group.items() if key != "name"} if isinstance(group, Mapping) else {}
    goal = str(options.pop("goal", "sampled" if "fanouts" in options else "exact"))
    if goal not in GRAPH_GOALS:
        raise ConfigError(f"strategy.goal={goal}: expected {', '.join(GRAPH_GOALS)}")
    on_events = _plans_events(graph, settings, only)
    settings = settings if on_events else with_auto_defaults(graph, settings, for_all=True, quiet=quiet)
    configs, refused = _candidate_configs(settings, options, only, on_events=on_events)
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gnnfleet-")))
        stored = graph if graph.store is not None else save_store(graph, scratch / "store")
        base = configs[0] if on_events else resolve({**_without_strategy(settings), "strategy": {"name": "sar"}})
        stack.enter_context(annotate_model_errors(base.model.file))
        progress = stack.enter_context(make_progress(quiet))
        if on_events:
            estimates = _estimate_events(stored, base, bandwidth, scratch, progress)
            remarks = describe_unused(base.model, stored)
        else:
            accepted = {option for config in configs for option in type(config.strategy).model_fields}
            valid = {option: value for option, value in options.items() if option in accepted}
            fanouts, batch = valid.get("fanouts"), valid.get("batch") or DEFAULT_BATCH
            base, remark = settle_execution(stored, base, for_plan=True)
            if remark:
                print_note(remark, quiet=quiet)
            settings = {**settings, "model": base.model.model_dump(exclude_unset=True)}
            planner = _GraphPlanner(stored, base, fanouts, batch, bandwidth, scratch, progress, quiet)
            remarks = describe_unused(base.model, stored, planner.validated.model)
            estimates = [estimate for config in configs for estimate in planner.estimate(config)]
            if bandwidth is None:
                estimates = planner.with_trials(estimates, _without_strategy(settings))
    plan = _recommend([*estimates, *refused], base.memory, goal, EVENT_GOALS if on_events else GRAPH_GOALS)
    return replace(plan, remarks=remarks)


def _plans_events(graph: Graph, settings: Mapping[str, Any], only: Sequence[str]) -> bool:
    """True if an event stream is to be trained on, by the strategies, the model or the task, or else by the graph."""
    specs = all_specs()
    for_events = [name for name in only if name in specs and specs[name].input == "events"]
    if for_events and len(set(only)) > 1:
        raise ConfigError(f"{for_events[0]} trains on events and the others on nodes or links: plan it by itself")
    if only:
        return bool(for_events)
    model = settings.get("model", {})
    name = model.get("name") if isinstance(model, Mapping) else model
    if name is not None or "task" in settings:
        return name in TEMPORAL_MODELS or settings.get("task") == "edge"
    return is_event_graph(graph)


def _without_strategy(settings: Mapping[str, Any]) -> SettingsTree:
    return {key: value for key, value in settings.items() if key != "strategy"}


def _candidate_configs(
    settings: Mapping[str, Any], options: Mapping[str, Any], only: Sequence[str], *, on_events: bool
) -> tuple[list[RunConfig], list[CostEstimate]]:
    """(a config of every strategy with those of the options that it has, refusals of strategies that reject one)."""
    specs = {
        name: spec
        for name, spec in all_specs().items()
        if spec.estimate is not None and on_events == (spec.input == "events")
    }
    valid = {option for spec in specs.values() for option in spec.config.model_fields}
    for option in options:
        if option not in valid:
            raise ConfigError(f"no strategy has a setting {option!r}: {suggest(option, sorted(valid))}")
    for name in only:
        if name not in specs:
            raise ConfigError(f"strategy {name!r} cannot be planned: choose among {', '.join(specs)}")
    workers = settings.get("workers", 1)
    if only and workers == 1 and not on_events and "local" not in only:
        raise ConfigError(f"with one worker only local is planned, found {', '.join(only)}: pass --workers")
    configs, refused = list[RunConfig](), list[CostEstimate]()
    for name, spec in specs.items():
        if (only and name not in only) or (workers == 1 and not on_events and spec.execution != "single"):
            continue
        group = {"name": name, **{key: value for key, value in options.items() if key in spec.config.model_fields}}
        tree = {**_without_strategy(settings), "strategy": group}
        if spec.execution == "single":
            tree = {**tree, "workers": 1, "partition": None}
        try:
            configs.append(resolve(tree))
        except ConfigError as error:
            refused.append(_refusal(name, tree.get("workers", 1), error))
    if not configs:
        raise ConfigError(refused[0].refused)
    return configs, refused


def _refusal(name: str, workers: int, error: ConfigError) -> CostEstimate:
    return CostEstimate(settings={"name": name}, kind="exact", workers=workers, memory=0.0, refused=str(error))


@dataclass(eq=False)
class _GraphPlanner:
    graph: Graph
    base: RunConfig
    fanouts: FanoutOption
    batch: int
    bandwidth: float | None
    scratch: Path
    progress: Progress
    quiet: bool

    def __post_init__(self) -> None:
        self.validated: ValidatedRun = validate(self.graph, self.base)

    def _ensure(self, ensure: Callable[..., Any], config: RunConfig) -> Any:
        """Call one of the functions that make and store a placement."""
        return ensure(self.graph, self.validated.graph, config, progress=self.progress, quiet=self.quiet)

    def estimate(self, config: RunConfig) -> list[CostEstimate]:
        """The candidates of a strategy; a single refused one if it cannot train at all."""
        try:
            self.progress.stage(f"estimate of {config.strategy.name}")
            check_strategy(config, self.validated)
            return estimate_costs(config.strategy, self._context)
        except ConfigError as error:
            return [_refusal(config.strategy.name, config.workers, error)]

    @cached_property
    def _context(self) -> PlanningContext:
        workers = self.base.workers
        job = make_job(self.validated, self.base, RankContext(progress=self.progress))
        partition = self._ensure(ensure_partition, self.base)
        shards = [Partition.open(partition).shard(part) for part in range(workers)]
        self.progress.stage("profile of this machine")
        single = profile_machine(job, shards[0], self.fanouts, self.batch)
        least = workers * single.base_memory
        if self.bandwidth is None and workers > 1 and least > memory_limit():
            raise ConfigError(
                f"{workers} workers need {format_size(least)} before training, this machine has "
                f"{format_size(memory_limit())}: gnnfleet plan --bandwidth is for one worker per machine"
            )
        return PlanningContext(
            job=job,
            single_profile=single,
            shared_profile=single.linked(workers, self.bandwidth) if self.bandwidth else single.shared_by(workers),
            overlaps=self.bandwidth is not None,
            parts=lambda: shards,
            assignment=self._assignment,
            layouts=lambda strategy: open_chunk_layouts(self._ensure(ensure_layouts, self._with(strategy))),
        )

    def _with(self, strategy: StrategyConfig) -> RunConfig:
        return self.base.model_copy(update={"strategy": strategy})

    def _assignment(self, strategy: StrategyConfig) -> NodeAssignment:
        path = self._ensure(ensure_clusters, self._with(strategy))
        counts = {kind: table.count for kind, table in self.graph.nodes.items()}
        return NodeAssignment(counts, None if path is None else ClusterMap.open(path), self.base.seed)

    def with_trials(self, estimates: Sequence[CostEstimate], settings: SettingsTree) -> list[CostEstimate]:
        """The estimates with the seconds of trials, for candidates whose epochs are short."""
        limit, workers = min(memory_limit(), self.base.memory or memory_limit()), self.base.workers
        candidates = trial_candidates(estimates, {1: limit, workers: min(limit, memory_limit() / workers)})
        timings: dict[int, TrialTiming] = {}
        for estimate in candidates:
            if estimate.workers == 1:
                self.progress.stage(f"trial of {estimate_label(estimate)}")
                timings[id(estimate)] = self._run_alone(estimate, self._trial(estimate, settings))
        distributed = [estimate for estimate in candidates if estimate.workers > 1]
        if distributed:
            outcomes = self._launch(distributed, [self._trial(estimate, settings) for estimate in distributed])
            timings |= {id(estimate): timing for estimate, timing in zip(distributed, outcomes, strict=True)}
        return apply_trials(estimates, timings)

    def _trial(self, estimate: CostEstimate, settings: SettingsTree) -> TrialRun:
        tree = {**settings, "strategy": dict(estimate.settings), "workers": estimate.workers}
        config = resolve(tree if estimate.workers > 1 else {**tree, "partition": None})
        path = self._ensure(ensure_placement, config)
        length = trial_length(estimate)
        assert length is not None
        return TrialRun(config.model_dump(mode="json"), path and str(path.resolve()), estimate.steps, **length)

    def _launch(self, candidates: Sequence[CostEstimate], trials: Sequence[TrialRun]) -> list[TrialTiming]:
        """Run all in one launch, since starting workers takes as long as a trial. If it dies, launch each by itself."""
        single = len(candidates) == 1
        names = [estimate_label(estimate) if single else estimate.name for estimate in candidates]
        self.progress.stage(f"trial of {', '.join(dict.fromkeys(names))}")
        try:
            return launch_trials(self.graph, self.base, trials, scratch=self.scratch)
        except GnnfleetError as error:
            if single:
                return [self._failed(candidates[0], error)]
            return [self._launch([estimate], [trial])[0] for estimate, trial in zip(candidates, trials, strict=True)]

    def _run_alone(self, estimate: CostEstimate, trial: TrialRun) -> TrialTiming:
        try:
            return run_trial(self.graph, trial)
        except (GnnfleetError, RuntimeError, MemoryError) as error:  # torch raises RuntimeError if memory is short
            return self._failed(estimate, error)

    def _failed(self, estimate: CostEstimate, error: Exception) -> TrialTiming:
        reason = f"its trial failed: {first_line(error)}"
        print_note(f"{estimate_label(estimate)}: {reason}", quiet=self.quiet)
        return TrialTiming(refused=reason)


def _estimate_events(
    graph: Graph, base: RunConfig, bandwidth: float | None, scratch: Path, progress: Progress
) -> list[CostEstimate]:
    """Estimates on an event stream, all of them from trials."""

    def run_trials(workers: int, candidates: Sequence[tuple[StrategyConfig, int]]) -> list[TrialTiming]:
        progress.stage(f"trial of {workers} workers")
        configs = [base.model_copy(update={"workers": workers, "strategy": strategy}) for strategy, _ in candidates]
        trials = []
        for config, (_, steps) in zip(configs, candidates, strict=True):
            warmup = min(WARMUP_STEPS, steps - 1)
            first = max(0, min(steps // 2, steps - warmup - EVENT_TIMED_STEPS))
            fields = config.model_dump(mode="json")
            trials.append(TrialRun(fields, None, steps, first, warmup, timed_steps=EVENT_TIMED_STEPS))
        return launch_trials(graph, configs[0], trials, scratch=scratch)

    job = make_event_job(graph, base, RankContext(progress=progress))
    return estimate_costs(base.strategy, EventPlanningContext(job, base.workers, run_trials, bandwidth))


def _recommend(
    estimates: Sequence[CostEstimate], memory: int | None, goal: str, goals: Mapping[str, str] = GRAPH_GOALS
) -> StrategyPlan:
    fits: list[CostEstimate] = []
    refused: list[CostEstimate] = []
    for estimate in estimates:
        if not estimate.refused and memory is not None and estimate.memory > memory:
            excess = format_size(estimate.memory - memory)
            reason = f"needs {format_size(estimate.memory)}, {excess} more than --memory"
            estimate = replace(estimate, refused=reason)
        (refused if estimate.refused else fits).append(estimate)
    fits.sort(key=lambda estimate: (estimate.seconds_per_pass, estimate.memory))
    best, reasons = _fastest(fits, goal, goals[goal])
    if best is None and memory is not None and refused:
        least = min((estimate for estimate in refused if estimate.memory), key=lambda e: e.memory, default=None)
        need = "" if least is None else f"; the least that any needs is {format_size(least.memory)} ({least.name})"
        reasons = (f"nothing fits into --memory {format_size(memory)}{need}: set more workers or more memory",)
    return StrategyPlan(tuple(fits), tuple(refused), goal, best, reasons)


def _fastest(fits: Sequence[CostEstimate], goal: str, description: str) -> tuple[CostEstimate | None, tuple[str, ...]]:
    """(the fastest candidate of the goal, else the fastest of all that fit; the reasons)."""
    matching = [estimate for estimate in fits if goal == "any" or estimate.kind == goal]
    candidates = matching or fits
    if not candidates:
        return None, ("no strategy can train this",)
    best = candidates[0]
    choice = f"the fastest of {description} that fit"
    if not matching:
        choice = f"none of {description} fits; the fastest of the others"
    reasons = [f"{estimate_label(best)}: {choice}, {seconds_text(best)}", *best.reasons]
    second = next((estimate for estimate in candidates if estimate.name != best.name), None)
    if second is not None:
        reasons.append(f"next is {estimate_label(second)}: {seconds_text(second)}, {format_size(second.memory)}")
    return best, tuple(reasons)


def estimate_label(estimate: CostEstimate) -> str:
    """The strategy and its settings, for people."""
    options = [f"{key}={_short(value)}" for key, value in estimate.settings.items() if key != "name"]
    return " ".join([estimate.name, *options])


def _short(value: Any) -> str:
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(str, value)) + "]"
    return str(value).lower() if isinstance(value, bool) else str(value)


def seconds_text(estimate: CostEstimate) -> str:
    return f"{estimate.seconds_per_pass:.3g} s per epoch"

"""Estimate an epoch of every parallel layout: bytes and rounds are counted, seconds and memory come from trials.

A trial trains some steps from the middle of the stream with as many processes as training would use. Node embeddings
that are trained before the first epoch are left out of it.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from gnnfleet.strategies.estimates import LATENCY, CostEstimate, EventPlanningContext, TrialTiming
from gnnfleet.strategies.temporal.config import TemporalConfig
from gnnfleet.strategies.temporal.layout_planner import CaptureCurve, all_layouts
from gnnfleet.strategies.temporal.schedule import ParallelLayout, Schedule


def estimate(config: TemporalConfig, context: EventPlanningContext) -> list[CostEstimate]:
    """One trainer, and every layout of several."""
    if config.batch == "auto":
        config = config.model_copy(update={"batch": CaptureCurve.of(context.job.task.parts["train"]).batch})
    planner = _LayoutPlanner(config, context)
    requested = config.requested_layout
    layouts = [layout for layout in all_layouts(context.workers) if layout.workers > 1 and layout.fits(requested)]
    single = ParallelLayout()
    (alone,) = planner.time([single])
    estimates = [planner.estimate(single, alone)]
    if context.bandwidth is None:
        timings = planner.time(layouts) if layouts else []
    else:
        timings = [planner.across_machines(layout, alone) for layout in layouts]
    return estimates + [planner.estimate(layout, timing) for layout, timing in zip(layouts, timings, strict=True)]


class _LayoutPlanner:
    def __init__(self, config: TemporalConfig, context: EventPlanningContext) -> None:
        self._config, self._context = config, context
        self._bounds = context.job.task.parts["train"].batches(config.batch_size)
        weights = list(context.job.model.parameters())
        self._weight_bytes = sum(weight.nbytes for weight in weights)
        # A sum of gradients also counts, for each parameter, the ranks that have one; loss and events travel with it.
        tail = (len(weights) + 3) * context.job.dtype.itemsize
        self._allreduce_bytes = self._weight_bytes + tail

    def _steps(self, layout: ParallelLayout) -> int:
        return Schedule(layout, len(self._bounds) - 1).start(1)

    def time(self, layouts: list[ParallelLayout]) -> list[TrialTiming]:
        """Try layouts that have as many trainers each."""
        timings: dict[ParallelLayout, TrialTiming] = {}
        for layout in layouts:
            if not self._steps(layout):
                count = f"{len(self._bounds) - 1} batches are too few for {layout.workers} trainers"
                timings[layout] = TrialTiming(refused=f"{count}: set a smaller batch size")
        tried = [layout for layout in layouts if layout not in timings]
        candidates = [
            (self._config.model_copy(update={**vars(layout), "static": False}), self._steps(layout)) for layout in tried
        ]
        if candidates:
            outcomes = self._context.run_trials(tried[0].workers, candidates)
            timings |= dict(zip(tried, outcomes, strict=True))
        return [timings[layout] for layout in layouts]

    def across_machines(self, layout: ParallelLayout, alone: TrialTiming) -> TrialTiming:
        """A layout of trainers on machines of their own, from the trial of one trainer."""
        bandwidth = self._context.bandwidth
        assert bandwidth is not None
        if layout.memory_parallel < layout.workers:
            reason = "trainers that share a node memory must run on one machine: set strategy.memory_parallel"
            return TrialTiming(refused=reason)
        steps, allreduce = self._steps(layout), 2 * self._weight_bytes / bandwidth + 2 * LATENCY
        return replace(alone, seconds=steps * (alone.seconds / max(1, self._steps(ParallelLayout())) + allreduce))

    def estimate(self, layout: ParallelLayout, timing: TrialTiming) -> CostEstimate:
        steps = self._steps(layout)
        batch = max(high - low for low, high in pairwise(self._bounds))
        exact = layout.epoch_parallel == layout.memory_parallel == 1
        reasons = [f"{steps} steps of {timing.seconds / max(1, steps):.2g} s on batches of {batch} events"]
        if not exact:
            batches = layout.epoch_parallel * layout.memory_parallel
            reasons.append(f"a step averages the gradients of {batches} batches: fewer and larger steps")
        return CostEstimate(
            settings=self._config.settings_with(**vars(layout)),
            kind="exact" if exact else "approximate",
            workers=layout.workers,
            memory=timing.memory,
            bytes=steps * layout.workers * self._allreduce_bytes if layout.workers > 1 else 0.0,
            rounds=steps * (2 if layout.batch_parallel > 1 else 1) if layout.workers > 1 else 0.0,
            seconds=timing.seconds,
            steps=max(1, steps),
            reasons=tuple(reasons),
            refused=timing.refused,
        )

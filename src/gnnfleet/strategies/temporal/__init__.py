"""Memory-based models on event streams (DistTGL): mini-batch, epoch and memory parallelism."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gnnfleet.nn.config import TEMPORAL_DEFAULTS
from gnnfleet.strategies.spec import Settings, StrategySpec
from gnnfleet.strategies.temporal.config import TemporalConfig

if TYPE_CHECKING:
    from gnnfleet.strategies.estimates import CostEstimate, EventPlanningContext
    from gnnfleet.strategies.job import EventJob
    from gnnfleet.strategies.protocol import Strategy


def _build(config: TemporalConfig, job: EventJob) -> Strategy:
    from gnnfleet.strategies.temporal.strategy import TemporalStrategy

    return TemporalStrategy(config, job)


def _estimate(config: TemporalConfig, context: EventPlanningContext) -> list[CostEstimate]:
    from gnnfleet.strategies.temporal.estimate import estimate

    return estimate(config, context)


def _reference(config: TemporalConfig, layers: int) -> Settings | None:
    """One trainer. Only mini-batch parallelism takes the same steps."""
    if (config.epoch_parallel, config.memory_parallel) != (1, 1):
        return None
    return {**config.model_dump(), "batch_parallel": 1}


SPEC = StrategySpec(
    config=TemporalConfig,
    build=_build,
    input="events",
    defaults={
        "task": "link",
        "model": {"name": "tgn", **TEMPORAL_DEFAULTS},
        "train": {"epochs": 20, "lr": 1e-3, "weight_decay": 0.0},
    },
    estimate=_estimate,
    reference=_reference,
    resumable=("batch_parallel", "epoch_parallel", "memory_parallel"),
)

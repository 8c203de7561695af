"""Memory-based models on event streams (DistTGL): mini-batch, epoch and memory parallelism."""

from __future__ import annotations

from gnnfleet.nn.config import TEMPORAL_DEFAULTS
from gnnfleet.strategies.spec import Settings, StrategySpec, lazy
from gnnfleet.strategies.temporal.config import TemporalConfig


def _reference(config: TemporalConfig, layers: int) -> Settings | None:
    """One trainer. Only mini-batch parallelism takes the same steps."""
    if (config.epoch_parallel, config.memory_parallel) != (1, 1):
        return None
    return {**config.model_dump(), "batch_parallel": 1}


SPEC = StrategySpec(
    config=TemporalConfig,
    build=lazy("gnnfleet.strategies.temporal.strategy:TemporalStrategy"),
    input="events",
    defaults={
        "task": "link",
        "model": {"name": "tgn", **TEMPORAL_DEFAULTS},
        "train": {"epochs": 20, "lr": 1e-3, "weight_decay": 0.0},
    },
    estimate=lazy("gnnfleet.strategies.temporal.estimate:estimate"),
    reference=_reference,
    resumable=("batch_parallel", "epoch_parallel", "memory_parallel", "memory_budget"),
    memory_settings=("strategy.memory_budget",),
)

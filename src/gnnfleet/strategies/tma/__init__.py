"""Independent trainers on randomised partitions; a coordinator averages their weights at fixed intervals."""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING, Any

from gnnfleet.strategies.sampling_options import DEFAULT_BATCH
from gnnfleet.strategies.spec import Settings, StrategySpec
from gnnfleet.strategies.tma.config import TmaConfig

if TYPE_CHECKING:
    from gnnfleet.strategies.estimates import CostEstimate, PlanningContext
    from gnnfleet.strategies.job import Job
    from gnnfleet.strategies.protocol import Strategy


def _build(config: TmaConfig, job: Job) -> Strategy:
    from gnnfleet.strategies.tma.build import build

    return build(config, job)


def _estimate(config: TmaConfig, context: PlanningContext) -> list[CostEstimate]:
    from gnnfleet.strategies.tma.estimate import estimate

    return estimate(config, context)


def _expand(settings: Settings, workers: Any) -> Settings:
    """Translate scheme ``ggs``, the baseline that sees the whole graph.

    It draws batches that are as many times larger as there are workers, and fetches each by itself.
    """
    if settings.get("scheme") != "ggs":
        return settings
    TmaConfig(**{**settings, "scheme": "random"})  # refuses unknown settings
    batch, count = settings.get("batch", DEFAULT_BATCH), workers if isinstance(workers, int) else 1
    return {
        "name": "macrobatch",
        **{key: settings[key] for key in ("fanouts", "replace") if key in settings},
        "batch": batch * count if isinstance(batch, int) else batch,
        "batches_per_fetch": 1,
        "cache_inputs": False,
    }


def _one_pass(config: TmaConfig, items: int, workers: int) -> Settings:
    if config.steps or "interval" in config.model_fields_set:
        return {}
    return {"steps": max(1, ceil(items / workers / (config.batch or items or 1)))}


SPEC = StrategySpec(
    config=TmaConfig,
    build=_build,
    execution="supervised",
    placement="clusters",
    estimate=_estimate,
    expand=_expand,
    one_pass=_one_pass,
    resumable=(
        "quorum",
        "deadline",
        "silence",
        "on_trainer_loss",
        "launcher",
        "listen",
        "local_trainers",
        "give_up",
    ),
)

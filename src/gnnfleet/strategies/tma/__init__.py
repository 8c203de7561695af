"""Independent trainers on randomised partitions; a coordinator averages their weights at fixed intervals."""

from __future__ import annotations

from math import ceil
from typing import Any

from gnnfleet.strategies.sampling_options import DEFAULT_BATCH
from gnnfleet.strategies.spec import Settings, StrategySpec, lazy
from gnnfleet.strategies.tma.config import TmaConfig


def _expand(settings: Settings, workers: Any) -> Settings:
    """Translate scheme ``ggs``, the baseline that sees the whole graph, to macrobatch with one batch per fetch.

    All workers share a batch, so it is as many times larger as there are workers.
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
    build=lazy("gnnfleet.strategies.tma.strategy:TmaStrategy"),
    execution="supervised",
    placement="clusters",
    estimate=lazy("gnnfleet.strategies.tma.estimate:estimate"),
    expand=_expand,
    one_pass=_one_pass,
    resumable=("quorum", "deadline", "silence", "on_trainer_loss", "launcher", "listen", "local_trainers", "give_up"),
)

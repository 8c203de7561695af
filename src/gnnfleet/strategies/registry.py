"""Strategies by name. A strategy's code is loaded when it is chosen."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from gnnfleet.errors import ConfigError
from gnnfleet.strategies.config import EventConfig, StrategyConfig
from gnnfleet.strategies.spec import StrategySpec

if TYPE_CHECKING:
    from gnnfleet.strategies.estimates import CostEstimate, EventPlanningContext, PlanningContext
    from gnnfleet.strategies.job import EventJob, Job
    from gnnfleet.strategies.protocol import Strategy

STRATEGIES = ("local", "sar", "macrobatch", "tma", "pipe", "temporal")
AUTO = "auto"
"""The strategy a plan recommends. It is replaced before a run starts."""


@cache
def find_spec(name: str) -> StrategySpec[Any]:
    """The spec of a strategy; raises ConfigError for an unknown name."""
    if name == AUTO:
        raise ConfigError(
            "strategy auto is planned on one machine before training: use gnnfleet train or gf.train with workers, or "
            "choose a strategy that gnnfleet plan recommends"
        )
    if name not in STRATEGIES:
        raise ConfigError(f"no strategy {name!r}; this version has {', '.join(STRATEGIES)}")
    spec: StrategySpec[Any] = import_module(f"gnnfleet.strategies.{name}").SPEC
    return spec


def all_specs() -> dict[str, StrategySpec[Any]]:
    return {name: find_spec(name) for name in STRATEGIES}


def make_config(settings: Mapping[str, Any]) -> StrategyConfig:
    """The settings object of the strategy ``settings["name"]``."""
    config: StrategyConfig = find_spec(settings["name"]).config(**settings)
    return config


def build_strategy(config: StrategyConfig, job: Job | EventJob) -> Strategy:
    _check_model(config, job)
    return find_spec(config.name).build(config, job)


def _check_model(config: StrategyConfig, job: Job | EventJob) -> None:
    from gnnfleet.strategies.job import Job

    if isinstance(job, Job):
        config.check_model(job.model)


def strategy_options(name: str) -> list[str]:
    """The options of a strategy; for ``auto`` the options of all strategies and ``goal``."""
    if name != AUTO:
        return list(find_spec(name).config.model_fields)
    return ["goal", *dict.fromkeys(option for spec in all_specs().values() for option in spec.config.model_fields)]


def estimate_costs(config: StrategyConfig, context: PlanningContext | EventPlanningContext) -> list[CostEstimate]:
    """Estimate the cost of every candidate of the settings that a config leaves open; raises ConfigError."""
    estimate = find_spec(config.name).estimate
    assert estimate is not None
    _check_model(config, context.job)
    return estimate(config, context)


def reference_config(config: StrategyConfig, layers: int) -> StrategyConfig | None:
    """Settings of one process that takes the same steps; None for strategies without such a reference."""
    settings = find_spec(config.name).reference(config, layers)
    return None if settings is None else make_config(settings)


def inference_config(config: StrategyConfig, workers: int) -> StrategyConfig:
    """Settings for exact outputs of a trained run on ``workers`` processes; any exact strategy gives the same."""
    if isinstance(config, EventConfig):
        return config.single_trainer
    if workers == 1:
        return make_config({"name": "local"})
    return config if config.name == "sar" else make_config({"name": "sar"})

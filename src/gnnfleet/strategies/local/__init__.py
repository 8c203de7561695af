"""One process: the reference that every other strategy on graphs is tested against."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gnnfleet.strategies.local.config import LocalConfig
from gnnfleet.strategies.spec import StrategySpec

if TYPE_CHECKING:
    from gnnfleet.strategies.estimates import CostEstimate, PlanningContext
    from gnnfleet.strategies.job import Job
    from gnnfleet.strategies.protocol import Strategy


def _build(config: LocalConfig, job: Job) -> Strategy:
    from gnnfleet.strategies.local.strategy import LocalStrategy

    return LocalStrategy(config, job)


def _estimate(config: LocalConfig, context: PlanningContext) -> list[CostEstimate]:
    from gnnfleet.strategies.local.estimate import estimate

    return estimate(config, context)


SPEC = StrategySpec(
    config=LocalConfig,
    build=_build,
    execution="single",
    estimate=_estimate,
)

"""Exact full batch over ranks (SAR): remote blocks are aggregated a group at a time, freed, and rebuilt in backward."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gnnfleet.strategies.sar.config import SarConfig
from gnnfleet.strategies.spec import StrategySpec

if TYPE_CHECKING:
    from gnnfleet.strategies.estimates import CostEstimate, PlanningContext
    from gnnfleet.strategies.job import Job
    from gnnfleet.strategies.protocol import Strategy


def _build(config: SarConfig, job: Job) -> Strategy:
    from gnnfleet.strategies.sar.strategy import SarStrategy

    return SarStrategy(config, job)


def _estimate(config: SarConfig, context: PlanningContext) -> list[CostEstimate]:
    from gnnfleet.strategies.sar.estimate import estimate

    return estimate(config, context)


SPEC = StrategySpec(
    config=SarConfig,
    build=_build,
    placement="partition",
    estimate=_estimate,
    reference=lambda config, layers: {"name": "local"},
)

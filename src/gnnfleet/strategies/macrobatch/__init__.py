"""Sampled training on a partitioned graph (BatchGNN): one exchange samples and fetches several mini-batches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gnnfleet.strategies.macrobatch.config import MacrobatchConfig
from gnnfleet.strategies.sampling_options import DEFAULT_FANOUT
from gnnfleet.strategies.spec import Settings, StrategySpec

if TYPE_CHECKING:
    from gnnfleet.strategies.estimates import CostEstimate, PlanningContext
    from gnnfleet.strategies.job import Job
    from gnnfleet.strategies.protocol import Strategy


def _build(config: MacrobatchConfig, job: Job) -> Strategy:
    from gnnfleet.strategies.macrobatch.strategy import MacrobatchStrategy

    return MacrobatchStrategy(config, job)


def _estimate(config: MacrobatchConfig, context: PlanningContext) -> list[CostEstimate]:
    from gnnfleet.strategies.macrobatch.estimate import estimate

    return estimate(config, context)


def _reference(config: MacrobatchConfig, layers: int) -> Settings:
    fanouts = config.fanouts or (DEFAULT_FANOUT,) * layers
    return {"name": "local", "fanouts": fanouts, **config.model_dump(include={"replace", "batch", "cache_inputs"})}


SPEC = StrategySpec(
    config=MacrobatchConfig,
    build=_build,
    placement="partition",
    estimate=_estimate,
    reference=_reference,
)

"""Pipeline parallelism over layers (GNNPipe): chunks of nodes stream through stages, hybrid with graph parallelism."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gnnfleet.strategies.pipe.config import PipeConfig
from gnnfleet.strategies.spec import Settings, StrategySpec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gnnfleet.strategies.estimates import CostEstimate, PlanningContext
    from gnnfleet.strategies.job import Job
    from gnnfleet.strategies.protocol import Strategy


def _build(config: PipeConfig, job: Job) -> Strategy:
    from gnnfleet.strategies.pipe.strategy import PipeStrategy

    return PipeStrategy(config, job)


def _estimate(config: PipeConfig, context: PlanningContext) -> list[CostEstimate]:
    from gnnfleet.strategies.pipe.estimate import estimate

    return estimate(config, context)


def _chosen(state: Mapping[str, Any]) -> Settings:
    """The grid of a run; another plan might be exact or not."""
    graph_parallel, _, chunks, *_ = state["cut"].tolist()
    return {"graph_parallel": graph_parallel, "chunks": chunks}


SPEC = StrategySpec(
    config=PipeConfig,
    build=_build,
    placement="chunks",
    estimate=_estimate,
    reference=lambda config, layers: {"name": "local"},
    chosen=_chosen,
)

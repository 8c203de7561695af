"""Pipeline parallelism over layers (GNNPipe): chunks of nodes stream through stages, hybrid with graph parallelism."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gnnfleet.strategies.pipe.config import PipeConfig
from gnnfleet.strategies.spec import Settings, StrategySpec, lazy


def _chosen(state: Mapping[str, Any]) -> Settings:
    """The grid of a run; another plan might be exact or not."""
    graph_parallel, _, chunks, *_ = state["cut"].tolist()
    return {"graph_parallel": graph_parallel, "chunks": chunks}


SPEC = StrategySpec(
    config=PipeConfig,
    build=lazy("gnnfleet.strategies.pipe.strategy:PipeStrategy"),
    placement="chunks",
    estimate=lazy("gnnfleet.strategies.pipe.profile:estimate"),
    reference=lambda config, layers: {"name": "local"},
    chosen=_chosen,
    memory_settings=(),
)

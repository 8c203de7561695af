"""Exact full batch over ranks (SAR): remote blocks are aggregated a group at a time, freed, and rebuilt in backward."""

from __future__ import annotations

from gnnfleet.strategies.sar.config import SarConfig
from gnnfleet.strategies.spec import StrategySpec, lazy

SPEC = StrategySpec(
    config=SarConfig,
    build=lazy("gnnfleet.strategies.sar.strategy:SarStrategy"),
    placement="partition",
    estimate=lazy("gnnfleet.strategies.sar.estimate:estimate"),
    memory_settings=("memory",),
    reference=lambda config, layers: {"name": "local"},
)

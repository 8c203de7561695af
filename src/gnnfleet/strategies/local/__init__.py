"""One process: the reference that every other strategy on graphs is tested against."""

from __future__ import annotations

from gnnfleet.strategies.local.config import LocalConfig
from gnnfleet.strategies.spec import StrategySpec, lazy

SPEC = StrategySpec(
    config=LocalConfig,
    build=lazy("gnnfleet.strategies.local.strategy:LocalStrategy"),
    execution="single",
    estimate=lazy("gnnfleet.strategies.local.estimate:estimate"),
)

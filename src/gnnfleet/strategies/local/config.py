"""The knobs of ``local``."""

from __future__ import annotations

from typing import Literal

from gnnfleet.strategies.base import StrategyConfig


class LocalConfig(StrategyConfig, frozen=True, extra="forbid"):
    """Full batch in one process."""

    name: Literal["local"] = "local"
    # How rows lie in memory; results agree to rounding. auto: cluster above 50,000 nodes, where it pays for itself.
    order: Literal["auto", "store", "cluster"] = "auto"

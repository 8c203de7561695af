"""The knobs of ``local``."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from gnnfleet.strategies.base import StrategyConfig


class LocalConfig(StrategyConfig, frozen=True, extra="forbid"):
    """Full batch in one process."""

    name: Literal["local"] = "local"
    # Items (labelled nodes, target edges) of a step, every step on the whole graph; 0: all in one step an epoch.
    batch: int = Field(default=0, ge=0)
    # How rows lie in memory; results agree to rounding. auto: cluster above 50,000 nodes, where it pays for itself.
    order: Literal["auto", "store", "cluster"] = "auto"
    # Evaluation goes layer by layer in chunks of rows when a layer's activations need more than this.
    eval_bytes: int = Field(default=4 << 30, gt=0)

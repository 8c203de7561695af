"""The knobs of ``local``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from gnnfleet.strategies.config import StrategyConfig
from gnnfleet.strategies.sampling_options import DEFAULT_BATCH, AutoSwitch, FanoutOption


class LocalConfig(StrategyConfig, frozen=True, extra="forbid"):
    """One process: every step on the whole graph, or with ``fanouts`` on sampled blocks."""

    name: Literal["local"] = "local"
    # Neighbours drawn per node, the hop next to the seeds first, −1 for all; by SRC:RELATION:DST where they differ.
    # Without it the whole graph is walked.
    fanouts: FanoutOption = None
    replace: bool = False  # whether a neighbour may be drawn twice
    # Items (labelled nodes, target edges) of a step; 0: all in one step an epoch. By default 0, and 1024 with fanouts.
    batch: int | None = Field(default=None, ge=0)
    # Batches that a thread in the background makes ahead; 0 for none. Results are the same. auto: 2 where that thread
    # does not take a core from the products, or features do not fit the memory.
    prefetch: Literal["auto"] | Annotated[int, Field(ge=0)] = "auto"
    # The first layer's aggregate of all neighbours, computed once; with fanouts the last hop is then neither drawn nor
    # read. auto: where the model allows it.
    cache_inputs: AutoSwitch = "auto"
    # How rows lie in memory; results agree to rounding. auto: cluster above 50,000 nodes, where it pays for itself;
    # store with fanouts.
    order: Literal["auto", "store", "cluster"] = "auto"

    @property
    def is_sampled(self) -> bool:
        return self.fanouts is not None

    @property
    def batch_size(self) -> int:
        if self.batch is None:
            return 0 if self.fanouts is None else DEFAULT_BATCH
        return self.batch

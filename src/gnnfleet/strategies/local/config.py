"""Options of strategy ``local``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from gnnfleet.strategies.config import StrategyConfig
from gnnfleet.strategies.sampling_options import DEFAULT_BATCH, AutoSwitch, FanoutOption


class LocalConfig(StrategyConfig, frozen=True, extra="forbid"):
    """Training in one process: on the whole graph, or with ``fanouts`` on sampled blocks."""

    name: Literal["local"] = "local"
    # Neighbours sampled per node, the hop next to the seeds first, −1 for all; by SRC:RELATION:DST where they differ.
    # Unset: full batch.
    fanouts: FanoutOption = None
    replace: bool = False  # sample neighbours with replacement
    # Items (labelled nodes, target edges) of a step; 0: one step per epoch. Default 0, and 1024 with fanouts.
    batch: int | None = Field(default=None, ge=0)
    # Batches that a background thread prepares ahead; 0 for none. Results are the same. auto: 2 if a core is free for
    # that thread or features do not fit into memory.
    prefetch: Literal["auto"] | Annotated[int, Field(ge=0)] = "auto"
    # Cache the first layer's aggregate of all neighbours; with fanouts the last hop is then neither sampled nor read.
    # auto: where the model and the memory allow it.
    cache_inputs: AutoSwitch = "auto"
    # Order of rows in memory; results agree to rounding. auto: cluster above 50,000 nodes; store with fanouts.
    order: Literal["auto", "store", "cluster"] = "auto"

    @property
    def is_sampled(self) -> bool:
        return self.fanouts is not None

    @property
    def batch_size(self) -> int:
        if self.batch is None:
            return 0 if self.fanouts is None else DEFAULT_BATCH
        return self.batch

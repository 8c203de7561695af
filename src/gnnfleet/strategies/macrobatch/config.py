"""The knobs of ``macrobatch``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from gnnfleet.strategies.config import StrategyConfig
from gnnfleet.strategies.sampling_options import DEFAULT_BATCH, AutoSwitch, FanoutOption
from gnnfleet.units import parse_size

CachePolicy = Literal["static", "score", "belady"]

ByteSize = Annotated[int, BeforeValidator(lambda given: 0 if given in (0, "0") else parse_size(given))]


class MacrobatchConfig(StrategyConfig, frozen=True, extra="forbid"):
    """Sampled mini-batches on a partitioned graph; results are those of ``local`` with the same fanouts, to rounding.

    Neighbours and features of several mini-batches are fetched in one relay, each row once.
    """

    name: Literal["macrobatch"] = "macrobatch"
    # Neighbours drawn per node, the hop next to the seeds first, −1 for all; by SRC:RELATION:DST where they differ.
    # By default 10 in every hop.
    fanouts: FanoutOption = None
    replace: bool = False  # whether a neighbour may be drawn twice
    batch: int = Field(default=DEFAULT_BATCH, ge=0)  # items of a step, of all workers together; 0: all
    # Mini-batches per relay; results are the same. 1 fetches for each batch by itself. auto: what ``buffer`` holds.
    batches_per_fetch: Literal["auto"] | Annotated[int, Field(ge=1)] = "auto"
    buffer: ByteSize = 512 << 20  # bytes of blocks and rows that relays may hold on a worker, those ahead included
    # Relays that a thread in the background makes ahead while the present one is trained on; 0 for none. auto: 1 where
    # workers are on several machines and wait for a network.
    prefetch: Literal["auto"] | Annotated[int, Field(ge=0)] = "auto"
    # The first layer's aggregate of all neighbours, computed once; the last hop is then neither drawn nor fetched.
    # auto: where the model allows it.
    cache_inputs: AutoSwitch = "auto"
    # Whether features of a worker's own nodes may stay in memory; false reads those of a relay from the disk, in the
    # order in which they lie, and lets them go. auto: where they take less than half of --memory, or of what there is.
    features_in_memory: AutoSwitch = "auto"
    # How features are dealt: nodes gives a worker all features of its nodes; columns some features of all nodes: none
    # travel, the first layer's sums do (sage, gcn). For features much wider than model.hidden.
    split: Literal["nodes", "columns"] = "nodes"
    # Bytes of rows of other machines kept from relay to relay; 0 for none. Results are the same.
    cache: ByteSize = 0
    # Which rows are kept: those used most often (static), by MassiveGNN's scores (score), those needed next (belady).
    policy: CachePolicy = "belady"
    cache_lookahead: int = Field(default=2, ge=0)  # relays sampled ahead so that belady knows what is needed next

    @property
    def is_sampled(self) -> bool:
        return True

    @property
    def lookahead(self) -> int:
        """Relays sampled ahead of the one that is fetched."""
        return self.cache_lookahead if self.cache and self.policy == "belady" else 0

    @property
    def batch_size(self) -> int:
        return self.batch

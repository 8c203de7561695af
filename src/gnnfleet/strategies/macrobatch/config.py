"""Options of strategy ``macrobatch``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from gnnfleet.strategies.config import StrategyConfig
from gnnfleet.strategies.sampling_options import DEFAULT_BATCH, AutoSwitch, FanoutOption
from gnnfleet.units import OptionalSize, parse_size

CachePolicy = Literal["score", "belady"]

ByteSize = Annotated[int, BeforeValidator(lambda size: 0 if size in (0, "0") else parse_size(size))]


class MacrobatchConfig(StrategyConfig, frozen=True, extra="forbid"):
    """Sampled mini-batches on a partitioned graph; results are those of ``local`` with the same fanouts, to rounding.

    Neighbours and features of several mini-batches are fetched together, each row once.
    """

    name: Literal["macrobatch"] = "macrobatch"
    # Neighbours sampled per node, the hop next to the seeds first, −1 for all; by SRC:RELATION:DST where they differ.
    # 10 in every hop by default.
    fanouts: FanoutOption = None
    replace: bool = False  # sample neighbours with replacement
    batch: int = Field(default=DEFAULT_BATCH, ge=0)  # items of a step, summed over workers; 0: all
    # Mini-batches per fetch; results are the same. 1 fetches for each batch by itself. auto: what ``buffer`` holds.
    batches_per_fetch: Literal["auto"] | Annotated[int, Field(ge=1)] = "auto"
    buffer: ByteSize = 512 << 20  # bytes of blocks and rows per worker, prefetched ones included
    # Macrobatches that a background thread fetches ahead; 0 for none. auto: 1 if workers are on several machines.
    prefetch: Literal["auto"] | Annotated[int, Field(ge=0)] = "auto"
    # Cache the first layer's aggregate of all neighbours; the last hop is then neither sampled nor fetched.
    # auto: where the model and the memory allow it.
    cache_inputs: AutoSwitch = "auto"
    # Keep the features of a worker's nodes in memory; false reads those of each fetch from disk, in disk order.
    # auto: if they take at most half of ``feature_memory``.
    features_in_memory: AutoSwitch = "auto"
    # Bytes per worker for features and their aggregate; by default its share of the machine's memory.
    feature_memory: OptionalSize = None
    # nodes: a worker has all features of its nodes. columns: it has some columns of all nodes; sums of the first layer
    # are exchanged instead of features (sage, gcn). For features much wider than model.hidden.
    split: Literal["nodes", "columns"] = "nodes"
    # Bytes per worker for caching rows of other hosts; 0 for none. Results are the same.
    cache: ByteSize = 0
    policy: CachePolicy = "belady"  # rows to cache: by MassiveGNN's scores (score), those needed next (belady)
    cache_lookahead: int = Field(default=2, ge=0)  # macrobatches sampled ahead, for belady

    @property
    def is_sampled(self) -> bool:
        return True

    @property
    def lookahead(self) -> int:
        """Macrobatches sampled ahead of the one that is fetched."""
        return self.cache_lookahead if self.cache and self.policy == "belady" else 0

    @property
    def batch_size(self) -> int:
        return self.batch

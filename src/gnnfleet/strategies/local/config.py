"""The knobs of ``local``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from gnnfleet.graph.graph import EdgeType
from gnnfleet.graph.sample import Fanouts
from gnnfleet.strategies.base import StrategyConfig

SAMPLED_BATCH = 1024


class LocalConfig(StrategyConfig, frozen=True, extra="forbid"):
    """One process: every step on the whole graph, or with ``fanouts`` on sampled blocks."""

    name: Literal["local"] = "local"
    # Neighbours drawn per node, the hop next to the seeds first, −1 for all; by SRC:RELATION:DST where they differ.
    # Without it the whole graph is walked.
    fanouts: tuple[int, ...] | dict[str, tuple[int, ...]] | None = None
    replace: bool = False  # whether a neighbour may be drawn twice
    # Items (labelled nodes, target edges) of a step; 0: all in one step an epoch. By default 0, and 1024 with fanouts.
    batch: int | None = Field(default=None, ge=0)
    # Batches that a thread in the background makes ahead; 0 for none. Results are the same. auto: 2 where that thread
    # does not take a core from the products, or features do not fit the memory.
    prefetch: Literal["auto"] | Annotated[int, Field(ge=0)] = "auto"
    # The first layer's aggregate of all neighbours, computed once; with fanouts the last hop is then neither drawn nor
    # read. auto: where the model allows it.
    cache_inputs: Literal["auto"] | bool = "auto"
    # How rows lie in memory; results agree to rounding. auto: cluster above 50,000 nodes, where it pays for itself;
    # store with fanouts.
    order: Literal["auto", "store", "cluster"] = "auto"

    @field_validator("fanouts", mode="before")
    @classmethod
    def _check_fanouts(cls, given: Any) -> Any:
        lists = list(given.values()) if isinstance(given, dict) else [given]
        if given is not None and not all(isinstance(one, list | tuple) and all(map(_is_whole, one)) for one in lists):
            raise ValueError(f"expected whole numbers, one per layer, as [15, 10, 5]; found {given!r}")
        return given

    @field_validator("cache_inputs", mode="before")
    @classmethod
    def _check_cache(cls, given: Any) -> Any:
        if given not in ("auto", True, False):
            raise ValueError(f"expected auto, true or false; found {given!r}")
        return given

    @property
    def batch_size(self) -> int:
        """Items of a step; 0 for all."""
        if self.batch is None:
            return 0 if self.fanouts is None else SAMPLED_BATCH
        return self.batch

    @property
    def hops(self) -> Fanouts:
        """``fanouts`` as a sampler takes them; raises ConfigError for a name that is no edge type."""
        assert self.fanouts is not None
        if isinstance(self.fanouts, dict):
            return {EdgeType.parse(name): counts for name, counts in self.fanouts.items()}
        return self.fanouts


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)

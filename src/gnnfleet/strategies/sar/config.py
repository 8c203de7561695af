"""The knobs of ``sar``."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator

from gnnfleet.errors import ConfigError
from gnnfleet.strategies.base import StrategyConfig
from gnnfleet.strategies.task import Task


class SarConfig(StrategyConfig, frozen=True, extra="forbid"):
    """Every step on the whole graph, each rank with its part; results are those of ``local``, to rounding."""

    uses_parts: ClassVar[bool] = True

    name: Literal["sar"] = "sar"
    # Parts whose rows are in memory at a time: 1 is SAR, the number of workers fetches all at once. More is faster
    # where waiting for peers costs more than computing, and takes more memory.
    group: int = Field(default=1, ge=1)
    prefetch: int = Field(default=1, ge=0)  # groups fetched ahead of the one that is worked on
    flow: bool = True  # layers compute only the rows that labelled nodes need, and fetch only what those read
    cache_inputs: Literal["auto"] | bool = "auto"  # the first layer's aggregate, computed once; auto: where it can be

    def check(self, task: Task) -> None:
        if task.hides:
            raise ConfigError("strategy sar walks every edge in every step: set link.exclude=none")

    @field_validator("cache_inputs", mode="before")
    @classmethod
    def _check_cache(cls, given: Any) -> Any:
        if given not in ("auto", True, False):
            raise ValueError(f"expected auto, true or false; found {given!r}")
        return given

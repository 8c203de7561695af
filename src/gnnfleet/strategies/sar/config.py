"""The knobs of ``sar``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from gnnfleet.errors import ConfigError
from gnnfleet.strategies.config import StrategyConfig
from gnnfleet.strategies.sampling_options import AutoSwitch

if TYPE_CHECKING:
    from gnnfleet.tasks.base import Task


class SarConfig(StrategyConfig, frozen=True, extra="forbid"):
    """Every step on the whole graph, each rank with its part; results are those of ``local``, to rounding."""

    name: Literal["sar"] = "sar"
    # Parts whose rows are in memory at a time: 1 is SAR, the number of workers fetches all at once. More is faster
    # where waiting for peers costs more than computing, and takes more memory. auto: 1, or what --memory allows.
    group: Literal["auto"] | Annotated[int, Field(ge=1)] = "auto"
    # Groups fetched ahead of the one that is worked on. auto: 1, or 0 where --memory does not allow it.
    prefetch: Literal["auto"] | Annotated[int, Field(ge=0)] = "auto"
    # Whether rows that backward needs again (GATv2, edge features, messages of your own) are kept, not fetched again;
    # auto: in as many layers as --memory allows, in none without it.
    cache_for_backward: AutoSwitch = "auto"
    # How rows are written on the wire in steps: as they are, rounded to bfloat16, or as int8 with error feedback.
    # Evaluation is exact.
    wire_dtype: Literal["exact", "bf16", "int8"] = "exact"
    restrict_rows: bool = True  # layers compute only the rows that labelled nodes need, and fetch only what those read
    cache_inputs: AutoSwitch = "auto"  # the first layer's aggregate, computed once; auto: where it can be

    def check_task(self, task: Task) -> None:
        if task.masks_edges:
            raise ConfigError("strategy sar walks every edge in every step: set link.exclude=none")

"""Options of strategy ``sar``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from gnnfleet.errors import ConfigError
from gnnfleet.strategies.config import StrategyConfig
from gnnfleet.strategies.sampling_options import AutoSwitch

if TYPE_CHECKING:
    from gnnfleet.tasks.base import Task


class SarConfig(StrategyConfig, frozen=True, extra="forbid"):
    """Full-batch training on a partitioned graph; results are those of ``local``, to rounding."""

    name: Literal["sar"] = "sar"
    # Partitions whose rows are in memory at a time: 1 is SAR, the number of workers fetches all at once. Larger groups
    # save rounds and take more memory. auto: 1, or what --memory allows.
    group: Literal["auto"] | Annotated[int, Field(ge=1)] = "auto"
    # Groups fetched ahead. auto: 1, or 0 if --memory does not allow it.
    prefetch: Literal["auto"] | Annotated[int, Field(ge=0)] = "auto"
    # Cache rows that backward needs again (GATv2, edge features, custom messages) instead of fetching them again.
    # auto: in as many layers as --memory allows, in none without it.
    cache_for_backward: AutoSwitch = "auto"
    # Encoding of rows exchanged in steps: exact, rounded to bfloat16, or int8 with error feedback. Evaluation is exact.
    wire_dtype: Literal["exact", "bf16", "int8"] = "exact"
    restrict_rows: bool = True  # compute and fetch only the rows that labelled nodes depend on
    cache_inputs: AutoSwitch = "auto"  # cache the first layer's aggregate; auto: where the model allows it

    def check_task(self, task: Task) -> None:
        if task.masks_edges:
            raise ConfigError("strategy sar reads every edge in a step and cannot mask some: set link.exclude=none")

"""The knobs of ``pipe``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from gnnfleet.errors import ConfigError
from gnnfleet.strategies.config import StrategyConfig
from gnnfleet.strategies.sampling_options import AutoSwitch

if TYPE_CHECKING:
    from gnnfleet.tasks.base import Task

CHUNKS_PER_STAGE = 4
"""Chunks of a way for every stage, unless the user says: a bubble of less than a fifth."""

AutoCount = Literal["auto"] | Annotated[int, Field(ge=1)]


class PipeConfig(StrategyConfig, frozen=True, extra="forbid"):
    """Layers in stages on different workers, chunks of nodes streamed through them; one optimizer step per epoch.

    Neighbours in chunks that come later are read from a history, so training is not exact unless every way has one
    chunk; evaluation is.
    """

    name: Literal["pipe"] = "pipe"
    # Graph-parallel ways × stages of layers = workers. auto: what is predicted to be fastest, exact graph parallelism
    # (ways = workers) and a single worker included.
    graph_parallel: AutoCount = "auto"
    chunks: AutoCount = "auto"  # of all ways together; auto: four for every worker. As many as ways is exact.
    shuffle: bool = True  # another order of chunks in every epoch
    refresh: int = Field(default=10, ge=1)  # epochs for which one history serves
    # What stands for gradients of neighbours that were read from history: nothing, while the others count twice
    # (double, as GNNPipe), those of the epoch before (stale), or these as a control variate.
    gradient: Literal["double", "stale", "control_variate"] = "double"
    warmup_history: bool = True  # fill the history by one exact pass at the start, not with zeros
    # Epochs until gradients are compared with exact ones for the first time; after that twice as many each time, as
    # long as they agree. 0 never compares.
    exactness_check_every: int = Field(default=5, ge=0)
    tolerance: float = Field(default=0.7, ge=0, le=1)  # the least cosine between the gradient and the exact one
    wire_dtype: Literal["exact", "bf16"] = "exact"  # how rows are written on the wire in steps; evaluation is exact
    cache_inputs: AutoSwitch = "auto"  # the first layer's aggregate, computed once; auto: where it can be

    def check_workers(self, workers: int) -> None:
        if self.graph_parallel != "auto" and workers % self.graph_parallel:
            raise ConfigError(
                f"strategy.graph_parallel={self.graph_parallel} does not divide {workers} workers into stages"
            )
        if self.chunks != "auto" and self.graph_parallel != "auto" and self.chunks % self.graph_parallel:
            raise ConfigError(
                f"strategy.chunks={self.chunks} must be a multiple of strategy.graph_parallel={self.graph_parallel}"
            )

    def check_task(self, task: Task) -> None:
        if task.masks_edges:
            raise ConfigError("strategy pipe walks every edge in every step: set link.exclude=none")
        if not task.reads_only_local_rows and self.graph_parallel not in ("auto", 1):
            raise ConfigError(
                f"links are trained on one way, found strategy.graph_parallel={self.graph_parallel}: leave it out"
            )

    def layout_candidates(self, workers: int, *, local_rows_only: bool = True) -> list[tuple[int, int]]:
        """(ways, chunks) that may be planned with."""
        every = (
            [ways for ways in range(1, workers + 1) if workers % ways == 0]
            if self.graph_parallel == "auto"
            else [self.graph_parallel]
        )
        found = []
        for ways in every if local_rows_only else [1]:
            stages = workers // ways
            chunks = self.chunks if self.chunks != "auto" else ways * (CHUNKS_PER_STAGE * stages if stages > 1 else 1)
            if chunks % ways == 0:
                found.append((ways, chunks))
        return found

"""The knobs of ``pipe``."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from gnnfleet.errors import ConfigError
from gnnfleet.strategies.sampling_options import Switch
from gnnfleet.strategies.spec import StrategyConfig
from gnnfleet.tasks.base import Task

SLOTS_PER_STAGE = 4
"""Chunks of a way for every stage, unless the user says: a bubble of less than a fifth."""

Number = Literal["auto"] | Annotated[int, Field(ge=1)]


class PipeConfig(StrategyConfig, frozen=True, extra="forbid"):
    """Layers in stages on different workers, chunks of nodes streamed through them; one optimizer step per epoch.

    Neighbours in chunks that come later are read from a history, so training is not exact unless every way has one
    chunk; evaluation is.
    """

    uses_parts: ClassVar[bool] = True
    cut: ClassVar[Literal["parts", "clusters", "chunks", "none"]] = "chunks"

    name: Literal["pipe"] = "pipe"
    # Graph-parallel ways × stages of layers = workers. auto: what is predicted to be fastest, exact graph parallelism
    # (ways = workers) and a single worker included.
    ways: Number = "auto"
    chunks: Number = "auto"  # of all ways together; auto: four for every worker. As many as ways is exact.
    shuffle: bool = True  # another order of chunks in every epoch
    refresh: int = Field(default=10, ge=1)  # epochs for which one history serves
    # What stands for gradients of neighbours that were read from history: nothing, while the others count twice
    # (double, as GNNPipe), those of the epoch before (stale), or these as a control variate.
    gradient: Literal["double", "stale", "control_variate"] = "double"
    warm: bool = True  # fill the history by one exact pass at the start, not with zeros
    # Epochs until gradients are compared with exact ones for the first time; after that twice as many each time, as
    # long as they agree. 0 never compares.
    guard: int = Field(default=5, ge=0)
    tolerance: float = Field(default=0.7, ge=0, le=1)  # the least cosine between the gradient and the exact one
    wire: Literal["exact", "bf16"] = "exact"  # how rows are written on the wire in steps; evaluation is exact
    cache_inputs: Switch = "auto"  # the first layer's aggregate, computed once; auto: where it can be

    def check_workers(self, workers: int) -> None:
        if self.ways != "auto" and workers % self.ways:
            raise ConfigError(f"strategy.ways={self.ways} does not divide {workers} workers into stages")
        if self.chunks != "auto" and self.ways != "auto" and self.chunks % self.ways:
            raise ConfigError(f"strategy.chunks={self.chunks} must be a multiple of strategy.ways={self.ways}")

    def check(self, task: Task) -> None:
        if task.hides:
            raise ConfigError("strategy pipe walks every edge in every step: set link.exclude=none")
        if not task.stays and self.ways not in ("auto", 1):
            raise ConfigError(f"links are trained on one way, found strategy.ways={self.ways}: leave it out")

    def candidates(self, workers: int, *, stays: bool = True) -> list[tuple[int, int]]:
        """(ways, chunks) that may be planned with."""
        every = [ways for ways in range(1, workers + 1) if workers % ways == 0] if self.ways == "auto" else [self.ways]
        found = []
        for ways in every if stays else [1]:
            stages = workers // ways
            chunks = self.chunks if self.chunks != "auto" else ways * (SLOTS_PER_STAGE * stages if stages > 1 else 1)
            if chunks % ways == 0:
                found.append((ways, chunks))
        return found

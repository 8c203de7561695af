"""Options of strategy ``pipe``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from gnnfleet.errors import ConfigError
from gnnfleet.strategies.config import StrategyConfig
from gnnfleet.strategies.sampling_options import AutoSwitch

if TYPE_CHECKING:
    from gnnfleet.nn.base import Model
    from gnnfleet.tasks.base import Task

CHUNKS_PER_STAGE = 4
"""Default number of chunks of a partition per stage: stages wait for less than a fifth of the time."""

AutoCount = Literal["auto"] | Annotated[int, Field(ge=1)]


class PipeConfig(StrategyConfig, frozen=True, extra="forbid"):
    """Layers in stages on different workers, chunks of nodes streamed through them; one optimizer step per epoch.

    Rows of later chunks are historical, so training is exact only if every partition is one chunk. Evaluation is exact.
    """

    name: Literal["pipe"] = "pipe"
    # Graph-parallel workers of each stage; times the number of stages it is the number of workers. auto: the fastest by
    # estimate, exact graph parallelism (graph_parallel = workers) and a single worker included.
    graph_parallel: AutoCount = "auto"
    chunks: AutoCount = "auto"  # of all partitions; auto: four per worker. As many as graph_parallel is exact.
    shuffle: bool = True  # a new order of chunks in every epoch
    refresh: int = Field(default=10, ge=1)  # epochs between updates of the history
    # Gradients of historical rows: none, and those of fresh rows count twice (double, as in GNNPipe); those of the
    # previous epoch (stale).
    gradient: Literal["double", "stale"] = "double"
    warmup_history: bool = True  # begin with a history from one exact pass instead of zeros
    # Epochs until gradients are first compared with exact ones; the interval doubles while they agree. 0: never.
    exactness_check_every: int = Field(default=5, ge=0)
    tolerance: float = Field(default=0.7, ge=0, le=1)  # least cosine between the gradient and the exact one
    wire_dtype: Literal["exact", "bf16"] = "exact"  # encoding of rows exchanged in steps; evaluation is exact
    cache_inputs: AutoSwitch = "auto"  # cache the first layer's aggregate; auto: where the model allows it

    def check_workers(self, workers: int) -> None:
        if self.graph_parallel == "auto":
            return
        if workers % self.graph_parallel:
            raise ConfigError(
                f"strategy.graph_parallel={self.graph_parallel} does not divide {workers} workers into stages"
            )
        if self.chunks != "auto" and self.chunks % self.graph_parallel:
            raise ConfigError(
                f"strategy.chunks={self.chunks} must be a multiple of strategy.graph_parallel={self.graph_parallel}"
            )

    @property
    def runs_layers(self) -> bool:
        return True

    def check_model(self, model: Model) -> None:
        from gnnfleet.nn.pyg.module import PygModule

        super().check_model(model)
        if model.is_precomputed:
            raise ConfigError("strategy pipe splits layers with neighbours into stages, sign has none: use sar")
        if isinstance(model, PygModule) and model.propagation.mode not in ("auto", "plain"):
            raise ConfigError("strategy pipe fetches rows of a chunk once: leave out model.propagate")
        for name, module in model.named_modules():
            if getattr(module, "track_running_stats", False) and not getattr(module, "affine", True):
                raise ConfigError(
                    f"strategy pipe keeps running statistics with the weights of their norm, and {name} "
                    f"({type(module).__name__}) has none: set affine=True"
                )

    def check_task(self, task: Task) -> None:
        if task.masks_edges:
            raise ConfigError("strategy pipe reads every edge in a step and cannot mask some: set link.exclude=none")
        if not task.reads_only_local_rows and self.graph_parallel not in ("auto", 1):
            raise ConfigError(
                f"link prediction needs strategy.graph_parallel=1, found {self.graph_parallel}: remove the option"
            )

    def layout_candidates(self, workers: int, *, local_rows_only: bool = True) -> list[tuple[int, int]]:
        """(partitions, chunks) of the layouts to choose from."""
        if self.graph_parallel == "auto":
            counts = [count for count in range(1, workers + 1) if workers % count == 0]
        else:
            counts = [self.graph_parallel]
        layouts = []
        for partitions in counts if local_rows_only else [1]:
            stages = workers // partitions
            default = partitions * (CHUNKS_PER_STAGE * stages if stages > 1 else 1)
            chunks = default if self.chunks == "auto" else self.chunks
            if chunks % partitions == 0:
                layouts.append((partitions, chunks))
        return layouts

"""Settings of ``temporal``."""

from __future__ import annotations

from math import prod
from typing import Annotated, Literal

from pydantic import Field

from gnnfleet.errors import ConfigError
from gnnfleet.strategies.config import StrategyConfig
from gnnfleet.strategies.sampling_options import AutoSwitch
from gnnfleet.strategies.temporal.schedule import ParallelLayout
from gnnfleet.units import OptionalSize

AutoCount = Literal["auto"] | Annotated[int, Field(ge=1)]


class TemporalConfig(StrategyConfig, frozen=True, extra="forbid"):
    """Settings of memory-based training on event streams."""

    name: Literal["temporal"] = "temporal"
    # Events of a mini-batch, plus further ones at the time of the last. auto: the largest that captures enough updates.
    batch: AutoCount = 600
    # DistTGL's mini-batch × epoch × memory parallelism; the product is the number of workers. auto: planned.
    batch_parallel: AutoCount = "auto"
    epoch_parallel: AutoCount = "auto"
    memory_parallel: AutoCount = "auto"
    memory_budget: OptionalSize = None  # bytes per machine for copies of the node memory; by default half of its memory
    # A step averages epoch_parallel · memory_parallel batches; the learning rate grows with it over ``warmup`` epochs.
    lr_scale: Literal["linear", "sqrt", "none"] = "sqrt"
    warmup: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    # With train.schedule=constant, the learning rate after e epochs is multiplied by 1 / (1 + lr_decay · e).
    lr_decay: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    # Decay per batch of the EMA of weights that evaluations and checkpoints use; 0: the last weights.
    average: float = Field(default=0.99, ge=0, lt=1, allow_inf_nan=False)
    relation: str = ""  # edge type whose events are predicted, if several have times
    # Query time of a node: that of its event, or the start of the batch, once per node, which is cheaper. Both see the
    # events before the batch.
    queries: Literal["event", "batch"] = "event"
    # Events of a node that attention reads: the latest, or a uniform sample of all earlier ones, other in every pass.
    events: Literal["latest", "drawn"] = "latest"
    # Train a static embedding table first, from training events in any order. auto: if nodes have no features.
    static: AutoSwitch = "auto"
    static_epochs: int = Field(default=10, ge=1)
    static_lr: float = Field(default=1e-3, gt=0, allow_inf_nan=False)
    eval_batch: int = Field(default=200, ge=1)  # events between memory updates in evaluations, as in TGB
    eval_negatives: int = Field(
        default=49, ge=1
    )  # in evaluations during training; the final one ranks among all destinations
    # Batches built ahead by a thread; results are the same. auto: if the thread has a core to itself.
    prefetch: Literal["auto"] | Annotated[int, Field(ge=0)] = "auto"

    @property
    def batch_size(self) -> int:
        assert self.batch != "auto", "resolved from the stream"
        return self.batch

    @property
    def requested_layout(self) -> ParallelLayout:
        """Layout with 0 for each degree that is planned."""
        degrees = self.batch_parallel, self.epoch_parallel, self.memory_parallel
        return ParallelLayout(*(0 if degree == "auto" else degree for degree in degrees))

    @property
    def single_trainer(self) -> TemporalConfig:
        """The same settings for one trainer."""
        return self.model_copy(update={"batch_parallel": 1, "epoch_parallel": 1, "memory_parallel": 1})

    def learns_static(self, features: bool) -> bool:
        """True if a static embedding table is trained first; ``features``: the nodes have features."""
        return not features if self.static == "auto" else self.static

    def check_workers(self, workers: int) -> None:
        degrees = {name: degree for name, degree in vars(self.requested_layout).items() if degree}
        product = prod(degrees.values())
        if workers % product or (len(degrees) == 3 and product != workers):
            requested = " × ".join(f"{name}={degree}" for name, degree in degrees.items())
            raise ConfigError(
                "strategy.batch_parallel × epoch_parallel × memory_parallel must be the number of workers, "
                f"found {requested} for {workers} workers"
            )

"""The knobs of ``temporal``."""

from __future__ import annotations

from math import prod
from typing import Annotated, Literal

from pydantic import Field

from gnnfleet.errors import ConfigError
from gnnfleet.strategies.config import StrategyConfig
from gnnfleet.strategies.sampling_options import AutoSwitch
from gnnfleet.strategies.temporal.schedule import ParallelLayout

AutoCount = Literal["auto"] | Annotated[int, Field(ge=1)]


class TemporalConfig(StrategyConfig, frozen=True, extra="forbid"):
    """Events in the order of time; every node has a memory that its events change."""

    name: Literal["temporal"] = "temporal"
    # Events of a batch, more where the last ones happen at the same time. auto: as many as leave enough updates.
    batch: AutoCount = 600
    # A node hears of the last of its events in a batch only. Batches end before a larger share of such updates is lost
    # than this; 1: they never do.
    max_lost_updates: float = Field(default=1.0, ge=0, le=1, allow_inf_nan=False)
    # Trainers of one batch × passes over one memory at a time × memories = workers. auto: planned.
    batch_parallel: AutoCount = "auto"
    epoch_parallel: AutoCount = "auto"
    memory_parallel: AutoCount = "auto"
    # A step of several lanes and copies is a mean over as many batches: the rate grows with them, over so many epochs.
    lr_scale: Literal["linear", "sqrt", "none"] = "sqrt"
    warmup: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    # The rate after e epochs is 1 / (1 + lr_decay · e) of what it would be.
    lr_decay: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    # Evaluations and what is kept are of a mean of weights, of which a batch leaves this share; 0: of the last weights.
    average: float = Field(default=0.99, ge=0, lt=1, allow_inf_nan=False)
    relation: str = ""  # the edge type whose events are predicted, where several have times
    # When nodes are looked at: each at the time of its event, or once per batch, when it begins, which is cheaper and
    # knows no time within it. Both see the events before the batch.
    queries: Literal["event", "batch"] = "event"
    # Which events of a node attention looks at: its latest, or some of all it has had, drawn anew in every pass.
    events: Literal["latest", "drawn"] = "latest"
    # Rows learnt for nodes beforehand, from training events in any order, as what is known of them. auto: where nodes
    # have no features.
    static: AutoSwitch = "auto"
    static_epochs: int = Field(default=10, ge=1)
    static_lr: float = Field(default=1e-3, gt=0, allow_inf_nan=False)
    eval_batch: int = Field(default=200, ge=1)  # events between updates of the state in evaluations, as TGB has it
    eval_negatives: int = Field(default=49, ge=1)  # in evaluations during training; at the end all destinations
    # Batches looked up ahead by a thread; results are the same. auto: where it has a core of its own.
    prefetch: Literal["auto"] | Annotated[int, Field(ge=0)] = "auto"

    @property
    def batch_size(self) -> int:
        assert self.batch != "auto", "decided with the stream"
        return self.batch

    @property
    def requested_layout(self) -> ParallelLayout:
        """What is decided of the arrangement; 0 is open."""
        return ParallelLayout(
            *(
                0 if size == "auto" else size
                for size in (self.batch_parallel, self.epoch_parallel, self.memory_parallel)
            )
        )

    @property
    def single_trainer(self) -> TemporalConfig:
        """The same for one trainer."""
        return self.model_copy(update={"batch_parallel": 1, "epoch_parallel": 1, "memory_parallel": 1})

    def learns_static(self, features: bool) -> bool:
        """Whether rows are learnt beforehand, for nodes with or without features."""
        return not features if self.static == "auto" else self.static

    def check_workers(self, workers: int) -> None:
        sizes = [size for size in vars(self.requested_layout).values() if size]
        if workers % prod(sizes) or (len(sizes) == len(vars(self.requested_layout)) and prod(sizes) != workers):
            words = " × ".join(f"{name}={size}" for name, size in vars(self.requested_layout).items() if size)
            raise ConfigError(f"strategy.batch_parallel × lanes × copies are the workers, found {words} of {workers}")

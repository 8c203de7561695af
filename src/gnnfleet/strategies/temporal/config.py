"""The knobs of ``temporal``."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from gnnfleet.errors import ConfigError
from gnnfleet.strategies.base import StrategyConfig
from gnnfleet.strategies.sampling import Switch

EVENT_TRAINING = {"epochs": 20, "lr": 5e-4, "weight_decay": 0.0}
"""What training is on events unless someone says so, where it differs from graphs."""


class TemporalConfig(StrategyConfig, frozen=True, extra="forbid"):
    """Events in the order of time; every node has a memory that its events change."""

    name: Literal["temporal"] = "temporal"
    batch: int = Field(default=600, ge=1)  # events of a step; more where the last ones happen at the same time
    relation: str = ""  # the edge type whose events are predicted, where several have times
    # When nodes are looked at: each at the time of its event, with all events before it; or once per batch, when it
    # begins, which is cheaper and sees less.
    queries: Literal["event", "batch"] = "event"
    # Rows learnt for nodes beforehand, from training events in any order, as what is known of them. auto: where nodes
    # have no features.
    static: Switch = "auto"
    static_epochs: int = Field(default=10, ge=1)
    static_lr: float = Field(default=1e-3, gt=0, allow_inf_nan=False)
    eval_batch: int = Field(default=200, ge=1)  # events between updates of the state in evaluations, as TGB has it
    eval_negatives: int = Field(default=49, ge=1)  # in evaluations during training; at the end all destinations
    prefetch: int = Field(default=0, ge=0)  # batches looked up ahead by a thread; results are the same

    @property
    def batch_size(self) -> int:
        return self.batch

    def learns_static(self, features: bool) -> bool:
        """Whether rows are learnt beforehand, for nodes with or without features."""
        return not features if self.static == "auto" else self.static

    def check_workers(self, workers: int) -> None:
        if workers != 1:
            raise ConfigError(f"strategy temporal runs in one process, found workers={workers}: use --workers 1")

"""Options of training: epochs, optimizer, stopping."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field


class TrainConfig(BaseModel, frozen=True, extra="forbid"):
    """Training options of all strategies."""

    epochs: int = Field(default=100, ge=0)
    lr: float = Field(default=0.01, gt=0, allow_inf_nan=False)
    weight_decay: float = Field(default=5e-4, ge=0, allow_inf_nan=False)
    optimizer: Literal["adam", "adamw", "sgd"] = "adam"
    momentum: float = Field(default=0.9, ge=0, lt=1)  # sgd only
    clip: float = Field(default=0.0, ge=0)  # largest norm of all gradients together; 0: no clipping
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)  # share of the target distributed over all classes
    patience: int = Field(default=0, ge=0)  # epochs without a better val metric before training stops; 0: never
    eval_every: int = Field(default=1, ge=1)  # epochs between evaluations on val
    checkpoint_seconds: float = Field(default=10.0, ge=0)  # between checkpoints; 0: after every epoch
    metric: str = "auto"  # nodes: accuracy, roc_auc, micro_f1; links: mrr, hits@K

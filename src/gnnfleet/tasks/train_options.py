"""Options of training: epochs, optimizer, stopping."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from gnnfleet.errors import ConfigError


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
    # Metrics, the first of which decides which epoch is best. Classes: accuracy, balanced_accuracy, macro_f1, micro_f1,
    # roc_auc, ap; values: mae, rmse, r2; links: mrr, hits@K.
    metric: str | tuple[str, ...] = "auto"
    class_weights: Literal["none", "balanced"] | tuple[float, ...] = "none"  # of classes in the loss
    objective: Literal["auto", "classification", "regression"] = "auto"  # auto: labels with fractions are regression
    loss: Literal["mse", "l1", "huber"] = "mse"  # of regression

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the metrics; ``a,b`` and ``[a,b]`` of a command line are lists, too."""
        names = self.metric.strip("[]").split(",") if isinstance(self.metric, str) else self.metric
        return tuple(name.strip() for name in names) or ("auto",)

    @property
    def single_metric(self) -> str:
        """The metric of links and events."""
        if len(self.metrics) > 1:
            raise ConfigError("links and events have one metric and report others beside it: set train.metric to one")
        return self.metrics[0]

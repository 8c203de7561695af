"""Options of training: epochs, optimizer, stopping."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, Field, model_validator

from gnnfleet.errors import ConfigError


class TrainConfig(BaseModel, frozen=True, extra="forbid"):
    """Training options of all strategies."""

    epochs: int = Field(default=100, ge=0)
    lr: float = Field(default=0.01, gt=0, allow_inf_nan=False)
    schedule: Literal["constant", "cosine", "linear", "step", "plateau", "one_cycle"] = "constant"
    warmup: float = Field(default=0.0, ge=0, allow_inf_nan=False)  # epochs in which the rate rises to lr, by steps
    min_lr: float = Field(default=0.0, ge=0, allow_inf_nan=False)  # lowest rate of cosine, linear, step and plateau
    step_size: int = Field(default=20, ge=1)  # step: epochs between reductions; plateau: epochs without a better metric
    gamma: float = Field(default=0.1, gt=0, le=1)  # factor of a reduction of step and plateau
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

    @model_validator(mode="after")
    def _check_schedule(self) -> Self:
        if self.schedule == "one_cycle" and self.warmup:
            raise ValueError("train.schedule=one_cycle has a warm-up of its own: leave out train.warmup")
        return self

    @property
    def depends_on_epochs(self) -> bool:
        """True if the rates depend on the number of epochs."""
        return self.schedule in ("cosine", "linear", "one_cycle")

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

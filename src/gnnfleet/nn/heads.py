"""Loss and metrics of node classification and regression.

Losses are sums over labelled rows; the strategy divides by the number of labelled rows on all ranks. y is [n] int64
with −1 for no label, [n, C] int8 with −1 for an unknown one, or [n] or [n, K] floats with NaN for none.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from gnnfleet.errors import ConfigError
from gnnfleet.graph.graph import labelled_rows
from gnnfleet.nn.metrics import (
    CLASS_METRICS,
    MAX_CLASSES_REPORTED,
    SCORE_METRICS,
    VALUE_METRICS,
    MetricState,
    class_counts,
    class_report,
    compute_metric,
    value_counts,
)

VALUE_LOSSES: dict[str, Callable[..., Tensor]] = {
    "mse": functional.mse_loss,
    "l1": functional.l1_loss,
    "huber": functional.huber_loss,  # quadratic up to one standard deviation
}


@dataclass(frozen=True)
class NodeHead:
    """Multi-class (cross entropy) or multi-label (binary cross entropy) classification, or regression of values.

    A regression model predicts standardised values: (y − ``mean``) / ``std``.
    """

    num_classes: int  # or the number of values
    multilabel: bool = False
    metrics: tuple[str, ...] = ("auto",)  # the first decides which epoch is best
    smoothing: float = 0.0  # share of the target that is spread over all classes
    regression: bool = False
    value_loss: str = "mse"
    class_weights: tuple[float, ...] = ()  # of classes in the loss; of the positives of labels
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    is_labelled = staticmethod(labelled_rows)

    def __post_init__(self) -> None:
        auto = "mae" if self.regression else "micro_f1" if self.multilabel else "accuracy"
        names = tuple(dict.fromkeys(auto if name == "auto" else name for name in self.metrics)) or (auto,)
        object.__setattr__(self, "metrics", names)
        if self.smoothing and (self.multilabel or self.regression):
            raise ConfigError("label smoothing needs one label per node, its class: set train.label_smoothing=0")
        choices, kind = (VALUE_METRICS, "values") if self.regression else (CLASS_METRICS, "classes")
        for name in names:
            if name not in choices:
                raise ConfigError(f"there is no metric {name!r} of {kind}: choose one of {', '.join(choices)}")
            if name in SCORE_METRICS and not self.multilabel and self.num_classes != 2:
                raise ConfigError(
                    f"{name} needs two classes or several labels per node, found {self.num_classes} classes"
                )
            if name == "balanced_accuracy" and self.multilabel:
                raise ConfigError("balanced_accuracy needs one label per node, found several: use macro_f1")

    @property
    def name(self) -> str:
        """The metric that decides which epoch is best."""
        return self.metrics[0]

    def loss(self, logits: Tensor, y: Tensor) -> Tensor:
        """Sum over labelled rows; a row of several labels or values contributes the mean over its known ones.

        Rows are weighted by class; divide by ``total_weight`` for the mean.
        """
        weights = logits.new_tensor(self.class_weights) if self.class_weights else None
        if not self.multilabel and not self.regression:
            return functional.cross_entropy(
                logits, y, weights, ignore_index=-1, reduction="sum", label_smoothing=self.smoothing
            )
        if self.regression:
            target = self.standardise(y).to(logits.dtype)
            known = ~target.isnan()
            target = torch.where(known, target, logits.detach())
            losses = VALUE_LOSSES[self.value_loss](logits, target, reduction="none")
        else:
            known, target = y >= 0, y.to(logits.dtype)
            losses = functional.binary_cross_entropy_with_logits(
                logits, target, known.to(logits.dtype), reduction="none", pos_weight=weights
            )
        return (losses.sum(1) / known.sum(1).clamp(min=1)).sum()

    def total_weight(self, y: Tensor) -> float:
        """Sum of the class weights of labelled rows; their number without weights by class."""
        labelled = y[labelled_rows(y)]
        if not self.class_weights or self.multilabel:
            return float(len(labelled))
        return float(torch.tensor(self.class_weights, dtype=torch.float64)[labelled].sum())

    def standardise(self, y: Tensor) -> Tensor:
        """[n, K] float64."""
        y = y.double().view(len(y), self.num_classes)
        return (y - y.new_tensor(self.mean)) / y.new_tensor(self.std) if self.mean else y

    def predict(self, logits: Tensor) -> Tensor:
        """[n] most likely class, [n, C] int8 labels with a probability above 1/2, or [n, K] values."""
        if self.regression:
            return logits * logits.new_tensor(self.std) + logits.new_tensor(self.mean) if self.mean else logits
        return (logits > 0).to(torch.int8) if self.multilabel else logits.argmax(1)

    def metric(self, logits: Tensor, y: Tensor) -> MetricState:
        """Metric state of some rows; unlabelled rows do not count."""
        rows = labelled_rows(y)
        logits, y = logits.detach()[rows], y[rows]
        guess = self.predict(logits.double() if self.regression else logits)
        if self.regression:
            y = y.double().view(len(y), self.num_classes)
            centred = y - y.new_tensor(self.mean) if self.mean else y
            return MetricState(torch.zeros(2, dtype=torch.float64), value_counts(guess - y, centred))
        correct = (guess == y) | (y < 0)
        right = torch.tensor(
            [float((correct.all(1) if self.multilabel else correct).sum()), len(y)], dtype=torch.float64
        )
        counts = class_counts(guess, y, self.num_classes)
        if not set(self.metrics) & set(SCORE_METRICS):
            return MetricState(right, counts)
        score = logits if self.multilabel else (logits[:, 1] - logits[:, 0])[:, None]
        return MetricState(right, counts, score, y if self.multilabel else y[:, None])

    def compute(self, state: MetricState) -> dict[str, float]:
        """Values of the metrics; nan without rows, or where a metric is not defined."""
        return {name: compute_metric(name, state) for name in self.metrics}

    def report(self, state: MetricState) -> dict[str, Any]:
        """Measures per class; none for values and for many classes."""
        return {} if self.regression or self.num_classes > MAX_CLASSES_REPORTED else class_report(state.counts)

    def constant(self, y: Tensor) -> Tensor:
        """[C] logits of the best prediction for y that is the same for all rows."""
        if self.regression:
            return self.standardise(y).nanmean(0).nan_to_num(0)
        weights = torch.tensor(self.class_weights or [1.0], dtype=torch.float64)
        if self.multilabel:
            positive, negative = (y == 1).sum(0) * weights, (y == 0).sum(0)
            return (positive.clamp(min=0.1) / negative.clamp(min=0.1)).log()
        counts = torch.bincount(y[y >= 0], minlength=self.num_classes) * weights
        return (counts / counts.sum()).clamp(min=1e-9).log()


def training_statistics(y: Tensor, num_classes: int) -> dict[str, tuple[float, ...]]:
    """{"mean", "std"} of values, {"balanced": weights} of classes or of the positives of labels."""
    if y.is_floating_point():
        y = y.double().view(len(y), num_classes)
        mean = y.nanmean(0).nan_to_num(0)
        spread = (y - mean).square().nanmean(0).sqrt()
        std = torch.where(spread > 0, spread, 1.0)
        return {"mean": tuple(mean.tolist()), "std": tuple(std.tolist())}
    if y.dim() == 2:
        balanced = (y == 0).sum(0).double() / (y == 1).sum(0)
    else:
        counts = torch.bincount(y[y >= 0].long(), minlength=num_classes).double()
        balanced = counts.sum() / ((counts > 0).sum() * counts)
    return {"balanced": tuple(w if 0 < w < math.inf else 1.0 for w in balanced.tolist())}

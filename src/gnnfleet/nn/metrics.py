"""Metrics of node tasks, from sums that add up over batches and ranks, and from gathered scores.

Of C classes or labels: ``counts`` [3 + M, C] are hits, predictions and support per class, then a confusion matrix with
a row per true class (M = C) or none (M = 0). Of K values: [5, K] are rows, sums of |error| and error², and of y and y²
around a fixed centre.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gnnfleet.nn.ranking import average_precision

CLASS_METRICS = ("accuracy", "balanced_accuracy", "macro_f1", "micro_f1", "roc_auc", "ap")
SCORE_METRICS = ("roc_auc", "ap")
VALUE_METRICS = ("mae", "rmse", "r2")
LOWER_IS_BETTER = frozenset({"mae", "rmse"})

MAX_CLASSES_REPORTED = 100
"""Runs with more classes have no report per class and no confusion matrix."""


@dataclass(frozen=True, eq=False)
class MetricState:
    """Partial metrics. ``rows`` and ``counts`` add up; ``score`` and ``truth`` [n, K] are concatenated."""

    rows: Tensor  # [2] float64: rows that are right as a whole, all rows
    counts: Tensor  # float64
    score: Tensor | None = None  # for AUC and AP only
    truth: Tensor | None = None

    def __add__(self, other: MetricState) -> MetricState:
        score, truth = self.score, self.truth
        if score is not None and truth is not None and other.score is not None and other.truth is not None:
            score, truth = torch.cat([score, other.score]), torch.cat([truth, other.truth])
        return MetricState(self.rows + other.rows, self.counts + other.counts, score, truth)


def class_counts(guess: Tensor, y: Tensor, classes: int) -> Tensor:
    """Counts of [n] predicted and true classes, or of [n, C] labels, where −1 is unknown."""
    if y.dim() == 2:
        known = y >= 0
        return torch.stack([((guess * y) == 1).sum(0), ((guess == 1) & known).sum(0), (y == 1).sum(0)]).double()
    if classes > MAX_CLASSES_REPORTED:
        rows = [y[guess == y], guess, y]
        return torch.stack([torch.bincount(part, minlength=classes) for part in rows]).double()
    confusion = torch.bincount(y * classes + guess, minlength=classes * classes).view(classes, classes)
    return torch.cat([torch.stack([confusion.diagonal(), confusion.sum(0), confusion.sum(1)]), confusion]).double()


def value_counts(error: Tensor, y: Tensor) -> Tensor:
    """Counts of [n, K] errors and centred values; NaN where there is no label."""
    error, y = error.double(), y.double()
    return torch.stack([(~y.isnan()).sum(0).double(), *(t.nansum(0) for t in (error.abs(), error**2, y, y**2))])


def compute_metric(name: str, state: MetricState) -> float:
    """Value of a metric; nan without rows, or where it is not defined."""
    if name in SCORE_METRICS:
        assert state.score is not None and state.truth is not None
        return mean_over_columns(_SCORES[name], state.score, state.truth)
    if name == "accuracy":
        return float(state.rows[0] / state.rows[1])
    if name in VALUE_METRICS:
        rows, absolute, square, total, total_square = state.counts  # of each output; the metric is their mean
        if name == "mae":
            return float((absolute / rows).mean())
        if name == "rmse":
            return float((square / rows).sqrt().mean())
        spread = total_square - total**2 / rows
        return float((1 - square / torch.where(spread > 0, spread, torch.nan)).mean())
    hits, guessed, support = state.counts[:3]
    if name == "micro_f1":
        return float(2 * hits.sum() / (guessed.sum() + support.sum()))
    per_class = hits / support if name == "balanced_accuracy" else 2 * hits / (guessed + support)
    return float(per_class.nanmean())  # classes that do not occur are left out


def class_report(counts: Tensor) -> dict[str, Any]:
    """Precision, recall, F1 and support per class, and the confusion matrix if it was counted."""
    hits, guessed, support = counts[:3]
    values = {"precision": hits / guessed, "recall": hits / support, "f1": 2 * hits / (guessed + support)}
    report: dict[str, Any] = {name: value.nan_to_num(0).tolist() for name, value in values.items()}
    report |= {"support": support.long().tolist(), "predicted": guessed.long().tolist()}
    return {**report, **({"confusion": counts[3:].long().tolist()} if len(counts) > 3 else {})}


def mean_over_columns(metric: Callable[[Tensor, Tensor], float], score: Tensor, truth: Tensor) -> float:
    """Mean over the columns whose known rows have both classes; nan without such columns."""
    values = []
    for column in range(score.shape[1]):
        mask = truth[:, column] >= 0
        labels = truth[mask, column] > 0
        if bool(labels.any()) and not bool(labels.all()):
            values.append(metric(score[mask, column], labels))
    return sum(values) / len(values) if values else float("nan")


def roc_auc(score: Tensor, positive: Tensor) -> float:
    """Probability that a random positive scores above a random negative, ties counting half; score [n], bool [n]."""
    _, group, sizes = torch.unique(score, return_inverse=True, return_counts=True)
    mean_rank = sizes.cumsum(0).double() - (sizes.double() - 1) / 2  # shared by equal scores
    positives, negatives = int(positive.sum()), int((~positive).sum())
    total = mean_rank[group][positive].sum()
    return float((total - positives * (positives + 1) / 2) / (positives * negatives))


_SCORES = {"roc_auc": roc_auc, "ap": lambda score, positive: average_precision(score[positive], score[~positive])}

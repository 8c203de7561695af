"""Loss and metrics of node classification.

Losses are sums over labelled rows; the strategy divides by the number of labelled rows on all ranks. Metric states add
up over batches and ranks. y is [n] int64 with −1 for no label, or [n, C] int8 with −1 for an unknown one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from gnnfleet.errors import ConfigError

METRICS = ("accuracy", "roc_auc", "micro_f1")


@dataclass(frozen=True, eq=False)
class MetricState:
    """Partial metric. ``counts`` add up; ``score`` and ``truth`` [n, K] are concatenated (ROC-AUC only)."""

    # [3] float64; accuracy: correct, rows, 0; micro-F1: true positives, false positives, false negatives
    counts: Tensor
    score: Tensor | None = None
    truth: Tensor | None = None

    def __add__(self, other: MetricState) -> MetricState:
        if self.score is None or other.score is None or self.truth is None or other.truth is None:
            return MetricState(self.counts + other.counts)
        return MetricState(
            self.counts + other.counts, torch.cat([self.score, other.score]), torch.cat([self.truth, other.truth])
        )


@dataclass(frozen=True)
class NodeHead:
    """Multi-class (cross entropy) or multi-label (binary cross entropy with logits) node classification."""

    num_classes: int
    multilabel: bool = False
    name: str = "accuracy"  # auto: accuracy, or micro_f1 for several labels per node
    smoothing: float = 0.0  # share of the target that is spread over all classes

    def __post_init__(self) -> None:
        if self.name == "auto":
            object.__setattr__(self, "name", "micro_f1" if self.multilabel else "accuracy")
        if self.smoothing and self.multilabel:
            raise ConfigError("label smoothing needs one label per node, found several: set train.label_smoothing=0")
        if self.name not in METRICS:
            raise ConfigError(f"there is no metric {self.name!r}: choose one of {', '.join(METRICS)}")
        if self.name == "roc_auc" and not self.multilabel and self.num_classes != 2:
            raise ConfigError(f"roc_auc needs two classes or several labels per node, found {self.num_classes} classes")

    def is_labelled(self, y: Tensor) -> Tensor:
        """[n] bool: rows that have a label."""
        return (y >= 0).any(1) if self.multilabel else y >= 0

    def loss(self, logits: Tensor, y: Tensor) -> Tensor:
        """Sum over labelled rows; a multi-label row contributes the mean over its known labels."""
        if not self.multilabel:
            return functional.cross_entropy(logits, y, ignore_index=-1, reduction="sum", label_smoothing=self.smoothing)
        mask = (y >= 0).to(logits.dtype)
        losses = functional.binary_cross_entropy_with_logits(logits, y.to(logits.dtype), weight=mask, reduction="none")
        return (losses.sum(1) / mask.sum(1).clamp(min=1)).sum()

    def metric(self, logits: Tensor, y: Tensor) -> MetricState:
        """Metric state of some rows; unlabelled rows do not count."""
        rows = self.is_labelled(y)
        logits, y = logits.detach()[rows], y[rows]
        if self.name == "roc_auc":
            score = logits if self.multilabel else (logits[:, 1] - logits[:, 0])[:, None]
            return MetricState(torch.zeros(3, dtype=torch.float64), score, y if self.multilabel else y[:, None])
        guess = self.predict(logits)
        if self.name == "accuracy":
            correct = (guess == y) | (y < 0)
            correct = correct.all(1) if self.multilabel else correct
            return MetricState(torch.tensor([float(correct.sum()), len(y), 0], dtype=torch.float64))
        if self.multilabel:
            both, only_guess, only_truth = (guess == 1) & (y == 1), (guess == 1) & (y == 0), (guess == 0) & (y == 1)
            sums = [float(part.sum()) for part in (both, only_guess, only_truth)]
        else:  # one guess and one truth per row: a wrong guess is one false positive and one false negative
            correct_rows = float((guess == y).sum())
            sums = [correct_rows, len(y) - correct_rows, len(y) - correct_rows]
        return MetricState(torch.tensor(sums, dtype=torch.float64))

    def compute(self, state: MetricState) -> float:
        """Value of the metric; nan without rows, or for AUC with rows of one class only."""
        first, second, third = state.counts.tolist()
        if self.name == "roc_auc":
            assert state.score is not None and state.truth is not None
            return mean_roc_auc(state.score, state.truth)
        if self.name == "accuracy":
            return float(first / second) if second else float("nan")
        return float(2 * first / (2 * first + second + third)) if first + second + third else float("nan")

    def predict(self, logits: Tensor) -> Tensor:
        """[n] most likely class, or [n, C] int8 labels with a probability above 1/2."""
        return (logits > 0).to(torch.int8) if self.multilabel else logits.argmax(1)


def mean_roc_auc(score: Tensor, truth: Tensor) -> float:
    """Mean over the columns whose known rows have both classes; nan without such columns."""
    areas = []
    for column in range(score.shape[1]):
        mask = truth[:, column] >= 0
        labels = truth[mask, column] > 0
        if bool(labels.any()) and not bool(labels.all()):
            areas.append(roc_auc(score[mask, column], labels))
    return sum(areas) / len(areas) if areas else float("nan")


def roc_auc(score: Tensor, positive: Tensor) -> float:
    """Probability that a random positive scores above a random negative, ties counting half; score [n], bool [n]."""
    _, group, sizes = torch.unique(score, return_inverse=True, return_counts=True)
    mean_rank = sizes.cumsum(0).double() - (sizes.double() - 1) / 2  # shared by equal scores
    positives, negatives = int(positive.sum()), int((~positive).sum())
    total = mean_rank[group][positive].sum()
    return float((total - positives * (positives + 1) / 2) / (positives * negatives))

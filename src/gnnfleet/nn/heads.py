"""Node classification: a loss that sums, so that ranks can share the division, and metrics over all rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from gnnfleet.errors import ConfigError

METRICS = ("accuracy", "roc_auc", "micro_f1")


@dataclass(frozen=True)
class NodeHead:
    """``multilabel``: several labels per node ([N, C]), else one class number, −1 for none."""

    multilabel: bool = False
    metric: str = "accuracy"

    def __post_init__(self) -> None:
        if self.metric not in METRICS:
            raise ConfigError(f"no metric {self.metric!r}: choose one of {', '.join(METRICS)}")
        if self.multilabel and self.metric == "accuracy":
            raise ConfigError("graphs with several labels per node are judged by micro_f1 or roc_auc")

    def loss(self, logits: Tensor, y: Tensor) -> Tensor:
        """Summed over rows (and averaged over labels): divide by the count of all ranks together."""
        if self.multilabel:
            known = (y >= 0).to(logits.dtype)
            each = F.binary_cross_entropy_with_logits(logits, y.clamp(min=0).to(logits.dtype), reduction="none")
            return (each * known).sum() / max(y.shape[1], 1)
        return F.cross_entropy(logits, y, ignore_index=-1, reduction="sum")

    def score(self, logits: Tensor, y: Tensor) -> float:
        """The metric over rows with labels; NaN when there are none."""
        if not self.multilabel:
            logits, y = logits[y >= 0], y[y >= 0]
        if not len(y):
            return float("nan")
        if self.metric == "accuracy":
            return float((logits.argmax(1) == y).double().mean())
        if self.metric == "micro_f1":
            return micro_f1(logits, y) if self.multilabel else float((logits.argmax(1) == y).double().mean())
        if self.multilabel:
            return float(torch.tensor([roc_auc(logits[:, c], y[:, c]) for c in range(y.shape[1])]).nanmean())
        if logits.shape[1] != 2:
            raise ConfigError(f"roc_auc needs two classes, this graph has {logits.shape[1]}: use accuracy")
        return roc_auc(logits[:, 1] - logits[:, 0], y)


def roc_auc(score: Tensor, y: Tensor) -> float:
    """The chance that a positive scores above a negative, ties counted half; NaN when one of them is missing."""
    known = y >= 0
    score, positive = score[known].double(), y[known] > 0
    ups, downs = int(positive.sum()), int((~positive).sum())
    if not ups or not downs:
        return float("nan")
    _, place, count = torch.unique(score, return_inverse=True, return_counts=True)
    below = torch.cumsum(count, 0) - count
    rank = below[place].double() + (count[place].double() + 1) / 2
    return float((rank[positive].sum() - ups * (ups + 1) / 2) / (ups * downs))


def micro_f1(logits: Tensor, y: Tensor) -> float:
    """2 TP / (2 TP + FP + FN) over all labels; a label is predicted when its logit is positive."""
    known, guess, truth = y >= 0, logits > 0, y > 0
    hits = int((guess & truth & known).sum())
    wrong = int(((guess != truth) & known).sum())
    return 2 * hits / (2 * hits + wrong) if hits or wrong else 1.0

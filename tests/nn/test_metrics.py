"""Metrics against their definitions, written out here; sums over batches; losses with class weights and of values."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from gnnfleet.errors import ConfigError
from gnnfleet.nn.heads import NodeHead, training_statistics

ALL = ("accuracy", "balanced_accuracy", "macro_f1", "micro_f1")


def _counts(guess: Tensor, y: Tensor, c: int) -> tuple[int, int, int]:
    """True positives, false positives, false negatives."""
    kinds = [(g == c, t == c) for g, t in zip(guess.tolist(), y.tolist(), strict=True)]
    return kinds.count((True, True)), kinds.count((True, False)), kinds.count((False, True))


def _class_reference(guess: Tensor, y: Tensor, classes: int) -> dict[str, float]:
    counts = [_counts(guess, y, c) for c in range(classes)]
    recalls = [tp / (tp + fn) for tp, _, fn in counts if tp + fn]
    f1s = [2 * tp / (2 * tp + fp + fn) for tp, fp, fn in counts if tp + fp + fn]
    tp, fp, fn = (sum(part) for part in zip(*counts, strict=True))
    return {
        "accuracy": sum(a == b for a, b in zip(guess.tolist(), y.tolist(), strict=True)) / len(y),
        "balanced_accuracy": sum(recalls) / len(recalls),
        "macro_f1": sum(f1s) / len(f1s),
        "micro_f1": 2 * tp / (2 * tp + fp + fn),
    }


@pytest.mark.parametrize("classes", [4, 150])
def test_class_metrics_equal_their_definitions_and_add_up(classes: int) -> None:
    torch.manual_seed(0)
    logits, y = torch.randn(60, classes), torch.randint(-1, classes - 1, (60,))  # the last class does not occur
    head = NodeHead(classes, metrics=ALL)
    labelled = y >= 0
    reference = _class_reference(logits.argmax(1)[labelled], y[labelled], classes)
    parts = [head.metric(logits[a:b], y[a:b]) for a, b in itertools.pairwise((0, 7, 7, 41, 60))]
    total = parts[0] + parts[1] + parts[2] + parts[3]
    assert head.compute(total) == pytest.approx(reference, rel=1e-12)
    report = head.report(total)
    if classes > 100:
        assert report == {} and len(total.counts) == 3
        return
    guess = logits.argmax(1)[labelled]
    confusion = [[int(((y[labelled] == t) & (guess == g)).sum()) for g in range(classes)] for t in range(classes)]
    assert report["confusion"] == confusion
    assert report["support"] == [sum(row) for row in confusion]
    assert report["precision"][0] == pytest.approx(confusion[0][0] / sum(row[0] for row in confusion))
    assert report["f1"][3] == 0 and report["support"][3] == 0


def test_scores_of_several_labels_equal_their_definitions() -> None:
    torch.manual_seed(1)
    logits, y = torch.randn(50, 3).round(decimals=1), torch.randint(-1, 2, (50, 3)).to(torch.int8)
    head = NodeHead(3, True, ("ap", "roc_auc", "macro_f1", "micro_f1", "accuracy"))
    values = head.compute(head.metric(logits[:20], y[:20]) + head.metric(logits[20:], y[20:]))

    def average_precision(column: int) -> float:
        known = y[:, column] >= 0
        score, truth = logits[known, column], y[known, column] == 1
        total, before = 0.0, 0.0
        for threshold in sorted(set(score.tolist()), reverse=True):
            chosen = score >= threshold
            recall = float((chosen & truth).sum() / truth.sum())
            total += (recall - before) * float((chosen & truth).sum() / chosen.sum())
            before = recall
        return total

    def f1(columns: list[int]) -> float:
        guess, truth, known = (logits > 0)[:, columns], (y == 1)[:, columns], (y >= 0)[:, columns]
        hits, wrong = (guess & truth).sum(), ((guess != truth) & known).sum()
        return float(2 * hits / (2 * hits + wrong))

    assert values["ap"] == pytest.approx(sum(map(average_precision, range(3))) / 3, rel=1e-6)
    assert values["macro_f1"] == pytest.approx(sum(f1([c]) for c in range(3)) / 3)
    assert values["micro_f1"] == pytest.approx(f1([0, 1, 2]))
    rows = (y >= 0).any(1)
    assert values["accuracy"] == pytest.approx(float((((logits > 0) == y) | (y < 0))[rows].all(1).float().mean()))


def test_values_are_measured_in_their_own_units() -> None:
    torch.manual_seed(2)
    y = torch.randn(40, 2, dtype=torch.float64) * 3 + torch.tensor([1e4, -5.0])
    y[3], y[5, 1] = torch.nan, torch.nan
    statistics = training_statistics(y, 2)
    head = NodeHead(2, metrics=("mae", "rmse", "r2"), regression=True, **statistics)
    logits = torch.randn(40, 2, dtype=torch.float64)
    values = head.compute(head.metric(logits[:9], y[:9]) + head.metric(logits[9:], y[9:]))
    known = ~y.isnan()
    expected: dict[str, list[float]] = {"mae": [], "rmse": [], "r2": []}
    for k in range(2):
        truth = y[known[:, k], k]
        mean = truth.mean()
        std = ((truth - mean) ** 2).mean().sqrt()
        torch.testing.assert_close((statistics["mean"][k], statistics["std"][k]), (float(mean), float(std)))
        error = logits[known[:, k], k] * std + mean - truth
        expected["mae"].append(float(error.abs().mean()))
        expected["rmse"].append(float((error**2).mean().sqrt()))
        expected["r2"].append(float(1 - (error**2).sum() / ((truth - mean) ** 2).sum()))
    assert values == pytest.approx({name: sum(v) / 2 for name, v in expected.items()}, rel=1e-9)
    assert int(head.is_labelled(y).sum()) == 39
    constant = head.compute(head.metric(head.constant(y).expand(40, -1), y))
    assert constant["r2"] == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("name", ["mse", "l1", "huber"])
def test_losses_of_values_equal_torchs_on_known_entries(name: str) -> None:
    peers: dict[str, Any] = {"mse": torch.nn.MSELoss, "l1": torch.nn.L1Loss, "huber": torch.nn.HuberLoss}
    y = torch.randn(12, 3, dtype=torch.float64)
    y[0], y[1, 2] = torch.nan, torch.nan
    logits = torch.randn(12, 3, dtype=torch.float64, requires_grad=True)
    statistics = training_statistics(y, 3)
    head = NodeHead(3, metrics=("auto",), regression=True, value_loss=name, **statistics)
    target = (y - torch.tensor(statistics["mean"])) / torch.tensor(statistics["std"])
    rows = [peers[name]()(logits[i][~y[i].isnan()], target[i][~y[i].isnan()]) for i in range(1, 12)]
    loss = head.loss(logits, y)
    torch.testing.assert_close(loss, torch.stack(rows).sum())
    (grad,) = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(grad, torch.autograd.grad(torch.stack(rows).sum(), logits)[0])
    assert not grad[0].any() and not grad[1, 2]


def test_class_weights_equal_torchs() -> None:
    torch.manual_seed(3)
    logits, y = torch.randn(30, 3, dtype=torch.float64), torch.randint(-1, 3, (30,))
    for smoothing in (0.0, 0.2):
        head = NodeHead(3, smoothing=smoothing, class_weights=(0.5, 2.0, 7.0))
        weights = torch.tensor(head.class_weights, dtype=torch.float64)
        peer = torch.nn.CrossEntropyLoss(weights, ignore_index=-1, label_smoothing=smoothing)(logits, y)
        torch.testing.assert_close(head.loss(logits, y) / head.total_weight(y), peer)
    counts = torch.bincount(y[y >= 0], minlength=4)
    balanced = training_statistics(y, 4)["balanced"]
    assert balanced == pytest.approx([*(float(counts.sum()) / (3 * counts[:3].double())).tolist(), 1.0])
    labels = torch.randint(0, 2, (30, 3)).to(torch.int8)
    head = NodeHead(3, True, class_weights=(0.5, 2.0, 7.0))
    peer = torch.nn.BCEWithLogitsLoss(pos_weight=weights)(logits, labels.double())
    torch.testing.assert_close(head.loss(logits, labels) / head.total_weight(labels), peer)


def test_the_constant_prediction_has_the_smallest_loss() -> None:
    y = torch.tensor([0, 0, 0, 1, 2, 2, -1])
    head = NodeHead(3, class_weights=(1.0, 3.0, 2.0))
    best = head.constant(y).requires_grad_()
    (grad,) = torch.autograd.grad(head.loss(best.expand(7, -1), y), best)
    torch.testing.assert_close(grad, torch.zeros_like(grad))
    uniform = NodeHead(2)
    assert float(
        uniform.loss(uniform.constant(torch.tensor([0, 1])).expand(2, -1), torch.tensor([0, 1]))
    ) == pytest.approx(2 * math.log(2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_classes": 3, "metrics": ("roc_auc",)}, "two classes or several labels"),
        ({"num_classes": 2, "metrics": ("f1",)}, "no metric 'f1'"),
        ({"num_classes": 1, "metrics": ("accuracy",), "regression": True}, "no metric 'accuracy' of values"),
        ({"num_classes": 3, "multilabel": True, "metrics": ("balanced_accuracy",)}, "use macro_f1"),
    ],
)
def test_metrics_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        NodeHead(**options)

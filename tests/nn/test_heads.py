"""Losses and metrics against torch and against counting pairs."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gnnfleet.errors import ConfigError
from gnnfleet.nn.heads import NodeHead
from gnnfleet.nn.metrics import mean_over_columns, roc_auc


@given(st.lists(st.tuples(st.integers(-3, 3), st.booleans()), min_size=2, max_size=40))
@settings(max_examples=100, deadline=None)
def test_auc_counts_pairs(rows: list[tuple[int, bool]]) -> None:
    score = torch.tensor([float(value) for value, _ in rows])
    truth = torch.tensor([label for _, label in rows])
    wins = [1.0 if a > b else 0.5 if a == b else 0.0 for a, p in rows for b, q in rows if p and not q]
    if wins:
        assert math.isclose(roc_auc(score, truth), sum(wins) / len(wins), abs_tol=1e-12)
    else:
        assert math.isnan(mean_over_columns(roc_auc, score[:, None], truth.long()[:, None]))


def test_cross_entropy_is_a_sum_over_labelled_rows() -> None:
    head = NodeHead(4)
    logits, y = torch.randn(20, 4, requires_grad=True), torch.randint(-1, 4, (20,))
    labelled = y >= 0
    expected = torch.nn.functional.cross_entropy(logits[labelled], y[labelled]) * labelled.sum()
    torch.testing.assert_close(head.loss(logits, y), expected)
    assert head.loss(logits, torch.full((20,), -1)).item() == 0
    assert head.loss(logits[:0], y[:0]).item() == 0
    assert torch.equal(head.is_labelled(y), labelled)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.7])
def test_label_smoothing_equals_torchs(smoothing: float) -> None:
    logits, y = torch.randn(20, 4, dtype=torch.float64, requires_grad=True), torch.randint(-1, 4, (20,))
    loss = NodeHead(4, smoothing=smoothing).loss(logits, y)
    labelled = y >= 0
    peer = torch.nn.CrossEntropyLoss(label_smoothing=smoothing, reduction="sum")(logits[labelled], y[labelled])
    spread = torch.nn.functional.one_hot(y[labelled], 4) * (1 - smoothing) + smoothing / 4
    by_hand = -(spread * logits[labelled].log_softmax(1)).sum()
    torch.testing.assert_close(loss, peer)
    torch.testing.assert_close(loss, by_hand)
    torch.testing.assert_close(torch.autograd.grad(loss, logits)[0], torch.autograd.grad(by_hand, logits)[0])


def test_label_smoothing_needs_one_label_per_node() -> None:
    with pytest.raises(ConfigError, match="label smoothing needs one label per node"):
        NodeHead(4, multilabel=True, metrics=("micro_f1",), smoothing=0.1)


def test_multilabel_loss_and_micro_f1_equal_their_formulas() -> None:
    head = NodeHead(5, multilabel=True, metrics=("micro_f1",))
    logits, y = torch.randn(30, 5), torch.randint(0, 2, (30, 5)).to(torch.int8)
    expected = torch.nn.functional.binary_cross_entropy_with_logits(logits, y.float())
    torch.testing.assert_close(head.loss(logits, y) / 30, expected)
    guess = logits > 0
    hits = float((guess & (y == 1)).sum())
    precision, recall = hits / float(guess.sum()), hits / float((y == 1).sum())
    assert math.isclose(head.compute(head.metric(logits, y))[head.name], 2 * precision * recall / (precision + recall))
    y[3], y[4, 2] = -1, -1
    rows = head.is_labelled(y)
    assert int(rows.sum()) == 29
    row_losses = [
        torch.nn.functional.binary_cross_entropy_with_logits(a[b >= 0], b[b >= 0].float())
        for a, b in zip(logits[rows], y[rows], strict=True)
    ]
    torch.testing.assert_close(head.loss(logits, y), torch.stack(row_losses).sum())


@pytest.mark.parametrize(
    "head",
    [
        NodeHead(2),
        NodeHead(2, metrics=("roc_auc",)),
        NodeHead(2, metrics=("micro_f1",)),
        NodeHead(3, multilabel=True, metrics=("roc_auc",)),
        NodeHead(3, multilabel=True, metrics=("micro_f1",)),
        NodeHead(3, multilabel=True),
    ],
)
def test_metric_states_of_batches_add_up(head: NodeHead) -> None:
    logits = torch.randn(50, head.num_classes)
    y = torch.randint(-1, 2, (50, 3)).to(torch.int8) if head.multilabel else torch.randint(-1, 2, (50,))
    whole = head.compute(head.metric(logits, y))[head.name]
    parts = [head.metric(logits[low:high], y[low:high]) for low, high in ((0, 10), (10, 10), (10, 37), (37, 50))]
    total = parts[0] + parts[1] + parts[2] + parts[3]
    assert math.isclose(head.compute(total)[head.name], whole) and 0 <= whole <= 1


def test_accuracy_and_binary_auc_equal_their_definitions() -> None:
    logits, y = torch.randn(40, 3), torch.randint(0, 3, (40,))
    head = NodeHead(3)
    assert math.isclose(
        head.compute(head.metric(logits, y))[head.name], float((logits.argmax(1) == y).float().mean()), abs_tol=1e-6
    )
    assert math.isnan(head.compute(head.metric(logits[:0], y[:0]))["accuracy"])
    binary_logits, labels = torch.randn(40, 2), torch.randint(0, 2, (40,))
    auc = NodeHead(2, metrics=("roc_auc",))
    assert math.isclose(
        auc.compute(auc.metric(binary_logits, labels))["roc_auc"],
        roc_auc(binary_logits.double().softmax(1)[:, 1], labels == 1),
    )


def test_the_default_metric_follows_the_kind_of_labels() -> None:
    assert NodeHead(3, metrics=("auto",)) == NodeHead(3, metrics=("accuracy",))
    assert NodeHead(2, True, ("auto",)) == NodeHead(2, True, ("micro_f1",))

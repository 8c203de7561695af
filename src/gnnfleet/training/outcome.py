"""Judgement of a finished run: a loss that exploded, predictions of one class, scores without order, nothing learnt."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from gnnfleet.config.schema import RunConfig
from gnnfleet.nn.metrics import LOWER_IS_BETTER
from gnnfleet.tasks.base import PER_CLASS
from gnnfleet.tasks.link import LinkTask
from gnnfleet.tasks.node import NodeTask

_MIN_EPOCHS, _ENOUGH_EPOCHS = 5, 20  # before an exploded loss counts, and one that is merely high
_EXPLODED, _HIGH = 10.0, 1.05  # multiples of the loss of a constant prediction

Rows = Sequence[Mapping[str, Any]]


def judge_run(task: object, config: RunConfig, rows: Rows, metrics: Mapping[str, Any]) -> tuple[str, bool]:
    """(remark for the user, True if nothing was learnt). Short runs are not judged."""
    if isinstance(task, LinkTask) and (remark := _tied_scores(task, config, rows)):
        return remark, False
    if len(rows) < _MIN_EPOCHS:
        return "", False
    loss, first = rows[-1]["train_loss"], rows[0]["train_loss"]
    if not isinstance(task, NodeTask):
        text = f"The train loss ended at {loss:.4g}, above {first:.4g} of the first epoch: try a smaller train.lr"
        return (text if loss > _EXPLODED * first else ""), False
    constant = task.constant("train")["loss"]
    exploded = loss > _EXPLODED * max(constant, first)
    is_high = exploded or (loss > _HIGH * constant and len(rows) >= _ENOUGH_EPOCHS)
    slow = loss <= min(_EXPLODED * constant, 2 * first)
    rate = "more epochs or a larger" if slow else "a smaller"
    advice = f"try {rate} train.lr (now {config.train.lr:g}), standardised features, or train.class_weights=balanced"
    split = next((split for split in ("test", "val") if metrics[split] is not None), None)
    if is_high and split is not None:
        scores, value = task.constant(split), metrics[split]
        best, chance = scores[task.metric], 1 / math.sqrt(max(scores["count"], 1))
        if not (value < best if task.metric in LOWER_IS_BETTER else value > best + chance or math.isnan(best)):
            return (
                f"nothing was learnt: {split} {task.metric} {value:.4g} is no better than a constant prediction "
                f"({best:.4g}), and so is the train loss {loss:.4g} ({constant:.4g}): {advice}"
            ), True
    if loss > _EXPLODED * constant:
        return f"The train loss ended at {loss:.4g}; that of a constant prediction is {constant:.4g}: {advice}", False
    return _one_class(metrics.get(PER_CLASS)), False


def _one_class(report: Mapping[str, Any] | None) -> str:
    predicted = [i for i, count in enumerate(report["predicted"]) if count] if report else []
    if report is None or len(predicted) != 1 or sum(map(bool, report["support"])) < 2:
        return ""
    name, total = report["classes"][predicted[0]], sum(report["support"])
    return (
        f"All {total:,} test nodes are predicted as class {name}, which {report['support'][predicted[0]]:,} of them "
        "have: try train.class_weights=balanced, another train.lr, or more epochs."
    )


def _tied_scores(task: LinkTask, config: RunConfig, rows: Rows) -> str:
    """A remark if a link model scores all candidates alike; its metric alone does not show that."""
    tied = task.tied_val_metric
    last = next((row["val"] for row in reversed(rows) if row.get("val") is not None), None)
    # A random order of candidates gives a higher metric than ties, so this is not a model that learns slowly.
    if tied is None or last is None or not math.isclose(last, tied, rel_tol=0.01):
        return ""
    return (
        f"All candidates have nearly the same score in the last evaluation (val {task.metric} {last:.3g}): try a "
        f"smaller train.lr (now {config.train.lr:g}), or scale the features."
    )

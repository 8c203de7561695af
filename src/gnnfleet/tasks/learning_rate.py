"""Schedules of the learning rate: functions of the step, so that all ranks agree and a resumed run has the same rates.

They equal those of ``torch.optim.lr_scheduler`` that are stepped after every optimizer step; warm-up comes before them.
"""

from __future__ import annotations

import math

from gnnfleet.tasks.train_options import TrainConfig

_RISE, _START, _END = 0.3, 25.0, 1e4  # one_cycle: share of steps that rise, divisors of the first and the last rate


def learning_rate(train: TrainConfig, step: int, *, steps_per_epoch: int = 1, scale: float = 1.0) -> float:
    """The rate of a step of the whole run; ``scale`` is the reduction of a plateau so far."""
    total, warmup = train.epochs * steps_per_epoch, round(train.warmup * steps_per_epoch)
    if step < warmup:
        return train.lr * (step + 1) / (warmup + 1)
    step, total = step - warmup, max(total - warmup, 1)
    if train.schedule == "one_cycle":
        return _one_cycle(train.lr, step, total)
    if train.schedule == "cosine":
        return _cosine(train.lr, train.min_lr, step / total)
    if train.schedule == "linear":
        return train.lr + (train.min_lr - train.lr) * min(step / total, 1.0)
    if train.schedule == "step":
        scale = train.gamma ** (step // steps_per_epoch // train.step_size)
    return max(train.lr * scale, min(train.min_lr, train.lr))


def _cosine(start: float, end: float, share: float) -> float:
    return end + (start - end) / 2 * (1 + math.cos(math.pi * min(share, 1.0)))


def _one_cycle(highest: float, step: int, total: int) -> float:
    top, last, start = _RISE * total - 1, total - 1, highest / _START
    if step <= top and top > 0:
        return _cosine(start, highest, step / top)
    return _cosine(highest, start / _END, (step - top) / max(last - top, 1e-9))

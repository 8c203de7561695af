"""What two nodes had to do with each other, as numbers a decoder reads: embeddings of single nodes cannot tell.

Streams of people and things repeat themselves, and whether this very pair met, how often and how long ago says more
than what either end is like. n events, K candidates each.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gnnfleet.ops.temporal_neighbors import TemporalNeighbors

HISTORY_DEPTH = 1024
"""Events of a source that are searched for meetings."""
NUM_FEATURES = 12


@dataclass(frozen=True, eq=False)
class PairFeatures:
    """Makes features of pairs. ``unit`` is what times are measured in, the mean time between events, say."""

    recent: TemporalNeighbors
    sources: Tensor  # [E] int64 of all events
    unit: float

    def of(self, src: Tensor, dst: Tensor, times: Tensor, *, visible: int) -> Tensor:
        """[n, K, FEATURES] float32 of sources [n] at times [n] with ``dst`` [n, K]; later events are unknown."""
        before = self.recent.count_before(times, visible=visible)
        met = self.recent.pair_history(src, dst, before, depth=HISTORY_DEPTH)
        had, times = met.number > 0, times[:, None]
        known = self.recent.counts(src, before).clamp(max=HISTORY_DEPTH)[:, None]
        began = had & (self.sources[met.last.clamp(min=0)] == src[:, None])
        pair = [
            had,
            _small(met.number, 3),
            _small(self._since(times, met.last), 10),
            met.number / known.clamp(min=1),
            _small(met.gap, 4),
            met.gap == 1,
            had * torch.exp(met.gap / -3),
            began,
        ]
        return torch.stack([part.float() for part in (*pair, *self._of_destinations(dst, times, before))], 2)

    def _of_destinations(self, dst: Tensor, times: Tensor, before: Tensor) -> list[Tensor]:
        """How busy destinations are, and were lately."""
        now = before.repeat_interleave(dst.shape[1])
        count = self.recent.counts(dst.flatten(), now).view(dst.shape)
        when = times.expand(dst.shape).flatten()
        last = self.recent.latest(dst.flatten(), when, 1, visible=now)[1].view(dst.shape)
        passed = torch.where(last >= 0, before[:, None] - last, 0)
        return [count > 0, _small(count, 5), _small(self._since(times, last), 10), _small(passed, 10)]

    def _since(self, times: Tensor, events: Tensor) -> Tensor:
        """Time since events, in units; 0 where there was none."""
        return torch.where(events >= 0, times - self.recent.times_of(events), 0) / self.unit


def _small(value: Tensor, scale: float) -> Tensor:
    """Numbers over many magnitudes as numbers about 1."""
    return torch.log1p(value.float()) / scale

"""Per-epoch phase times and traffic of all workers, gathered on the first rank.

Gathering is a collective, so the first rank decides when, at most once a second; until then every rank keeps its own
measurements. Workers that are no ranks (tma's trainers) are reported by the strategy.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from gnnfleet.comm.collectives import all_gather_rows
from gnnfleet.comm.world import EVERYONE, World
from gnnfleet.report.memory import peak_rss
from gnnfleet.report.metrics import MetricsSink
from gnnfleet.report.phase_timer import PHASES

REPORT_INTERVAL = 1.0

Seconds = list[float]
"""By phase."""

OnTotals = Callable[[Mapping[str, Any]], None]
"""Takes what all workers have sent and their memory so far."""


@dataclass(eq=False)
class PhaseProfiler:
    """Measures one rank of ``world``, as the training loop tells. On the first rank ``rows`` takes a row per epoch and
    ``totals`` the sums; without them nothing is kept."""

    world: World = field(default_factory=World)
    external: Sequence[Mapping[str, float]] = ()  # statistics of workers that this rank reports
    rows: MetricsSink | None = None
    totals: OnTotals | None = None
    _pending: list[tuple[int, list[Seconds]]] = field(default_factory=list)
    _last_epoch: int = 0
    _reported: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self._uncounted = self.world.uncounted()
        self.begin()

    @property
    def is_due(self) -> bool:
        """True if ranks should gather; the answer of the first rank counts."""
        return time.monotonic() - self._reported >= REPORT_INTERVAL

    def begin(self) -> None:
        self._base = self._read()
        self._step_begin = self._epoch_begin = time.perf_counter()

    def after_step(self, number: int) -> None:
        self.world.clock.record(f"step {number + 1}", "step", self._step_begin)
        self._step_begin = time.perf_counter()

    def end(self, epoch: int) -> None:
        now = self._read()
        self._pending.append((epoch, _difference(now, self._base)))
        self.world.clock.record(f"epoch {epoch}", "epoch", self._epoch_begin)
        self._base, self._last_epoch = now, epoch

    @contextmanager
    def pause(self, name: str) -> Iterator[None]:
        """Exclude the context from the epoch."""
        before, begin = self._read(), time.perf_counter()
        yield
        paused = _difference(self._read(), before)
        self._base = [[a + b for a, b in zip(*pair, strict=True)] for pair in zip(self._base, paused, strict=True)]
        self._step_begin = time.perf_counter()
        self.world.clock.record(name, "beside", begin)

    def report(self) -> None:
        """Collective. Gather the measurements on the first rank."""
        pending, self._pending = self._pending, []
        epochs, totals = self._gather_epochs(pending), self._gather_totals()
        if self.rows is not None:
            for row in epochs:
                self.rows.write(row)
        if self.totals is not None:
            self.totals(totals)
        self._reported = time.monotonic()

    def _read(self) -> list[Seconds]:
        """Seconds by phase of this rank, and of the external workers that it reports."""
        external = [[worker.get(phase, 0.0) for phase in PHASES] for worker in self.external]
        return [list(self.world.clock.read().values()), *external]

    def _gather_epochs(self, pending: list[tuple[int, list[Seconds]]]) -> list[dict[str, Any]]:
        epochs, workers, phases = len(pending), 1 + len(self.external), len(PHASES)
        own = torch.tensor([seconds for _, seconds in pending], dtype=torch.float64).view(epochs, workers, phases)
        # [ranks, epochs, workers, phases]
        ranks = torch.cat(all_gather_rows(self._uncounted, own)).view(self.world.size, epochs, workers, phases)
        by_epoch = ranks.transpose(0, 1).reshape(epochs, self.world.size * workers, phases)
        return [
            {"epoch": epoch, **{phase: seconds[:, p].tolist() for p, phase in enumerate(PHASES)}}
            for (epoch, _), seconds in zip(pending, by_epoch.round(decimals=6), strict=True)
        ]

    def _gather_totals(self) -> dict[str, Any]:
        """Bytes from worker to worker, with those to all ranks in a last column; rounds; memory."""
        traffic, count = self.world.traffic, self.world.size + len(self.external)
        sent = [traffic.bytes_by_peer.get(peer, 0) for peer in (*range(count), EVERYONE)]
        rows = [[*sent, traffic.rounds, peak_rss()]]
        for worker in self.external:  # they send to this rank alone
            sent = [int(worker["bytes_sent"]), *[0] * count]
            rows.append([*sent, int(worker["rounds"]), int(worker.get("peak_rss", 0))])
        rows = torch.cat(all_gather_rows(self._uncounted, torch.tensor(rows, dtype=torch.int64))).tolist()
        return {
            "epoch": self._last_epoch,
            "bytes": [row[: count + 1] for row in rows],
            "rounds": [row[-2] for row in rows],
            "peak_rss": [row[-1] for row in rows],
        }


def _difference(after: list[Seconds], before: list[Seconds]) -> list[Seconds]:
    return [[a - b for a, b in zip(*pair, strict=True)] for pair in zip(after, before, strict=True)]

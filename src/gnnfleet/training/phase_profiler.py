"""What every worker did with its time, epoch by epoch, and what it sent to whom: told to the first rank now and then.

Telling is a message among all ranks, so the first says when, at most once a second; between that everybody keeps what
it has measured. Workers that are no ranks (tma's trainers) are told of by the strategy.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from gnnfleet.comm.collectives import all_gather_rows
from gnnfleet.comm.world import World
from gnnfleet.report.memory import peak_rss
from gnnfleet.report.metrics import MetricsSink
from gnnfleet.report.phase_timer import PHASES, PhaseTimer
from gnnfleet.report.traffic import EVERYONE
from gnnfleet.strategies.protocol import Strategy

REPORT_INTERVAL = 1.0

Seconds = list[float]
"""By phase."""


class PhaseProfiler(Protocol):
    """Told by the loop when epochs begin and end; every rank has one."""

    @property
    def is_due(self) -> bool:
        """Whether ranks should tell; the first rank's word counts."""

    def begin(self) -> None: ...

    def after_step(self, number: int) -> None: ...

    def end(self, epoch: int) -> None: ...

    def pause(self, what: str) -> Any:
        """A context: what happens in it is no part of the epoch."""

    def report(self) -> None: ...


class NoProfiler:
    """For runs that keep nothing."""

    is_due = False

    def begin(self) -> None:
        return None

    def after_step(self, number: int) -> None:
        return None

    def end(self, epoch: int) -> None:
        return None

    @contextmanager
    def pause(self, what: str) -> Iterator[None]:
        yield

    def report(self) -> None:
        return None


class OnTotals(Protocol):
    """Takes what all workers have sent and held until now."""

    def __call__(self, found: Mapping[str, Any]) -> None: ...


@dataclass(eq=False)
class RankProfiler:
    """``world`` is the one that is counted, ``beside`` the same ranks for words that are not. The first rank has
    somewhere to write: ``rows`` takes one row per epoch, ``totals`` the rest."""

    world: World
    beside: World
    strategy: Strategy
    rows: MetricsSink | None = None
    totals: OnTotals | None = None
    _pending: list[tuple[int, list[Seconds]]] = field(default_factory=list)
    _last: int = 0
    _told: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self._base = self._read()
        self._since = self._begun = time.perf_counter()

    @property
    def is_due(self) -> bool:
        return time.monotonic() - self._told >= REPORT_INTERVAL

    @property
    def _clock(self) -> PhaseTimer:
        return self.world.clock

    def begin(self) -> None:
        self._base = self._read()
        self._since = self._begun = time.perf_counter()

    def after_step(self, number: int) -> None:
        self._clock.record(f"step {number + 1}", "step", self._since)
        self._since = time.perf_counter()

    def end(self, epoch: int) -> None:
        after = self._read()
        spent = [[b - a for a, b in zip(*pair, strict=True)] for pair in zip(self._base, after, strict=True)]
        self._pending.append((epoch, spent))
        self._clock.record(f"epoch {epoch}", "epoch", self._begun)
        self._base, self._last = after, epoch

    @contextmanager
    def pause(self, what: str) -> Iterator[None]:
        before, began = self._read(), time.perf_counter()
        yield
        passed = [[b - a for a, b in zip(*pair, strict=True)] for pair in zip(before, self._read(), strict=True)]
        self._base = [[a + b for a, b in zip(*pair, strict=True)] for pair in zip(self._base, passed, strict=True)]
        self._since = time.perf_counter()
        self._clock.record(what, "beside", began)

    def report(self) -> None:
        """All ranks call it together."""
        pending, self._pending = self._pending, []
        if self.rows is not None:
            for row in self._gathered(pending):
                self.rows.write(row)
        else:
            self._gathered(pending)
        found = self._totals()
        if self.totals is not None:
            self.totals(found)
        self._told = time.monotonic()

    def _read(self) -> list[Seconds]:
        """Seconds by phase of this rank, and of workers that it speaks for."""
        others = [[each.get(phase, 0.0) for phase in PHASES] for each in self.strategy.external_workers]
        return [list(self._clock.read().values()), *others]

    def _gathered(self, pending: list[tuple[int, list[Seconds]]]) -> list[dict[str, Any]]:
        workers = 1 + len(self.strategy.external_workers)
        own = torch.tensor([spent for _, spent in pending], dtype=torch.float64).view(len(pending), workers, 3)
        # [epochs, workers, phases] of every rank
        each = torch.cat(all_gather_rows(self.beside, own)).view(self.world.size, len(pending), workers, len(PHASES))
        found = each.transpose(0, 1).reshape(len(pending), self.world.size * workers, len(PHASES))
        rows = []
        for (epoch, _), seconds in zip(pending, found.round(decimals=6), strict=True):
            rows.append({"epoch": epoch, **{phase: seconds[:, p].tolist() for p, phase in enumerate(PHASES)}})
        return rows

    def _totals(self) -> dict[str, Any]:
        """Bytes from worker to worker, those to all at once in a last column; rounds; memory."""
        sent, others = self.world.traffic, self.strategy.external_workers
        count = self.world.size + len(others)
        own = [
            [sent.bytes_by_peer.get(peer, 0) for peer in range(count)]
            + [sent.bytes_by_peer.get(EVERYONE, 0), sent.rounds, peak_rss()]
        ]
        for each in others:  # they send to this rank alone
            row = [int(each["bytes_sent"]), *[0] * count, int(each["rounds"]), int(each.get("peak_rss", 0))]
            own.append(row)
        rows = torch.cat(all_gather_rows(self.beside, torch.tensor(own, dtype=torch.int64))).tolist()
        return {
            "epoch": self._last,
            "bytes": [row[: count + 1] for row in rows],
            "rounds": [row[-2] for row in rows],
            "peak_rss": [row[-1] for row in rows],
        }

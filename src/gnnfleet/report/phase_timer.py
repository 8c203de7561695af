"""Phase times of a rank: compute, exchange (pack, post, unpack) and wait (for messages in flight).

Phases nest and the innermost counts, so the three add up to the elapsed time. Only the thread that created the timer
is counted: other threads run beside the training. A trace, if enabled, records the phases of all threads.
"""

from __future__ import annotations

from threading import get_ident
from time import perf_counter
from types import TracebackType
from typing import NamedTuple

COMPUTE, EXCHANGE, WAIT = "compute", "exchange", "wait"
PHASES = (COMPUTE, EXCHANGE, WAIT)

MAX_SPANS = 200_000
"""Number of spans that a trace keeps; later ones are left out."""


class TraceSpan(NamedTuple):
    """Activity of a thread."""

    name: str
    kind: str  # a phase, or step, epoch, evaluation
    begin: float  # seconds of perf_counter
    end: float
    thread: int = 0


class PhaseTimer:
    """Seconds of each phase since construction."""

    def __init__(self) -> None:
        self._thread, self._phase, self._since = get_ident(), COMPUTE, perf_counter()
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self.spans: list[TraceSpan] | None = None

    def phase(self, phase: str, name: str = "") -> PhaseContext:
        """A context that counts as ``phase``; ``name`` names it in the trace."""
        return PhaseContext(self, phase, name)

    def read(self) -> dict[str, float]:
        self._switch(self._phase)
        return dict(self._seconds)

    def record(self, name: str, kind: str, begin: float) -> None:
        """Add a span to the trace only."""
        if self.spans is not None and len(self.spans) < MAX_SPANS:
            self.spans.append(TraceSpan(name, kind, begin, perf_counter(), get_ident()))

    def _switch(self, phase: str) -> str:
        """Begin a phase; returns the previous one."""
        now = perf_counter()
        self._seconds[self._phase] += now - self._since
        before, self._phase, self._since = self._phase, phase, now
        return before


class PhaseContext:
    """See ``PhaseTimer.phase``; a class, not a generator, because it is entered for every message."""

    __slots__ = ("_before", "_begin", "_clock", "_counted", "_name", "_phase")

    def __init__(self, clock: PhaseTimer, phase: str, name: str) -> None:
        self._clock, self._phase, self._name = clock, phase, name

    def __enter__(self) -> None:
        clock = self._clock
        self._counted = clock._thread == get_ident()
        if self._counted:
            self._before = clock._switch(self._phase)
        if clock.spans is not None:
            self._begin = perf_counter()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        clock = self._clock
        if clock.spans is not None:
            clock.record(self._name, self._phase, self._begin)
        if self._counted:
            clock._switch(self._before)

"""What a rank does with its time: it computes, exchanges (packs, posts, unpacks) or waits for what is under way.

Phases nest and the innermost counts, so the three add up to the time that passed. Only the thread that made the clock
is counted: what others do goes on beside the training. A trace notes every phase of every thread, where it is asked
for.
"""

from __future__ import annotations

from threading import get_ident
from time import perf_counter
from types import TracebackType
from typing import NamedTuple

COMPUTE, EXCHANGE, WAIT = "compute", "exchange", "wait"
PHASES = (COMPUTE, EXCHANGE, WAIT)

MAX_SPANS = 200_000
"""Spans that a trace keeps; those after it are left out."""


class TraceSpan(NamedTuple):
    """Something that a thread did."""

    what: str
    kind: str  # a phase, or step, epoch, evaluation
    begin: float  # seconds of perf_counter
    end: float
    thread: int = 0


class PhaseTimer:
    """Seconds of each phase since it was made."""

    def __init__(self) -> None:
        self._thread, self._phase, self._since = get_ident(), COMPUTE, perf_counter()
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self.spans: list[TraceSpan] | None = None

    def phase(self, phase: str, what: str = "") -> PhaseContext:
        """A phase, for as long as a ``with`` lasts; ``what`` is for the trace."""
        return PhaseContext(self, phase, what)

    def read(self) -> dict[str, float]:
        self._switch(self._phase)
        return dict(self._seconds)

    def record(self, what: str, kind: str, begin: float, end: float | None = None) -> None:
        """A span for the trace alone."""
        if self.spans is not None and len(self.spans) < MAX_SPANS:
            self.spans.append(TraceSpan(what, kind, begin, perf_counter() if end is None else end, get_ident()))

    def _switch(self, phase: str) -> str:
        """Begin a phase; the one before."""
        now = perf_counter()
        self._seconds[self._phase] += now - self._since
        before, self._phase, self._since = self._phase, phase, now
        return before


class PhaseContext:
    """See ``PhaseTimer.phase``; a class of its own because it is entered for every message."""

    __slots__ = ("_before", "_begin", "_clock", "_own", "_phase", "_what")

    def __init__(self, clock: PhaseTimer, phase: str, what: str) -> None:
        self._clock, self._phase, self._what = clock, phase, what

    def __enter__(self) -> None:
        clock = self._clock
        self._own = clock._thread == get_ident()
        if self._own:
            self._before = clock._switch(self._phase)
        if clock.spans is not None:
            self._begin = perf_counter()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        clock = self._clock
        if clock.spans is not None:
            clock.record(self._what, self._phase, self._begin)
        if self._own:
            clock._switch(self._before)

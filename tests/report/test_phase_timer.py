"""Phases add up to the elapsed time; the innermost phase counts, background threads do not."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from gnnfleet.report import phase_timer as clock_module
from gnnfleet.report.phase_timer import COMPUTE, EXCHANGE, WAIT, PhaseTimer, TraceSpan
from gnnfleet.training.trace_files import pack_spans, trace_json, unpack_spans


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Time of the patched clock, which tests set."""
    at = [100.0]
    monkeypatch.setattr(clock_module, "perf_counter", lambda: at[0])
    return at


def test_the_innermost_phase_counts(now: list[float]) -> None:
    clock = PhaseTimer()
    now[0] += 1
    with clock.phase(EXCHANGE):
        now[0] += 2
        with clock.phase(WAIT):
            now[0] += 4
            with clock.phase(COMPUTE):
                now[0] += 8
        now[0] += 16
    now[0] += 32
    assert clock.read() == {COMPUTE: 1 + 8 + 32, EXCHANGE: 2 + 16, WAIT: 4}


def test_an_error_ends_its_phase(now: list[float]) -> None:
    clock = PhaseTimer()
    with pytest.raises(ValueError), clock.phase(WAIT):
        now[0] += 1
        raise ValueError
    now[0] += 2
    assert clock.read() == {COMPUTE: 2, EXCHANGE: 0, WAIT: 1}


def test_other_threads_are_traced_but_not_counted(now: list[float]) -> None:
    clock = PhaseTimer()
    clock.spans = []

    def beside() -> None:
        with clock.phase(WAIT, "relay"):
            now[0] += 5

    thread = threading.Thread(target=beside)
    thread.start()
    thread.join()
    assert clock.read() == {COMPUTE: 5, EXCHANGE: 0, WAIT: 0}
    (span,) = clock.spans
    assert (span.name, span.kind, span.end - span.begin) == ("relay", WAIT, 5)


def test_spans_are_recorded_only_if_enabled(now: list[float]) -> None:
    clock = PhaseTimer()
    with clock.phase(WAIT, "rows"):
        now[0] += 1
    clock.record("step 1", "step", 100.0)
    assert clock.spans is None


def test_a_trace_has_a_process_for_every_worker() -> None:
    spans = [
        TraceSpan("step 1", "step", 10.0, 10.5, 7),
        TraceSpan("rows", WAIT, 10.1, 10.2, 7),
        TraceSpan("relay", WAIT, 10.0, 10.3, 9),
    ]
    moved = unpack_spans(pack_spans(spans, offset=1.0))
    assert [(s.begin, s.end) for s in moved] == [(s.begin + 1, s.end + 1) for s in spans]
    events: list[dict[str, Any]] = json.loads(trace_json({"rank 0": spans, "rank 1": moved}))["traceEvents"]
    drawn = [event for event in events if event["ph"] == "X"]
    assert [(e["pid"], e["tid"], e["name"], e["ts"], e["dur"]) for e in drawn] == [
        (0, 0, "step 1", 0.0, 5e5),
        (0, 0, "rows", 1e5, 1e5),
        (0, 1, "relay", 0.0, 3e5),
        (1, 0, "step 1", 1e6, 5e5),
        (1, 0, "rows", 1.1e6, 1e5),
        (1, 1, "relay", 1e6, 3e5),
    ]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {0: "rank 0", 1: "rank 1"}

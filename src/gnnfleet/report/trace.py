"""Spans of all workers as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing open; a worker is a process."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from gnnfleet.report.phase_timer import MAX_SPANS, TraceSpan


def pack_spans(spans: Sequence[TraceSpan], offset: float = 0.0) -> bytes:
    """Serialize spans, shifted by a clock offset, for another process."""
    return json.dumps([[s.name, s.kind, s.begin + offset, s.end + offset, s.thread] for s in spans]).encode()


def unpack_spans(data: bytes) -> list[TraceSpan]:
    return [TraceSpan(*fields) for fields in json.loads(data or b"[]")]


def trace_json(workers: Mapping[str, Sequence[TraceSpan]]) -> str:
    """Spans by name of the worker, all by one clock; times are relative to the earliest span."""
    start = min((span.begin for spans in workers.values() for span in spans), default=0.0)
    events: list[dict[str, Any]] = []
    for pid, (name, spans) in enumerate(workers.items()):
        full = " (truncated)" if len(spans) >= MAX_SPANS else ""
        events.append({"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name + full}})
        events.append({"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}})
        threads: dict[int, int] = {}
        for thread in (span.thread for span in spans if span.kind in ("epoch", "step", "beside")):
            threads.setdefault(thread, 0)  # the training thread
        for span in spans:
            threads.setdefault(span.thread, len(threads))
            events.append(
                {
                    "ph": "X",
                    "name": span.name or span.kind,
                    "cat": span.kind,
                    "ts": round(1e6 * (span.begin - start), 3),
                    "dur": round(1e6 * (span.end - span.begin), 3),
                    "pid": pid,
                    "tid": threads[span.thread],
                }
            )
        for number in threads.values():
            name = "training" if not number else f"background {number}"
            events.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": number, "args": {"name": name}})
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})

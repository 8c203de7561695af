"""``--trace``: spans of all ranks in one file, ``trace.json``, in the time of the first rank.

Perfetto (ui.perfetto.dev) and chrome://tracing open it; a worker is a process.

The coordinator and the trainers of tma are no ranks: each writes its spans into the run directory, and their
supervisor collects them. They use the clock of their machine; trainers of other machines are not in the trace.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from gnnfleet.comm.all_to_all import all_to_all_bytes
from gnnfleet.comm.p2p import receive, send
from gnnfleet.comm.world import World
from gnnfleet.io.atomic import write_atomically
from gnnfleet.report.phase_timer import MAX_SPANS, PhaseTimer, TraceSpan

TRACE_FILE = "trace.json"
_SPANS_DIR = ".spans"
_REQUEST_TAG, _REPLY_TAG = 6, 7
_REQUESTS = 8


def write_trace(world: World, run: Path) -> None:
    """Collective. Write the spans of all ranks; the first rank writes the file."""
    spans, world.clock.spans = world.clock.spans or [], None
    own = torch.frombuffer(bytearray(pack_spans(spans, clock_offset(world))), dtype=torch.uint8)
    nothing = torch.empty(0, dtype=torch.uint8)
    packed = all_to_all_bytes(world, [own, *[nothing] * (world.size - 1)], op="trace")
    if world.is_first:
        by_rank = {f"rank {rank}": unpack_spans(content.numpy().tobytes()) for rank, content in enumerate(packed)}
        write_atomically(run / TRACE_FILE, trace_json(by_rank).encode())


def write_spans(clock: PhaseTimer, run: Path, name: str) -> None:
    """Leave the spans of a process for ``collect_spans``."""
    (run / _SPANS_DIR).mkdir(exist_ok=True)
    write_atomically(run / _SPANS_DIR / name, pack_spans(clock.spans or []))


def collect_spans(run: Path) -> None:
    """Write the trace of processes that have ended; no file if none of them left spans."""
    if not (run / _SPANS_DIR).is_dir():
        return
    by_process = {path.name: unpack_spans(path.read_bytes()) for path in sorted((run / _SPANS_DIR).iterdir())}
    write_atomically(run / TRACE_FILE, trace_json(by_process).encode())
    shutil.rmtree(run / _SPANS_DIR)


def clock_offset(world: World) -> float:
    """Collective. Seconds to add to this rank's perf_counter to get the first rank's; 0 on the first rank.

    The reply with the shortest round trip counts; request and reply are assumed to take equally long.
    """
    if world.is_first:
        for peer in range(1, world.size):
            for _ in range(_REQUESTS):
                receive(world, torch.empty(1), peer, tag=_REQUEST_TAG, op="receiving clock request").wait()
                now = torch.tensor([perf_counter()], dtype=torch.float64)
                send(world, now, peer, tag=_REPLY_TAG, op="sending clock reply").wait()
        return 0.0
    shortest, offset = float("inf"), 0.0
    for _ in range(_REQUESTS):
        reply = receive(world, torch.empty(1, dtype=torch.float64), 0, tag=_REPLY_TAG, op="receiving clock reply")
        start = perf_counter()
        send(world, torch.zeros(1), 0, tag=_REQUEST_TAG, op="sending clock request").wait()
        first_rank, end = float(reply.wait()), perf_counter()
        if end - start < shortest:
            shortest, offset = end - start, first_rank - (start + end) / 2
    return offset


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

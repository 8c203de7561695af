"""``--trace``: spans of all ranks in one file, ``trace.json``, by the first rank's clock.

A coordinator and its trainers are processes of their own: each leaves its spans in the run's directory, and whoever
started them collects them. On one machine they have one clock; trainers of other machines are not in the trace.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from gnnfleet.comm.all_to_all import all_to_all_bytes
from gnnfleet.comm.clock_sync import clock_offset
from gnnfleet.comm.world import World
from gnnfleet.io.atomic import write_atomically
from gnnfleet.report.phase_timer import PhaseTimer
from gnnfleet.report.trace import pack_spans, trace_json, unpack_spans

TRACE_FILE = "trace.json"
_SPANS_DIR = ".spans"


def write_trace(world: World, run: Path) -> None:
    """All ranks call it together; the first writes."""
    spans, world.clock.spans = world.clock.spans or [], None
    data = pack_spans(spans, clock_offset(world))
    none = torch.empty(0, dtype=torch.uint8)
    own = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    found = all_to_all_bytes(world, [own, *[none] * (world.size - 1)], what="trace")
    if world.is_first:
        every = {f"rank {rank}": unpack_spans(each.numpy().tobytes()) for rank, each in enumerate(found)}
        write_atomically(run / TRACE_FILE, trace_json(every).encode())


def write_spans(clock: PhaseTimer, run: Path, name: str) -> None:
    """What a process of a fleet did, for ``collect_spans``."""
    (run / _SPANS_DIR).mkdir(exist_ok=True)
    write_atomically(run / _SPANS_DIR / name, pack_spans(clock.spans or []))


def collect_spans(run: Path) -> None:
    """The trace of a fleet that has ended; none where nothing was left."""
    if not (run / _SPANS_DIR).is_dir():
        return
    every = {path.name: unpack_spans(path.read_bytes()) for path in sorted((run / _SPANS_DIR).iterdir())}
    write_atomically(run / TRACE_FILE, trace_json(every).encode())
    shutil.rmtree(run / _SPANS_DIR)

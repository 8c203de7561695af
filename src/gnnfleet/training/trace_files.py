"""``--trace``: spans of all ranks in one file, ``trace.json``, in the time of the first rank.

The coordinator and the trainers of tma are no ranks: each writes its spans into the run directory, and their
supervisor collects them. They use the clock of their machine; trainers of other machines are not in the trace.
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

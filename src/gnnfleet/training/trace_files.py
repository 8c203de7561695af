"""``--trace``: spans of all ranks in one file, ``trace.json``, by the first rank's clock.

A coordinator and its trainers are processes of their own: each leaves its spans in the run's directory, and whoever
started them collects them. On one machine they have one clock; trainers of other machines are not in the trace.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from gnnfleet.comm.all_to_all import relay
from gnnfleet.comm.clock_sync import clock_offset
from gnnfleet.comm.world import World
from gnnfleet.io.atomic import write_atomically
from gnnfleet.report.phase_timer import Clock
from gnnfleet.report.trace import pack_spans, trace_json, unpack_spans

NAME = "trace.json"
_LEFT = ".spans"


def write_trace(world: World, run: Path) -> None:
    """All ranks call it together; the first writes."""
    spans, world.clock.trace = world.clock.trace or [], None
    data = pack_spans(spans, clock_offset(world))
    none = torch.empty(0, dtype=torch.uint8)
    own = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    found = relay(world, [own, *[none] * (world.size - 1)], what="trace")
    if world.is_first:
        every = {f"rank {rank}": unpack_spans(each.numpy().tobytes()) for rank, each in enumerate(found)}
        write_atomically(run / NAME, trace_json(every).encode())


def leave_spans(clock: Clock, run: Path, name: str) -> None:
    """What a process of a fleet did, for ``collect_spans``."""
    (run / _LEFT).mkdir(exist_ok=True)
    write_atomically(run / _LEFT / name, pack_spans(clock.trace or []))


def collect_spans(run: Path) -> None:
    """The trace of a fleet that has ended; none where nothing was left."""
    if not (run / _LEFT).is_dir():
        return
    every = {path.name: unpack_spans(path.read_bytes()) for path in sorted((run / _LEFT).iterdir())}
    write_atomically(run / NAME, trace_json(every).encode())
    shutil.rmtree(run / _LEFT)

"""Ranks by the dozen for tests of faults: this process loads torch once and forks a trial's ranks from itself.

``python -m tests.faults.forks`` reads one JSON object per line, {"spec", "size", "folder"}, and answers with the pids
of the ranks, later with {"ended", "code"} for each that ended. The store of a trial lives in a process of its own, as
it does under torchrun. A rank that gets SIGUSR1 raises an exception wherever it happens to be in gnnfleet's own code.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import gnnfleet
from gnnfleet.comm.launch_env import LaunchEnv
from gnnfleet.comm.process_lifetime import die_with_parent
from gnnfleet.comm.world import World
from gnnfleet.launch.rank_main import run_rank, run_spec
from gnnfleet.launch.spec import RunSpec
from gnnfleet.training import loop

EPOCH_SECONDS = 0.04
"""Added to every epoch: many trials run side by side, and phases other than computing get their share."""


OWN = Path(gnnfleet.__file__).parent


class Sabotage(Exception):
    """Raised on purpose."""


def rank(number: int, order: dict[str, Any]) -> NoReturn:
    folder = Path(order["folder"])
    log = os.open(folder / f"rank-{number}.err", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 2)
    os.dup2(log, 1)
    die_with_parent()
    while not (folder / "port").exists():
        time.sleep(0.01)
    seat = LaunchEnv(rank=number, size=order["size"], port=int((folder / "port").read_text()), external_store=True)
    plain = loop._epoch

    def slower(*words: Any) -> dict[str, Any]:
        time.sleep(EPOCH_SECONDS)
        return plain(*words)

    loop._epoch = slower
    signal.signal(signal.SIGUSR1, _sabotage)
    signal.signal(signal.SIGALRM, _sabotage)

    def work(world: World, _: object) -> None:
        (folder / f"rank-{number}.ready").touch()
        run_spec(RunSpec.from_json(order["spec"]), world)

    run_rank(seat, work, print_errors=True)


def _sabotage(_: int, frame: FrameType | None) -> None:
    """Raise in gnnfleet's code, or look again shortly.

    Inside the standard library an exception from nowhere breaks invariants (a thread half started answers KeyError),
    and readers of files take whatever goes wrong in them for damage of the file.
    """
    within = Path(frame.f_code.co_filename) if frame else Path()
    reads = False
    while frame and not reads:
        reads = Path(frame.f_code.co_filename).parent == OWN / "graph"
        frame = frame.f_back
    if not reads and within.is_relative_to(OWN):
        raise Sabotage("somewhere")
    signal.setitimer(signal.ITIMER_REAL, 0.003)


def store(order: dict[str, Any]) -> NoReturn:
    from torch.distributed import TCPStore

    die_with_parent()
    kept = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=300))
    partial = Path(order["folder"]) / "port.partial"
    partial.write_text(str(kept.port))
    partial.rename(Path(order["folder"]) / "port")
    while True:
        signal.pause()


def main() -> None:
    while True:
        if select.select([0], [], [], 0.02)[0]:
            line = sys.stdin.readline()
            if not line:
                return
            order = json.loads(line)
            started = {}
            for number in (-1, *range(order["size"])):
                child = os.fork()
                if child == 0:
                    rank(number, order) if number >= 0 else store(order)
                started[number] = child
            say({"folder": order["folder"], "store": started.pop(-1), "ranks": list(started.values())})
        reap()


def reap() -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        say({"ended": pid, "code": os.waitstatus_to_exitcode(status), "at": time.monotonic()})


def say(word: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(word) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()

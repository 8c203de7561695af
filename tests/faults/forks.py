"""Fork server for tests of faults: loads torch once and forks the ranks of many trials from itself.

``python -m tests.faults.forks`` reads one JSON object per line, {"spec", "size", "folder"}. It answers with the pids
of the ranks, and later with {"ended", "code"} for each rank that ended. The store of a trial is a process of its own,
as under torchrun. A rank that receives SIGUSR1 raises an exception at its current place in gnnfleet's code.
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
"""Added to every epoch, so that faults of parallel trials also hit phases other than computing."""


PACKAGE = Path(gnnfleet.__file__).parent


class Sabotage(Exception):
    """Raised on SIGUSR1."""


def run_forked_rank(number: int, trial: dict[str, Any]) -> NoReturn:
    folder = Path(trial["folder"])
    log = os.open(folder / f"rank-{number}.err", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 2)
    os.dup2(log, 1)
    die_with_parent()
    while not (folder / "port").exists():
        time.sleep(0.01)
    launch_env = LaunchEnv(
        rank=number, size=trial["size"], port=int((folder / "port").read_text()), external_store=True
    )
    run_epoch = loop._run_epoch

    def run_slow_epoch(*args: Any) -> Any:
        time.sleep(EPOCH_SECONDS)
        return run_epoch(*args)

    loop._run_epoch = run_slow_epoch
    signal.signal(signal.SIGUSR1, _sabotage)
    signal.signal(signal.SIGALRM, _sabotage)

    def work(world: World, _: object) -> None:
        (folder / f"rank-{number}.ready").touch()
        run_spec(RunSpec.from_json(trial["spec"]), world)

    run_rank(launch_env, work, print_errors=True)


def _sabotage(_: int, frame: FrameType | None) -> None:
    """Raise in gnnfleet's code, or try again 3 ms later.

    In the standard library a sudden exception breaks invariants (a half-started thread answers KeyError). Readers of
    files report any exception as a damaged file.
    """
    current = Path(frame.f_code.co_filename) if frame else Path()
    in_reader = False
    while frame and not in_reader:
        in_reader = Path(frame.f_code.co_filename).parent in (PACKAGE / "graph", PACKAGE / "io")
        frame = frame.f_back
    if not in_reader and current.is_relative_to(PACKAGE):
        raise Sabotage("somewhere")
    signal.setitimer(signal.ITIMER_REAL, 0.003)


def serve_store(trial: dict[str, Any]) -> NoReturn:
    from torch.distributed import TCPStore

    die_with_parent()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=300))
    partial = Path(trial["folder"]) / "port.partial"
    partial.write_text(str(store.port))
    partial.rename(Path(trial["folder"]) / "port")
    while True:
        signal.pause()


def main() -> None:
    while True:
        if select.select([0], [], [], 0.02)[0]:
            line = sys.stdin.readline()
            if not line:
                return
            trial = json.loads(line)
            pids = {}
            for number in (-1, *range(trial["size"])):
                child = os.fork()
                if child == 0:
                    run_forked_rank(number, trial) if number >= 0 else serve_store(trial)
                pids[number] = child
            send({"folder": trial["folder"], "store": pids.pop(-1), "ranks": list(pids.values())})
        reap()


def reap() -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        send({"ended": pid, "code": os.waitstatus_to_exitcode(status), "at": time.monotonic()})


def send(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()

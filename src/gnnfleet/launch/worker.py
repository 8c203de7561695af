"""``python -m gnnfleet.launch.worker SPEC.json``: a worker as ``gnnfleet train --workers N`` starts it.

Threads and the allocator are set before torch is loaded; nothing heavy is imported above ``main``.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import NoReturn

from gnnfleet.comm.allocator import prefer_huge_pages
from gnnfleet.comm.process_lifetime import die_with_parent
from gnnfleet.launch.spec import Spec


def main() -> NoReturn:
    spec = Spec.read(Path(sys.argv[1]))
    die_with_parent(spec.parent)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # standard output is the launcher's, for the result
    prefer_huge_pages()
    if spec.threads is not None:
        os.environ.setdefault("OMP_NUM_THREADS", str(spec.threads))
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # what the network says of a dead peer is said better here
    from gnnfleet.comm.launch_env import Seat
    from gnnfleet.comm.world import World
    from gnnfleet.inference.query import answer_spec
    from gnnfleet.launch.rank_main import run_spec, serve
    from gnnfleet.planner.remote_profile import rehearse_spec

    def work(world: World, _: object) -> None:
        if spec.rehearsal is not None:
            found = rehearse_spec(spec, world)
        elif spec.question is not None:
            found = answer_spec(spec, world)
        else:
            found = run_spec(spec, world).as_json()
        if world.is_first and spec.answer is not None:
            Path(spec.answer).write_text(json.dumps(found))

    seat = Seat.from_environment()
    assert seat is not None, "started by gnnfleet"
    serve(seat, work, speaks=False)


if __name__ == "__main__":
    main()

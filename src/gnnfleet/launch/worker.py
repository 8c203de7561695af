"""``python -m gnnfleet.launch.worker SPEC.json``: a worker as ``gnnfleet train --workers N`` starts it.

Threads and the allocator are set before torch is loaded; nothing heavy is imported at the top.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from gnnfleet.comm.process_lifetime import set_up_worker
from gnnfleet.launch.spec import RunSpec

if TYPE_CHECKING:
    from gnnfleet.comm.world import World


def run_worker(load: Callable[[], Callable[[RunSpec, World], Any]]) -> NoReturn:
    """Run as a worker. ``load`` imports the function that answers its spec, once threads and the allocator are set."""
    spec = RunSpec.read(Path(sys.argv[1]))
    set_up_worker(spec.parent, spec.threads)
    from gnnfleet.comm.launch_env import LaunchEnv
    from gnnfleet.config.schema import DEFAULT_SILENCE_LIMIT
    from gnnfleet.launch.rank_main import run_rank

    answer = load()

    def work(world: World, _: object) -> None:
        content = answer(spec, world)
        if world.is_first and spec.answer is not None:
            Path(spec.answer).write_text(json.dumps(content))

    env = LaunchEnv.from_environment()
    assert env is not None, "started by gnnfleet"
    run_rank(env, work, print_errors=False, silence_limit=spec.config.get("silence_limit", DEFAULT_SILENCE_LIMIT))


def _load_training() -> Callable[[RunSpec, World], Any]:
    from gnnfleet.launch.rank_main import run_spec

    return lambda spec, world: run_spec(spec, world).as_json()


def main() -> NoReturn:
    run_worker(_load_training)


if __name__ == "__main__":
    main()

"""``python -m gnnfleet.launch.worker SPEC.json MODULE:FUNCTION``: a worker started by ``launch``.

Threads and the allocator are set before torch is loaded; nothing heavy is imported at the top.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from gnnfleet.comm.process_lifetime import set_up_worker
from gnnfleet.launch.spec import RunSpec

if TYPE_CHECKING:
    from gnnfleet.comm.world import World


def main() -> NoReturn:
    """Call a function with a spec and the World of this worker, and write the answer of the first rank."""
    spec, (module, function) = RunSpec.read(Path(sys.argv[1])), sys.argv[2].split(":")
    set_up_worker(spec.parent, spec.threads)
    from gnnfleet.comm.launch_env import LaunchEnv
    from gnnfleet.config.schema import DEFAULT_SILENCE_LIMIT
    from gnnfleet.launch.live_module import receive_module
    from gnnfleet.launch.rank_main import run_rank

    answer = getattr(import_module(module), function)

    def work(world: World, _: object) -> None:
        receive_module(spec)
        content = answer(spec, world)
        if world.is_first and spec.answer is not None:
            Path(spec.answer).write_text(json.dumps(content))

    env = LaunchEnv.from_environment()
    assert env is not None, "started by gnnfleet"
    run_rank(env, work, print_errors=False, silence_limit=spec.config.get("silence_limit", DEFAULT_SILENCE_LIMIT))


if __name__ == "__main__":
    main()

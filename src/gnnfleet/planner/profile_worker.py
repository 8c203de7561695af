"""``python -m gnnfleet.planner.profile_worker SPEC.json``: a worker that profiles for a plan and trains nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gnnfleet.launch.spec import RunSpec
from gnnfleet.launch.worker import run_worker

if TYPE_CHECKING:
    from gnnfleet.comm.world import World


def _load() -> Callable[[RunSpec, World], Any]:
    from gnnfleet.planner.remote_profile import run_profile_spec

    return run_profile_spec


if __name__ == "__main__":
    run_worker(_load)

"""``python -m gnnfleet.planner.profile_worker SPEC.json``: a worker that profiles for a plan and trains nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gnnfleet.launch.spec import Spec
from gnnfleet.launch.worker import run_worker

if TYPE_CHECKING:
    from gnnfleet.comm.world import World


def _load() -> Callable[[Spec, World], Any]:
    from gnnfleet.planner.remote_profile import rehearse_spec

    return rehearse_spec


if __name__ == "__main__":
    run_worker(_load)

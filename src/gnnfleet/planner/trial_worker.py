"""``python -m gnnfleet.planner.trial_worker SPEC.json``: a worker that runs trials for a plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gnnfleet.launch.spec import RunSpec
from gnnfleet.launch.worker import run_worker

if TYPE_CHECKING:
    from gnnfleet.comm.world import World


def _load() -> Callable[[RunSpec, World], Any]:
    from gnnfleet.planner.trial_runs import run_trial_spec

    return run_trial_spec


if __name__ == "__main__":
    run_worker(_load)

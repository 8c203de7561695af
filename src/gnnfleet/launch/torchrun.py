"""Specs shared by ranks that torchrun started: the first rank prepares, the others wait."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from gnnfleet.comm.rendezvous import Meeting
from gnnfleet.comm.world import World
from gnnfleet.errors import ExchangeError
from gnnfleet.launch.confirmed_model import check_model_path
from gnnfleet.launch.spec import Spec

PREPARE_SECONDS = 24 * 3600.0
"""How long the others wait for the first rank to cut the graph. Whether it lives is known all the while."""


def shared_spec(
    world: World, meeting: Meeting, prepare: Callable[[], Spec], local_model_files: Callable[[], frozenset[Path]]
) -> Spec:
    """What the first rank prepares, while the others wait; they execute no model file but their own."""
    if world.is_first:
        spec = prepare()
        meeting.store.set("spec", spec.as_json())
        return spec
    spec = Spec.from_json(_await(meeting, "spec"))
    check_model_path(spec.config, local_model_files())
    return spec


def _await(meeting: Meeting, key: str) -> bytes:
    """A word in the store. Asked for again and again: a call that waits would hang with the network."""
    deadline = time.monotonic() + PREPARE_SECONDS
    while not meeting.store.check([key]):
        if time.monotonic() > deadline:
            raise ExchangeError(f"rank 0 has not prepared the run within {PREPARE_SECONDS / 3600:.0f} hours")
        time.sleep(0.1)
    return meeting.store.get(key)

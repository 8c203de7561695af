"""Specs shared by ranks that torchrun started: the first rank prepares, the others wait."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from gnnfleet.comm.rendezvous import Rendezvous
from gnnfleet.comm.world import World
from gnnfleet.errors import ExchangeError
from gnnfleet.launch.confirmed_model import check_model_path
from gnnfleet.launch.spec import RunSpec

PREPARE_TIMEOUT = 24 * 3600.0
"""How long the others wait for the first rank to cut the graph. Whether it lives is known all the while."""


def broadcast_spec(
    world: World, meeting: Rendezvous, prepare: Callable[[], RunSpec], local_model_files: Callable[[], frozenset[Path]]
) -> RunSpec:
    """What the first rank prepares, while the others wait; they execute no model file but their own."""
    if world.is_first:
        spec = prepare()
        meeting.store.set("spec", spec.as_json())
        return spec
    spec = RunSpec.from_json(_poll_key(meeting, "spec"))
    check_model_path(spec.config, local_model_files())
    return spec


def _poll_key(meeting: Rendezvous, key: str) -> bytes:
    """A word in the store. Asked for again and again: a call that waits would hang with the network."""
    deadline = time.monotonic() + PREPARE_TIMEOUT
    while not meeting.store.check([key]):
        if time.monotonic() > deadline:
            raise ExchangeError(f"rank 0 has not prepared the run within {PREPARE_TIMEOUT / 3600:.0f} hours")
        time.sleep(0.1)
    return meeting.store.get(key)

"""The spec of ranks that torchrun started: the first rank prepares it, the others wait."""

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
"""Seconds that other ranks wait for the first rank to partition the graph; heartbeats go on meanwhile."""


def broadcast_spec(
    world: World,
    rendezvous: Rendezvous,
    prepare: Callable[[], RunSpec],
    local_model_files: Callable[[], frozenset[Path]],
) -> RunSpec:
    """Collective. The spec that the first rank prepares; other ranks execute no model file but their own."""
    if world.is_first:
        spec = prepare()
        rendezvous.store.set("spec", spec.as_json())
        return spec
    spec = RunSpec.from_json(_poll_key(rendezvous, "spec"))
    check_model_path(spec.config, local_model_files())
    return spec


def _poll_key(rendezvous: Rendezvous, key: str) -> bytes:
    """Wait for a key of the store by polling: a call that blocks would hang with the network."""
    deadline = time.monotonic() + PREPARE_TIMEOUT
    while not rendezvous.store.check([key]):
        if time.monotonic() > deadline:
            raise ExchangeError(f"rank 0 has not prepared the run within {PREPARE_TIMEOUT / 3600:.0f} hours")
        time.sleep(0.1)
    return rendezvous.store.get(key)

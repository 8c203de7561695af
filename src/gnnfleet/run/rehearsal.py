"""A rehearsal on workers: each times layers and links on its own part while all of them do, and nothing is trained."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from gnnfleet.comm.world import World
from gnnfleet.graph.graph import Graph
from gnnfleet.nn.own import naming_line
from gnnfleet.run.build import Here, check, job_of
from gnnfleet.run.config import RunConfig, resolve
from gnnfleet.run.launch import launch
from gnnfleet.run.rank import open_own
from gnnfleet.run.spec import Spec
from gnnfleet.strategies.forecast import LayerPace, Pace
from gnnfleet.strategies.pace import Draw, measure_pace

LATENCY = 1e-4
"""Seconds of a round between machines, where only their bandwidth is given."""


def rehearse(graph: Graph, config: RunConfig, partition: Path, draw: Draw, *, scratch: Path) -> Pace:
    """All workers of a config on this machine."""
    assert graph.store is not None
    spec = Spec(
        store=str(graph.store.path.resolve()),
        digest=graph.store.digest,
        partition=str(partition.relative_to(graph.store.path)),
        run_dir=str(scratch),
        config=config.model_dump(mode="json"),
        rehearsal=asdict(draw),
    )
    found = launch(spec, folder=scratch / "launch", workers=config.workers, advice="try again")
    return Pace(**{**found, "layers": tuple(LayerPace(**each) for each in found["layers"])})


def rehearse_spec(spec: Spec, world: World) -> dict[str, Any]:
    """This rank's share."""
    config = resolve(spec.config)
    with naming_line(config.model.file):
        graph, shard = open_own(spec, world)
        job = job_of(check(graph, config), config, Here(world))
        words = dict(spec.rehearsal or {})
        return asdict(measure_pace(world, job, shard, Draw(**words)))


def apart(pace: Pace, workers: int, bandwidth: float, weights: int) -> Pace:
    """What one process takes here, as one of several machines that are linked."""
    sums = 2 * weights / bandwidth + 2 * LATENCY
    return replace(pace, workers=workers, bandwidth=bandwidth, socket=bandwidth, latency=LATENCY, sums=sums)

"""A rehearsal on workers: each times layers and links on its own part while all of them do, and nothing is trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from gnnfleet.comm.world import World
from gnnfleet.config.resolve import resolve
from gnnfleet.config.schema import RunConfig
from gnnfleet.graph.graph import Graph
from gnnfleet.graph.partition.chunk_layout import open_layouts
from gnnfleet.launch.local_launcher import launch
from gnnfleet.launch.rank_main import open_own, open_same
from gnnfleet.launch.spec import Spec
from gnnfleet.launch.tma_process import open_deal
from gnnfleet.launch.tma_subgraph import make_alone
from gnnfleet.nn.custom_model import naming_line
from gnnfleet.planner.profiler import Draw, measure_pace
from gnnfleet.planner.trial_runs import Took, Trial, run_trial
from gnnfleet.strategies.estimates import LayerPace, Pace
from gnnfleet.strategies.pipe import estimate as pipe
from gnnfleet.strategies.pipe.config import PipeConfig
from gnnfleet.strategies.temporal import estimate as events
from gnnfleet.strategies.temporal.config import TemporalConfig
from gnnfleet.strategies.temporal.schedule import Shape
from gnnfleet.strategies.tma import estimate as trainers
from gnnfleet.strategies.tma.config import TmaConfig
from gnnfleet.training.build import Here, check, event_job, job_of

LATENCY = 1e-4
"""Seconds of a round between machines, where only their bandwidth is given."""


def rehearse(graph: Graph, config: RunConfig, partition: Path, draw: Draw, *, scratch: Path) -> Pace:
    """All workers of a config on this machine."""
    assert graph.store is not None
    found = _launch(graph, config, str(partition.relative_to(graph.store.path)), asdict(draw), scratch)
    return Pace(**{**found, "layers": tuple(LayerPace(**each) for each in found["layers"])})


def try_together(
    graph: Graph, configs: Sequence[RunConfig], cuts: Sequence[Path | None], *, scratch: Path
) -> list[dict[str, Any]]:
    """What all workers say of strategies that stream chunks, or deal clusters, which are the cuts; one by one."""
    assert graph.store is not None
    below = ["" if cut is None else str(cut.relative_to(graph.store.path)) for cut in cuts]
    tries = [
        {"strategy": config.strategy.model_dump(mode="json"), "cut": cut}
        for config, cut in zip(configs, below, strict=True)
    ]
    return list(_launch(graph, configs[0], "", {"tries": tries}, scratch)["said"])


def try_epochs(graph: Graph, config: RunConfig, trials: Sequence[Trial], *, scratch: Path) -> list[Took]:
    """Epochs of all workers of a config, one setting after the other."""
    found = _launch(graph, config, "", {"trials": [trial.as_json() for trial in trials]}, scratch)
    return list(found["took"])


def rehearse_events(
    graph: Graph, config: RunConfig, shapes: Sequence[Shape], *, scratch: Path
) -> list[events.Rehearsed]:
    """Arrangements of the trainers of a config, one after the other."""
    found = _launch(graph, config, "", {"shapes": [list(vars(shape).values()) for shape in shapes]}, scratch)
    return [events.Rehearsed(**{**each, "begin": tuple(each["begin"])}) for each in found["shapes"]]


def _launch(
    graph: Graph, config: RunConfig, partition: str, rehearsal: dict[str, Any], scratch: Path
) -> dict[str, Any]:
    assert graph.store is not None
    spec = Spec(
        store=str(graph.store.path.resolve()),
        digest=graph.store.digest,
        partition=partition,
        run_dir=str(scratch),
        config=config.model_dump(mode="json"),
        rehearsal=rehearsal,
    )
    return launch(
        spec,
        folder=scratch / "launch",
        workers=config.workers,
        advice="try again",
        module="gnnfleet.planner.profile_worker",
    )


def rehearse_spec(spec: Spec, world: World) -> dict[str, Any]:
    """This rank's share."""
    config, words = resolve(spec.config), dict(spec.rehearsal or {})
    if "trials" in words:
        graph = open_same(spec, world)
        with naming_line(config.model.file):
            return {"took": [run_trial(graph, Trial(**trial), world) for trial in words["trials"]]}
    if "tries" in words:
        with naming_line(config.model.file):
            return {"said": [_try(spec, world, **each) for each in words["tries"]]}
    if isinstance(config.strategy, TemporalConfig):
        on_events = event_job(open_same(spec, world), config, Here(world))
        shapes = [Shape(*sizes) for sizes in words["shapes"]]
        return {"shapes": [asdict(each) for each in events.rehearse(config.strategy, on_events, shapes)]}
    with naming_line(config.model.file):
        graph, shard = open_own(spec, world)
        job = job_of(check(graph, config), config, Here(world))
        return asdict(measure_pace(world, job, shard, Draw(**words)))


def _try(spec: Spec, world: World, strategy: dict[str, Any], cut: str) -> dict[str, Any]:
    spec = replace(spec, config={**spec.config, "strategy": strategy}, partition=cut)
    config = resolve(spec.config)
    if isinstance(config.strategy, TmaConfig):
        graph, deal = open_deal(spec, config.seed)
        return trainers.rehearse(make_alone(graph, config, world.rank, deal.own(world.rank, world.size)), world)
    assert isinstance(config.strategy, PipeConfig)
    graph = open_same(spec, world)
    assert graph.store is not None
    here = Here(world, layouts=open_layouts(graph.store.path / cut))
    return pipe.rehearse(config.strategy, job_of(check(graph, config), config, here))


def apart(pace: Pace, workers: int, bandwidth: float, weights: int) -> Pace:
    """What one process takes here, as one of several machines that are linked."""
    sums = 2 * weights / bandwidth + 2 * LATENCY
    return replace(pace, workers=workers, bandwidth=bandwidth, socket=bandwidth, latency=LATENCY, sums=sums)

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
from gnnfleet.graph.partition.chunk_layout import open_chunk_layouts
from gnnfleet.launch.local_launcher import launch
from gnnfleet.launch.rank_main import open_own_part, open_same_store
from gnnfleet.launch.spec import RunSpec
from gnnfleet.launch.tma_process import open_assignment
from gnnfleet.launch.tma_subgraph import make_local_training
from gnnfleet.nn.custom_model import annotate_model_errors
from gnnfleet.planner.profiler import SamplingProbe, profile_machine
from gnnfleet.planner.trial_runs import TrialOutcome, TrialRun, run_trial
from gnnfleet.strategies.estimates import LayerCostModel, MachineProfile
from gnnfleet.strategies.pipe import estimate as pipe
from gnnfleet.strategies.pipe.config import PipeConfig
from gnnfleet.strategies.temporal import estimate as events
from gnnfleet.strategies.temporal.config import TemporalConfig
from gnnfleet.strategies.temporal.schedule import ParallelLayout
from gnnfleet.strategies.tma import estimate as trainers
from gnnfleet.strategies.tma.config import TmaConfig
from gnnfleet.training.build import RankContext, make_event_job, make_job, validate

NETWORK_LATENCY = 1e-4
"""Seconds of a round between machines, where only their bandwidth is given."""


def profile_workers(
    graph: Graph, config: RunConfig, partition: Path, draw: SamplingProbe, *, scratch: Path
) -> MachineProfile:
    """All workers of a config on this machine."""
    assert graph.store is not None
    found = _launch(graph, config, str(partition.relative_to(graph.store.path)), asdict(draw), scratch)
    return MachineProfile(**{**found, "layers": tuple(LayerCostModel(**each) for each in found["layers"])})


def run_strategy_trials(
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


def run_epoch_trials(
    graph: Graph, config: RunConfig, trials: Sequence[TrialRun], *, scratch: Path
) -> list[TrialOutcome]:
    """Epochs of all workers of a config, one setting after the other."""
    found = _launch(graph, config, "", {"trials": [trial.as_json() for trial in trials]}, scratch)
    return list(found["took"])


def run_event_layout_trials(
    graph: Graph, config: RunConfig, shapes: Sequence[ParallelLayout], *, scratch: Path
) -> list[events.EventTrialResult]:
    """Arrangements of the trainers of a config, one after the other."""
    found = _launch(graph, config, "", {"shapes": [list(vars(shape).values()) for shape in shapes]}, scratch)
    return [events.EventTrialResult(**{**each, "begin": tuple(each["begin"])}) for each in found["shapes"]]


def _launch(
    graph: Graph, config: RunConfig, partition: str, rehearsal: dict[str, Any], scratch: Path
) -> dict[str, Any]:
    assert graph.store is not None
    spec = RunSpec(
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


def run_profile_spec(spec: RunSpec, world: World) -> dict[str, Any]:
    """This rank's share."""
    config, words = resolve(spec.config), dict(spec.rehearsal or {})
    if "trials" in words:
        graph = open_same_store(spec, world)
        with annotate_model_errors(config.model.file):
            return {"took": [run_trial(graph, TrialRun(**trial), world) for trial in words["trials"]]}
    if "tries" in words:
        with annotate_model_errors(config.model.file):
            return {"said": [_try(spec, world, **each) for each in words["tries"]]}
    if isinstance(config.strategy, TemporalConfig):
        on_events = make_event_job(open_same_store(spec, world), config, RankContext(world))
        shapes = [ParallelLayout(*sizes) for sizes in words["shapes"]]
        return {"shapes": [asdict(each) for each in events.run_event_trials(config.strategy, on_events, shapes)]}
    with annotate_model_errors(config.model.file):
        graph, shard = open_own_part(spec, world)
        job = make_job(validate(graph, config), config, RankContext(world))
        return asdict(profile_machine(world, job, shard, SamplingProbe(**words)))


def _try(spec: RunSpec, world: World, strategy: dict[str, Any], cut: str) -> dict[str, Any]:
    spec = replace(spec, config={**spec.config, "strategy": strategy}, partition=cut)
    config = resolve(spec.config)
    if isinstance(config.strategy, TmaConfig):
        graph, deal = open_assignment(spec, config.seed)
        return trainers.time_steps(
            make_local_training(graph, config, world.rank, deal.nodes_of(world.rank, world.size)), world
        )
    assert isinstance(config.strategy, PipeConfig)
    graph = open_same_store(spec, world)
    assert graph.store is not None
    here = RankContext(world, layouts=open_chunk_layouts(graph.store.path / cut))
    return pipe.profile_model(config.strategy, make_job(validate(graph, config), config, here))


def as_separate_machines(pace: MachineProfile, workers: int, bandwidth: float, weights: int) -> MachineProfile:
    """What one process takes here, as one of several machines that are linked."""
    sums = 2 * weights / bandwidth + 2 * NETWORK_LATENCY
    return replace(
        pace,
        workers=workers,
        bandwidth=bandwidth,
        socket_bandwidth=bandwidth,
        latency=NETWORK_LATENCY,
        allreduce_seconds=sums,
    )

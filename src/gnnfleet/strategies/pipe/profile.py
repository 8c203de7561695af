"""What layers and the network take, measured before the work is dealt to stages.

The first worker tries layers by itself (``single_threaded.py``), then all workers do at the same time (``crowd.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch

from gnnfleet.comm.collectives import barrier, broadcast_json
from gnnfleet.comm.compression import WireCodec
from gnnfleet.comm.world import World
from gnnfleet.graph.graph import Graph
from gnnfleet.graph.partition.chunk_layout import ChunkLayout
from gnnfleet.nn.base import Model
from gnnfleet.sharded.pipeline.chunked_partition import ChunkedPartition
from gnnfleet.strategies.job import Job
from gnnfleet.strategies.pipe.config import PipeConfig
from gnnfleet.strategies.pipe.contention_profile import profile_together
from gnnfleet.strategies.pipe.cpu_affinity import CpuShare
from gnnfleet.strategies.pipe.grid_planner import ClusterProfile, GridCandidate, LayerCost, ModelCost, ParameterUse
from gnnfleet.strategies.pipe.layer_bench import BenchSetup, LayerHarness, limit_chunk, num_in_edges, pick_chunk
from gnnfleet.strategies.pipe.layer_profile import profile_alone
from gnnfleet.strategies.pipe.pipeline_rank import partition_features, should_cache_inputs


@dataclass(frozen=True)
class ProfileResult:
    """A model, layer by layer, and the workers together."""

    work: ModelCost
    single: ModelCost  # of one worker for all of the graph, if that was tried
    weights: ParameterUse
    machine: ClusterProfile

    def cost_of(self, candidate: GridCandidate) -> ModelCost:
        return self.single if candidate.workers == candidate.chunks == 1 else self.work

    def as_json(self) -> dict[str, Any]:
        used = [sorted(names) for names in self.weights.layers]
        return {
            "work": asdict(self.work),
            "single": asdict(self.single),
            "weights": {"layers": used, "sizes": dict(self.weights.sizes)},
            "machine": asdict(self.machine),
        }

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> ProfileResult:
        weights = told["weights"]
        work, single = (
            ModelCost(**{**told[name], "layers": tuple(LayerCost(**layer) for layer in told[name]["layers"])})
            for name in ("work", "single")
        )
        return cls(
            work,
            single,
            ParameterUse(tuple(map(frozenset, weights["layers"])), weights["sizes"]),
            ClusterProfile(**told["machine"]),
        )


def chunk_loads(graph: Graph, layout: ChunkLayout) -> list[tuple[int, int]]:
    """(rows, edges to them) of every chunk."""
    degree = torch.zeros(len(layout.order), dtype=torch.int64)
    for edges in graph.edges.values():
        degree += edges.in_degree()
    before = torch.cat([degree[:1].new_zeros(1), degree[layout.order].cumsum(0)])
    rows, edges_to = layout.starts.diff().tolist(), before[layout.starts].diff().tolist()
    return list(zip(rows, edges_to, strict=True))


def profile_on_layout(
    config: PipeConfig, job: Job, layout: ChunkLayout, *, cores: CpuShare | None = None, single: bool = False
) -> ProfileResult:
    """The layers of a model on chunks of a layout; all ranks of the job call it. ``single``: one worker for all of the
    graph is tried as well."""
    number, which = divmod(job.world.rank, layout.partitions)
    way = ChunkedPartition(job.graph, _with_rows(layout, which, 2) if job.model.batch_norm else layout, which)
    cached, code = should_cache_inputs(config, job), WireCodec(config.wire_dtype)
    trial = BenchSetup(way, partial(partition_features, job, way), job.precision, cached, code, job.train)
    cores = cores or CpuShare.detect(job.world.uncounted())
    return profile_layers(job.world, job.model, trial, cores, number=number, single=single)


def _with_rows(layout: ChunkLayout, way: int, least: int) -> ChunkLayout:
    """The same, but a way that has fewer rows takes some of those beside it: batch norm counts the rows of all ways in
    a run, in a trial its own alone."""
    low, high = layout.partition_range(way)
    low = min(low, max(0, len(layout.order) - least))
    starts = layout.starts.clone()
    starts[: way * layout.chunks_per_partition + 1].clamp_(max=low)
    starts[(way + 1) * layout.chunks_per_partition :].clamp_(min=min(max(high, low + least), len(layout.order)))
    return replace(layout, starts=starts)


def profile_layers(
    world: World, model: Model, trial: BenchSetup, cores: CpuShare, *, number: int = 0, single: bool = False
) -> ProfileResult:
    """Try every layer; all ranks call it, ``number`` is the stage they would have. All find what the first does."""
    aside = world.uncounted()
    kept = {name: buffer.clone() for name, buffer in model.named_buffers()}
    way = trial.partition
    # Batch norm needs all rows, and more than one.
    chunk = way.as_one_chunk if model.batch_norm else limit_chunk(way, pick_chunk(way, number))
    tried = LayerHarness(model, trial, chunk)
    sizes = {name: weight.nbytes + weight.element_size() for name, weight in model.named_parameters()}
    weights, machine = ParameterUse(tuple(tried.parameters), sizes), ClusterProfile(float("inf"), 0.0)
    barrier(aside)
    found = ProfileResult(*profile_alone(tried, cores, single=single), weights, machine) if world.is_first else None
    heard = _from_first(aside, found)  # until then the others wait
    if world.size > 1:
        foreseen = [layer.seconds(chunk.rows, num_in_edges(chunk)) for layer in heard.work.layers]
        machine = profile_together(aside, tried, foreseen, cores, number)
        heard = _from_first(aside, replace(heard, machine=machine) if world.is_first else None)
    for name, buffer in model.named_buffers():
        buffer.copy_(kept[name])
    model.zero_grad(set_to_none=True)
    return heard


def _from_first(aside: World, found: ProfileResult | None) -> ProfileResult:
    """What the first rank has found: clocks differ, and all have to plan the same."""
    return ProfileResult.from_json(broadcast_json(aside, {} if found is None else found.as_json()))

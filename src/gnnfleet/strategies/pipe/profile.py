"""What layers and the network take, measured before the work is dealt to stages.

The first worker tries layers by itself (``alone.py``), then all workers do at the same time (``crowd.py``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch

from gnnfleet.comm.collectives import share
from gnnfleet.comm.compression import Code
from gnnfleet.comm.world import World
from gnnfleet.graph.graph import Graph
from gnnfleet.graph.partition.chunk_layout import Layout
from gnnfleet.nn.base import Model
from gnnfleet.report.traffic import Traffic
from gnnfleet.sharded.pipeline.chunked_partition import Way
from gnnfleet.strategies.job import Job
from gnnfleet.strategies.pipe.config import PipeConfig
from gnnfleet.strategies.pipe.contention_profile import all_at_once, wait_for_all
from gnnfleet.strategies.pipe.cpu_affinity import Cores
from gnnfleet.strategies.pipe.grid_planner import Candidate, LayerCost, Machine, Weights, Work
from gnnfleet.strategies.pipe.layer_bench import Trial, Tried, edges_of, piece_of, some_chunk
from gnnfleet.strategies.pipe.layer_profile import try_alone
from gnnfleet.strategies.pipe.pipeline_rank import caches_inputs, features_of


@dataclass(frozen=True)
class Found:
    """A model, layer by layer, and the workers together."""

    work: Work
    single: Work  # of one worker for all of the graph, if that was tried
    weights: Weights
    machine: Machine

    def of(self, candidate: Candidate) -> Work:
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
    def from_json(cls, told: Mapping[str, Any]) -> Found:
        weights = told["weights"]
        work, single = (
            Work(**{**told[name], "layers": tuple(LayerCost(**layer) for layer in told[name]["layers"])})
            for name in ("work", "single")
        )
        return cls(
            work,
            single,
            Weights(tuple(map(frozenset, weights["layers"])), weights["sizes"]),
            Machine(**told["machine"]),
        )


def loads_of(graph: Graph, layout: Layout) -> list[tuple[int, int]]:
    """(rows, edges to them) of every chunk."""
    degree = torch.zeros(len(layout.order), dtype=torch.int64)
    for edges in graph.edges.values():
        degree += edges.in_degree()
    before = torch.cat([degree[:1].new_zeros(1), degree[layout.order].cumsum(0)])
    rows, edges_to = layout.starts.diff().tolist(), before[layout.starts].diff().tolist()
    return list(zip(rows, edges_to, strict=True))


def try_layers(
    config: PipeConfig, job: Job, layout: Layout, *, cores: Cores | None = None, single: bool = False
) -> Found:
    """The layers of a model on chunks of a layout; all ranks of the job call it. ``single``: one worker for all of the
    graph is tried as well."""
    number, which = divmod(job.world.rank, layout.ways)
    way = Way(job.graph, _with_rows(layout, which, 2) if job.model.batch_norm else layout, which)
    cached, code = caches_inputs(config, job), Code(config.wire)
    trial = Trial(way, partial(features_of, job, way), job.precision, cached, code, job.train)
    cores = cores or Cores.find(replace(job.world, traffic=Traffic()))
    return probe(job.world, job.model, trial, cores, number=number, single=single)


def _with_rows(layout: Layout, way: int, least: int) -> Layout:
    """The same, but a way that has fewer rows takes some of those beside it: batch norm counts the rows of all ways in
    a run, in a trial its own alone."""
    low, high = layout.way(way)
    low = min(low, max(0, len(layout.order) - least))
    starts = layout.starts.clone()
    starts[: way * layout.slots + 1].clamp_(max=low)
    starts[(way + 1) * layout.slots :].clamp_(min=min(max(high, low + least), len(layout.order)))
    return replace(layout, starts=starts)


def probe(world: World, model: Model, trial: Trial, cores: Cores, *, number: int = 0, single: bool = False) -> Found:
    """Try every layer; all ranks call it, ``number`` is the stage they would have. All find what the first does."""
    aside = replace(world, traffic=Traffic())
    kept = {name: buffer.clone() for name, buffer in model.named_buffers()}
    way = trial.way
    # Batch norm needs all rows, and more than one.
    chunk = way.whole if model.batch_norm else piece_of(way, some_chunk(way, number))
    tried = Tried(model, trial, chunk)
    sizes = {name: weight.nbytes + weight.element_size() for name, weight in model.named_parameters()}
    weights, machine = Weights(tuple(tried.parameters), sizes), Machine(float("inf"), 0.0)
    wait_for_all(aside)
    found = Found(*try_alone(tried, cores, single=single), weights, machine) if world.is_first else None
    heard = _from_first(aside, found)  # until then the others wait
    if world.size > 1:
        foreseen = [layer.seconds(chunk.rows, edges_of(chunk)) for layer in heard.work.layers]
        machine = all_at_once(aside, tried, foreseen, cores, number)
        heard = _from_first(aside, replace(heard, machine=machine) if world.is_first else None)
    for name, buffer in model.named_buffers():
        buffer.copy_(kept[name])
    model.zero_grad(set_to_none=True)
    return heard


def _from_first(aside: World, found: Found | None) -> Found:
    """What the first rank has found: clocks differ, and all have to plan the same."""
    return Found.from_json(json.loads(share(aside, None if found is None else json.dumps(found.as_json()).encode())))

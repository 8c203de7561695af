"""What forecasts of several strategies have in common: a scouted step, drawn blocks, what weights and features take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from gnnfleet.graph.graph import Graph
from gnnfleet.graph.sampling.batches import batches
from gnnfleet.graph.sampling.sampler import Sampler
from gnnfleet.graph.views.local import LocalView
from gnnfleet.nn.base import Aggregate, Model
from gnnfleet.nn.embedding import NodeEmbedding
from gnnfleet.ops.buffers import unpooled
from gnnfleet.ops.draws import DrawKey
from gnnfleet.planner.profiler import can_precompute, drawn, fanouts_of, loads_of, read_inputs, run_blocks
from gnnfleet.report.memory import peak_tensors
from gnnfleet.sharded.full_batch.ring_view import RingView
from gnnfleet.sharded.step_tracer import Sketch, scout
from gnnfleet.strategies.estimates import SLACK
from gnnfleet.strategies.input_cache import CACHED_RELATIONS, Cached, aggregate_once, wants_aggregate
from gnnfleet.strategies.protocol import PRECISIONS, Job, Outlook, products
from gnnfleet.strategies.sampling_options import FanoutWords

EDGE = 16.0
"""Bytes that an edge takes in memory: its ends by destination, and by source for backward."""

BLOCK_EDGE = 40.0


@dataclass(frozen=True)
class Weights:
    """Bytes: of the parameters that every worker has, of a sum of their gradients, of the rows learnt for nodes."""

    nbytes: int
    summed: int
    rows: int

    @classmethod
    def of(cls, model: Model) -> Weights:
        learnt = {id(module.weight) for module in model.modules() if isinstance(module, NodeEmbedding)}
        common = [each for each in model.parameters() if id(each) not in learnt]
        nbytes = sum(each.nbytes for each in common)
        # After the gradients, a number for each parameter: how many ranks have one.
        summed = nbytes + sum(each.element_size() for each in common)
        return cls(nbytes, summed, sum(each.nbytes for each in model.parameters() if id(each) in learnt))

    def state(self, share: float = 1.0) -> float:
        """Weights, their gradients, and what Adam remembers of each twice; of learnt rows a share."""
        return 4 * (self.nbytes + share * self.rows)


def keeps_aggregate(job: Job, wanted: Cached) -> bool:
    """Whether the first layer's aggregate will be kept, memory apart."""
    few = len(job.graph.edges) <= CACHED_RELATIONS or wanted is True
    return few and wants_aggregate(wanted, hides=job.task.hides) and can_precompute(job.model, job.graph)


def sketch_of(outlook: Outlook, wanted: Cached, many: Sequence[bool] = ()) -> Sketch:
    """A full-batch step, scouted on stand-ins for a part; ``many`` as of ``scout``."""
    job = outlook.job
    keeps = keeps_aggregate(job, wanted)

    def precompute(model: Model, view: RingView, x: Any) -> Aggregate | None:
        return aggregate_once(wanted, model, view, x) if keeps else None

    def find() -> Sketch:
        with products(job.precision):
            return scout(job.model, outlook.parts()[0], PRECISIONS[job.precision], precompute, many)

    found: Sketch = outlook.once(f"sketch {keeps} {tuple(many)}", find)
    return found


def feature_bytes(graph: Graph, itemsize: int | None = None) -> float:
    """Of all nodes; as they are stored, or in numbers of ``itemsize``."""
    tables = [nodes.x for nodes in graph.nodes.values() if nodes.x is not None]
    return float(sum(x.numel() * (itemsize or x.element_size()) for x in tables))


def evaluation_bytes(job: Job, rows: float, *, in_pieces: bool = True) -> float:
    """At the peak of an exact pass over so many rows: what a layer reads, what it makes, and one more in between."""
    most = 3.0 * rows * job.model.width * PRECISIONS[job.precision].itemsize
    return min(most, 3.0 * job.evaluation_memory) if in_pieces else most


@dataclass(frozen=True, eq=False)
class Drawn:
    """The blocks of some batches."""

    views: Sequence[Sequence[LocalView]]

    @property
    def loads(self) -> list[tuple[float, float]]:
        """(rows, edges) of every layer, on average."""
        each = torch.tensor([loads_of(views) for views in self.views], dtype=torch.float64)
        return [(rows, edges) for rows, edges in each.mean(0).tolist()]

    @property
    def amount(self) -> float:
        """Edges drawn and rows read, on average."""
        return sum(drawn(views) for views in self.views) / len(self.views)

    @property
    def structure(self) -> float:
        """Bytes of the blocks of a batch: ends and ids of edges, and the same turned round for backward."""
        return self.amount * BLOCK_EDGE


def draw_blocks(
    job: Job, items: Tensor, size: int, *, fanouts: FanoutWords, given: bool, replace: bool = False, count: int = 2
) -> Drawn:
    """The blocks of the first ``count`` batches of ``size`` items."""
    sampler = Sampler(job.graph, fanouts_of(fanouts, job.model.num_layers), replace=replace)
    found = []
    for number, part in islice(batches(items, size, seed=job.seed, epoch=0), count):
        batch = job.task.batch(part, DrawKey(job.seed, 0, number))
        found.append(sampler.blocks(batch.seeds, batch.key, given=given))
    return Drawn(found)


def step_tensors(job: Job, views: Sequence[LocalView], *, given: bool) -> float:
    """Bytes of tensors at the peak of a step on blocks, counted in one; the weights stay as they are."""
    x, near = read_inputs(job.graph, job.model, views[0], job.precision, given)

    def step() -> None:
        run_blocks(job.model, views, x, near, job.precision)

    before = {name: buffer.clone() for name, buffer in job.model.named_buffers()}
    with unpooled():
        peak = peak_tensors(step)
    for name, buffer in job.model.named_buffers():
        buffer.copy_(before[name])
    job.model.zero_grad(set_to_none=True)
    inputs = float(sum(each.nbytes for each in (x.values() if isinstance(x, dict) else [x])))
    return SLACK * (peak + inputs * (2 if given else 1))

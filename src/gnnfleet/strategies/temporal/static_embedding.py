"""Static node memory (DistTGL): an embedding table trained before the node memory.

The task is the same with the table in place of memories, on training events in any order, so the table may contain
information of later training events. Validation and test events are not used. Nodes without a training event have
zero rows.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from gnnfleet.graph.sampling.batches import epoch_batches
from gnnfleet.nn.temporal.model import TemporalModel
from gnnfleet.ops.draws import DrawKey, Draws, Purpose
from gnnfleet.strategies.job import EventJob, autocast
from gnnfleet.strategies.optim import Adam
from gnnfleet.strategies.temporal.batch_step import NeighborhoodBuilder, draw_ids, query_times
from gnnfleet.strategies.temporal.config import TemporalConfig
from gnnfleet.tasks.event import EventTask

STATIC_NEGATIVE_SET = 0xFFFF
"""Number of a set of negatives that training with memory does not use."""


def train_static_embedding(config: TemporalConfig, job: EventJob, builder: NeighborhoodBuilder) -> Tensor:
    """Train the table [V, D]; it depends on the seed and the training events only."""
    task, stream, train = job.task, job.task.stream, job.task.parts["train"]
    width, dtype = job.model.width, job.dtype
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(job.seed)
        model_config = job.model.config.model_copy(update={"name": "tgat", "pairs": False})
        model = TemporalModel(model_config, replace(job.model.dims, static=width, has_features=False)).to(dtype)
    initial = Draws(job.seed, Purpose.PARAMETERS).normals_at(torch.arange(stream.num_nodes), width)
    table = torch.nn.Parameter(initial.to(dtype) * 0.1)
    optimizer = Adam([table, *model.parameters()], lr=config.static_lr, foreach=False)
    builder = replace(builder, queries="event", neighbours=model_config.neighbours, num_hops=model.num_hops)
    advance = job.progress.stage("static memory", config.static_epochs)
    for epoch in range(config.static_epochs):
        for step, numbers in epoch_batches(train.numbers, config.batch_size, seed=job.seed, epoch=epoch):
            _step(model, table, task, builder, numbers, DrawKey(job.seed, epoch, step), job.precision)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        advance(1)
    embedding = torch.zeros_like(table.detach())
    trained = torch.unique(torch.cat([train.src, train.dst]))
    embedding[trained] = table.detach()[trained]
    return embedding


def _step(
    model: TemporalModel,
    table: Tensor,
    task: EventTask,
    builder: NeighborhoodBuilder,
    numbers: Tensor,
    key: DrawKey,
    precision: str,
) -> None:
    stream = task.stream
    src, dst, t = stream.src[numbers], stream.dst[numbers], stream.t[numbers]
    negatives = task.sample_negatives(numbers, sweep=key.epoch, number=STATIC_NEGATIVE_SET)
    nodes = torch.cat([src, dst, negatives.flatten()])
    block = builder.block(nodes, query_times(t, negatives), draw_ids(numbers, negatives), sweep=key.epoch)
    model.train()
    with autocast(precision):
        z = model.embed(block, table[block.nodes], key)
        loss, count = task.loss(model, z, numbers)
    (loss / max(count, 1)).backward()  # type: ignore[no-untyped-call]

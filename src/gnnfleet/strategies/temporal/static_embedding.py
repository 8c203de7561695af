"""Rows learnt for nodes beforehand: what a node is like over all of training, which its memory at a time cannot know.

The same task with a learnt table in place of memories, on training events in any order. An event may thus tell of an
earlier one, within training; nothing of validation or test does. Rows of nodes without a training event are zeros.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from gnnfleet.graph.sampling.batches import epoch_batches
from gnnfleet.nn.temporal.model import TemporalModel
from gnnfleet.ops.draws import DrawKey, Draws, Purpose
from gnnfleet.strategies.job import PRECISIONS, EventJob, autocast
from gnnfleet.strategies.temporal.batch_step import NeighborhoodBuilder, draw_ids, times_of
from gnnfleet.strategies.temporal.config import TemporalConfig
from gnnfleet.tasks.event import EventTask


def train_static_embedding(config: TemporalConfig, job: EventJob, lookout: NeighborhoodBuilder) -> Tensor:
    """[V, D]; the same for a seed, whatever comes after training."""
    task, stream, train = job.task, job.task.stream, job.task.parts["train"]
    width, dtype = job.model.width, PRECISIONS[job.precision]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(job.seed)
        plain = job.model.config.model_copy(update={"name": "tgat", "pairs": False})
        model = TemporalModel(plain, replace(job.model.dims, static=width, given=False)).to(dtype)
    first = Draws(job.seed, Purpose.PARAMETERS).normals_at(torch.arange(stream.num_nodes), width)
    table = torch.nn.Parameter(first.to(dtype) * 0.1)
    optimizer = torch.optim.Adam([table, *model.parameters()], lr=config.static_lr, foreach=False)
    lookout = replace(lookout, queries="event", neighbours=plain.neighbours, num_hops=model.num_hops)
    advance = job.progress.stage("static memory", config.static_epochs)
    for epoch in range(config.static_epochs):
        for step, numbers in epoch_batches(train.numbers, config.batch_size, seed=job.seed, epoch=epoch):
            _step(model, table, task, lookout, numbers, DrawKey(job.seed, epoch, step), job.precision)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        advance(1)
    found = torch.zeros_like(table.detach())
    seen = torch.unique(torch.cat([train.src, train.dst]))
    found[seen] = table.detach()[seen]
    return found


def _step(
    model: TemporalModel,
    table: Tensor,
    task: EventTask,
    lookout: NeighborhoodBuilder,
    numbers: Tensor,
    key: DrawKey,
    precision: str,
) -> None:
    stream = task.stream
    src, dst, t = stream.src[numbers], stream.dst[numbers], stream.t[numbers]
    drawn = task.negatives_of(numbers, sweep=key.epoch, number=STATIC_NEGATIVE_SET)
    asked = torch.cat([src, dst, drawn.flatten()])
    block = lookout.block(asked, times_of(t, drawn), draw_ids(numbers, drawn), sweep=key.epoch)
    model.train()
    with autocast(precision):
        z = model.embed(block, table[block.nodes], key)
        loss, count = task.loss_of(model, z, numbers)
    (loss / max(count, 1)).backward()  # type: ignore[no-untyped-call]


STATIC_NEGATIVE_SET = 0xFFFF
"""The set of negatives that no training with memory uses."""

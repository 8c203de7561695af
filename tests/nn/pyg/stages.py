"""A module layer by layer in the two stages of strategy pipe, with one chunk: outputs, gradients and buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast
from unittest import mock

import torch
from torch import Tensor

from gnnfleet.comm.world import World
from gnnfleet.graph.partition.chunk_layout import build_chunk_layout
from gnnfleet.strategies.job import Job, RankContext
from gnnfleet.strategies.pipe import profile
from gnnfleet.strategies.pipe.config import PipeConfig
from gnnfleet.strategies.pipe.strategy import PipeStrategy
from gnnfleet.tasks.base import RowLookup
from gnnfleet.tasks.train_options import TrainConfig
from tests.equivalence.spread import NODES, loss_weights, plain_graph
from tests.nn.pyg.outcomes import Outcome, common_buffers, split_module


class AllRows:
    """A task whose loss reads all rows of the output."""

    masks_edges, reads_only_local_rows = False, True

    def __init__(self) -> None:
        self.out: Tensor | None = None

    def train_items(self, seed: int, epoch: int) -> Tensor:
        return torch.arange(1)

    def shard(self, world: World, owned_ids: object) -> AllRows:
        return self

    def batch(self, items: Tensor, key: object) -> None:
        return None

    def loss(self, lookup: RowLookup, batch: None) -> Tensor:
        out = lookup("node", torch.arange(NODES))
        self.out = out.detach()
        return (out * loss_weights(self.out)).sum()


def run_on_stages(world: World, make: Callable[[], torch.nn.Module]) -> Outcome:
    """Collective. One pass through the stages; the first rank has the gradient of x, the last one the output."""
    graph, task, model = plain_graph(), AllRows(), split_module(make)
    context = RankContext(world, layouts=[build_chunk_layout(graph, 1, 1)])
    job = Job(
        graph=graph, model=model, task=cast(Any, task), train=TrainConfig(), precision="float64",
        workers=world.size, context=context,
    )  # fmt: skip
    one_thread = profile.CpuShare(cores=1, threads=1, threads_sharing=1)
    # Times do not count: two or three layers go to two stages.
    with mock.patch.object(profile, "REPEATS", 1), mock.patch.object(profile.CpuShare, "detect", lambda _: one_thread):
        run = PipeStrategy(PipeConfig(graph_parallel=1, chunks=1, cache_inputs=False), job)
    assert run.grid.stages == world.size and run._pipeline_rank is not None
    stage, inputs = run._pipeline_rank.stage, []
    if (read := stage.features) is not None:

        def features(view: Any) -> Tensor:
            if not inputs:
                inputs.append(read(view).detach().clone().requires_grad_())
            return inputs[0]

        object.__setattr__(stage, "features", features)
    run._run_pass(0, [], exact=True, updates_history=False)
    reported = run._reported_parameters()
    run.state_dict()  # every rank gets the buffers of all stages
    module, x = model.module, inputs[0] if inputs else None
    return {
        "out": task.out,
        "x": None if x is None else torch.zeros_like(x) if x.grad is None else x.grad,
        "parameters": {n: p.grad for n, p in module.named_parameters() if f"module.{n}" in reported},
        "buffers": {n: buffer.clone() for n, buffer in module.named_buffers() if buffer.is_floating_point()},
    }


def joined_stages(ranks: list[Outcome]) -> Outcome:
    parameters = {name: grad for rank in ranks for name, grad in rank["parameters"].items()}
    buffers = common_buffers(ranks)
    return {"out": ranks[-1]["out"], "x": ranks[0]["x"], "parameters": parameters, "buffers": buffers}

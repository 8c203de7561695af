"""What a step runs the model on: sampled blocks and the rows they read, made ahead in a thread.

Where the first layer's aggregate is kept for all nodes, its rows are read in place of the last hop.
"""

from __future__ import annotations

from collections.abc import Generator

import torch
from torch import Tensor

from gnnfleet.graph.sampling.batches import epoch_batches
from gnnfleet.graph.sampling.loader import FeatureGather, prepare_backward
from gnnfleet.graph.sampling.prefetch import auto_depth, prefetch_items
from gnnfleet.graph.sampling.sampler import NeighborSampler
from gnnfleet.graph.views.local import LocalView
from gnnfleet.nn.base import Aggregate
from gnnfleet.ops.buffers import empty_buffer
from gnnfleet.ops.draws import DrawKey
from gnnfleet.ops.gather import gather
from gnnfleet.strategies.job import PRECISIONS, Job
from gnnfleet.strategies.local.config import LocalConfig
from gnnfleet.strategies.sampling_options import PreparedBatch, check_fanouts_per_layer, fanouts_by_hop
from gnnfleet.tasks.base import Batch


class MiniBatchMaker:
    """Makes the batches of an epoch. ``aggregated`` has a row per node, in store order. Raises ConfigError."""

    def __init__(self, config: LocalConfig, job: Job, aggregated: Aggregate | None) -> None:
        self._config, self._job, self._aggregated = config, job, aggregated
        assert config.fanouts is not None
        self._sampler = NeighborSampler(job.graph, fanouts_by_hop(config.fanouts), replace=config.replace)
        tables = {kind: nodes.x for kind, nodes in job.graph.nodes.items()}
        self._readers = {kind: FeatureGather(x) for kind, x in tables.items() if x is not None}
        check_fanouts_per_layer(len(self._sampler.hops), job.model.num_layers)

    def epoch(self, epoch: int, first: int = 0) -> Generator[PreparedBatch]:
        depth = self._config.prefetch
        return prefetch_items(self._make(epoch, first), self._depth() if depth == "auto" else depth)

    def _depth(self) -> int:
        tables = [nodes.x for nodes in self._job.graph.nodes.values() if nodes.x is not None]
        return auto_depth(sum(x.numel() * x.element_size() for x in tables), processes=self._job.processes)

    def _make(self, epoch: int, first: int) -> Generator[PreparedBatch]:
        task, seed = self._job.task, self._job.seed
        items = task.train_items(seed, epoch)
        for step, part in epoch_batches(items, self._config.batch_size, seed=seed, epoch=epoch, first=first):
            yield self._ready(task.batch(part, DrawKey(seed, epoch, step)))

    def _ready(self, batch: Batch) -> PreparedBatch:
        given = self._aggregated is not None
        views = [self._job.task.mask_edges(v, batch) for v in self._sampler.blocks(batch.seeds, batch.key, given=given)]
        prepare_backward(views)
        if isinstance(self._aggregated, Tensor):
            return PreparedBatch(batch, views, *self._read_both(self._aggregated, views[0]))
        x = {kind: self._read(kind, rows.node_ids) for kind, rows in views[0].nodes.items()}
        return PreparedBatch(batch, views, x if len(x) > 1 else next(iter(x.values())), self._read_aggregate(views[0]))

    def _read_both(self, kept: Tensor, view: LocalView) -> tuple[Tensor, Tensor]:
        """(x, aggregated) as neighbouring columns: a layer that multiplies both makes one product of them."""
        ids, x, width = view.node_ids, self._job.graph.single_nodes.x, kept.shape[1]
        assert x is not None, "there is an aggregate of features"
        (read,) = self._readers.values()
        both = empty_buffer((len(ids), width + x.shape[1]), kept.dtype)
        near = gather(kept, ids, out=both[:, :width])
        if torch.promote_types(x.dtype, torch.float32) == kept.dtype:
            return read(ids, out=both[:, width:]), near
        return both[:, width:].copy_(read(ids)), near

    def _read_aggregate(self, view: LocalView) -> Aggregate | None:
        kept = self._aggregated
        assert not isinstance(kept, Tensor)
        if kept is None:
            return None
        return {kind: gather(rows, view.nodes[kind.dst].node_ids) for kind, rows in kept.items()}

    def _read(self, kind: str, ids: Tensor) -> Tensor:
        dtype, read = PRECISIONS[self._job.precision], self._readers.get(kind)
        return torch.empty(len(ids), 0, dtype=dtype) if read is None else read(ids).to(dtype)

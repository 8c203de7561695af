"""Sampled mini-batches of one process: blocks and the rows they read, prefetched in a thread.

Where the first layer's aggregate is cached for all nodes, its rows are read instead of the last hop.
"""

from __future__ import annotations

from collections.abc import Generator

import torch
from torch import Tensor

from gnnfleet.graph.sampling.batches import epoch_batches
from gnnfleet.graph.sampling.loader import FeatureGather, prepare_backward
from gnnfleet.graph.sampling.prefetch import auto_depth, prefetch_items
from gnnfleet.graph.sampling.sampler import NeighborSampler
from gnnfleet.nn.base import Aggregate
from gnnfleet.ops.draws import DrawKey
from gnnfleet.ops.gather import gather
from gnnfleet.strategies.batch_inputs import PreparedBatch, X, aggregate_tables, read_inputs
from gnnfleet.strategies.job import Job
from gnnfleet.strategies.local.config import LocalConfig
from gnnfleet.strategies.sampling_options import check_fanouts_per_layer, parse_fanouts
from gnnfleet.tasks.base import Batch


class MiniBatchMaker:
    """Prepares the batches of an epoch. ``aggregated`` has a row per node, in store order. Raises ConfigError."""

    def __init__(self, config: LocalConfig, job: Job, aggregated: Aggregate | None) -> None:
        self._config, self._job, self._aggregated = config, job, aggregated
        fanouts = parse_fanouts(config.fanouts, job.model.num_layers)
        self._sampler = NeighborSampler(job.graph, fanouts, replace=config.replace)
        self._features = {kind: nodes.x for kind, nodes in job.graph.nodes.items() if nodes.x is not None}
        self._readers = {kind: FeatureGather(x) for kind, x in self._features.items()}
        self._aggregates = {(kind, name): rows for kind, name, rows in aggregate_tables(aggregated, job.task.target)}
        check_fanouts_per_layer(len(self._sampler.hops), job.model.num_layers)

    def epoch(self, epoch: int, first: int = 0) -> Generator[PreparedBatch]:
        depth = self._config.prefetch
        if depth == "auto":
            nbytes = sum(x.numel() * x.element_size() for x in self._features.values())
            depth = auto_depth(nbytes, processes=self._job.processes)
        return prefetch_items(self._batches(epoch, first), depth)

    def _batches(self, epoch: int, first: int) -> Generator[PreparedBatch]:
        task, seed = self._job.task, self._job.seed
        items = task.train_items(seed, epoch)
        for step, batch_items in epoch_batches(items, self._config.batch_size, seed=seed, epoch=epoch, first=first):
            yield self._prepare(task.batch(batch_items, DrawKey(seed, epoch, step)))

    def _prepare(self, batch: Batch) -> PreparedBatch:
        blocks = self._sampler.blocks(batch.seeds, batch.key, skip_last_hop=self._aggregated is not None)
        views = [self._job.task.mask_edges(view, batch) for view in blocks]
        prepare_backward(views)

        def read(kind: str, table: str, *, out: Tensor | None = None) -> Tensor:
            ids = views[0].nodes[kind].node_ids
            if table == X:
                return self._readers[kind](ids, out=out)
            return gather(self._aggregates[kind, table], ids, out=out)

        dtype: torch.dtype = self._job.dtype
        return read_inputs(batch, views, read, features=self._features, aggregated=self._aggregated, dtype=dtype)

"""What a step runs the model on: sampled blocks and the rows they read, made ahead in a thread.

Where the first layer's aggregate is kept for all nodes, its rows are read in place of the last hop.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gnnfleet.errors import ConfigError
from gnnfleet.graph.batches import batches
from gnnfleet.graph.loader import prepare_backward, read_features
from gnnfleet.graph.local import LocalView
from gnnfleet.graph.prefetch import prefetched
from gnnfleet.graph.sample import Sampler
from gnnfleet.nn.base import Aggregate, Features
from gnnfleet.ops.draws import DrawKey
from gnnfleet.ops.rows import gather
from gnnfleet.strategies.base import PRECISIONS, Job
from gnnfleet.strategies.local.config import LocalConfig
from gnnfleet.strategies.task import Batch


@dataclass(frozen=True, eq=False)
class Ready:
    """A batch with everything the model takes."""

    batch: Batch
    views: Sequence[LocalView]
    x: Features
    aggregated: Aggregate | None


class SampledBatches:
    """Makes the batches of an epoch. ``aggregated`` has a row per node, in store order. Raises ConfigError."""

    def __init__(self, config: LocalConfig, job: Job, aggregated: Aggregate | None) -> None:
        self._config, self._job, self._aggregated = config, job, aggregated
        self._sampler = Sampler(job.graph, config.hops, replace=config.replace)
        found, layers = len(self._sampler.hops), job.model.num_layers
        if found != layers:
            raise ConfigError(f"strategy.fanouts needs one number per layer, {layers}; found {found}")

    def epoch(self, epoch: int) -> Iterator[Ready]:
        return prefetched(self._make(epoch), self._config.prefetch)

    def _make(self, epoch: int) -> Iterator[Ready]:
        task, seed = self._job.task, self._job.seed
        items = batches(task.trained(seed, epoch), self._config.batch_size, seed=seed, epoch=epoch)
        for step, part in enumerate(items):
            yield self._ready(task.batch(part, DrawKey(seed, epoch, step)))

    def _ready(self, batch: Batch) -> Ready:
        given = self._aggregated is not None
        views = [self._job.task.hide(v, batch) for v in self._sampler.blocks(batch.seeds, batch.key, given=given)]
        prepare_backward(views)
        x = {kind: self._read(kind, rows.node_ids) for kind, rows in views[0].nodes.items()}
        return Ready(batch, views, x if len(x) > 1 else next(iter(x.values())), self._read_aggregate(views[0]))

    def _read_aggregate(self, view: LocalView) -> Aggregate | None:
        kept = self._aggregated
        if kept is None or isinstance(kept, Tensor):
            return None if kept is None else gather(kept, view.node_ids)
        return {kind: gather(rows, view.nodes[kind.dst].node_ids) for kind, rows in kept.items()}

    def _read(self, kind: str, ids: Tensor) -> Tensor:
        x = self._job.graph.nodes[kind].x
        dtype = PRECISIONS[self._job.precision]
        return torch.empty(len(ids), 0, dtype=dtype) if x is None else read_features(x, ids).to(dtype)

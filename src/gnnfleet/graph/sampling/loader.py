"""NeighborLoader: mini-batches of seeds with sampled blocks, for custom training loops.

Arguments are named as in PyG. A batch depends on the seed, the epoch and the number of the batch alone.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gnnfleet.errors import ConfigError, InputError
from gnnfleet.graph.graph import SPLITS, Graph
from gnnfleet.graph.sampling.batches import count_batches, epoch_batches
from gnnfleet.graph.sampling.prefetch import prefetch_items
from gnnfleet.graph.sampling.sampler import Fanouts, NeighborSampler
from gnnfleet.graph.views.local import LocalView
from gnnfleet.ops.draws import DrawKey
from gnnfleet.ops.gather import gather, gather_by_window, is_paged


@dataclass(frozen=True, eq=False)
class MiniBatch:
    """``model(batch.views, batch.x)`` returns a row for every seed, in the order of ``seeds`` and ``y``.

    ``x`` and ``n_id`` are dicts by node type if the graph has several; ``x`` lacks types without features.
    """

    views: list[LocalView]
    x: Tensor | dict[str, Tensor] | None
    y: Tensor | None
    seeds: Tensor  # [batch_size] store ids
    n_id: Tensor | dict[str, Tensor]  # store ids of the rows of x
    key: DrawKey

    @property
    def batch_size(self) -> int:
        return int(self.seeds.shape[0])


class NeighborLoader:
    """Iterating is one epoch; the next iteration is the next epoch, with other neighbours and, with ``shuffle``, in
    another order. Up to ``prefetch`` batches are sampled ahead in a thread, so there is no ``num_workers``.

    ``input_nodes``: "train", "val" or "test", a mask or store ids of the labelled (or only) node type; for another type
    a pair of the type and any of these; all nodes by default. ``num_neighbors`` begins with the hop next to the seeds;
    −1 takes all. ``weight_attr="weight"`` draws by edge weight.
    """

    def __init__(
        self,
        graph: Graph,
        num_neighbors: Fanouts,
        *,
        batch_size: int = 1,
        input_nodes: Any = None,
        replace: bool = False,
        shuffle: bool = False,
        drop_last: bool = False,
        weight_attr: str | None = None,
        seed: int = 0,
        prefetch: int = 2,
    ) -> None:
        if batch_size < 1 or prefetch < 0:
            raise ConfigError(
                f"batch_size must be at least 1 and prefetch at least 0, found {batch_size} and {prefetch}"
            )
        if weight_attr not in (None, "weight"):
            raise ConfigError(f"weight_attr must be 'weight' or None, found {weight_attr!r}")
        self._graph, self._seed, self._prefetch = graph, seed, prefetch
        self._size, self._shuffle, self._drop_last = batch_size, shuffle, drop_last
        self._kind, ids = _find_nodes(graph, input_nodes)
        self._ids = ids.sort().values if shuffle else ids
        self._new_sampler = partial(
            NeighborSampler, graph, num_neighbors, replace=replace, weighted=weight_attr is not None
        )
        self._idle_samplers = [self._new_sampler()]
        self._readers = {kind: FeatureGather(table.x) for kind, table in graph.nodes.items() if table.x is not None}
        self.epoch = 0
        """The epoch of the next iteration; may be set to resume."""

    def __len__(self) -> int:
        return len(self._ids) // self._size if self._drop_last else count_batches(len(self._ids), self._size)

    def __iter__(self) -> Iterator[MiniBatch]:
        epoch, self.epoch = self.epoch, self.epoch + 1
        return prefetch_items(self._batches(epoch), self._prefetch)

    def _batches(self, epoch: int) -> Generator[MiniBatch]:
        # Loops over one loader may overlap: each has its own sampler until its end.
        sampler = self._idle_samplers.pop() if self._idle_samplers else self._new_sampler()
        try:
            for step, seeds in self._slices(epoch):
                if len(seeds) == self._size or not self._drop_last:
                    yield self._batch(sampler, seeds, DrawKey(self._seed, epoch, step))
        finally:
            self._idle_samplers.append(sampler)

    def _slices(self, epoch: int) -> Iterator[tuple[int, Tensor]]:
        if self._shuffle:
            return epoch_batches(self._ids, self._size, seed=self._seed, epoch=epoch)
        return iter(enumerate(torch.split(self._ids, self._size)))

    def _batch(self, sampler: NeighborSampler, seeds: Tensor, key: DrawKey) -> MiniBatch:
        views = sampler.blocks({self._kind: seeds}, key)
        prepare_backward(views)
        ids = {kind: rows.node_ids for kind, rows in views[0].nodes.items()}
        x = {kind: read(ids[kind]) for kind, read in self._readers.items()}
        y = self._graph.nodes[self._kind].y
        single = len(ids) == 1
        return MiniBatch(
            views,
            x.get(self._kind) if single else x,
            None if y is None else y[seeds],
            seeds,
            ids[self._kind] if single else ids,
            key,
        )


class FeatureGather:
    """Gather feature rows by store id; half precision becomes float32. Pages of large files do not stay in memory."""

    def __init__(self, x: Tensor) -> None:
        self._x = x
        self._dtype = torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype
        self._gather = gather_by_window if is_paged(x) else gather

    def __call__(self, ids: Tensor, *, out: Tensor | None = None) -> Tensor:
        return self._gather(self._x, ids, self._dtype, out=out)


def prepare_backward(views: list[LocalView]) -> None:
    """Transpose the blocks whose inputs have gradients now, rather than in the backward pass."""
    for view in views[1:]:
        for relation in view.relations.values():
            _ = relation.structure.transposed


def _find_nodes(graph: Graph, nodes: Any) -> tuple[str, Tensor]:
    """(node type, store ids)."""
    kind = graph.labelled_type or next(iter(graph.nodes))
    if isinstance(nodes, tuple) and len(nodes) == 2 and isinstance(nodes[0], str):
        kind, nodes = nodes
    elif isinstance(nodes, str) and nodes in graph.nodes and nodes not in SPLITS:
        kind, nodes = nodes, None
    if kind not in graph.nodes:
        raise ConfigError(f"the graph has no nodes of type {kind!r}: choose one of {', '.join(graph.nodes)}")
    table = graph.nodes[kind]
    if nodes is None:
        return kind, torch.arange(table.count)
    if isinstance(nodes, str):
        if nodes not in SPLITS:
            raise ConfigError(f"input_nodes must be {', '.join(SPLITS)}, a mask or store ids, found {nodes!r}")
        return kind, table.mask(nodes).nonzero()[:, 0]
    ids = torch.as_tensor(nodes)
    if ids.dtype == torch.bool:
        if ids.shape != (table.count,):
            raise InputError(f"the mask of input_nodes must have {table.count} entries, found {list(ids.shape)}")
        return kind, ids.nonzero()[:, 0]
    ids = ids.long()
    if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= table.count or len(torch.unique(ids)) < len(ids)):
        raise InputError(f"input_nodes must be different store ids below {table.count}")
    return kind, ids

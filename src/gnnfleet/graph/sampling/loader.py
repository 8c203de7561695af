"""NeighborLoader: mini-batches of seeds with sampled blocks, for a training loop of one's own.

Arguments are named as PyG's. What a batch holds depends on the seed, the epoch and the number of the batch alone.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gnnfleet.errors import ConfigError, InputError
from gnnfleet.graph.graph import SPLITS, Graph
from gnnfleet.graph.sampling.batches import epoch_batches
from gnnfleet.graph.sampling.prefetch import prefetch_items
from gnnfleet.graph.sampling.sampler import Fanouts, NeighborSampler
from gnnfleet.graph.views.local import LocalView
from gnnfleet.ops.draws import DrawKey
from gnnfleet.ops.gather import gather
from gnnfleet.ops.paging import gather_by_window, is_paged


@dataclass(frozen=True, eq=False)
class MiniBatch:
    """``model(batch.views, batch.x)`` gives a row for every seed, in the order of ``seeds`` and ``y``.

    ``x`` and ``n_id`` are by node type where the graph has several; ``x`` lacks types without features.
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
    another order. Batches are made ahead in a thread, not by worker processes, so there is no ``num_workers``.

    ``input_nodes``: "train", "val" or "test", a mask or store ids of the labelled (or only) node type; for another one
    a pair of type and any of these; all nodes by default. ``num_neighbors`` names the hop next to the seeds first;
    −1 takes all. ``weight_attr="weight"`` draws by edge weight. ``prefetch`` batches are made ahead in a thread.
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
            raise ConfigError(f"batch_size must be at least 1 and prefetch 0, found {batch_size} and {prefetch}")
        if weight_attr not in (None, "weight"):
            raise ConfigError(f"weight_attr is 'weight', the edges' weights, or None; found {weight_attr!r}")
        self._graph, self._seed, self._prefetch = graph, seed, prefetch
        self._size, self._shuffle, self._drop_last = batch_size, shuffle, drop_last
        self._kind, ids = _find_nodes(graph, input_nodes)
        self._ids = ids.sort().values if shuffle else ids
        self._sampling = {"fanouts": num_neighbors, "replace": replace, "weighted": weight_attr is not None}
        self._readers = {kind: FeatureGather(table.x) for kind, table in graph.nodes.items() if table.x is not None}
        self._idle = [NeighborSampler(graph, num_neighbors, replace=replace, weighted=weight_attr is not None)]
        self.epoch = 0
        """Of the next iteration; may be set, to go on where another run ended."""

    def __len__(self) -> int:
        whole, rest = divmod(len(self._ids), self._size)
        return whole + (rest > 0 and not self._drop_last)

    def __iter__(self) -> Iterator[MiniBatch]:
        epoch, self.epoch = self.epoch, self.epoch + 1
        return prefetch_items(self._make(epoch), self._prefetch)

    def _make(self, epoch: int) -> Generator[MiniBatch]:
        # Loops over one loader may overlap: each has a sampler of its own, given back at its end.
        sampler = self._idle.pop() if self._idle else NeighborSampler(self._graph, **self._sampling)  # type: ignore[arg-type]
        try:
            for step, seeds in self._slices(epoch):
                if len(seeds) == self._size or not self._drop_last:
                    yield self._batch(sampler, seeds, DrawKey(self._seed, epoch, step))
        finally:
            self._idle.append(sampler)

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
        one = len(ids) == 1
        return MiniBatch(
            views,
            x.get(self._kind) if one else x,
            None if y is None else y[seeds],
            seeds,
            ids[self._kind] if one else ids,
            key,
        )


class FeatureGather:
    """Rows of features by store id; half precision becomes float32. Pages of large files do not stay in memory."""

    def __init__(self, x: Tensor) -> None:
        self._x = x
        self._dtype = torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype
        self._gather = gather_by_window if is_paged(x) else gather

    def __call__(self, ids: Tensor, *, out: Tensor | None = None) -> Tensor:
        return self._gather(self._x, ids, self._dtype, out=out)


def prepare_backward(views: list[LocalView]) -> None:
    """Turn the blocks whose inputs have gradients round, here rather than in the backward pass."""
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
        raise ConfigError(f"there are no nodes of type {kind!r}: choose one of {', '.join(graph.nodes)}")
    table = graph.nodes[kind]
    if nodes is None:
        return kind, torch.arange(table.count)
    if isinstance(nodes, str):
        if nodes not in SPLITS:
            raise ConfigError(f"input_nodes is {', '.join(SPLITS)}, a mask or store ids; found {nodes!r}")
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

"""Node classification or regression as a task: an item is the store id of a labelled node."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from gnnfleet.comm.collectives import all_gather_rows, sum_over_ranks
from gnnfleet.comm.world import World
from gnnfleet.graph.graph import Nodes
from gnnfleet.graph.ids import Ids
from gnnfleet.graph.views.local import LocalView
from gnnfleet.graph.views.row_index import RowIndex
from gnnfleet.nn.heads import NodeHead
from gnnfleet.nn.metrics import MetricState
from gnnfleet.ops.draws import DrawKey
from gnnfleet.tasks.base import PER_CLASS, SPLITS, Batch, RowLookup, Scores


@dataclass(frozen=True, eq=False)
class NodeTask:
    """Labelled nodes; an item is a store id. ``nodes`` has exactly the split that is trained on.

    A sharded task has the nodes ``ids`` of one rank.
    """

    target: str
    nodes: Nodes
    head: NodeHead
    ids: Tensor | None = None  # [n] store ids of the rows of ``nodes``; None: 0 to n − 1
    world: World = field(default_factory=World)
    whole: NodeTask | None = None  # of a sharded task: the task of all ranks

    masks_edges, reads_only_local_rows = False, True

    @property
    def metric(self) -> str:
        return self.head.name

    @cached_property
    def _items(self) -> dict[str, Tensor]:
        labelled = self.head.is_labelled(self._y)
        items = {name: (self.nodes.mask(name) & labelled).nonzero()[:, 0] for name in SPLITS}
        return items if self.ids is None else {name: self.ids[rows].sort().values for name, rows in items.items()}

    @cached_property
    def _y(self) -> Tensor:
        assert self.nodes.y is not None, "checked when the run was built"
        y = self.nodes.y
        return y.long() if y.dim() == 1 and not y.is_floating_point() else y

    @cached_property
    def _row_index(self) -> RowIndex:
        assert self.ids is not None
        return RowIndex(self.ids)

    def _labels(self, items: Tensor) -> Tensor:
        return self._y[items if self.ids is None else self._row_index.rows(items)]

    def items(self, split: str) -> Tensor:
        return self._items[split]

    def reachable_mask(self) -> Tensor | None:
        return self.nodes.mask("train") & self.head.is_labelled(self._y)

    def train_items(self, seed: int, epoch: int) -> Tensor:
        return self._items["train"]

    def batch(self, items: Tensor, key: DrawKey, global_items: Tensor | None = None) -> Batch:
        return Batch(items, {self.target: items}, key, items if global_items is None else global_items)

    def owners_of_items(self, items: Tensor) -> Iterator[tuple[str, Tensor | slice, Tensor]]:
        yield self.target, slice(None), items

    def mask_edges(self, view: LocalView, batch: Batch) -> LocalView:
        return view

    def loss(self, lookup: RowLookup, batch: Batch) -> Tensor:
        return self.head.loss(lookup(self.target, batch.items), self._labels(batch.items)) * self._scale(batch)

    def _scale(self, batch: Batch) -> float:
        """Items per class weight of a batch: strategies divide by items, a weighted mean by the sum of weights."""
        if not self.head.class_weights or self.head.multilabel:
            return 1.0
        if self.whole is not None and batch.global_items is batch.items:  # this rank's items of a full batch
            return self.whole._train_scale
        return (self.whole or self)._scale_of(batch.global_items)

    @cached_property
    def _train_scale(self) -> float:
        return self._scale_of(self._items["train"])

    def _scale_of(self, items: Tensor) -> float:
        return len(items) / (self.head.total_weight(self._labels(items)) or 1.0)

    def measure(self, lookup: RowLookup, split: str) -> Scores:
        items = self._items[split]
        logits, y = lookup(self.target, items), self._labels(items)
        state = self.head.metric(logits, y)
        sums = torch.tensor(
            [float(self.head.loss(logits, y)), self.head.total_weight(y), len(items)], dtype=torch.float64
        )
        sums = sum_over_ranks(self.world, torch.cat([sums, state.rows, state.counts.flatten()]))
        score, truth = self._all_gather(state.score), self._all_gather(state.truth)
        total = MetricState(sums[3:5], sums[5:].view_as(state.counts), score, truth)
        loss, weight, count = sums[:3].tolist()
        scores = {"loss": loss / (weight or 1), "count": count, **self.head.compute(total)}
        return {**scores, PER_CLASS: report} if (report := self.head.report(total)) else scores

    def constant(self, split: str) -> Scores:
        """Scores that the best constant prediction for the training labels has on a split."""
        logits = self.head.constant(self._labels(self._items["train"]))
        return self.measure(lambda kind, ids: logits.expand(len(ids), -1), split)

    def _all_gather(self, rows: Tensor | None) -> Tensor | None:
        return None if rows is None else torch.cat(all_gather_rows(self.world, rows))

    def shard(self, world: World, owned_ids: Mapping[str, Tensor]) -> NodeTask:
        assert self.ids is None, "sharded already"
        ids, nodes = owned_ids[self.target], self.nodes
        y = None if nodes.y is None else nodes.y[ids]
        split = None if nodes.split is None else nodes.split[:, ids]
        owned_nodes = replace(nodes, count=len(ids), x=None, y=y, split=split, ids=Ids(len(ids)))
        return replace(self, nodes=owned_nodes, ids=ids, world=world, whole=self)

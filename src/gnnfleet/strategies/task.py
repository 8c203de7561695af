"""What is learnt, apart from how the graph is walked: which rows a step reads, the loss on them, the metric.

A task deals in items: labelled nodes, or target edges. A strategy picks the items of a step, computes the rows their
batch asks for and hands over a way to take them; losses are sums, whoever knows the count of all ranks divides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from torch import Tensor

from gnnfleet.graph.graph import Nodes
from gnnfleet.graph.local import LocalView
from gnnfleet.nn.heads import NodeHead
from gnnfleet.ops.draws import DrawKey

Take = Callable[[str, Tensor], Tensor]
"""(node type, [n] store ids) → [n, C] rows of the model's output."""

SPLITS = ("train", "val", "test")


@dataclass(frozen=True, eq=False)
class Batch:
    """The items of a step. ``seeds`` are the rows of output that the loss reads: {node type: ascending store ids}."""

    items: Tensor
    seeds: Mapping[str, Tensor]
    key: DrawKey


class Task(Protocol):
    """One thing to learn."""

    @property
    def metric(self) -> str:
        """The name of what is measured; higher is better."""

    @property
    def target(self) -> str:
        """The node type whose rows are predicted."""

    def items(self, split: str) -> Tensor:
        """[n] int64, ascending."""

    def reach(self) -> Tensor | None:
        """[N] bool: rows of the target that the training loss may ever read; None for all of every type."""

    def trained(self, seed: int, epoch: int) -> Tensor:
        """[n] int64, ascending: the training items of an epoch."""

    def batch(self, items: Tensor, key: DrawKey) -> Batch:
        """What a step on some training items reads."""

    @property
    def hides(self) -> bool:
        """Whether ``hide`` ever hides anything."""

    def hide(self, view: LocalView, batch: Batch) -> LocalView:
        """The view or block without the edges that would give the answers away; the same object where none does."""

    def loss(self, take: Take, batch: Batch) -> Tensor:
        """The sum over the batch's items."""

    def measure(self, take: Take, split: str) -> dict[str, float]:
        """{"loss", "count", the metric} of exact rows."""


@dataclass(frozen=True, eq=False)
class NodeTask:
    """Classes of labelled nodes; an item is the store id of one. ``nodes`` has exactly the split that is trained on."""

    target: str
    nodes: Nodes
    head: NodeHead

    @property
    def metric(self) -> str:
        return self.head.name

    @cached_property
    def _items(self) -> dict[str, Tensor]:
        labelled = self.head.labelled(self._y)
        return {name: (self.nodes.mask(name) & labelled).nonzero()[:, 0] for name in SPLITS}

    @cached_property
    def _y(self) -> Tensor:
        assert self.nodes.y is not None, "checked when the run was built"
        return self.nodes.y.long() if self.nodes.y.dim() == 1 else self.nodes.y

    def items(self, split: str) -> Tensor:
        return self._items[split]

    def reach(self) -> Tensor | None:
        return self.nodes.mask("train") & self.head.labelled(self._y)

    def trained(self, seed: int, epoch: int) -> Tensor:
        return self._items["train"]

    def batch(self, items: Tensor, key: DrawKey) -> Batch:
        return Batch(items, {self.target: items}, key)

    @property
    def hides(self) -> bool:
        return False

    def hide(self, view: LocalView, batch: Batch) -> LocalView:
        return view

    def loss(self, take: Take, batch: Batch) -> Tensor:
        return self.head.loss(take(self.target, batch.items), self._y[batch.items])

    def measure(self, take: Take, split: str) -> dict[str, float]:
        items = self._items[split]
        logits, y = take(self.target, items), self._y[items]
        loss = float(self.head.loss(logits, y)) / max(len(items), 1)
        return {"loss": loss, "count": float(len(items)), self.metric: self.head.value(self.head.metric(logits, y))}

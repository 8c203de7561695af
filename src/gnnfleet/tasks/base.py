"""Interface of a learning task: the rows a step reads, its loss and its metric, independent of distribution.

A task has items: labelled nodes or target edges. A strategy selects the items of a step, computes the rows that their
batch needs and passes a row lookup. Losses are sums; the strategy divides by the number of items on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from gnnfleet.comm.world import World
from gnnfleet.graph.views.local import LocalView
from gnnfleet.ops.draws import DrawKey

RowLookup = Callable[[str, Tensor], Tensor]
"""(node type, [n] store ids) → [n, C] rows of the model's output."""

SPLITS = ("train", "val", "test")

Scores = dict[str, Any]
"""{"loss", "count", metrics by name}; of classes also ``PER_CLASS``: lists of measures and the confusion matrix."""

PER_CLASS = "per_class"


@dataclass(frozen=True, eq=False)
class Batch:
    """Items of a step. The loss reads the output rows ``seeds``: {node type: ascending store ids}."""

    items: Tensor
    seeds: Mapping[str, Tensor]
    key: DrawKey
    global_items: Tensor  # items of all ranks


class Task(Protocol):
    """A prediction target with its loss and metric."""

    @property
    def metric(self) -> str:
        """Name of the metric that decides which epoch is best."""

    @property
    def target(self) -> str:
        """Node type whose rows are predicted."""

    def items(self, split: str) -> Tensor:
        """[n] int64, ascending."""

    def reachable_mask(self) -> Tensor | None:
        """[N] bool: rows of the target that the training loss may read; None: all rows of all types."""

    def train_items(self, seed: int, epoch: int) -> Tensor:
        """[n] int64, ascending: training items of an epoch."""

    def batch(self, items: Tensor, key: DrawKey, global_items: Tensor | None = None) -> Batch:
        """Build the batch of some training items; ``global_items`` are those of all ranks, by default ``items``."""

    def owners_of_items(self, items: Tensor) -> Iterator[tuple[str, Tensor | slice, Tensor]]:
        """Yield (node type, selected items, [n] store ids of a node for each); its owner processes the item."""

    @property
    def masks_edges(self) -> bool:
        """True if ``mask_edges`` may remove edges."""

    def mask_edges(self, view: LocalView, batch: Batch) -> LocalView:
        """Remove edges that would reveal the answers from a view or block; without any, return the same object."""

    def loss(self, lookup: RowLookup, batch: Batch) -> Tensor:
        """Sum of the losses of the batch's items."""

    def measure(self, lookup: RowLookup, split: str) -> Scores:
        """Collective. The scores of a split, from exact rows, over all ranks."""

    @property
    def reads_only_local_rows(self) -> bool:
        """True if the items of a rank read rows of its own nodes only."""

    def shard(self, world: World, owned_ids: Mapping[str, Tensor]) -> Task:
        """Restrict the task to this rank's items; ``owned_ids`` are the store ids of its nodes by type.

        ``loss`` of the result is collective too, unless the task ``reads_only_local_rows``.
        """

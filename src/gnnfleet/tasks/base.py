"""What is learnt, apart from how the graph is walked: which rows a step reads, the loss on them, the metric.

A task deals in items: labelled nodes, or target edges. A strategy picks the items of a step, computes the rows their
batch asks for and hands over a way to take them; losses are sums, whoever knows the count of all ranks divides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from gnnfleet.comm.world import World
from gnnfleet.graph.views.local import LocalView
from gnnfleet.ops.draws import DrawKey

RowLookup = Callable[[str, Tensor], Tensor]
"""(node type, [n] store ids) → [n, C] rows of the model's output."""

SPLITS = ("train", "val", "test")


@dataclass(frozen=True, eq=False)
class Batch:
    """The items of a step. ``seeds`` are the rows of output that the loss reads: {node type: ascending store ids}."""

    items: Tensor
    seeds: Mapping[str, Tensor]
    key: DrawKey
    global_items: Tensor  # the items of all ranks


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

    def reachable_mask(self) -> Tensor | None:
        """[N] bool: rows of the target that the training loss may ever read; None for all of every type."""

    def train_items(self, seed: int, epoch: int) -> Tensor:
        """[n] int64, ascending: the training items of an epoch."""

    def batch(self, items: Tensor, key: DrawKey, global_items: Tensor | None = None) -> Batch:
        """What a step on some training items reads; ``every`` are those of all ranks, where this is one of several."""

    def owners_of_items(self, items: Tensor) -> Iterator[tuple[str, Tensor | slice, Tensor]]:
        """(node type, which training items, [n] store id of a node for each): whose owner works on the items."""

    @property
    def masks_edges(self) -> bool:
        """Whether ``mask_edges`` ever hides anything."""

    def mask_edges(self, view: LocalView, batch: Batch) -> LocalView:
        """The view or block without the edges that would give the answers away; the same object where none does."""

    def loss(self, lookup: RowLookup, batch: Batch) -> Tensor:
        """The sum over the batch's items."""

    def measure(self, lookup: RowLookup, split: str) -> dict[str, float]:
        """{"loss", "count", the metric} of exact rows, of all ranks together."""

    @property
    def reads_only_local_rows(self) -> bool:
        """Whether a rank's items read rows of its own nodes only."""

    def shard(self, world: World, own: Mapping[str, Tensor]) -> Task:
        """This rank's share of the items; ``own`` are the store ids of its nodes by type. ``measure`` is then called
        by all ranks together, and so is ``loss`` unless it ``reads_only_local_rows``."""

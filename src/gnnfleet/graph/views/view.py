"""GraphView: all a layer knows of a graph. A layer never knows a rank; it gets a view and calls a verb on it.

In every view the first ``num_dst`` rows of x are the destinations. ``LocalView`` serves one process: the whole graph,
an induced subgraph, a sampled block. With ``loops`` a verb works on the edges plus one from every destination to
itself, in place of any the store has; those are never stored. On a sampled block, sums over neighbours are scaled up
to all of them, so that a layer gives on average what it gives with every neighbour.
N_src source rows, N_dst destination rows, E edges, F features, H heads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from gnnfleet.graph.graph import EdgeType
from gnnfleet.ops.draws import DrawKey
from gnnfleet.ops.message import Message


class GraphView(Protocol):
    """The verbs. x is [N_src, …]; results are [N_dst, …]."""

    @property
    def training(self) -> bool:
        """Whether dropout drops and batch norm uses the batch's statistics."""

    def with_step(
        self, *, key: DrawKey | None = None, layer: int | None = None, training: bool | None = None
    ) -> GraphView:
        """The same edges for another step, layer or mode."""

    def for_type(self, kind: str) -> GraphView:
        """The nodes of one type without edges: counts, ids, dropout and sums of that type."""

    @property
    def node_types(self) -> tuple[str, ...]: ...

    @property
    def num_src(self) -> int: ...

    @property
    def num_dst(self) -> int: ...

    @property
    def has_many_sources(self) -> bool:
        """Whether there are far more sources than destinations, as in sampled blocks; the same on all ranks."""

    @property
    def node_ids(self) -> Tensor:
        """[N_src] int64 store ids of the rows."""

    @property
    def edge_ids(self) -> Tensor:
        """[E] int64 store edge ids."""

    @property
    def weight(self) -> Tensor | None:
        """[E] the store's edge weights."""

    @property
    def attr(self) -> Tensor | None:
        """[E, F] the store's edge features."""

    @property
    def in_degree(self) -> Tensor:
        """[N_dst] edges in this view."""

    def graph_degree(self, *, weighted: bool = False) -> Tensor:
        """[N_src] float32: in-edges in the whole graph, self-loops not counted; or the sum of their weights."""

    def aggregate(
        self, x: Tensor, *, reduce: str = "sum", weight: Tensor | None = None, self_loops: bool = False
    ) -> Tensor:
        """Linear or max aggregation over in-edges; a self-loop weighs 1."""

    def aggregate_with_self(self, x: Tensor, *, reduce: str = "sum") -> tuple[Tensor, Tensor]:
        """(``aggregate(x)``, the destinations' own rows of x): the same as apart, with one pass for both gradients."""

    def aggregate_relations(
        self, x: Mapping[str, Tensor], *, reduce: str = "sum", into: str | None = None
    ) -> dict[EdgeType, Tensor]:
        """Every edge type at once, or those into one node type: {edge type: [N_dst of its destination type, F]}."""

    def attend(
        self,
        value: Tensor,
        *,
        src: Tensor,
        dst: Tensor,
        score: str = "add",
        vector: Tensor | None = None,
        edge: Tensor | None = None,
        heads: int | None = None,
        slope: float = 0.2,
        dropout: float = 0.0,
        self_loops: bool = False,
    ) -> Tensor:
        """Edge-softmax attention; see ``ops.attend``. The edge term of a self-loop is the mean of its row's."""

    def propagate(
        self,
        message: Message,
        *,
        src: Mapping[str, Tensor] | None = None,
        dst: Mapping[str, Tensor] | None = None,
        edge: Mapping[str, Tensor] | None = None,
        params: Sequence[Tensor] = (),
        reduce: str = "sum",
    ) -> Tensor:
        """Any differentiable message; see ``ops.propagate``."""

    def num_dst_of(self, kind: str) -> int:
        """Destinations of one node type."""

    def dropout(self, x: Tensor, p: float, *, place: int = 0, kind: str | None = None) -> Tensor:
        """Dropout by key on the rows of a node type; ``place`` tells several in one layer apart."""

    def gather_rows(self, x: Tensor, store_ids: Tensor) -> Tensor:
        """[n, …] rows of x by store id, wherever they live; ids [n] in any order, repeated or not. Differentiable.

        x has a row for every source, or for every destination. Raises InputError for a node that has none.
        """

    def sum_over_nodes(self, t: Tensor) -> Tensor:
        """The sum of t over everything that holds part of the nodes; differentiable."""


MANY_SOURCES = 2
"""From how many sources for each destination there are many."""


def first_rows(x: Tensor, count: int) -> Tensor:
    """``x[:count]``; x itself when that is all of it, since the backward of a slice fills and copies a whole tensor."""
    return x if x.shape[0] == count else x[:count]

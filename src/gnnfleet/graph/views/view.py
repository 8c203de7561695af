"""GraphView: the interface between a layer and a graph. A layer calls verbs of a view and never knows a rank.

In every view the first ``num_dst`` rows of x are the destinations. ``LocalView`` serves one process: the whole graph
or a sampled block. With ``self_loops`` a verb uses exactly one self-loop per destination, which
replaces those of the store. On a sampled block, sums over neighbours are scaled to estimate, without bias, the sum over
all neighbours.
N_src source rows, N_dst destination rows, E edges, F features, H heads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from gnnfleet.graph.graph import EdgeType
from gnnfleet.graph.views.edge_list import EdgeList
from gnnfleet.ops.draws import DrawKey
from gnnfleet.ops.message import Message

K = TypeVar("K", EdgeType, str)


class GraphView(Protocol):
    """The verbs. x is [N_src, …]; results are [N_dst, …]."""

    @property
    def training(self) -> bool:
        """True if dropout is active and batch norm uses the statistics of the batch."""

    def with_step(
        self, *, key: DrawKey | None = None, layer: int | None = None, training: bool | None = None
    ) -> GraphView:
        """The same edges for another step, layer or mode."""

    def for_type(self, node_type: str) -> GraphView:
        """The nodes of one type without edges, for counts, ids, dropout and sums."""

    @property
    def node_types(self) -> tuple[str, ...]: ...

    @property
    def edge_types(self) -> tuple[EdgeType, ...]: ...

    @property
    def num_src(self) -> int: ...

    @property
    def num_dst(self) -> int: ...

    @property
    def has_many_sources(self) -> bool:
        """True if there are over ``MANY_SOURCES`` sources per destination, as in sampled blocks; equal on all ranks."""

    @property
    def node_ids(self) -> Tensor:
        """[N_src] int64 store ids."""

    @property
    def edge_ids(self) -> Tensor:
        """[E] int64 store edge ids."""

    @property
    def weight(self) -> Tensor | None:
        """[E] edge weights."""

    @property
    def attr(self) -> Tensor | None:
        """[E, F] edge features."""

    @property
    def in_degree(self) -> Tensor:
        """[N_dst] in-edges in this view."""

    def graph_degree(self, *, weighted: bool = False) -> Tensor:
        """[N_src] number of in-edges in the whole graph, or the sum of their weights, without self-loops."""

    def loop_weight(self, weight: Tensor) -> Tensor:
        """[N_src] the weight of the last self-loop of every node in the whole graph, NaN for nodes without one.

        Weights [E] other than the store's are those of the edges of this view; the result is differentiable in them.
        """

    def aggregate(
        self, x: Tensor, *, reduce: str = "sum", weight: Tensor | None = None, self_loops: bool = False
    ) -> Tensor:
        """Linear or max aggregation over in-edges; self-loops have weight 1."""

    def aggregate_with_self(self, x: Tensor, *, reduce: str = "sum") -> tuple[Tensor, Tensor]:
        """(``aggregate(x)``, ``x[:num_dst]``), with one backward pass for both."""

    def aggregate_relations(
        self, x: Mapping[str, Tensor], *, reduce: str = "sum", into: str | None = None, weighted: bool = False
    ) -> dict[EdgeType, Tensor]:
        """Aggregate every edge type, or those into one node type: {edge type: [N_dst of its destinations, F]}.

        With ``weighted`` a sum is Σ w x and a mean Σ w x / Σ |w|, with the store's weights of the types that have some.
        """

    def relative_weight(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """[E] each weight over the mean magnitude of those into its destination; 0 where all are 0.

        With it, ``reduce="mean"`` gives Σ w x / Σ |w|, also on sampled blocks. Differentiable in the weights.
        """

    def mean_attr(self, attr: Tensor, dtype: torch.dtype, weight: Tensor | None = None) -> Tensor:
        """[N_dst, F] mean of ``attr`` [E, F] over in-edges, times ``weight`` [E]. Needs no exchange; cached."""

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
        mask_id: int = 0,
        self_loops: bool = False,
    ) -> Tensor:
        """Edge-softmax attention; see ``ops.attend``. The edge term of a self-loop is the mean over its row."""

    def attend_relations(
        self,
        value: Mapping[EdgeType, Tensor],
        *,
        src: Mapping[EdgeType, Tensor],
        dst: Mapping[K, Tensor],
        heads: int,
        score: str = "add",
        vector: Tensor | None = None,
        slope: float = 0.2,
        dropout: float = 0.0,
        mask_id: int = 0,
    ) -> dict[K, Tensor]:
        """Attention over several edge types in one exchange; rows are [N, ·], results [N_dst, H·C].

        With ``dst`` by edge type, each has a softmax of its own. With ``dst`` by node type, a softmax runs over all
        edges of these types into a node.
        """

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

    def dropout(self, x: Tensor, p: float, *, mask_id: int = 0, edge_ids: Tensor | None = None) -> Tensor:
        """Dropout drawn by key and store id, or by ``edge_ids``; ``mask_id`` distinguishes the masks of one layer."""

    def edge_list(self, edge_type: EdgeType | None = None) -> EdgeList:
        """The edges of a type, by default the only one, as index tensors for code that gathers rows by them."""

    def gather_rows(self, x: Tensor, store_ids: Tensor) -> Tensor:
        """[n, …] rows of x by store id, on whatever rank they are; ids may repeat. Differentiable.

        x has a row for every source, or for every destination. Raises InputError for a node without a row.
        """

    def sum_over_nodes(self, t: Tensor) -> Tensor:
        """The sum of t over all ranks that hold part of the nodes; differentiable."""


MANY_SOURCES = 2
"""Sources per destination above which ``has_many_sources`` is true."""


def first_rows(x: Tensor, count: int) -> Tensor:
    """``x[:count]``, or x itself if it has no more rows: the backward of a slice copies a whole tensor."""
    return x if x.shape[0] == count else x[:count]

"""GraphView: the interface between a layer and a graph. A layer calls verbs of a view and never knows a rank.

In every view the first ``num_dst`` rows of x are the destinations. ``LocalView`` serves one process: the whole graph
or a sampled block. With ``self_loops`` a verb uses exactly one self-loop per destination, which
replaces those of the store. On a sampled block, sums over neighbours are scaled to estimate, without bias, the sum over
all neighbours.
N_src source rows, N_dst destination rows, E edges, F features, H heads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, Self, TypeVar, cast

import torch
from torch import Tensor

from gnnfleet.errors import ConfigError
from gnnfleet.graph.graph import EdgeType
from gnnfleet.graph.views import view_base
from gnnfleet.graph.views.edge_list import EdgeList
from gnnfleet.graph.views.view_base import LOOPS, EdgeTables, NodeRows
from gnnfleet.ops import draws
from gnnfleet.ops.draws import DrawKey, Purpose
from gnnfleet.ops.message import Message

K = TypeVar("K", EdgeType, str)


class GraphView(Protocol):
    """The verbs. x is [N_src, …]; results are [N_dst, …]. Views are frozen dataclasses with these fields."""

    nodes: Mapping[str, NodeRows]
    relations: Mapping[EdgeType, EdgeTables]
    key: DrawKey
    layer: int
    training: bool
    """True if dropout is active and batch norm uses the statistics of the batch."""

    def with_step(self, *, key: DrawKey | None = None, layer: int | None = None, training: bool | None = None) -> Self:
        """The same edges for another step, layer or mode."""
        changes = {"key": key, "layer": layer, "training": training}
        return self._with(**{name: value for name, value in changes.items() if value is not None})

    def for_type(self, node_type: str) -> Self:
        """The nodes of one type without edges, for counts, ids, dropout and sums."""
        return self._with(nodes={node_type: self.nodes[node_type]}, relations={})

    def _with(self, **changes: Any) -> Self:
        return cast("Self", replace(cast("Any", self), **changes))

    @property
    def node_types(self) -> tuple[str, ...]:
        return tuple(self.nodes)

    @property
    def edge_types(self) -> tuple[EdgeType, ...]:
        return tuple(self.relations)

    @property
    def _kind(self) -> str:
        if len(self.nodes) != 1:
            raise ConfigError(f"this layer works on one node type; the graph has {', '.join(self.nodes)}")
        return next(iter(self.nodes))

    @property
    def _rows(self) -> NodeRows:
        return self.nodes[self._kind]

    @property
    def _edge_type(self) -> EdgeType:
        if len(self.relations) != 1:
            count = len(self.relations)
            raise ConfigError(f"this layer works on one edge type; the graph has {count}: use rgcn or a hetero- model")
        return next(iter(self.relations))

    @property
    def _edges(self) -> EdgeTables:
        return self.relations[self._edge_type]

    @property
    def num_src(self) -> int:
        return len(self.node_ids)

    @property
    def num_dst(self) -> int:
        return self._rows.num_dst

    @property
    def has_many_sources(self) -> bool:
        """True if there are over ``MANY_SOURCES`` sources per destination, as in sampled blocks; equal on all ranks."""

    @property
    def node_ids(self) -> Tensor:
        """[N_src] int64 store ids."""
        return self._rows.node_ids

    @property
    def edge_ids(self) -> Tensor:
        """[E] int64 store edge ids."""
        return self._edges.edge_ids

    @property
    def weight(self) -> Tensor | None:
        """[E] edge weights."""
        return self._edges.weight

    @property
    def attr(self) -> Tensor | None:
        """[E, F] edge features."""
        return self._edges.attr

    @property
    def in_degree(self) -> Tensor:
        """[N_dst] in-edges in this view."""

    def graph_degree(self, *, weighted: bool = False) -> Tensor:
        """[N_src] number of in-edges in the whole graph, or the sum of their weights, without self-loops."""
        return self._rows.degree(weighted)

    def loop_weight(self, weight: Tensor) -> Tensor:
        """[N_src] the weight of the last self-loop of every node in the whole graph, NaN for nodes without one.

        Weights [E] other than the store's are those of the edges of this view; the result is differentiable in them.
        """
        if weight is self.weight and not weight.requires_grad:
            return self._rows.degree(LOOPS)
        rows, positions = self._edges.last_loops
        return weight.new_full((self.num_src,), torch.nan).index_put((rows,), weight[positions])

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

    def combine_relations(
        self, x: Tensor, coefficient: Tensor, *, reduce: str = "sum", weighted: bool = False
    ) -> Tensor:
        """[N_dst, F]: Σ_r coefficient[r] · (sum or mean over the edges of type r), in the order of ``edge_types``."""

    def relative_weight(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """[E] each weight over the mean magnitude of those into its destination; 0 where all are 0.

        With it, ``reduce="mean"`` gives Σ w x / Σ |w|, also on sampled blocks. Differentiable in the weights.
        """
        return view_base.compute_once(self._edges, "relative", (weight, dtype), view_base.relative_weight)

    def mean_attr(self, attr: Tensor, dtype: torch.dtype, weight: Tensor | None = None) -> Tensor:
        """[N_dst, F] mean of ``attr`` [E, F] over in-edges, times ``weight`` [E]. Needs no exchange; cached."""
        return view_base.compute_once(self._edges, "mean", (attr, weight, dtype), view_base.mean_attr)

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
        score: str = "add",
        slope: float = 0.2,
        dropout: float = 0.0,
        mask_id: int = 0,
        **options: Any,
    ) -> dict[K, Tensor]:
        """Attention over several edge types in one exchange; rows are [N, ·], results [N_dst, H·C]. See ``attend``.

        With ``dst`` by edge type, each has a softmax of its own. With ``dst`` by node type, a softmax runs over all
        edges of these types into a node.
        """
        num_dst = {key: self.nodes[key if isinstance(key, str) else key.dst].num_dst for key in dst}
        values = torch.cat(list(value.values()))
        out = self._attend_stacked(
            tuple(value),
            num_dst,
            values,
            src=values if src is value else torch.cat(list(src.values())),
            dst=torch.cat([rows[: num_dst[key]] for key, rows in dst.items()]),
            score=score,
            slope=slope,
            dropout=dropout if self.training else 0.0,
            draws=self.key.draws(Purpose.ATTENTION, self.layer, relation=mask_id),
            **options,
        )
        return dict(zip(dst, torch.split(out, list(num_dst.values())), strict=True))

    def _attend_stacked(
        self, kinds: tuple[EdgeType, ...], num_dst: Mapping[Any, int], value: Tensor, **inputs: Any
    ) -> Tensor:
        """Attention over the edges of ``kinds``: source rows are stacked by edge type, destinations by ``num_dst``."""

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
        if not self.training or not p:
            return x
        purpose = Purpose.DROPOUT if edge_ids is None else Purpose.ATTENTION
        ids = self.node_ids[: x.shape[0]] if edge_ids is None else edge_ids
        return draws.dropout(x, p, ids=ids, draws=self.key.draws(purpose, self.layer, relation=mask_id))

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

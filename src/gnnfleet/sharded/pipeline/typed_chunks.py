"""Chunks of several node types. All types are rows of one table, numbered as in ``Graph.node_offsets``.

Partitions, halos and histories see a graph of one node type, whose relations lead from rows of a type to rows of
another. A layer sees rows by type: a verb joins them before the exchange and selects the results of each type.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from gnnfleet.errors import ConfigError
from gnnfleet.graph.graph import NODE, EdgeType, Graph, Nodes
from gnnfleet.graph.views.edge_list import EdgeList
from gnnfleet.graph.views.local import graph_degrees
from gnnfleet.graph.views.view_base import NodeRows, selected_degrees
from gnnfleet.sharded.full_batch.partition_blocks import RelationBlocks
from gnnfleet.sharded.pipeline.chunked_partition import Chunk
from gnnfleet.sharded.pipeline.history import ChunkView, HistoryStore


def join_node_types(graph: Graph) -> Graph:
    """The same edges within one node type; a graph of one type is returned as it is. Store edge ids do not change."""
    if len(graph.nodes) == 1:
        return graph
    offsets, edges = graph.node_offsets, {}
    for kind, table in graph.edges.items():
        after = graph.num_nodes - offsets[kind.dst] - graph.nodes[kind.dst].count
        ends = [table.indptr.new_zeros(offsets[kind.dst]), table.indptr, table.indptr[-1:].expand(after)]
        joined = replace(table, indptr=torch.cat(ends), src=table.src + offsets[kind.src], links={})
        edges[EdgeType(NODE, str(kind), NODE)] = joined
    return Graph.of({NODE: Nodes(count=graph.num_nodes)}, edges)


def open_chunk_view(graph: Graph, chunk: Chunk, history: HistoryStore) -> ChunkView:
    """The view of a chunk of ``join_node_types(graph)``, with the node types of ``graph``."""
    view = ChunkView.open(chunk, history)
    return view if len(graph.nodes) == 1 else TypedChunkView.of(view, graph)


@dataclass(frozen=True, eq=False, kw_only=True)
class TypedChunkView(ChunkView):
    """A chunk whose rows have several types; ``blocks`` are those of all types together."""

    rows: Mapping[str, Tensor]  # [·] int64: the rows of each type, ascending

    @classmethod
    def of(cls, view: ChunkView, graph: Graph) -> TypedChunkView:
        rows, nodes, ids = {}, {}, view.node_ids
        for kind, start in graph.node_offsets.items():
            rows[kind] = ((ids >= start) & (ids < start + graph.nodes[kind].count)).nonzero()[:, 0]
            type_ids = ids[rows[kind]] - start
            nodes[kind] = NodeRows(type_ids, len(type_ids), selected_degrees(graph_degrees(graph, kind), type_ids))
        relations = dict(zip(graph.edges, view.relations.values(), strict=True))
        return cls(**_fields(view, nodes=nodes, relations=relations), rows=rows)

    @property
    def num_src(self) -> int:
        return self.chunk.rows

    @property
    def num_dst(self) -> int:
        return self.chunk.rows

    def for_type(self, node_type: str) -> ChunkView:  # type: ignore[override]
        return ChunkView(**_fields(self, nodes={node_type: self.nodes[node_type]}, relations={}))

    def join(self, x: Mapping[str, Tensor]) -> Tensor:
        """[r, F] the rows of all types; zeros for types that x lacks."""
        values = torch.cat(list(x.values()))
        rows = torch.cat([self.rows[kind] for kind in x])
        return values.new_zeros(self.chunk.rows, *values.shape[1:]).index_copy(0, rows, values)

    def split(self, table: Tensor) -> dict[str, Tensor]:
        """The rows of each type."""
        return {kind: table[rows] for kind, rows in self.rows.items()}

    def _joined(self, relations: Mapping[EdgeType, RelationBlocks]) -> ChunkView:
        by_kind = {edges.kind: edges for edges in relations.values()}
        return ChunkView(**_fields(self, nodes=self.blocks.nodes, relations=by_kind))

    def aggregate_relations(
        self, x: Mapping[str, Tensor], *, reduce: str = "sum", into: str | None = None, weighted: bool = False
    ) -> dict[EdgeType, Tensor]:
        relations = {kind: edges for kind, edges in self.relations.items() if into in (None, kind.dst)}
        if not relations:
            return {}
        sources = {kind.src for kind in relations}
        table = self.join({kind: rows for kind, rows in x.items() if kind in sources})
        outs = self._joined(relations).aggregate_relations({NODE: table}, reduce=reduce, weighted=weighted)
        return {kind: outs[edges.kind][self.rows[kind.dst]] for kind, edges in relations.items()}

    def attend_relations(
        self,
        value: Mapping[EdgeType, Tensor],
        *,
        src: Mapping[EdgeType, Tensor],
        dst: Mapping[Any, Tensor],
        **options: Any,
    ) -> dict[Any, Tensor]:
        relations = {kind: self.relations[kind] for kind in value}
        by_type = all(isinstance(key, str) for key in dst)

        def joined(x: Mapping[EdgeType, Tensor]) -> dict[EdgeType, Tensor]:
            return {edges.kind: self.join({kind.src: x[kind]}) for kind, edges in relations.items()}

        values = joined(value)
        keys = values if src is value else joined(src)
        if by_type:
            ends: dict[Any, Tensor] = {NODE: self.join(dst)}
        else:
            ends = {relations[kind].kind: self.join({kind.dst: rows}) for kind, rows in dst.items()}
        outs = self._joined(relations).attend_relations(values, src=keys, dst=ends, **options)
        if by_type:
            return {kind: outs[NODE][self.rows[kind]] for kind in dst}
        return {kind: outs[relations[kind].kind][self.rows[kind.dst]] for kind in dst}

    def edge_list(self, edge_type: EdgeType | None = None) -> EdgeList:
        raise ConfigError("strategy pipe has no edge lists of several node types: use sar")


def _fields(view: ChunkView, **changes: Any) -> dict[str, Any]:
    return {field.name: getattr(view, field.name) for field in fields(ChunkView)} | changes

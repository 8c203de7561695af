"""Blocks with full neighbourhoods: some destination rows of a view and all their sources.

The rows of a block are its destinations, then the other sources without repeats. A layer computes the same rows in a
block as in the whole view. No array has the size of the graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gnnfleet.graph.views.local import LocalEdges, LocalView
from gnnfleet.graph.views.view_base import NodeRows, selected_degrees
from gnnfleet.ops.csr import CSR

RowSpans = Mapping[str, tuple[int, int]]
"""{node type: (first row, end)}."""


@dataclass(frozen=True, eq=False)
class Block:
    """A view of the block, and per node type the rows of the parent view it reads ([n] int64, destinations first)."""

    view: LocalView
    rows: Mapping[str, Tensor]


def full_block(view: LocalView, spans: RowSpans) -> Block:
    """The destinations in ``spans`` with all their in-edges."""
    rows: dict[str, Tensor] = {}
    others: dict[str, Tensor] = {}
    for node_type in view.nodes:
        low, high = spans[node_type]
        columns = [
            _columns(relation, spans[edge_type.dst])
            for edge_type, relation in view.relations.items()
            if edge_type.src == node_type
        ]
        sources = torch.cat(columns) if columns else torch.empty(0, dtype=torch.int64)
        others[node_type] = torch.unique(sources[(sources < low) | (sources >= high)]).long()
        rows[node_type] = torch.cat([torch.arange(low, high), others[node_type]])
    nodes = {
        node_type: NodeRows(
            table.node_ids[rows[node_type]],
            spans[node_type][1] - spans[node_type][0],
            selected_degrees(table.degree, rows[node_type]),
        )
        for node_type, table in view.nodes.items()
    }
    relations = {
        edge_type: _block_edges(relation, spans[edge_type.dst], spans[edge_type.src], others[edge_type.src])
        for edge_type, relation in view.relations.items()
    }
    return Block(replace(view, nodes=nodes, relations=relations), rows)


def split_spans(view: LocalView, chunks: int) -> list[dict[str, tuple[int, int]]]:
    """Split the destinations of a view into ``chunks`` spans of every node type."""
    return [
        {
            node_type: (c * rows.num_dst // chunks, (c + 1) * rows.num_dst // chunks)
            for node_type, rows in view.nodes.items()
        }
        for c in range(chunks)
    ]


def _columns(relation: LocalEdges, span: tuple[int, int]) -> Tensor:
    indptr = relation.structure.indptr
    return relation.structure.col[int(indptr[span[0]]) : int(indptr[span[1]])]


def _block_edges(relation: LocalEdges, dst: tuple[int, int], src: tuple[int, int], others: Tensor) -> LocalEdges:
    indptr = relation.structure.indptr[dst[0] : dst[1] + 1]
    first, last = int(indptr[0]), int(indptr[-1])
    columns = relation.structure.col[first:last].long()
    is_destination = (columns >= src[0]) & (columns < src[1])
    count = src[1] - src[0]
    columns = torch.where(is_destination, columns - src[0], count + torch.searchsorted(others, columns))
    structure = CSR(indptr - first, columns.to(relation.structure.col.dtype), count + len(others))
    return relation.select(structure, slice(first, last))

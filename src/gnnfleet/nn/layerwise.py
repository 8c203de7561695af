"""Exact inference layer by layer, in chunks of destination rows with full neighbourhoods.

At most about ``limit`` bytes of activations are in memory: a larger layer output lies in an unnamed memory-mapped file.
Rows equal those of the whole graph up to rounding.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from gnnfleet.graph.views.block import Block, RowSpans, full_block, split_spans
from gnnfleet.graph.views.local import LocalView
from gnnfleet.nn.base import Features, Model, RowsByType

Table = dict[str, Tensor]

# Tensors of a chunk alive at the same time: source rows, transformed rows, aggregate and output.
_COPIES = 4


def layerwise_inference(
    model: Model, view: LocalView, x: Features, *, target: str, limit: int
) -> tuple[RowsByType, Features]:
    """Return (output of the last layer, its input) for all rows, by node type if there are several, else of ``target``.

    A carried tensor has a row for every destination, so a block reads only the rows of its destinations.
    """
    view = view.with_step(training=False)
    rows, carry = _by_type(x, target), _by_type(None, target)
    last_input = rows
    with torch.no_grad():
        for index in range(model.num_layers):
            last_input = rows
            rows, carry = _layer(model, view.with_step(layer=index), rows, carry, only=target, limit=limit)
    output: RowsByType = rows if len(rows) > 1 else rows[target]
    return output, last_input if len(view.nodes) > 1 else last_input.get(target)


def layer_bytes(view: LocalView, width: int) -> int:
    """Approximate bytes that one layer of the whole view needs, in float32."""
    rows = sum(len(table.node_ids) for table in view.nodes.values())
    return _COPIES * rows * width * 4


def _layer(model: Model, view: LocalView, x: Table, carry: Table, *, only: str, limit: int) -> tuple[Table, Table]:
    out: Table = {}
    carried: Table = {}
    width = max([model.width, *(rows.shape[1] for rows in x.values())])
    hetero = len(view.nodes) > 1
    for spans, block in _blocks(view, width=width, limit=limit):
        block_x = {kind: rows[block.rows[kind]] for kind, rows in x.items()}
        inputs = block_x if hetero else block_x.get(only)
        block_carry = None if hetero or only not in carry else carry[only][slice(*spans[only])]
        block_out, block_carried = model.layer(view.layer, block.view, inputs, block_carry)
        for table, rows_by_type in ((out, _by_type(block_out, only)), (carried, _by_type(block_carried, only))):
            for kind, rows in rows_by_type.items():
                if kind not in table:
                    table[kind] = allocate_rows(rows, view.nodes[kind].num_dst, limit=limit)
                table[kind][slice(*spans[kind])] = rows
    return out, carried


def _blocks(view: LocalView, *, width: int, limit: int) -> Iterator[tuple[RowSpans, Block]]:
    """Yield blocks that cover all destinations in order, each within the limit or of one destination."""
    max_dst = max(1, *(rows.num_dst for rows in view.nodes.values()))
    chunks = min(max_dst, max(1, math.ceil(layer_bytes(view, width) / limit)))
    pending = split_spans(view, chunks)[::-1]
    while pending:
        spans = pending.pop()
        block = full_block(view, spans)
        if layer_bytes(block.view, width) > limit and max(high - low for low, high in spans.values()) > 1:
            middle = {kind: (low + high) // 2 for kind, (low, high) in spans.items()}
            pending.append({kind: (middle[kind], high) for kind, (_, high) in spans.items()})
            pending.append({kind: (low, middle[kind]) for kind, (low, _) in spans.items()})
            continue
        yield spans, block


def allocate_rows(like: Tensor, rows: int, *, limit: int) -> Tensor:
    """Allocate a table for the rows of all chunks, with the dtype and width of the rows of one."""
    shape = (rows, *like.shape[1:])
    size = math.prod(shape) * like.element_size()
    if size <= limit:
        return like.new_empty(shape)
    with tempfile.TemporaryFile() as file:  # mapped memory outlives the descriptor
        file.truncate(size)
        raw = np.memmap(file, dtype=np.uint8, mode="r+", shape=(size,))
    return torch.from_numpy(raw).view(like.dtype).view(shape)


def _by_type(value: Features, only: str) -> Table:
    if value is None:
        return {}
    return dict(value) if isinstance(value, Mapping) else {only: value}

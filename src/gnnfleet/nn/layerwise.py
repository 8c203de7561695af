"""Exact inference layer by layer, in chunks of destination rows with full neighbourhoods.

Never more than about ``limit`` bytes of activations are in memory: a layer's output beyond that lies in a
memory-mapped file without a name. Rows are the same as the whole graph's, to rounding.
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

# Source rows, what a layer makes of them, its aggregate and its output: tensors of a chunk alive at the same time.
_COPIES = 4


def layerwise_inference(
    model: Model, view: LocalView, x: Features, *, target: str, limit: int
) -> tuple[RowsByType, Features]:
    """(output of the last layer for ``target``, or by type where it gives several; what that layer read), for all rows.

    A carried tensor has a row for every destination, so a block needs only those of its own destinations.
    """
    view = view.with_step(training=False)
    rows, carry = _by_type(x, target), _by_type(None, target)
    last_input = rows
    with torch.no_grad():
        for index in range(model.num_layers):
            last_input = rows
            rows, carry = _layer(model, view.with_step(layer=index), rows, carry, only=target, limit=limit)
    several = len(view.nodes) > 1
    return rows if len(rows) > 1 else rows[target], last_input if several else last_input.get(target)


def layer_bytes(view: LocalView, width: int, itemsize: int = 4) -> int:
    """What one layer of the whole view needs, roughly."""
    rows = sum(len(table.node_ids) for table in view.nodes.values())
    return _COPIES * rows * width * itemsize


def _layer(model: Model, view: LocalView, x: Table, carry: Table, *, only: str, limit: int) -> tuple[Table, Table]:
    out: Table = {}
    carried: Table = {}
    width = max([model.width, *(rows.shape[1] for rows in x.values())])
    hetero = len(view.nodes) > 1
    for spans, block in _blocks(view, width=width, limit=limit):
        near = {kind: rows[slice(*spans[kind])] for kind, rows in carry.items()}
        read = {kind: rows[block.rows[kind]] for kind, rows in x.items()}
        made, kept = model.layer(
            view.layer, block.view, read if hetero else read.get(only), None if hetero else near.get(only)
        )
        for room, part in ((out, _by_type(made, only)), (carried, _by_type(kept, only))):
            for kind, rows in part.items():
                if kind not in room:
                    room[kind] = _room(rows, view.nodes[kind].num_dst, limit=limit)
                room[kind][slice(*spans[kind])] = rows
    return out, carried


def _blocks(view: LocalView, *, width: int, limit: int) -> Iterator[tuple[RowSpans, Block]]:
    """Blocks that cover all destinations in order, each small enough or of one destination."""
    most = max(1, *(rows.num_dst for rows in view.nodes.values()))
    chunks = min(most, max(1, math.ceil(layer_bytes(view, width) / limit)))
    waiting = split_spans(view, chunks)[::-1]
    while waiting:
        spans = waiting.pop()
        block = full_block(view, spans)
        if layer_bytes(block.view, width) > limit and max(high - low for low, high in spans.values()) > 1:
            middle = {kind: (low + high) // 2 for kind, (low, high) in spans.items()}
            waiting.append({kind: (middle[kind], high) for kind, (_, high) in spans.items()})
            waiting.append({kind: (low, middle[kind]) for kind, (low, _) in spans.items()})
            continue
        yield spans, block


def _room(like: Tensor, rows: int, *, limit: int) -> Tensor:
    """Space for the rows of all chunks, of the dtype and width of those of one."""
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

"""Exact inference layer by layer, in chunks of destination rows with full neighbourhoods.

Never more than about ``limit`` bytes of activations are in memory: a layer's output beyond that lies in a
memory-mapped file without a name. Rows are the same as the whole graph's, to rounding.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gnnfleet.graph.block import Block, Spans, full_block, spans_of
from gnnfleet.graph.view import LocalView
from gnnfleet.nn.model import GNN

# Source rows, what a layer makes of them, its aggregate and its output: tensors of a chunk alive at the same time.
_COPIES = 4


def infer(model: GNN, view: LocalView, x: Any, *, limit: int) -> tuple[Any, Any]:
    """(output of the last layer, what that layer read), for every row of the view; x is a tensor or one per node type.

    A carried tensor has a row for every destination, so a block needs only those of its own destinations.
    """
    view = view.at(training=False)
    carry: Any = None
    last_input = x
    with torch.no_grad():
        for index in range(model.num_layers):
            last_input = x
            x, carry = _layer(model, view.at(layer=index), x, carry, limit=limit)
    return x, last_input


def layer_bytes(view: LocalView, width: int, itemsize: int) -> int:
    """What one layer of the whole view needs, roughly."""
    rows = sum(len(table.node_ids) for table in view.nodes.values())
    return _COPIES * rows * width * itemsize


def _layer(model: GNN, view: LocalView, x: Any, carry: Any, *, limit: int) -> tuple[Any, Any]:
    out = carried = None
    for spans, block in _blocks(view, width=_width(x), limit=limit):
        rows = block.rows
        near = _map(carry, lambda kind, t, spans=spans: t[slice(*_of(spans, kind))])
        made, kept = model.layer(view.layer, block.view, _map(x, lambda kind, t, rows=rows: t[_of(rows, kind)]), near)
        if out is None:
            out, carried = _room(made, view, limit=limit), _room(kept, view, limit=limit)
        _fill(out, made, spans)
        _fill(carried, kept, spans)
    return out, carried


def _blocks(view: LocalView, *, width: int, limit: int) -> Iterator[tuple[Spans, Block]]:
    """Blocks that cover all destinations in order, each small enough or of one destination."""
    chunks = max(1, math.ceil(layer_bytes(view, width, 4) / limit))
    most = max(1, max(rows.num_dst for rows in view.nodes.values()))
    waiting = spans_of(view, min(chunks, most))[::-1]
    while waiting:
        spans = waiting.pop()
        block = full_block(view, spans)
        if layer_bytes(block.view, width, 4) > limit and max(high - low for low, high in spans.values()) > 1:
            middle = {kind: (low + high) // 2 for kind, (low, high) in spans.items()}
            waiting.append({kind: (middle[kind], high) for kind, (_, high) in spans.items()})
            waiting.append({kind: (low, middle[kind]) for kind, (low, _) in spans.items()})
            continue
        yield spans, block


def _room(like: Any, view: LocalView, *, limit: int) -> Any:
    """Space for the rows of all chunks, of the dtype and width of those of one."""

    def make(kind: str | None, t: Tensor) -> Tensor:
        rows = view.nodes[kind].num_dst if kind is not None else view.num_dst
        shape = (rows, *t.shape[1:])
        if math.prod(shape) * t.element_size() <= limit:
            return t.new_empty(shape)
        with tempfile.TemporaryFile() as file:  # mapped memory outlives the file's name and descriptor
            count = math.prod(shape) * t.element_size()
            file.truncate(count)
            raw = np.memmap(file, dtype=np.uint8, mode="r+", shape=(count,))
        return torch.from_numpy(raw).view(t.dtype).view(shape)

    return _map(like, make)


def _fill(room: Any, rows: Any, spans: Spans) -> None:
    if rows is None:
        return
    if isinstance(rows, Mapping):
        for kind, part in rows.items():
            room[kind][slice(*spans[kind])] = part
    else:
        room[slice(*_of(spans, None))] = rows


def _map(value: Any, change: Any) -> Any:
    if value is None:
        return None
    if isinstance(value, Mapping):
        return {kind: change(kind, tensor) for kind, tensor in value.items()}
    return change(None, value)


def _of(table: Mapping[str, Any], kind: str | None) -> Any:
    """The entry of a node type; of the only one when none is named."""
    return table[kind] if kind is not None else next(iter(table.values()))


def _width(x: Any) -> int:
    tensors = x.values() if isinstance(x, Mapping) else [x]
    return max(1, *(t.shape[-1] for t in tensors), 1)

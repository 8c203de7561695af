"""Read the inputs of a sampled batch: features and, if it is cached, the first layer's aggregate."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from gnnfleet.graph.views.local import LocalView
from gnnfleet.nn.base import Aggregate, Features
from gnnfleet.ops.buffers import empty_buffer
from gnnfleet.tasks.base import Batch

X, AGGREGATE = "x", "aggregate"
"""Names of tables. With several edge types, each has a table of aggregates under its own name."""


@dataclass(frozen=True, eq=False)
class PreparedBatch:
    batch: Batch
    views: Sequence[LocalView]
    x: Features
    aggregated: Aggregate | None


class RowReader(Protocol):
    """Reads a table's rows for the source nodes of a batch, half precision as float32; into ``out`` if given."""

    def __call__(self, kind: str, table: str, *, out: Tensor | None = None) -> Tensor: ...


def aggregate_tables(aggregated: Aggregate | None, target: str) -> Iterator[tuple[str, str, Tensor]]:
    """(node type, name, rows) of each table of aggregates."""
    if isinstance(aggregated, Tensor):
        yield target, AGGREGATE, aggregated
    elif aggregated is not None:
        for edge_type, rows in aggregated.items():
            yield edge_type.dst, str(edge_type), rows


def read_inputs(
    batch: Batch,
    views: Sequence[LocalView],
    read: RowReader,
    *,
    features: Mapping[str, Tensor],
    aggregated: Aggregate | None,
    dtype: torch.dtype,
) -> PreparedBatch:
    """Inputs of the model in ``dtype``. ``features`` are the tables by node type, without types that have none."""
    if isinstance(aggregated, Tensor):
        return PreparedBatch(batch, views, *_read_adjacent(views[0], read, features, aggregated))
    x = {
        kind: read(kind, X).to(dtype) if kind in features else torch.empty(len(rows.node_ids), 0, dtype=dtype)
        for kind, rows in views[0].nodes.items()
    }
    rows = None if aggregated is None else {name: read(name.dst, str(name)) for name in aggregated}
    return PreparedBatch(batch, views, x if len(x) > 1 else next(iter(x.values())), rows)


def _read_adjacent(
    view: LocalView, read: RowReader, features: Mapping[str, Tensor], aggregated: Tensor
) -> tuple[Tensor, Tensor]:
    """(x, aggregated) as columns of one tensor: a layer that multiplies both computes one product."""
    ((kind, rows),) = view.nodes.items()
    x, width = features[kind], aggregated.shape[1]
    both = empty_buffer((len(rows.node_ids), width + x.shape[1]), aggregated.dtype)
    aggregated_rows = read(kind, AGGREGATE, out=both[:, :width])
    if torch.promote_types(x.dtype, torch.float32) == both.dtype:
        return read(kind, X, out=both[:, width:]), aggregated_rows
    return both[:, width:].copy_(read(kind, X)), aggregated_rows

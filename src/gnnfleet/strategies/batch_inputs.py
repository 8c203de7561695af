"""Inputs of a batch: features and the first layer's aggregate of them, which may be computed once and cached."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from gnnfleet.errors import ConfigError
from gnnfleet.graph.views.local import LocalView
from gnnfleet.graph.views.view import GraphView
from gnnfleet.nn.base import Aggregate, Features, Model
from gnnfleet.ops.buffers import empty_buffer
from gnnfleet.tasks.base import Batch

CacheInputs = Literal["auto"] | bool

_MAX_CACHED_RELATIONS = 8
"""Edge types up to which ``auto`` caches an aggregate for each: more take too much memory."""


def should_cache_aggregate(option: CacheInputs, model: Model, *, hides: bool, relations: int = 1) -> bool:
    """False if steps hide edges, which a cached aggregate would include; raises ConfigError if it is required."""
    if model.is_precomputed and hides:
        raise ConfigError("the model computes its hops once and cannot hide edges from a step: set link.exclude=none")
    if hides and option is True:
        raise ConfigError("strategy.cache_inputs=true would show hidden edges: use it with link.exclude=none")
    if model.is_precomputed:
        return True
    if option == "auto" and relations > _MAX_CACHED_RELATIONS:
        return False
    return bool(option) and not hides


def precompute_aggregate(option: CacheInputs, model: Model, view: GraphView, x: Any) -> Aggregate | None:
    """The first layer's aggregate of all rows; None, or ConfigError if it was set, if the model does not allow it."""
    aggregate = model.precompute(view, x)
    if option is True and aggregate is None:
        raise ConfigError(
            "this model does not allow strategy.cache_inputs=true: its first layer reads neighbours through "
            "parameters, learnable rows or dropout, or edge features"
        )
    return aggregate


def concat_columns(aggregated: Aggregate | None, x: Any) -> tuple[Aggregate | None, Any]:
    """(aggregate, features) as columns of one tensor: a layer that multiplies both computes one product."""
    if not isinstance(aggregated, Tensor) or not isinstance(x, Tensor) or aggregated.dtype != x.dtype:
        return aggregated, x
    both, width = torch.cat([aggregated, x], 1), aggregated.shape[1]
    return both[:, :width], both[:, width:]


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

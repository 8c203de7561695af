"""New events from a table, scored in the order of time: each batch knows all that happened before it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from torch import Tensor

from gnnfleet.errors import InputError
from gnnfleet.graph.events.event_stream import EventStream, event_edge_type
from gnnfleet.graph.graph import ColumnGroups, EdgeType, Graph
from gnnfleet.graph.ingest.spec import USUAL_NAMES
from gnnfleet.inference.predict import END_COLUMNS, id_columns, read_columns, write_table
from gnnfleet.training.build import BuiltRun

NON_FEATURE_COLUMNS = {
    *END_COLUMNS,
    *(name for part in ("time", "weight", "id", "label", "split") for name in USUAL_NAMES[part]),
}
"""Columns of which import makes no features of events, even where they hold numbers."""


def write_event_scores(built: BuiltRun, events: Path, path: Path) -> int:
    """Write ``src``, ``dst``, ``time``, ``probability`` of the events in a CSV or Parquet file, by time; the rows.

    Where classes of events are predicted, ``prediction`` and the probability of it, or ``probabilities`` of several.
    """
    table = _read(events, built.graph, _kind(built))
    return write_table(path, iter([_scored(built, table, str(events))]))


def score_events(built: BuiltRun, events: pa.Table, name: str = "the events") -> Tensor:
    """[n], or [n, C] of classes, in the order of the table, whose times must never fall; errors call it ``name``."""
    return built.event_predictor.score(_stream(built, events, name))


def _kind(built: BuiltRun) -> EdgeType:
    return event_edge_type(built.graph, built.event_predictor.relation or None)


def _scored(built: BuiltRun, table: pa.Table, name: str) -> pa.Table:
    found = score_events(built, table, name)
    content: dict[str, Any] = {name: table[name] for name in (*END_COLUMNS, "time")}
    if found.dim() == 1:
        content["probability"] = found.double().numpy()
    else:
        head = built.event_predictor.task.head
        assert head is not None
        if head.multilabel:
            content["prediction"] = [row.nonzero()[:, 0].tolist() for row in found > 0.5]
            content["probabilities"] = found.double().tolist()
        else:
            content["prediction"] = found.argmax(1).numpy()
            content["probability"] = found.double().amax(1).numpy()
    return pa.table(content)


def _read(path: Path, graph: Graph, kind: EdgeType) -> pa.Table:
    """The table by time, equal times in the order of the file."""
    table = read_columns(path, (*END_COLUMNS, "time"), id_columns(graph, kind))
    try:
        return table.take(pa.array(torch.argsort(_times(table), stable=True).numpy()))
    except (ValueError, TypeError, pa.ArrowNotImplementedError) as error:  # Arrow's other errors are ValueErrors
        raise InputError(f"{path}, column 'time': expected numbers, dates or timestamps: {error}") from error


def _times(table: pa.Table) -> Tensor:
    """[n] as ``import`` reads them: dates and timestamps are microseconds since 1970."""
    column = table["time"].combine_chunks()
    if column.null_count:
        raise ValueError(f"{column.null_count} rows have no time")
    if not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type)):
        zone = column.type.tz if pa.types.is_timestamp(column.type) else None
        column = column.cast(pa.timestamp("us", zone)).cast(pa.int64())
    return torch.from_numpy(column.to_numpy(zero_copy_only=False).copy())


def _stream(built: BuiltRun, table: pa.Table, name: str) -> EventStream:
    """A table as events behind those of the run."""
    known, kind, graph = built.event_predictor.task.stream, _kind(built), built.graph
    ends = {
        end: torch.from_numpy(graph.nodes[node].ids.rows(table[end].to_pylist())) + graph.node_offsets[node]
        for end, node in zip(END_COLUMNS, (kind.src, kind.dst), strict=True)
    }
    time = _times(table)
    if known.t.dtype == torch.int64 and time.is_floating_point() and bool((time != time.round()).any()):
        raise InputError("times of this stream are whole numbers, found fractions")
    return EventStream(
        src=ends["src"],
        dst=ends["dst"],
        t=time.to(known.t.dtype),
        num_nodes=known.num_nodes,
        destinations=known.destinations,
        edge_ids=torch.arange(len(time)),
        msg=None if known.msg is None else _features(table, known.msg, graph.edges[kind].columns, name),
    )


def _features(table: pa.Table, known: Tensor, columns: ColumnGroups, name: str) -> Tensor:
    """[n, F] of the columns that the run's events have, or, where these have no names, of numbers as import takes them.

    Raises InputError naming file and columns.
    """
    chosen, found = [column for column, _ in columns], ", ".join(table.column_names)
    if not set(chosen) <= set(table.column_names) or not chosen:
        if len(chosen) > 1 or (chosen and columns[0][1] == 1):  # the items of a single list have no names
            missing = ", ".join(column for column in chosen if column not in table.column_names)
            raise InputError(
                f"{name}: events of this run have features {', '.join(chosen)}, found columns {found}: add {missing}"
            )
        others = [column for column in table.column_names if column.casefold() not in NON_FEATURE_COLUMNS]
        chosen = [column for column in others if _is_number(table.schema.field(column).type)]
    parts = [_numbers(table[column], known.dtype, f"{name}, column {column!r}") for column in chosen]
    width = sum(part.shape[1] for part in parts)
    if width != known.shape[1]:
        raise InputError(
            f"{name}: events of this run have {known.shape[1]} features, found {width} in columns "
            f"{', '.join(chosen) or 'none'} of {found}"
        )
    return torch.cat(parts, 1)


def _numbers(column: pa.ChunkedArray, dtype: torch.dtype, place: str) -> Tensor:
    """[n, k]: a number or a list of k of them in every row."""
    if not _is_number(column.type):
        raise InputError(f"{place}: features of events are numbers or lists of numbers, found {column.type}")
    try:
        values = column.to_pylist() if pa.types.is_nested(column.type) else column.cast(pa.float64()).to_pylist()
        made = torch.tensor(values, dtype=dtype)
    except (TypeError, ValueError) as error:
        raise InputError(f"{place}: expected numbers, as many in every row: {error}") from error
    if not bool(torch.isfinite(made).all()):
        raise InputError(f"{place}: expected finite numbers, found others")
    return made[:, None] if made.dim() == 1 else made


def _is_number(kind: pa.DataType) -> bool:
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        kind = kind.value_type
    numbers = (pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal, pa.types.is_boolean)
    return any(is_one(kind) for is_one in numbers)

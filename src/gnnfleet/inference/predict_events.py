"""Scores of new events from a table, in the order of time: each batch is scored given all earlier events."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from torch import Tensor

from gnnfleet.errors import InputError
from gnnfleet.graph.events.event_stream import EventStream, event_edge_type
from gnnfleet.graph.graph import ColumnGroups, EdgeType
from gnnfleet.graph.ingest.spec import USUAL_NAMES
from gnnfleet.inference.predict import END_COLUMNS, id_columns, read_columns, write_table
from gnnfleet.training.build import BuiltRun

NON_FEATURE_COLUMNS = {
    *END_COLUMNS,
    *(name for part in ("time", "weight", "id", "label", "split") for name in USUAL_NAMES[part]),
}
"""Columns that import never reads as event features, even if they hold numbers."""


def write_event_scores(built: BuiltRun, events: Path, path: Path) -> int:
    """Write ``src``, ``dst``, ``time``, ``probability`` of the events in a file, by time; returns the number of rows.

    A run that classifies events writes ``prediction`` and its probability, or ``probabilities`` for multi-label data.
    """
    table = _read_by_time(built, events)
    scores = score_events(built, table, str(events))
    columns: dict[str, Any] = {name: table[name] for name in (*END_COLUMNS, "time")}
    head = built.event_predictor.task.head
    if scores.dim() == 1:
        columns["probability"] = scores.double().numpy()
    elif head is not None and head.multilabel:
        columns["prediction"] = [row.nonzero()[:, 0].tolist() for row in scores > 0.5]
        columns["probabilities"] = scores.double().tolist()
    else:
        columns["prediction"] = scores.argmax(1).numpy()
        columns["probability"] = scores.double().amax(1).numpy()
    return write_table(path, iter([pa.table(columns)]))


def score_events(built: BuiltRun, events: pa.Table, name: str = "the events") -> Tensor:
    """[n], or [n, C] for classes, of a table in the order of time; errors call the table ``name``."""
    stream, kind, graph = built.event_predictor.task.stream, _edge_type(built), built.graph
    src, dst = (
        torch.from_numpy(graph.nodes[node].ids.rows(events[end].to_pylist())) + graph.node_offsets[node]
        for end, node in zip(END_COLUMNS, (kind.src, kind.dst), strict=True)
    )
    time = _times(events)
    if stream.t.dtype == torch.int64 and time.is_floating_point() and bool((time != time.round()).any()):
        raise InputError(f"{name}, column 'time': times of this run are whole numbers, found fractions: round them")
    following = EventStream(
        src=src,
        dst=dst,
        t=time.to(stream.t.dtype),
        num_nodes=stream.num_nodes,
        destinations=stream.destinations,
        edge_ids=torch.arange(len(time)),
        msg=None if stream.msg is None else _features(events, stream.msg, graph.edges[kind].columns, name),
    )
    return built.event_predictor.score(following)


def _edge_type(built: BuiltRun) -> EdgeType:
    return event_edge_type(built.graph, built.event_predictor.relation or None)


def _read_by_time(built: BuiltRun, path: Path) -> pa.Table:
    """The table by time, equal times in the order of the file."""
    table = read_columns(path, (*END_COLUMNS, "time"), id_columns(built.graph, _edge_type(built)))
    try:
        return table.take(pa.array(torch.argsort(_times(table), stable=True).numpy()))
    except (ValueError, TypeError, pa.ArrowNotImplementedError) as error:  # Arrow's other errors are ValueErrors
        raise InputError(f"{path}, column 'time': expected numbers, dates or timestamps: {error}") from error


def _times(table: pa.Table) -> Tensor:
    """[n] times as ``import`` reads them: dates and timestamps are microseconds since 1970."""
    column = table["time"].combine_chunks()
    if column.null_count:
        raise ValueError(f"{column.null_count} rows have no time")
    if not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type)):
        zone = column.type.tz if pa.types.is_timestamp(column.type) else None
        column = column.cast(pa.timestamp("us", zone)).cast(pa.int64())
    return torch.from_numpy(column.to_numpy(zero_copy_only=False).copy())


def _features(table: pa.Table, msg: Tensor, columns: ColumnGroups, name: str) -> Tensor:
    """[n, F] the feature columns of the run, or if those have no names, the columns that import would choose.

    Raises InputError naming file and columns.
    """
    chosen, present = [column for column, _ in columns], ", ".join(table.column_names)
    missing = [column for column in chosen if column not in table.column_names]
    if missing and (len(chosen) > 1 or columns[0][1] == 1):  # the items of a single list have no names
        raise InputError(
            f"{name}: events of this run have features {', '.join(chosen)}, found columns {present}: "
            f"add {', '.join(missing)}"
        )
    if missing or not chosen:
        others = [column for column in table.column_names if column.casefold() not in NON_FEATURE_COLUMNS]
        chosen = [column for column in others if _is_number(table.schema.field(column).type)]
    parts = [_numbers(table[column], msg.dtype, f"{name}, column {column!r}") for column in chosen]
    width = sum(part.shape[1] for part in parts)
    if width != msg.shape[1]:
        raise InputError(
            f"{name}: events of this run have {msg.shape[1]} features, found {width} in columns "
            f"{', '.join(chosen) or 'none'} of {present}"
        )
    return torch.cat(parts, 1)


def _numbers(column: pa.ChunkedArray, dtype: torch.dtype, label: str) -> Tensor:
    """[n, k] from a number, or a list of k numbers, in every row."""
    if not _is_number(column.type):
        raise InputError(f"{label}: features of events are numbers or lists of numbers, found {column.type}")
    try:
        values = column.to_pylist() if pa.types.is_nested(column.type) else column.cast(pa.float64()).to_pylist()
        numbers = torch.tensor(values, dtype=dtype)
    except (TypeError, ValueError) as error:
        raise InputError(f"{label}: expected numbers, as many in every row: {error}") from error
    if not bool(torch.isfinite(numbers).all()):
        raise InputError(f"{label}: expected finite numbers, found infinite ones or NaN")
    return numbers[:, None] if numbers.dim() == 1 else numbers


def _is_number(type_: pa.DataType) -> bool:
    if pa.types.is_list(type_) or pa.types.is_large_list(type_) or pa.types.is_fixed_size_list(type_):
        type_ = type_.value_type
    checks = (pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal, pa.types.is_boolean)
    return any(check(type_) for check in checks)

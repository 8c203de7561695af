"""New events from a table, scored in the order of time: each batch knows all that happened before it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from pyarrow import csv
from torch import Tensor

from gnnfleet.errors import ConfigError, InputError
from gnnfleet.graph.events import EventStream, timed_type
from gnnfleet.graph.graph import EdgeType, Graph
from gnnfleet.run.build import Built
from gnnfleet.run.prediction import ENDS, id_columns, write_table
from gnnfleet.strategies.temporal.strategy import TemporalStrategy


def write_event_scores(built: Built, events: Path, path: Path) -> int:
    """Write ``src``, ``dst``, ``time``, ``probability`` of the events in a CSV or Parquet file, by time; the rows.

    Where classes of events are predicted, ``prediction`` and the probability of it, or ``probabilities`` of several.
    """
    table = _read(events, built.graph, _kind(built))
    return write_table(path, iter([_scored(built, table)]))


def score_events(built: Built, events: pa.Table) -> Tensor:
    """[n], or [n, C] of classes, in the order of the table, whose times must never fall."""
    strategy = built.strategy
    if not isinstance(strategy, TemporalStrategy):
        raise ConfigError("events are scored by a run with --strategy temporal")
    return strategy.score(_stream(built, events))


def _kind(built: Built) -> EdgeType:
    if not isinstance(built.strategy, TemporalStrategy):
        raise ConfigError("events are scored by a run with --strategy temporal; this one has no stream")
    return timed_type(built.graph, built.strategy.relation or None)


def _scored(built: Built, table: pa.Table) -> pa.Table:
    found = score_events(built, table)
    content: dict[str, Any] = {name: table[name] for name in (*ENDS, "time")}
    if found.dim() == 1:
        content["probability"] = found.double().numpy()
    else:
        assert isinstance(built.strategy, TemporalStrategy)
        head = built.strategy.task.head
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
    try:
        if path.suffix == ".parquet":
            table = pq.read_table(path)
        else:
            table = csv.read_csv(path, convert_options=csv.ConvertOptions(column_types=id_columns(graph, kind)))
        missing = [name for name in (*ENDS, "time") if name not in table.column_names]
        if missing:
            raise KeyError(f"there is no column {missing[0]}")
        return table.take(pa.array(torch.argsort(_times(table), stable=True).numpy()))
    except (OSError, KeyError, TypeError, pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise InputError(f"expected a CSV or Parquet file with columns src, dst and time in {path}: {error}") from error


def _times(table: pa.Table) -> Tensor:
    """[n] as ``import`` reads them: dates and timestamps are microseconds since 1970."""
    column = table["time"].combine_chunks()
    if column.null_count:
        raise KeyError(f"{column.null_count} rows have no time")
    if not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type)):
        zone = column.type.tz if pa.types.is_timestamp(column.type) else None
        column = column.cast(pa.timestamp("us", zone)).cast(pa.int64())
    return torch.from_numpy(column.to_numpy(zero_copy_only=False).copy())


def _stream(built: Built, table: pa.Table) -> EventStream:
    """A table as events behind those of the run."""
    assert isinstance(built.strategy, TemporalStrategy)
    known, kind, graph = built.strategy.task.stream, _kind(built), built.graph
    ends = {
        name: torch.from_numpy(graph.nodes[end].ids.rows(table[name].to_pylist())) + graph.node_offsets[end]
        for name, end in zip(ENDS, (kind.src, kind.dst), strict=True)
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
        msg=None if known.msg is None else _features(table, known.msg),
    )


def _features(table: pa.Table, known: Tensor) -> Tensor:
    """All columns but the ends and the time, in their order; as many as the run's events have."""
    columns = [name for name in table.column_names if name not in (*ENDS, "time")]
    try:
        found = [torch.tensor(table[name].to_pylist(), dtype=known.dtype).view(len(table), -1) for name in columns]
    except (TypeError, ValueError) as error:
        raise InputError(f"features of events must be numbers: {error}") from error
    width = sum(part.shape[1] for part in found)
    if width != known.shape[1]:
        names = ", ".join(columns) or "none"
        raise InputError(f"events of this run have {known.shape[1]} features, found {width} in columns {names}")
    return torch.cat(found, 1)

"""Predictions in a file: original ids, class names, probabilities; written in pieces of bounded size."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from pyarrow import csv
from torch import Tensor

from gnnfleet.errors import ConfigError, InputError, RunError
from gnnfleet.graph.events.event_stream import EventStream, event_edge_type
from gnnfleet.graph.graph import ColumnGroups, EdgeType, Graph, Nodes
from gnnfleet.graph.ingest.spec import USUAL_NAMES
from gnnfleet.io.atomic import PARTIAL
from gnnfleet.nn.heads import NodeHead
from gnnfleet.tasks.link import LinkTask
from gnnfleet.tasks.node import NodeTask
from gnnfleet.training.build import BuiltRun
from gnnfleet.training.build_link import score_pairs, target_edge_type

ROWS_AT_ONCE = 1 << 16
PARQUET_ENDINGS = (".parquet", ".pq")
END_COLUMNS = ("src", "dst")
"""Columns of tables of pairs and of events."""


def class_names(head: NodeHead, nodes: Nodes, logits: Tensor) -> list[Any]:
    """The class of every row; for multi-label data a list of classes. Of a regression its value or values."""
    classes = head.predict(logits)
    if head.regression:
        return (classes[:, 0] if head.num_classes == 1 else classes).tolist()
    names: Any = nodes.classes or range(logits.shape[1])
    if not head.multilabel:
        return [names[number] for number in classes.tolist()]
    return [[names[number] for number in row.nonzero()[:, 0].tolist()] for row in classes]


def write_predictions(built: BuiltRun, path: Path, *, logits: bool = False, embeddings: bool = False) -> int:
    """Collective. Write every node of the labelled type in store order; returns the number of rows.

    A link run writes the embeddings of all nodes, which its decoder reads. Only the first rank writes.
    """
    pieces = _embeddings(built) if isinstance(built.task, LinkTask) else _predictions(built, logits, embeddings)
    if built.world.is_first:
        return write_table(path, pieces)
    for _ in pieces:
        pass
    return 0


def write_scores(built: BuiltRun, pairs: Path, path: Path, *, relation: str = "") -> int:
    """Collective. Write ``src``, ``dst``, ``probability`` for pairs of original ids; returns the number of rows.

    Only the first rank reads and writes. Raises ConfigError for a node run, InputError for missing columns or an
    unknown id.
    """
    if not isinstance(built.task, LinkTask):
        raise ConfigError("pairs are scored by a run with --task link; this one classifies nodes")
    ids: dict[str, list[Any]] = {end: [] for end in END_COLUMNS}
    if built.world.is_first:
        ids = _read_pairs(pairs, built.graph, target_edge_type(built.task, relation)[1])
    task = built.task.shard(built.world, {})
    scores = score_pairs(built.node_predictor, task, list(zip(*ids.values(), strict=True)), relation)
    if not built.world.is_first:
        return 0
    return write_table(path, iter([pa.table({**ids, "probability": scores.float().numpy()})]))


def _read_pairs(path: Path, graph: Graph, kind: EdgeType) -> dict[str, list[Any]]:
    table = read_columns(path, END_COLUMNS, id_columns(graph, kind))
    return {end: table[end].to_pylist() for end in END_COLUMNS}


def id_columns(graph: Graph, kind: EdgeType) -> dict[str, pa.DataType]:
    """The types in which the ids of both ends are read."""
    types = [graph.nodes[name].ids.select([]).type for name in (kind.src, kind.dst)]
    columns = [pa.string() if pa.types.is_large_string(type_) else pa.int64() for type_ in types]
    return dict(zip(END_COLUMNS, columns, strict=True))


def read_columns(path: Path, required: Sequence[str], types: dict[str, pa.DataType]) -> pa.Table:
    """A Parquet file, or a CSV file with the ``types`` of columns; raises InputError without a required column."""
    expected = f"{', '.join(required[:-1])} and {required[-1]}"
    try:
        if path.suffix.lower() in PARQUET_ENDINGS:
            table = pq.read_table(path)
        else:
            table = csv.read_csv(path, convert_options=csv.ConvertOptions(column_types=types))
    except (OSError, pa.ArrowInvalid) as error:
        raise InputError(f"expected a CSV or Parquet file with columns {expected} in {path}: {error}") from error
    for name in required:
        if name not in table.column_names:
            columns = ", ".join(table.column_names)
            raise InputError(f"{path}: expected columns {expected}, found {columns}: there is no column {name}")
    return table


def check_output(path: Path) -> None:
    """Raise ConfigError if predictions cannot be written to a path, before they are computed."""
    if path.suffix.lower() not in (*PARQUET_ENDINGS, ".csv"):
        raise ConfigError(f"predictions are written as .parquet or .csv, found {path}: give the output one of these")
    if not path.parent.is_dir():
        raise ConfigError(f"cannot write {path}: the directory {path.parent} does not exist; make it first")


def write_table(path: Path, pieces: Iterator[pa.Table]) -> int:
    """Write a file atomically, CSV if it ends in .csv, else Parquet; returns the number of rows."""
    temporary = path.with_name(f".{path.name}{PARTIAL}{secrets.token_hex(3)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = _write(temporary, pieces, is_csv=path.suffix.lower() == ".csv")
        temporary.replace(path)
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)
    return rows


def _write(path: Path, pieces: Iterator[pa.Table], *, is_csv: bool) -> int:
    first = next(pieces)
    lists = [field.name for field in first.schema if pa.types.is_nested(field.type)]
    if lists and is_csv:
        raise ConfigError(f"CSV cannot hold the lists in column {lists[0]!r}: use an output that ends in .parquet")
    rows = 0
    open_writer = csv.CSVWriter if is_csv else partial(pq.ParquetWriter, compression="zstd")
    with open_writer(path, first.schema) as writer:
        for piece in chain([first], pieces):
            writer.write_table(piece)
            rows += piece.num_rows
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return rows


def _embeddings(built: BuiltRun) -> Iterator[pa.Table]:
    lookup = built.node_predictor.exact_lookup()
    id_types = {nodes.ids.select([]).type for nodes in built.graph.nodes.values()}
    for kind, nodes in built.graph.nodes.items():
        for rows in _pieces_of_ids(built, nodes.count):
            ids = nodes.ids.select(rows.numpy())
            columns: dict[str, Any] = {"id": ids if len(id_types) == 1 else ids.cast(pa.string())}
            if len(built.graph.nodes) > 1:
                columns["type"] = pa.array([kind] * len(rows), pa.string())
            yield pa.table({**columns, "embedding": _lists(lookup(kind, rows).detach().float())})


def _pieces_of_ids(built: BuiltRun, count: int) -> Iterator[Tensor]:
    """Store ids of all nodes in pieces; ranks after the first get as many empty pieces."""
    for low in range(0, max(count, 1), ROWS_AT_ONCE):
        rows = torch.arange(low, min(low + ROWS_AT_ONCE, count))
        yield rows if built.world.is_first else rows[:0]


def _predictions(built: BuiltRun, with_logits: bool, with_embeddings: bool) -> Iterator[pa.Table]:
    assert isinstance(built.task, NodeTask)
    nodes, head = built.nodes, built.task.head
    # The type does not depend on the classes that happen to be predicted.
    class_type = pa.string() if nodes.classes else pa.int64()
    for rows in _pieces_of_ids(built, nodes.count):
        prediction = built.node_predictor.predict_nodes(rows, embeddings=with_embeddings)
        logits = prediction.logits.float()
        content: dict[str, Any] = {"id": nodes.ids.select(rows.numpy())}
        if len(built.graph.nodes) > 1:
            content["type"] = pa.array([built.task.target] * len(rows), pa.string())
        if head.regression:
            names = nodes.classes or [str(number) for number in range(head.num_classes)]
            columns = ["prediction"] if head.num_classes == 1 else [f"prediction_{name}" for name in names]
            content |= dict(zip(columns, head.predict(logits).numpy().T.copy(), strict=True))
        else:
            predicted = class_names(head, nodes, logits)
            content["prediction"] = pa.array(predicted, pa.list_(class_type) if head.multilabel else class_type)
            if head.multilabel:
                content["probabilities"] = _lists(torch.sigmoid(logits))
            else:
                content["probability"] = torch.softmax(logits, 1).amax(1).numpy()
        if with_logits:
            content["logits"] = _lists(logits)
        if with_embeddings:
            assert prediction.embeddings is not None
            content["embedding"] = _lists(prediction.embeddings.float())
        yield pa.table(content)


def _lists(rows: Tensor) -> Any:
    """[n, k] as one list of k floats per row."""
    return pa.FixedSizeListArray.from_arrays(pa.array(rows.contiguous().numpy().reshape(-1)), rows.shape[1])


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

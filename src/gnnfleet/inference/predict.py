"""Predictions for people: original ids, class names, probabilities, one file written in bounded pieces."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from pyarrow import csv
from torch import Tensor

from gnnfleet.errors import ConfigError, InputError, RunError
from gnnfleet.graph.graph import EdgeType, Graph, Nodes
from gnnfleet.io.atomic import PARTIAL
from gnnfleet.nn.heads import NodeHead
from gnnfleet.tasks.link import LinkTask
from gnnfleet.tasks.node import NodeTask
from gnnfleet.training.build import BuiltRun
from gnnfleet.training.build_link import score_pairs, target_edge_type

ROWS_AT_ONCE = 1 << 16
"""Rows written at a time."""

PARQUET_ENDINGS = (".parquet", ".pq")

END_COLUMNS = ("src", "dst")
"""Columns of tables of pairs and of events."""


@dataclass(frozen=True)
class OutputColumns:
    """What is written besides id, prediction and probability."""

    logits: bool = False
    embeddings: bool = False


def class_names(head: NodeHead, nodes: Nodes, logits: Tensor) -> list[Any]:
    """The class of every row; with several labels per node a list of them."""
    guess = head.predict(logits)
    names: Any = nodes.classes or range(logits.shape[1])
    if not head.multilabel:
        return [names[number] for number in guess.tolist()]
    return [[names[number] for number in row.nonzero()[:, 0].tolist()] for row in guess]


def write_predictions(built: BuiltRun, path: Path, columns: OutputColumns) -> int:
    """Write every node of the labelled type in store order; returns the rows. The file appears whole or not at all.

    A run on links has embeddings of all nodes instead: the rows its decoder reads. All ranks call it, the first writes.
    """
    pieces = _embeddings(built) if isinstance(built.task, LinkTask) else _pieces(built, columns)
    if built.world.is_first:
        return write_table(path, pieces)
    return sum(0 * piece.num_rows for piece in pieces)


def write_scores(built: BuiltRun, pairs: Path, path: Path, *, relation: str = "") -> int:
    """Write ``src``, ``dst``, ``probability`` for the pairs of original ids in a CSV or Parquet file; the rows.

    Raises ConfigError for a run on nodes, InputError for a file without columns src and dst or an unknown id. All
    ranks call it, the first reads and writes.
    """
    if not isinstance(built.task, LinkTask):
        raise ConfigError("pairs are scored by a run with --task link; this one classifies nodes")
    first = built.world.is_first
    asked = (
        _read_pairs(pairs, built, target_edge_type(built.task, relation)[1])
        if first
        else {end: [] for end in END_COLUMNS}
    )
    task = built.task.shard(built.world, {})
    found = score_pairs(built.node_predictor, task, list(zip(*asked.values(), strict=True)), relation)
    if not first:
        return 0
    return write_table(path, iter([pa.table({**asked, "probability": found.float().numpy()})]))


def id_columns(graph: Graph, kind: EdgeType) -> dict[str, pa.DataType]:
    """How the ids of both ends are read from text."""
    ids = {
        end: graph.nodes[name].ids.select([]).type for end, name in zip(END_COLUMNS, (kind.src, kind.dst), strict=True)
    }
    return {end: pa.string() if pa.types.is_large_string(each) else pa.int64() for end, each in ids.items()}


def _read_pairs(path: Path, built: BuiltRun, kind: EdgeType) -> dict[str, list[Any]]:
    read = read_columns(path, END_COLUMNS, id_columns(built.graph, kind))
    return {end: read[end].to_pylist() for end in END_COLUMNS}


def read_columns(path: Path, needed: Sequence[str], types: dict[str, pa.DataType]) -> pa.Table:
    """A CSV or Parquet file, ``types`` for what is text; raises InputError where it lacks columns that are needed."""
    expected = f"{', '.join(needed[:-1])} and {needed[-1]}"
    try:
        if path.suffix.lower() in PARQUET_ENDINGS:
            table = pq.read_table(path)
        else:
            table = csv.read_csv(path, convert_options=csv.ConvertOptions(column_types=types))
    except (OSError, pa.ArrowInvalid) as error:
        raise InputError(f"expected a CSV or Parquet file with columns {expected} in {path}: {error}") from error
    missing = [name for name in needed if name not in table.column_names]
    if missing:
        found = ", ".join(table.column_names)
        raise InputError(f"{path}: expected columns {expected}, found {found}: there is no column {missing[0]}")
    return table


def check_output(path: Path) -> None:
    """Raise ConfigError where predictions cannot be written, before they are made."""
    if path.suffix.lower() not in (*PARQUET_ENDINGS, ".csv"):
        raise ConfigError(f"predictions are written as .parquet or .csv, found {path}: give the output one of these")
    if not path.parent.is_dir():
        raise ConfigError(f"cannot write {path}: the directory {path.parent} does not exist; make it first")


def write_table(path: Path, pieces: Iterator[pa.Table]) -> int:
    """Write a Parquet file, or CSV where it is called so, that appears whole or not at all; returns the rows."""
    partial = path.with_name(f".{path.name}{PARTIAL}{secrets.token_hex(3)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = _write(partial, pieces, csv.CSVWriter if path.suffix.lower() == ".csv" else _parquet)
        partial.replace(path)
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        partial.unlink(missing_ok=True)
    return rows


def _parquet(path: Path, schema: pa.Schema) -> Any:
    return pq.ParquetWriter(path, schema, compression="zstd")


def _write(path: Path, pieces: Iterator[pa.Table], open_writer: Callable[[Path, pa.Schema], Any]) -> int:
    first = next(pieces)
    rows: int = first.num_rows
    lists = [field.name for field in first.schema if pa.types.is_nested(field.type)]
    if lists and open_writer is not _parquet:
        raise ConfigError(f"CSV has no place for the lists in column {lists[0]!r}: end the output in .parquet")
    with open_writer(path, first.schema) as writer:
        writer.write_table(first)
        for piece in pieces:
            writer.write_table(piece)
            rows += piece.num_rows
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return rows


def _embeddings(built: BuiltRun) -> Iterator[pa.Table]:
    take, several = built.node_predictor.exact_lookup(), len(built.graph.nodes) > 1
    texts = {kind: pa.types.is_integer(nodes.ids.select([]).type) for kind, nodes in built.graph.nodes.items()}
    for kind, nodes in built.graph.nodes.items():
        for rows in _rows_at_a_time(built, nodes.count):
            ids = nodes.ids.select(rows.numpy())
            content: dict[str, Any] = {"id": ids if len(set(texts.values())) == 1 else ids.cast(pa.string())}
            if several:
                content["type"] = pa.array([kind] * len(rows), pa.string())
            content["embedding"] = _lists(take(kind, rows).detach().float())
            yield pa.table(content)


def _rows_at_a_time(built: BuiltRun, count: int) -> Iterator[Tensor]:
    """Store ids of all nodes in pieces; other ranks than the first have as many pieces, of none."""
    for low in range(0, max(count, 1), ROWS_AT_ONCE):
        rows = torch.arange(low, min(low + ROWS_AT_ONCE, count))
        yield rows if built.world.is_first else rows[:0]


def _pieces(built: BuiltRun, columns: OutputColumns) -> Iterator[pa.Table]:
    assert isinstance(built.task, NodeTask)
    nodes, head = built.nodes, built.task.head
    for rows in _rows_at_a_time(built, nodes.count):
        prediction = built.node_predictor.predict_nodes(rows, embeddings=columns.embeddings)
        logits = prediction.logits.float()
        content: dict[str, Any] = {"id": nodes.ids.select(rows.numpy())}
        if len(built.graph.nodes) > 1:
            content["type"] = pa.array([built.task.target] * len(rows), pa.string())
        content["prediction"] = _predicted(head, nodes, logits)
        if head.multilabel:
            content["probabilities"] = _lists(torch.sigmoid(logits))
        else:
            content["probability"] = torch.softmax(logits, 1).amax(1).numpy()
        if columns.logits:
            content["logits"] = _lists(logits)
        if columns.embeddings:
            assert prediction.embeddings is not None
            content["embedding"] = _lists(prediction.embeddings.float())
        yield pa.table(content)


def _predicted(head: NodeHead, nodes: Nodes, logits: Tensor) -> Any:
    """Names where classes have them; the types do not depend on what is predicted."""
    kind = pa.string() if nodes.classes else pa.int64()
    return pa.array(class_names(head, nodes, logits), pa.list_(kind) if head.multilabel else kind)


def _lists(rows: Tensor) -> Any:
    """[n, k] as one list of k floats per row."""
    return pa.FixedSizeListArray.from_arrays(pa.array(rows.contiguous().numpy().reshape(-1)), rows.shape[1])

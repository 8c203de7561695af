"""Predictions for people: original ids, class names, probabilities, one Parquet file written in bounded pieces."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from gnnfleet.errors import RunError
from gnnfleet.graph.bundle import PARTIAL
from gnnfleet.graph.graph import Nodes
from gnnfleet.nn.heads import NodeHead
from gnnfleet.run.build import Built
from gnnfleet.strategies.base import Prediction

ROWS = 1 << 16
"""Rows written at a time."""


@dataclass(frozen=True)
class Columns:
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


def write_predictions(built: Built, path: Path, columns: Columns) -> int:
    """Write every node of the labelled type in store order; returns the rows. The file appears whole or not at all."""
    prediction = built.strategy.predict(embeddings=columns.embeddings)
    partial = path.with_name(f".{path.name}{PARTIAL}{secrets.token_hex(3)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _write(partial, _pieces(built, prediction, columns))
        partial.replace(path)
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        partial.unlink(missing_ok=True)
    return built.nodes.count


def _write(path: Path, pieces: Iterator[pa.Table]) -> None:
    first = next(pieces)
    with pq.ParquetWriter(path, first.schema, compression="zstd") as writer:
        writer.write_table(first)
        for piece in pieces:
            writer.write_table(piece)
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _pieces(built: Built, prediction: Prediction, columns: Columns) -> Iterator[pa.Table]:
    nodes, head = built.nodes, built.task.head
    for low in range(0, max(nodes.count, 1), ROWS):
        high = min(low + ROWS, nodes.count)
        logits = prediction.logits[low:high].float()
        content: dict[str, Any] = {"id": nodes.ids.take(np.arange(low, high))}
        if len(built.graph.nodes) > 1:
            content["type"] = pa.array([built.task.target] * (high - low), pa.string())
        content["prediction"] = _predicted(head, nodes, logits)
        if head.multilabel:
            content["probabilities"] = _lists(torch.sigmoid(logits))
        else:
            content["probability"] = torch.softmax(logits, 1).amax(1).numpy()
        if columns.logits:
            content["logits"] = _lists(logits)
        if columns.embeddings:
            assert prediction.embeddings is not None
            content["embedding"] = _lists(prediction.embeddings[low:high].float())
        yield pa.table(content)


def _predicted(head: NodeHead, nodes: Nodes, logits: Tensor) -> Any:
    """Names where classes have them; the types do not depend on what is predicted."""
    kind = pa.string() if nodes.classes else pa.int64()
    return pa.array(class_names(head, nodes, logits), pa.list_(kind) if head.multilabel else kind)


def _lists(rows: Tensor) -> Any:
    """[n, k] as one list of k floats per row."""
    return pa.FixedSizeListArray.from_arrays(pa.array(rows.contiguous().numpy().reshape(-1)), rows.shape[1])

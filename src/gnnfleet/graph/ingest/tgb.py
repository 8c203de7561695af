"""Event streams of the Temporal Graph Benchmark: ``gnnfleet import tgb:tgbl-wiki -o wiki``.

TGB's own package (extra ``tgb``) reads its files, which are pickles and tables in several formats.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import numpy as np
import torch

from gnnfleet.errors import ConfigError, InputError
from gnnfleet.graph.graph import Graph

PREFIX = "tgb:"


def read_tgb(name: str) -> Graph:
    """Read a downloaded link dataset; raises ConfigError without the package, InputError without the dataset."""
    try:
        from tgb.linkproppred.dataset import LinkPropPredDataset
    except ImportError as error:
        raise ConfigError(
            "the package of TGB is not installed: pip install 'gnnfleet[tgb]', or import the dataset's table of events"
        ) from error
    try:
        with contextlib.redirect_stdout(sys.stderr):  # standard output is for results only
            dataset = LinkPropPredDataset(name=name, root="datasets", preprocess=True)
    except Exception as error:  # it raises plain Exception for missing data, and EOFError without a terminal
        raise InputError(
            f"TGB cannot load {name}: {str(error) or type(error).__name__}. Download the dataset with TGB first"
        ) from error
    return from_tgb(dataset)


def from_tgb(dataset: Any) -> Graph:
    """Convert a ``LinkPropPredDataset`` to a graph with times; node numbers stay.

    Its split by time equals ``EventStream.split`` and its edge labels are all 1, so neither is stored.
    """
    events = dataset.full_data
    pairs = np.stack([np.asarray(events[name], dtype=np.int64) for name in ("sources", "destinations")])
    edge_attr, x = events.get("edge_feat"), getattr(dataset, "node_feat", None)
    return Graph(
        torch.from_numpy(pairs),
        x=x,
        edge_attr=None if edge_attr is None else np.asarray(edge_attr, dtype=np.float32).reshape(pairs.shape[1], -1),
        time=_times(np.asarray(events["timestamps"])),
        num_nodes=max(int(pairs.max()) + 1 if pairs.size else 0, 0 if x is None else len(x)),
        name=getattr(dataset, "name", "tgb"),
    )


def _times(timestamps: Any) -> Any:
    """Whole numbers as int64, others as float64."""
    integers = timestamps.astype(np.int64)
    return integers if np.array_equal(integers, timestamps) else timestamps.astype(np.float64)

"""Streams of the Temporal Graph Benchmark, through its own package: ``gnnfleet import tgb:tgbl-wiki -o wiki``.

Its files are pickles and tables of many kinds, so the package (extra ``tgb``) reads them; events come as it gives them.
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
    """A link data set that the user has, by its name; raises ConfigError without the package, InputError without it."""
    try:
        from tgb.linkproppred.dataset import LinkPropPredDataset
    except ImportError as error:
        raise ConfigError(
            "reading a data set of TGB needs its package: pip install 'gnnfleet[tgb]', or import its table of events"
        ) from error
    try:
        # What it says goes where messages go: standard output is for results.
        with contextlib.redirect_stdout(sys.stderr):
            dataset = LinkPropPredDataset(name=name, root="datasets", preprocess=True)
    except Exception as error:  # it raises plain Exception where data is missing, and asks a terminal that may not be
        raise InputError(
            f"TGB cannot give {name}: {str(error) or type(error).__name__}. Download it with TGB first"
        ) from error
    return from_tgb(dataset)


def from_tgb(dataset: Any) -> Graph:
    """A ``LinkPropPredDataset`` as a graph with times; nodes are numbered as there.

    Its parts by time are what ``EventStream.split`` gives, and its edge labels are all 1, so neither is kept.
    """
    data = dataset.full_data
    ends = np.stack([np.asarray(data[name], dtype=np.int64) for name in ("sources", "destinations")])
    features, known = data.get("edge_feat"), getattr(dataset, "node_feat", None)
    count = max(int(ends.max()) + 1 if ends.size else 0, 0 if known is None else len(known))
    return Graph(
        torch.from_numpy(ends),
        x=known,
        edge_attr=None if features is None else np.asarray(features, dtype=np.float32).reshape(ends.shape[1], -1),
        time=_times(np.asarray(data["timestamps"])),
        num_nodes=count,
        name=getattr(dataset, "name", "tgb"),
    )


def _times(given: Any) -> Any:
    whole = given.astype(np.int64)
    return whole if np.array_equal(whole, given) else given.astype(np.float64)

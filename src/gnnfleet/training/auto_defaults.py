"""Defaults of model and training for a graph that nobody tuned for, from what its training labels and features say.

They replace fixed defaults only: a setting of the user stays. Rules: docs/defaults.md; benchmarks/defaults.py compares
them with published figures and with ``gnnfleet tune``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gnnfleet.config.resolve import flatten, named_group, overlay, resolve, unflatten
from gnnfleet.config.schema import RunConfig, SettingsTree
from gnnfleet.errors import ConfigError
from gnnfleet.graph.events.event_stream import is_event_graph
from gnnfleet.graph.graph import TRAIN, VAL, Edges, Graph, Nodes, labelled_rows
from gnnfleet.nn.base import Model
from gnnfleet.nn.config import TEMPORAL_MODELS
from gnnfleet.nn.norm import sample_rows
from gnnfleet.report.remarks import print_note
from gnnfleet.training.build import split_codes

FEW_LABELS = 50
"""Training labels per class below which deep models overfit."""

MIXED = 0.3
"""Adjusted homophily below which the neighbours of a node are mostly of other classes."""

_EDGES_READ = 1 << 20
_MIN_EDGES = 50  # between labelled nodes, to estimate homophily from
_SPARSE = 0.8  # share of zeros from which non-negative features count as a bag of words
_SCALES = 10.0  # root mean square of a column, and its ratio to the median, from which features are standardized


@dataclass(frozen=True)
class GraphFacts:
    """Facts that defaults depend on. ``homophily`` is adjusted for class sizes: 0 at random, 1 for equal labels."""

    labels_per_class: float  # of a regression: all
    is_regression: bool
    features: str  # none, bag of words, other scales, plain
    homophily: float | None  # None: too few edges between labelled nodes
    is_hetero: bool
    validates: bool

    def __str__(self) -> str:
        homophily = "unknown" if self.homophily is None else f"{self.homophily:.2f}"
        features = "no features" if self.features == "none" else f"features: {self.features}"
        if self.is_regression:
            return f"{self.labels_per_class:,.0f} labels, {features}"
        return f"{self.labels_per_class:,.0f} labels per class, homophily {homophily}, {features}"


def with_auto_defaults(
    graph: Graph, settings: Mapping[str, Any], *, for_all: bool = False, quiet: bool = False
) -> SettingsTree:
    """Settings with defaults for the graph, once: ``auto_defaults`` is false in the result. Says what it chose.

    ``for_all``: they must suit all strategies; those of the settings and the number of workers are not read.
    """
    tree = dict(settings)
    if not tree.get("auto_defaults", True):
        return tree
    model = named_group("model", tree.get("model", {})).get("name", "")
    if for_all and model in TEMPORAL_MODELS:
        return {**tree, "auto_defaults": False}
    ignored = ("strategy", "workers", "partition", "memory") if for_all else ()
    config = resolve({key: value for key, value in tree.items() if key not in ignored})
    fixed, target = {**tree, "auto_defaults": False}, graph.labelled_type
    if config.task != "node" or config.spec.input == "events" or config.model.is_custom or target is None:
        return fixed
    nodes = graph.nodes[target]
    facts = measure_facts(graph, nodes, split_codes(nodes, config)[0])
    is_sampled = config.strategy.is_sampled
    chosen = choose_defaults(facts, model, is_sampled=is_sampled, batch_norm=not for_all and _allows_batch_norm(config))
    own = flatten({**tree, "model": named_group("model", tree.get("model", {}))})
    chosen = {key: value for key, value in chosen.items() if key not in own}
    if chosen:
        values = ", ".join(f"{key.partition('.')[2]}={value}" for key, value in chosen.items())
        print_note(f"defaults for this graph ({facts}): {values}", quiet=quiet)
    return overlay(fixed, unflatten(chosen))


def choose_defaults(
    facts: GraphFacts, model: str = "", *, is_sampled: bool = False, batch_norm: bool = False
) -> dict[str, Any]:
    """Settings by full name; ``model`` is the one that the user named. ``batch_norm``: the strategy allows it."""
    few, mixed = facts.labels_per_class < FEW_LABELS, facts.homophily is not None and facts.homophily < MIXED
    chosen: dict[str, Any] = {}
    if not model:
        chosen["model.name"] = "hetero-sage" if facts.is_hetero else "gcn" if few != mixed else "sage"
    if (model or chosen["model.name"]) not in ("gcn2", "res+"):  # those are deep, with norms and residuals of their own
        chosen["model.layers"] = 2 if few or facts.is_hetero else 10 if mixed and not is_sampled else 3
        norm = "batch" if mixed and batch_norm else "layer"
        has_norm = not facts.is_regression and (facts.is_hetero or not few)  # norms drop the size of a value
        chosen["model.norm"] = norm if has_norm else "none"
        chosen["model.dropout"] = 0.0 if facts.is_regression else 0.5 if few else 0.3
        chosen["model.residual"] = not few
    if facts.features == "none" and model != "sign":
        chosen["model.embedding"] = 64
    if facts.features == "other scales":
        chosen["model.input_norm"] = "standardize"
    elif facts.features == "bag of words" and few:  # deep models stall on tiny inputs
        chosen["model.input_norm"] = "sum"
    if mixed and not few:
        chosen["model.hidden"] = 64
    chosen["train.lr"] = 0.01 if few or mixed or facts.is_regression else 0.003
    chosen["train.epochs"] = 50 if is_sampled else 200
    if facts.validates:
        chosen["train.patience"] = 10 if is_sampled else 50
    return chosen


def _allows_batch_norm(config: RunConfig) -> bool:
    try:
        config.strategy.check_model(Model([torch.nn.BatchNorm1d(1)]))
    except ConfigError:
        return False
    return not config.strategy.is_sampled


def measure_facts(graph: Graph, nodes: Nodes, split: Tensor) -> GraphFacts:
    """Facts of a graph; only training labels are read. ``split`` [N] has the codes of the labelled type."""
    assert nodes.y is not None
    y = nodes.y
    is_labelled = labelled_rows(y)
    is_train = (split == TRAIN) & is_labelled
    count, is_hetero, homophily = int(is_train.sum()), graph.is_hetero, None
    if not is_hetero and y.dim() == 1 and not nodes.regression:
        homophily = _adjusted_homophily(graph.single_edges, y, is_train)
    validates = bool(((split == VAL) & is_labelled).any())
    per_class = count if nodes.regression else count / max(nodes.num_classes, 1)
    has_features = is_event_graph(graph) or any(
        table.x is not None and table.x.shape[1] for table in graph.nodes.values()
    )
    features = _feature_kind(nodes.x) if has_features else "none"
    return GraphFacts(per_class, nodes.regression, features, homophily, is_hetero, validates)


def _adjusted_homophily(edges: Edges, y: Tensor, is_train: Tensor) -> float | None:
    """(Share of edges with equal labels − that of random edges) / (1 − that), over edges between training nodes."""
    step = max(1, edges.count // _EDGES_READ)
    rows = torch.arange(0, edges.count, step)
    src = edges.src[rows].long()
    dst = torch.searchsorted(edges.indptr, rows, right=True) - 1
    known = is_train[src] & is_train[dst] & (src != dst)
    left, right = y[src[known]].long(), y[dst[known]].long()
    if len(left) < _MIN_EDGES:
        return None
    shares = torch.bincount(torch.cat([left, right])).double() / (2 * len(left))
    by_chance = float((shares**2).sum())
    return (float((left == right).double().mean()) - by_chance) / max(1 - by_chance, 1e-9)


def _feature_kind(x: Tensor | None) -> str:
    if x is None or not x.shape[1]:
        return "plain"  # of the type that is predicted; others have some
    rows = sample_rows(x)
    if bool((rows >= 0).all()) and float((rows == 0).double().mean()) >= _SPARSE:
        return "bag of words"
    size = rows.square().mean(0).sqrt()
    size = size[size > 0]
    differs = len(size) > 0 and float(size.max()) > _SCALES * min(1.0, float(size.median()))
    return "other scales" if differs else "plain"

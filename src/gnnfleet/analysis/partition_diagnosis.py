"""How alike the trainers of ``tma`` would be: edges, labels and features of their parts, losses and gradients on them.

Losses and gradients are compared at equal weights, the model's first ones and those after some steps on the whole
graph; only the parts differ then. One part is in memory at a time. N nodes, F features, C classes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gnnfleet.config.schema import RunConfig
from gnnfleet.errors import ConfigError, RunError
from gnnfleet.graph.graph import Graph
from gnnfleet.graph.partition.node_assignment import ClusterMap, NodeAssignment
from gnnfleet.graph.partition.partition_metrics import imbalance
from gnnfleet.launch.tma_subgraph import make_global_training, make_local_training
from gnnfleet.nn.embedding import NodeEmbedding
from gnnfleet.ops.gather import gather
from gnnfleet.report.progress import NoProgress, Progress
from gnnfleet.strategies.protocol import GradientSource, Strategy
from gnnfleet.training.partition_cache import ensure_clusters, trained_graph

SCHEMES = ("random", "super", "mincut")
COSINE_MARGIN = 0.95
"""The share of the best aim that is good enough to go by how well trainers agree."""

BATCHES = 100
"""Of an epoch that losses and gradients are taken over at most."""

PIECE = 1 << 16
"""Rows of features looked at at a time."""

WeightTensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Snapshot:
    """The trainers at equal weights; those with nothing to train on are left out. None where too few are left."""

    loss: float | None  # mean over trainers
    discrepancy: float | None  # standard deviation of their losses over the mean
    cosine: float | None  # of their gradients, mean over pairs
    aim: float | None  # cosine of the average of their gradients with the gradient on the whole graph


@dataclass(frozen=True)
class DiagnosisRow:
    """One way to deal the nodes. Divergences are means over parts; None without labels, without features."""

    scheme: str
    clusters: int | None  # super-nodes that are dealt; None where nodes go one by one
    kept: float  # share of the edges whose ends are in one part
    balance: float  # nodes of the largest part over the mean
    labels: float | None  # total variation between the labels of a part and all; of several labels mean |Δ frequency|
    features: float | None  # ‖mean of a part − mean of all‖ / ‖standard deviation of all‖
    first: Snapshot
    trained: Snapshot


def diagnose(
    graph: Graph,
    config: RunConfig,
    schemes: Sequence[str] = SCHEMES,
    clusters: Sequence[int] = (),
    steps: int = 20,
    *,
    batches: int = BATCHES,
    progress: Progress = NoProgress(),
) -> list[DiagnosisRow]:
    """A row for each scheme, for ``super`` one for each number of super-nodes (0: the default number).

    The graph is one of a store, which keeps the clusters; the config is one of tma. Raises ConfigError for numbers
    that do not fit, RunError for a loss that is no number.
    """
    strategy = config.strategy
    for number in clusters:
        if number and number < config.workers:
            raise ConfigError(f"{number} super-nodes are too few for {config.workers} workers: at least one for each")
    progress.stage("weights")
    moments = _snapshots(graph, config, steps, batches)
    whole = _GlobalStats.of(graph)
    trained = trained_graph(graph, config)
    rows = []
    for scheme in schemes:
        for number in (clusters or [strategy.num_clusters]) if scheme == "super" else [0]:
            knobs = strategy.model_copy(update={"clusters": number, "remote_negatives": 0})
            dealt = config.model_copy(update={"partition": scheme, "strategy": knobs})
            path = ensure_clusters(graph, trained, dealt, progress=progress)
            found = None if path is None else ClusterMap.open(path)
            deal = NodeAssignment({kind: table.count for kind, table in graph.nodes.items()}, found, config.seed)
            advance = progress.stage(f"{scheme} {number or ''}".rstrip(), config.workers)
            trainers = []
            for place in range(config.workers):
                trainers.append(_measure_part(graph, dealt, place, deal, whole, moments))
                advance(1)
            rows.append(_row(scheme, found, trainers, trained.num_edges, moments))
    return rows


def recommend(rows: Sequence[DiagnosisRow]) -> DiagnosisRow | None:
    """Of the rows whose average points nearly as well as the best where the whole graph's gradient does, the one whose
    trainers agree most; None where no gradients were compared."""
    known = [(row.trained.aim, row) for row in rows if row.trained.aim is not None]
    if not known:
        return None
    best = max(aim for aim, _ in known)
    enough = best - (1 - COSINE_MARGIN) * abs(best)
    return max((row for aim, row in known if aim >= enough), key=lambda row: (row.trained.cosine or 0.0, row.kept))


@dataclass(frozen=True, eq=False)
class _TrainerStats:
    """One trainer's part; ``moments`` has (loss, gradient) at each of the weights, None with nothing to train on."""

    nodes: int
    edges: int
    labels: float | None
    features: float | None
    moments: list[tuple[float, Tensor] | None]


@dataclass(frozen=True, eq=False)
class _WeightsAndGradient:
    """Weights, learnt rows of all nodes among them, and the gradient there on the whole graph."""

    weights: WeightTensors
    gradient: Tensor
    batches: int  # of an epoch, at most


def _snapshots(graph: Graph, config: RunConfig, steps: int, batches: int) -> list[_WeightsAndGradient]:
    """At the first weights, and after some steps on the whole graph."""
    strategy = make_global_training(graph, config)
    first = _WeightsAndGradient(_copy(strategy.state_dict()["model"]), _flat(strategy, batches)[2], batches)
    records = (
        record for epoch in range(steps) for record in strategy.train_epoch(epoch)
    )  # an epoch has a step at least
    for record in islice(records, steps):
        _check_finite(record.loss)
    records.close()
    trained = _WeightsAndGradient(_copy(strategy.state_dict()["model"]), _flat(strategy, batches)[2], batches)
    strategy.close()
    return [first, trained]


def _measure_part(
    graph: Graph,
    config: RunConfig,
    place: int,
    deal: NodeAssignment,
    whole: _GlobalStats,
    moments: Sequence[_WeightsAndGradient],
) -> _TrainerStats:
    own = deal.nodes_of(place, config.workers)
    nodes = sum(len(ids) for ids in own.values())
    if not nodes:
        return _TrainerStats(0, 0, None, None, [None] * len(moments))
    alone = make_local_training(graph, config, place, own)
    strategy = alone.strategy
    seen: list[tuple[float, Tensor] | None] = []
    for at in moments:
        mine = {name: at.weights[name][ids] for name, ids in alone.embeddings.items()}
        strategy.load_state_dict({"model": {**at.weights, **mine}})
        loss, count, gradient = _flat(strategy, at.batches)
        _check_finite(loss)
        seen.append((loss, gradient) if count else None)
    strategy.close()
    return _TrainerStats(nodes, alone.edges, whole.label_divergence(own), whole.feature_divergence(own), seen)


def _flat(strategy: Strategy, batches: int) -> tuple[float, int, Tensor]:
    """(loss, items, the gradient as one row, without learnt rows of nodes)."""
    rows = {
        f"{name}.weight" if name else "weight"
        for name, module in strategy.model.named_modules()
        if isinstance(module, NodeEmbedding)
    }
    assert isinstance(strategy, GradientSource)
    loss, count, found = strategy.gradients(0, batches)
    flat = [gradient.double().flatten() for name, gradient in found.items() if name not in rows]
    return loss, count, torch.cat(flat) if flat else torch.empty(0)


def _row(
    scheme: str,
    clusters: ClusterMap | None,
    trainers: Sequence[_TrainerStats],
    edges: int,
    moments: Sequence[_WeightsAndGradient],
) -> DiagnosisRow:
    return DiagnosisRow(
        scheme=scheme,
        clusters=None if clusters is None else len(clusters.sizes),
        kept=sum(seen.edges for seen in trainers) / edges if edges else 1.0,
        balance=imbalance(np.array([seen.nodes for seen in trainers])),
        labels=_mean([seen.labels for seen in trainers]),
        features=_mean([seen.features for seen in trainers]),
        first=_snapshot([seen.moments[0] for seen in trainers], moments[0].gradient),
        trained=_snapshot([seen.moments[1] for seen in trainers], moments[1].gradient),
    )


def _snapshot(given: Sequence[tuple[float, Tensor] | None], whole: Tensor) -> Snapshot:
    known = [each for each in given if each is not None]
    losses = torch.tensor([loss for loss, _ in known], dtype=torch.float64)
    mean = float(losses.mean()) if len(known) else None
    if mean is None or len(known) == 1 < len(given):
        return Snapshot(mean, None, None, None)
    spread = float(losses.std(correction=0)) / mean if mean else 0.0
    gradients = [gradient for _, gradient in known]
    aim = float(torch.cosine_similarity(torch.stack(gradients).mean(0), whole, 0)) if len(whole) else None
    return Snapshot(mean, spread, _cosine(gradients), aim)


def _cosine(gradients: Sequence[Tensor]) -> float | None:
    """Mean over pairs; one trainer agrees with itself."""
    if not len(gradients[0]):
        return None
    pairs = [float(torch.cosine_similarity(one, two, 0)) for one, two in combinations(gradients, 2)]
    return _mean(pairs) if pairs else 1.0


@dataclass(frozen=True, eq=False)
class _GlobalStats:
    """What parts are compared with: labels of the labelled type, features of every type that has some."""

    graph: Graph
    labels: Tensor | None  # [C] share of the labelled nodes; of several labels each one's frequency
    means: Mapping[str, Tensor]  # [F] float64 by node type
    deviation: float  # ‖standard deviations‖ over all types

    @classmethod
    def of(cls, graph: Graph) -> _GlobalStats:
        labels = None if graph.labelled_type is None else _frequencies(graph, graph.labelled_type, None)
        known = {kind: table.x for kind, table in graph.nodes.items() if table.x is not None and table.x.numel()}
        means = {kind: _mean_row(x, torch.arange(len(x))) for kind, x in known.items()}
        variance = sum(float(_mean_row(x, torch.arange(len(x)), around=means[kind]).sum()) for kind, x in known.items())
        return cls(graph, labels, means, math.sqrt(variance))

    def label_divergence(self, own: Mapping[str, Tensor]) -> float | None:
        kind = self.graph.labelled_type
        if kind is None or self.labels is None:
            return None
        found = _frequencies(self.graph, kind, own[kind])
        if found is None:
            return None
        apart = (found - self.labels).abs()
        if self.graph.nodes[kind].multilabel:
            apart = apart[~apart.isnan()]  # a label of which nothing is known here, or nowhere
            return float(apart.mean()) if len(apart) else None
        return float(apart.sum() / 2)

    def feature_divergence(self, own: Mapping[str, Tensor]) -> float | None:
        if not self.means:
            return None
        square = 0.0
        for kind, mean in self.means.items():
            x = self.graph.nodes[kind].x
            if x is not None and len(own[kind]):
                square += float((_mean_row(x, own[kind]) - mean).square().sum())
        return math.sqrt(square) / self.deviation if self.deviation else 0.0


def _frequencies(graph: Graph, kind: str, ids: Tensor | None) -> Tensor | None:
    """[C] float64, of these nodes or all; None where no node has a label."""
    table = graph.nodes[kind]
    assert table.y is not None
    y = table.y if ids is None else table.y[ids]
    known = y >= 0
    if not bool(known.any()):
        return None
    if table.multilabel:
        return ((y * known).sum(0, dtype=torch.float64)) / known.sum(0)
    counts = torch.bincount(y[known], minlength=table.num_classes).double()
    return counts / counts.sum()


def _mean_row(x: Tensor, ids: Tensor, *, around: Tensor | None = None) -> Tensor:
    """[F] float64: the mean of some rows, or of their squared distances from a point."""
    total = torch.zeros(x.shape[1], dtype=torch.float64)
    for low in range(0, len(ids), PIECE):
        piece = gather(x, ids[low : low + PIECE]).double()
        total += piece.sum(0) if around is None else (piece - around).square().sum(0)
    return total / len(ids)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _copy(weights: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in weights.items()}


def _check_finite(loss: float) -> None:
    if not math.isfinite(loss):
        raise RunError(f"the loss is {loss}: try a smaller train.lr, or train.clip=1")

"""Similarity of the trainers of ``tma``: edges, labels and features of their parts, losses and gradients on them.

Losses and gradients are compared at equal weights, so only the parts differ: at the initial weights, and after some
steps on the whole graph. One part is in memory at a time. N nodes, F features, C classes.
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
from gnnfleet.graph.partition.edge_scan import imbalance
from gnnfleet.graph.partition.metis import MAX_SUPER_NODES
from gnnfleet.graph.partition.node_assignment import ClusterMap, NodeAssignment
from gnnfleet.launch.tma_subgraph import make_global_training, make_local_training
from gnnfleet.nn.embedding import NodeEmbedding
from gnnfleet.ops.gather import gather
from gnnfleet.report.progress import Progress, make_progress
from gnnfleet.report.remarks import print_note
from gnnfleet.strategies.protocol import GradientSource, Strategy
from gnnfleet.training.partition_cache import ensure_clusters, trained_graph

SCHEMES = ("random", "super", "mincut")
COSINE_MARGIN = 0.95
"""Rows whose aim is at least this share of the best are ranked by how well their trainers agree."""

BATCHES = 100
"""Most batches of an epoch that losses and gradients are computed on."""

FEATURE_ROWS = 1 << 16
"""Rows of features in memory at a time."""


@dataclass(frozen=True)
class Snapshot:
    """Trainers at equal weights, without those that have nothing to train on. None if too few are left."""

    loss: float | None  # mean over trainers
    discrepancy: float | None  # standard deviation of their losses over the mean
    cosine: float | None  # of their gradients, mean over pairs
    aim: float | None  # cosine of the average of their gradients with the gradient on the whole graph


@dataclass(frozen=True)
class DiagnosisRow:
    """An assignment of nodes to trainers. Divergences are means over parts; None without labels, without features."""

    scheme: str
    clusters: int | None  # super-nodes that are assigned; None if nodes are assigned one by one
    kept: float  # share of the edges whose ends are in one part
    balance: float  # nodes of the largest part over the mean
    labels: float | None  # total variation between the labels of a part and all; for multi-label mean |Δ frequency|
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
    progress: Progress = Progress(),
) -> list[DiagnosisRow]:
    """Measure each scheme, ``super`` with each number of super-nodes (0: the default number).

    The graph has a store, which keeps the clusters; the config is one of tma. Raises ConfigError for too few
    super-nodes, RunError for a loss that is not finite.
    """
    for number in clusters:
        if number and number < config.workers:
            raise ConfigError(f"{number} super-nodes are too few for {config.workers} workers: at least one for each")
    progress.stage("weights")
    references = _reference_gradients(graph, config, steps, batches)
    global_stats = _GlobalStats.of(graph)
    trained = trained_graph(graph, config)
    counts = {kind: nodes.count for kind, nodes in graph.nodes.items()}
    rows = []
    for scheme in schemes:
        for number in (clusters or [config.strategy.num_clusters]) if scheme == "super" else [0]:
            strategy = config.strategy.model_copy(update={"clusters": number, "remote_negatives": 0})
            row_config = config.model_copy(update={"partition": scheme, "strategy": strategy})
            path = ensure_clusters(graph, trained, row_config, progress=progress)
            cluster_map = None if path is None else ClusterMap.open(path)
            assignment = NodeAssignment(counts, cluster_map, config.seed)
            advance = progress.stage(f"{scheme} {number or ''}".rstrip(), config.workers)
            trainers = []
            for index in range(config.workers):
                node_ids = assignment.nodes_of(index, config.workers)
                trainers.append(_measure_trainer(graph, row_config, index, node_ids, global_stats, references))
                advance(1)
            rows.append(_row(scheme, cluster_map, trainers, trained.num_edges, references))
    return rows


def recommend(rows: Sequence[DiagnosisRow]) -> DiagnosisRow | None:
    """The row with the largest cosine of those with nearly the best aim; None if no gradients were compared."""
    aims = [(row.trained.aim, row) for row in rows if row.trained.aim is not None]
    if not aims:
        return None
    best = max(aim for aim, _ in aims)
    least = best - (1 - COSINE_MARGIN) * abs(best)
    return max((row for aim, row in aims if aim >= least), key=lambda row: (row.trained.cosine or 0.0, row.kept))


@dataclass(frozen=True, eq=False)
class _TrainerStats:
    """One trainer's part; ``gradients`` has (loss, gradient) at each of the weights, None with nothing to train on."""

    nodes: int
    edges: int
    labels: float | None
    features: float | None
    gradients: list[tuple[float, Tensor] | None]


@dataclass(frozen=True, eq=False)
class _ReferenceGradient:
    """Weights, with learnable rows of all nodes, and the gradient there on the whole graph."""

    weights: Mapping[str, Tensor]
    gradient: Tensor
    batches: int  # of an epoch, at most


def _reference_gradients(graph: Graph, config: RunConfig, steps: int, batches: int) -> list[_ReferenceGradient]:
    """Compute the gradient at the initial weights, and after some steps on the whole graph."""
    strategy = make_global_training(graph, config)

    def reference() -> _ReferenceGradient:
        weights = {name: tensor.detach().clone() for name, tensor in strategy.state_dict()["model"].items()}
        return _ReferenceGradient(weights, _gradient(strategy, batches)[2], batches)

    initial = reference()
    records = (record for epoch in range(steps) for record in strategy.train_epoch(epoch))  # an epoch has a step
    for record in islice(records, steps):
        _check_finite(record.loss)
    records.close()
    trained = reference()
    strategy.close()
    return [initial, trained]


def _measure_trainer(
    graph: Graph,
    config: RunConfig,
    index: int,
    node_ids: Mapping[str, Tensor],
    global_stats: _GlobalStats,
    references: Sequence[_ReferenceGradient],
) -> _TrainerStats:
    num_nodes = sum(len(ids) for ids in node_ids.values())
    if not num_nodes:
        return _TrainerStats(0, 0, None, None, [None] * len(references))
    training = make_local_training(graph, config, index, node_ids)
    strategy = training.strategy
    gradients: list[tuple[float, Tensor] | None] = []
    for reference in references:
        local_rows = {name: reference.weights[name][ids] for name, ids in training.embeddings.items()}
        strategy.load_state_dict({"model": {**reference.weights, **local_rows}})
        loss, count, gradient = _gradient(strategy, reference.batches)
        _check_finite(loss)
        gradients.append((loss, gradient) if count else None)
    strategy.close()
    labels, features = global_stats.label_divergence(node_ids), global_stats.feature_divergence(node_ids)
    return _TrainerStats(num_nodes, training.edges, labels, features, gradients)


def _gradient(strategy: Strategy, batches: int) -> tuple[float, int, Tensor]:
    """(loss, items, flat gradient without learnable rows of nodes)."""
    embeddings = {
        f"{name}.weight" if name else "weight"
        for name, module in strategy.model.named_modules()
        if isinstance(module, NodeEmbedding)
    }
    assert isinstance(strategy, GradientSource)
    loss, count, gradients = strategy.gradients(0, batches)
    flat = [gradient.double().flatten() for name, gradient in gradients.items() if name not in embeddings]
    return loss, count, torch.cat(flat) if flat else torch.empty(0)


def _row(
    scheme: str,
    clusters: ClusterMap | None,
    trainers: Sequence[_TrainerStats],
    edges: int,
    references: Sequence[_ReferenceGradient],
) -> DiagnosisRow:
    first, trained = (
        _snapshot([trainer.gradients[index] for trainer in trainers], reference.gradient)
        for index, reference in enumerate(references)
    )
    return DiagnosisRow(
        scheme=scheme,
        clusters=None if clusters is None else len(clusters.sizes),
        kept=sum(trainer.edges for trainer in trainers) / edges if edges else 1.0,
        balance=imbalance(np.array([trainer.nodes for trainer in trainers])),
        labels=_mean([trainer.labels for trainer in trainers]),
        features=_mean([trainer.features for trainer in trainers]),
        first=first,
        trained=trained,
    )


def _snapshot(trainers: Sequence[tuple[float, Tensor] | None], reference: Tensor) -> Snapshot:
    active = [trainer for trainer in trainers if trainer is not None]
    losses = torch.tensor([loss for loss, _ in active], dtype=torch.float64)
    mean = float(losses.mean()) if active else None
    if mean is None or len(active) == 1 < len(trainers):
        return Snapshot(mean, None, None, None)
    discrepancy = float(losses.std(correction=0)) / mean if mean else 0.0
    if not len(reference):  # the model has learnable rows only
        return Snapshot(mean, discrepancy, None, None)
    gradients = [gradient for _, gradient in active]
    aim = float(torch.cosine_similarity(torch.stack(gradients).mean(0), reference, 0))
    cosines = [float(torch.cosine_similarity(a, b, 0)) for a, b in combinations(gradients, 2)]
    return Snapshot(mean, discrepancy, _mean(cosines) if cosines else 1.0, aim)


@dataclass(frozen=True, eq=False)
class _GlobalStats:
    """Statistics that parts are compared with: labels of the labelled type, features of every type that has some."""

    graph: Graph
    labels: Tensor | None  # [C] share of the labelled nodes; for multi-label the frequency of each
    means: Mapping[str, Tensor]  # [F] float64 by node type
    deviation: float  # ‖standard deviations‖ over all types

    @classmethod
    def of(cls, graph: Graph) -> _GlobalStats:
        labels = None if graph.labelled_type is None else _frequencies(graph, graph.labelled_type, None)
        means, variance = {}, 0.0
        for kind, nodes in graph.nodes.items():
            if nodes.x is not None and nodes.x.numel():
                ids = torch.arange(nodes.count)
                means[kind] = _mean_row(nodes.x, ids)
                variance += float(_mean_row(nodes.x, ids, around=means[kind]).sum())
        return cls(graph, labels, means, math.sqrt(variance))

    def label_divergence(self, node_ids: Mapping[str, Tensor]) -> float | None:
        kind = self.graph.labelled_type
        frequencies = None if kind is None else _frequencies(self.graph, kind, node_ids[kind])
        if kind is None or frequencies is None or self.labels is None:
            return None
        differences = (frequencies - self.labels).abs()
        if not self.graph.nodes[kind].multilabel:
            return float(differences.sum() / 2)
        differences = differences[~differences.isnan()]  # NaN: the label is unknown for all nodes of the part or graph
        return float(differences.mean()) if len(differences) else None

    def feature_divergence(self, node_ids: Mapping[str, Tensor]) -> float | None:
        if not self.means:
            return None
        squared = 0.0
        for kind, mean in self.means.items():
            x = self.graph.nodes[kind].x
            if x is not None and len(node_ids[kind]):
                squared += float((_mean_row(x, node_ids[kind]) - mean).square().sum())
        return math.sqrt(squared) / self.deviation if self.deviation else 0.0


def _frequencies(graph: Graph, kind: str, ids: Tensor | None) -> Tensor | None:
    """[C] float64, of these nodes or all; None if no node has a label."""
    nodes = graph.nodes[kind]
    assert nodes.y is not None
    y = nodes.y if ids is None else nodes.y[ids]
    if nodes.regression:
        return None
    labelled = y >= 0
    if not bool(labelled.any()):
        return None
    if nodes.multilabel:
        return (y * labelled).sum(0, dtype=torch.float64) / labelled.sum(0)
    counts = torch.bincount(y[labelled], minlength=nodes.num_classes).double()
    return counts / counts.sum()


def _mean_row(x: Tensor, ids: Tensor, *, around: Tensor | None = None) -> Tensor:
    """[F] float64: the mean of some rows, or of their squared distances from a point."""
    total = torch.zeros(x.shape[1], dtype=torch.float64)
    for low in range(0, len(ids), FEATURE_ROWS):
        rows = gather(x, ids[low : low + FEATURE_ROWS]).double()
        total += rows.sum(0) if around is None else (rows - around).square().sum(0)
    return total / len(ids)


def _mean(values: Sequence[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return sum(numbers) / len(numbers) if numbers else None


def _check_finite(loss: float) -> None:
    if not math.isfinite(loss):
        raise RunError(f"the loss is {loss}: try a smaller train.lr, or train.clip=1")


AUTO_STEPS, AUTO_BATCHES = 20, 20
"""For ``strategy.clusters=auto``: steps on the whole graph before parts are compared, and batches of each part."""


def choose_clusters(graph: Graph, config: RunConfig, *, quiet: bool) -> RunConfig:
    """The config with a number instead of ``auto``; the graph has a store, which keeps the clusters."""
    strategy = config.strategy
    if not strategy.measures_clusters:
        return config
    number = 0  # other schemes have no super-nodes
    if (config.partition or strategy.partitioner) == "super":
        candidates = cluster_candidates(graph.num_nodes, config.workers)
        with make_progress(quiet) as progress:
            rows = diagnose(graph, config, ["super"], candidates, AUTO_STEPS, batches=AUTO_BATCHES, progress=progress)
        best = recommend(rows)
        if best is not None:
            number = candidates[rows.index(best)]
            reason = f"{best.kept:.0%} of the edges are kept, gradients have cosine {best.trained.cosine or 0:.3f}"
            print_note(f"strategy.clusters={number} of {', '.join(map(str, candidates))}: {reason}", quiet=quiet)
    return config.model_copy(update={"strategy": strategy.model_copy(update={"clusters": number})})


def cluster_candidates(nodes: int, workers: int) -> list[int]:
    """Numbers of super-nodes from ten per trainer to the default number."""
    largest = max(workers, min(MAX_SUPER_NODES, nodes // 10))
    smaller = (workers * 10 * factor for factor in (1, 3, 10, 30, 100, 300))
    return [*(number for number in smaller if number < largest), largest]


def drop_auto_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a resumed run, which keeps the number that was measured for it."""
    strategy = settings.get("strategy")
    if isinstance(strategy, Mapping) and strategy.get("clusters") == "auto":
        return {**settings, "strategy": {key: value for key, value in strategy.items() if key != "clusters"}}
    return dict(settings)

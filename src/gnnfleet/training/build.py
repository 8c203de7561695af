"""Builds a strategy from a graph and a config: checks labels and features, applies the split, builds the model.

``rebuild`` does the same for a trained run, on its own graph or another one.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from gnnfleet.comm.world import World
from gnnfleet.config.schema import RunConfig
from gnnfleet.errors import ConfigError, InputError
from gnnfleet.graph.events.event_stream import EventStream, NegativeSampler, event_edge_type, is_event_graph
from gnnfleet.graph.graph import NO_SPLIT, TEST, Graph, Nodes
from gnnfleet.graph.split import SplitShares, parse_rule, split_nodes
from gnnfleet.nn.base import Model
from gnnfleet.nn.heads import NodeHead
from gnnfleet.nn.pyg.native import describe
from gnnfleet.nn.temporal.model import EventDims, TemporalModel
from gnnfleet.nn.unused_data import describe_unused
from gnnfleet.strategies.config import EventConfig
from gnnfleet.strategies.job import PRECISIONS, EventJob, Job, OwnedIds
from gnnfleet.strategies.job import RankContext as RankContext
from gnnfleet.strategies.protocol import EventPredictor, NodePredictor, Strategy
from gnnfleet.strategies.registry import build_strategy
from gnnfleet.tasks.event import EventTask
from gnnfleet.tasks.link import LinkTask
from gnnfleet.tasks.node import NodeTask
from gnnfleet.training.build_link import LEAKAGE_WARNING, build_links, seeded_model
from gnnfleet.training.output_schema import OutputSchema, with_objective


@dataclass(frozen=True, eq=False)
class BuiltRun:
    """A strategy and its inputs."""

    strategy: Strategy
    graph: Graph
    task: NodeTask | LinkTask | EventTask
    output: OutputSchema | None  # classes of nodes; None for links and events
    model_file: Path | None = None  # file of a custom model
    remarks: tuple[str, ...] = ()  # notes for the user
    world: World = field(default_factory=World)  # the ranks that built it together

    @property
    def node_predictor(self) -> NodePredictor:
        if not isinstance(self.strategy, NodePredictor):
            raise ConfigError("this run predicts events: use gnnfleet predict --events FILE or record.score(events)")
        return self.strategy

    @property
    def event_predictor(self) -> EventPredictor:
        if not isinstance(self.strategy, EventPredictor):
            raise ConfigError("events are scored by a run with --strategy temporal; this run has no event stream")
        return self.strategy

    @property
    def nodes(self) -> Nodes:
        return self.graph.nodes[self.task.target]

    @property
    def unit(self) -> str:
        """Plural noun of the items of the task."""
        if isinstance(self.task, EventTask):
            return "events"
        return "links" if isinstance(self.task, LinkTask) else "nodes"

    def has(self, split: str) -> bool:
        """True if a split has items of the task."""
        return bool(len(self.task.items(split)))


@dataclass(frozen=True, eq=False)
class ValidatedRun:
    """Checked inputs of a strategy. ``graph`` is the graph to train on."""

    graph: Graph
    task: NodeTask | LinkTask
    model: Model
    output: OutputSchema | None = None
    remarks: tuple[str, ...] = ()


def validate(graph: Graph, config: RunConfig, owned_ids: OwnedIds = None) -> ValidatedRun:
    """Make every check that is possible before a strategy is built; raises ConfigError or InputError."""
    _check_features(graph, config)
    if config.task == "link":
        run = _validated_links(graph, config, owned_ids, training=True)
    else:
        graph = with_objective(graph, config.train)
        output = OutputSchema.of(graph)
        target = output.target
        graph = graph.with_nodes(target, split=split_codes(graph.nodes[target], config))
        _check_labels(graph.nodes[target])
        output = output.fitted(graph.nodes[target], config.train)
        run = _validated_nodes(graph, config, output, owned_ids)
    if not len(run.task.items("train")):
        raise ConfigError("the training split has no labelled nodes: choose another --split, as 0.6/0.2/0.2")
    _check_training(run.task, config, "links" if config.task == "link" else "nodes")
    return run


def validate_events(graph: Graph, config: RunConfig) -> tuple[EventTask, TemporalModel, Tensor | None]:
    """``validate`` for events: (task, model, [V, S] node features)."""
    task, model, features = build_events(graph, config)
    _check_training(task, config, "events")
    return task, model, features


def _check_training(task: NodeTask | LinkTask | EventTask, config: RunConfig, unit: str) -> None:
    train = config.train
    if unit != "nodes" and train.class_weights != "none":
        raise ConfigError("train.class_weights weighs classes of nodes: leave it out, or use --task node")
    if (train.patience or train.schedule == "plateau") and not len(task.items("val")):
        option, other = ("patience", "patience=0") if train.patience else ("schedule=plateau", "schedule=cosine")
        raise ConfigError(
            f"train.{option} needs val {unit} and the split has none: set train.{other} or another --split"
        )
    if train.schedule == "plateau" and config.spec.execution == "supervised":
        raise ConfigError("trainers do not know the val metric, which train.schedule=plateau needs: use cosine or step")


def build(graph: Graph, config: RunConfig, *, context: RankContext | None = None) -> BuiltRun:
    """Check the graph against the config and build; raises ConfigError or InputError before anything is written.

    Collective if ``context`` has several ranks.
    """
    context = context or RankContext()
    if config.spec.input == "events":
        job = make_event_job(graph, config, context)
        remarks = describe_unused(config.model, graph)
        return BuiltRun(build_strategy(config.strategy, job), graph, job.task, None, None, remarks, context.world)
    return _assemble(validate(graph, config, context.owned_ids), config, context)


def make_event_job(graph: Graph, config: RunConfig, context: RankContext) -> EventJob:
    task, model, features = validate_events(graph, config)
    return EventJob(
        model=model,
        task=task,
        features=features,
        train=config.train,
        seed=config.seed,
        precision=config.precision,
        memory=config.memory,
        context=context,
    )


def rebuild(
    graph: Graph, config: RunConfig, output: OutputSchema, *, split: str | None = None, context: RankContext
) -> BuiltRun:
    """Build a trained run on a graph, to evaluate a ``split`` (or ``all`` nodes), or to predict if it is None.

    Predictions need neither labels nor a split. Raises RunError if the graph does not fit, InputError for labels.
    """
    graph = output.fit(graph, embedded=_embedding_types(config, output))
    target = output.target_in(graph)
    nodes = graph.nodes[target]
    if split is not None and nodes.y is None:
        raise InputError("this store has no labels to compare with: evaluate needs them, predict does not")
    codes = torch.full((1, nodes.count), TEST if split == "all" else NO_SPLIT, dtype=torch.int8)
    if split not in (None, "all"):
        if nodes.split is None and str(config.split).isdigit():
            raise ConfigError("this store has no split: evaluate all of it with --split all")
        codes = split_codes(nodes, config)
    graph = graph.with_nodes(target, y=output.unlabelled(nodes.count) if nodes.y is None else nodes.y, split=codes)
    return _assemble(_validated_nodes(graph, config, output, context.owned_ids), config, context)


def rebuild_links(graph: Graph, config: RunConfig, *, context: RankContext) -> BuiltRun:
    """Build a trained run on links, to evaluate or score; the config decides the held-out links, as in training."""
    return _assemble(_validated_links(graph, config, context.owned_ids, training=False), config, context)


def _validated_nodes(graph: Graph, config: RunConfig, output: OutputSchema, owned_ids: OwnedIds) -> ValidatedRun:
    target = output.target_in(graph)
    head = output.head(config.train)
    model = seeded_model(graph, config, output.num_classes, owned_ids)
    remarks = (*describe(model), *describe_unused(config.model, graph, model))
    return ValidatedRun(graph, NodeTask(target, graph.nodes[target], head), model, output, remarks)


def _validated_links(graph: Graph, config: RunConfig, owned_ids: OwnedIds, *, training: bool) -> ValidatedRun:
    task, model = build_links(graph, config, training=training, owned_ids=owned_ids)
    remarks = (*describe(model), *describe_unused(config.model, graph, model))
    remarks = remarks if task.masks_edges else (*remarks, LEAKAGE_WARNING)
    return ValidatedRun(task.data.graph, task, model, remarks=remarks)


def _assemble(run: ValidatedRun, config: RunConfig, context: RankContext) -> BuiltRun:
    strategy = build_strategy(config.strategy, make_job(run, config, context))
    return BuiltRun(strategy, run.graph, run.task, run.output, config.model.file, run.remarks, context.world)


def make_job(run: ValidatedRun, config: RunConfig, context: RankContext) -> Job:
    return Job(
        graph=run.graph,
        model=run.model,
        task=run.task,
        train=config.train,
        seed=config.seed,
        precision=config.precision,
        memory=config.memory,
        evaluation_memory=config.evaluation_limit,
        partition=config.partition,
        workers=config.workers,
        context=context,
    )


def _embedding_types(config: RunConfig, output: OutputSchema) -> set[str]:
    """Node types with a learnable embedding per node; those of a custom model are unknown."""
    if config.model.is_custom or config.model.name == "sign":
        return set()
    return {kind for kind, width in output.widths.items() if config.model.embedding or not width}


def split_codes(nodes: Nodes, config: RunConfig) -> torch.Tensor:
    """[1, N] split codes of the config's split."""
    if isinstance(config.split, str) and not config.split.isdigit():
        return split_nodes(nodes, parse_rule(config.split), seed=config.seed)
    if nodes.split is None:
        raise ConfigError("the graph has no split: pass --split 0.6/0.2/0.2 or --split 20-per-class")
    index, count = int(config.split), nodes.split.shape[0]
    if not 0 <= index < count:
        raise ConfigError(f"split {config.split} does not exist: this graph has splits 0 to {count - 1}")
    return nodes.split[index : index + 1]


def _check_labels(nodes: Nodes) -> None:
    assert nodes.y is not None
    if nodes.regression:
        if bool(nodes.y.isnan().all()) or bool(nodes.y.isinf().any()):
            raise InputError("labels to predict must be finite numbers, or NaN for none: found infinite ones or none")
        return
    if not nodes.y.numel() or int(nodes.y.max()) < 0:
        raise InputError("no node has a label: expected class numbers from 0, found none")
    low, high = int(nodes.y.min()), int(nodes.y.max())
    limit = 2 if nodes.multilabel else len(nodes.classes) or high + 1
    if low < -1 or high >= limit:
        label = low if low < -1 else high
        raise InputError(f"label {label} is out of range: expected 0 to {limit - 1}, or −1 for no label")


def _check_features(graph: Graph, config: RunConfig) -> None:
    """Raise ConfigError if no node type has features and embeddings are not set; custom models may do without both."""
    has_features = any(nodes.x is not None and nodes.x.shape[1] for nodes in graph.nodes.values())
    if config.model.is_custom or config.model.embedding or config.model.name == "sign" or has_features:
        return
    if is_event_graph(graph):
        raise ConfigError(
            "the nodes have no features, but edges have times: train on events with --strategy temporal, or set "
            "model.embedding=64 to learn features"
        )
    raise ConfigError("the nodes have no features: set model.embedding=64 to learn some, or import features")


LINK_METRICS = ("mrr", "ap")


def build_events(graph: Graph, config: RunConfig) -> tuple[EventTask, TemporalModel, Tensor | None]:
    """(task, model with its first weights, [V, S] node features); raises ConfigError or InputError."""
    strategy = config.strategy
    assert isinstance(strategy, EventConfig)
    kind = event_edge_type(graph, strategy.relation or None)
    stream, dtype = EventStream.of(graph, kind), PRECISIONS[config.precision]
    msg = stream.msg if config.model.edge_features else None
    stream = replace(stream, msg=None if msg is None else msg.to(dtype))
    task = _task(stream, _split_by_time(stream, config), config, target=kind.dst)
    features = _node_features(graph, dtype)
    width = 0 if features is None else features.shape[1]
    dims = EventDims(
        edge=0 if msg is None else msg.shape[1],
        static=width + (config.model.hidden if strategy.learns_static(bool(width)) else 0),
        has_features=width > 0,
        classes=0 if task.head is None else task.head.num_classes,
        mean_time_gap=task.mean_gap,
        time_span=task.span,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = TemporalModel(config.model, dims)
    return task, model.to(dtype), features


def _split_by_time(stream: EventStream, config: RunConfig) -> dict[str, EventStream]:
    """Parts of the stream by the shares of the config, or by default by those of TGB."""
    if config.split in (0, "0"):
        train, val, test = stream.split()
    else:
        rule = None if str(config.split).isdigit() else parse_rule(str(config.split))
        if not isinstance(rule, SplitShares):
            raise ConfigError(f"events are split by shares of time, as 0.7/0.15/0.15; found {config.split}")
        train, val, test = stream.split(rule.train, rule.train + rule.val)
    return {"train": train, "val": val, "test": test}


def _task(stream: EventStream, parts: dict[str, EventStream], config: RunConfig, *, target: str) -> EventTask:
    if not len(parts["train"]):
        raise ConfigError("the training split has no events: choose another --split, as 0.7/0.15/0.15")
    head, metric = None, config.train.single_metric
    if config.task == "edge":
        if stream.y is None:
            raise ConfigError("the events have no labels to predict: --task link predicts events, or import labels")
        multilabel = stream.y.dim() == 2
        classes = stream.y.shape[1] if multilabel else int(stream.y.max()) + 1 if len(stream) else 0
        head = NodeHead(classes, multilabel, (metric,), config.train.label_smoothing)
    elif metric not in ("auto", *LINK_METRICS):
        raise ConfigError(f"train.metric of events is {' or '.join(LINK_METRICS)}, found {metric}")
    negatives = NegativeSampler(stream.destinations, config.seed)
    return EventTask(stream, parts, target, negatives, config.link.negatives, config.link.loss, metric, head)


def _node_features(graph: Graph, dtype: torch.dtype) -> Tensor | None:
    """[V, S] features of all nodes, with separate columns for each node type; None if there are none."""
    widths = {kind: 0 if nodes.x is None else int(nodes.x.shape[1]) for kind, nodes in graph.nodes.items()}
    if not sum(widths.values()):
        return None
    features, column = torch.zeros(graph.num_nodes, sum(widths.values()), dtype=dtype), 0
    for kind, nodes in graph.nodes.items():
        if nodes.x is not None:
            first = graph.node_offsets[kind]
            features[first : first + nodes.count, column : column + widths[kind]] = nodes.x.to(dtype)
        column += widths[kind]
    return features

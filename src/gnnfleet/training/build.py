"""From a graph and a config to a strategy ready to train: the split, the checks on labels and features, the model.

``rebuild`` does the same for a trained run, on its own graph or another one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from gnnfleet.comm.world import World
from gnnfleet.config.schema import RunConfig
from gnnfleet.errors import ConfigError, InputError
from gnnfleet.graph.events.event_stream import is_event_graph
from gnnfleet.graph.graph import NO_SPLIT, TEST, Graph, Nodes
from gnnfleet.graph.split import parse_rule, split_nodes
from gnnfleet.nn.base import Model
from gnnfleet.nn.custom_model import build_custom_model
from gnnfleet.nn.model import build_model
from gnnfleet.nn.temporal.model import TemporalModel
from gnnfleet.report.progress import NoProgress, Progress
from gnnfleet.strategies.job import PRECISIONS, EventJob, Job, OwnedIds
from gnnfleet.strategies.job import RankContext as RankContext
from gnnfleet.strategies.protocol import EventPredictor, NodePredictor, Strategy
from gnnfleet.strategies.registry import build_strategy
from gnnfleet.tasks.event import EventTask
from gnnfleet.tasks.link import LinkTask
from gnnfleet.tasks.node import NodeTask
from gnnfleet.training.build_link import LEAKAGE_WARNING, build_links
from gnnfleet.training.build_temporal import build_events
from gnnfleet.training.output_schema import OutputSchema


@dataclass(frozen=True, eq=False)
class BuiltRun:
    """A strategy and what it was made of."""

    strategy: Strategy
    graph: Graph
    task: NodeTask | LinkTask | EventTask
    output: OutputSchema | None  # what nodes are classified as; None for links and events
    model_file: Path | None = None  # of a model of the user's own
    remarks: tuple[str, ...] = ()  # what the user should know
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
        """What is counted."""
        if isinstance(self.task, EventTask):
            return "events"
        return "links" if isinstance(self.task, LinkTask) else "nodes"

    def has(self, split: str) -> bool:
        """Whether a split has anything to learn from or measure."""
        return bool(len(self.task.items(split)))


@dataclass(frozen=True, eq=False)
class ValidatedRun:
    """What a strategy is made of, found to fit together. ``graph`` is what is trained on."""

    graph: Graph
    task: NodeTask | LinkTask
    model: Model
    output: OutputSchema | None = None
    remarks: tuple[str, ...] = ()


def validate(graph: Graph, config: RunConfig, own: OwnedIds = None) -> ValidatedRun:
    """Everything about a run that can be refused before a strategy is made; raises ConfigError or InputError."""
    _check_features(graph, config)
    if config.task == "link":
        checked = _check_links(graph, config, own, training=True)
    else:
        output = OutputSchema.of(graph)
        target = output.target
        graph = graph.with_nodes(target, split=_split(graph.nodes[target], config))
        _check_labels(graph.nodes[target])
        checked = _check_nodes(graph, config, output, own)
    if not len(checked.task.items("train")):
        raise ConfigError("the training split has no labelled nodes: choose another --split, as 0.6/0.2/0.2")
    if config.train.patience and not len(checked.task.items("val")):
        unit = "links" if config.task == "link" else "nodes"
        raise ConfigError(
            f"train.patience needs val {unit} and the split has none: set train.patience=0 or another --split"
        )
    return checked


def build(
    graph: Graph, config: RunConfig, *, progress: Progress = NoProgress(), here: RankContext | None = None
) -> BuiltRun:
    """Check the graph against the config and build; raises ConfigError or InputError before anything is written.

    Of several ranks each says where it is with ``here``.
    """
    here = here or RankContext(progress=progress)
    if config.spec.input == "events":
        return _on_events(graph, config, here)
    return _assemble(validate(graph, config, here.owned_ids), config, here)


def validate_events(graph: Graph, config: RunConfig) -> tuple[EventTask, TemporalModel, Tensor | None]:
    """``validate`` for events: (the task, the model, what is known of nodes)."""
    task, model, features = build_events(graph, config)
    if config.train.patience and not len(task.items("val")):
        raise ConfigError("train.patience needs val events and there are none: set train.patience=0 or another --split")
    return task, model, features


def _on_events(graph: Graph, config: RunConfig, here: RankContext) -> BuiltRun:
    """A run on a stream of events; the same to train and to ask a trained one."""
    job = make_event_job(graph, config, here)
    return BuiltRun(build_strategy(config.strategy, job), graph, job.task, None, world=here.world)


def make_event_job(graph: Graph, config: RunConfig, here: RankContext) -> EventJob:
    """What the strategy for events is made of, here."""
    task, model, features = validate_events(graph, config)
    return EventJob(
        model=model,
        task=task,
        features=features,
        train=config.train,
        seed=config.seed,
        precision=config.precision,
        memory=config.memory,
        context=here,
    )


def rebuild(
    graph: Graph,
    config: RunConfig,
    output: OutputSchema,
    *,
    split: str | None = None,
    progress: Progress = NoProgress(),
    here: RankContext | None = None,
) -> BuiltRun:
    """A trained run on a graph: to evaluate a ``split`` of it (or ``all`` of it), without one to predict.

    Predictions need neither labels nor a split. Raises RunError where the graph does not fit, InputError for labels.
    """
    graph = output.fit(graph, learnt=_embedding_types(config, output))
    target = output.target_in(graph)
    nodes = graph.nodes[target]
    if split is not None and nodes.y is None:
        raise InputError("this store has no labels to compare with: evaluate needs them, predict does not")
    shape = (nodes.count, output.num_classes) if output.multilabel else (nodes.count,)
    unknown = torch.full(shape, -1, dtype=torch.int8 if output.multilabel else torch.int64)
    codes = torch.full((1, nodes.count), TEST if split == "all" else NO_SPLIT, dtype=torch.int8)
    if split not in (None, "all"):
        if nodes.split is None and str(config.split).isdigit():
            raise ConfigError("this store has no split: evaluate all of it with --split all")
        codes = _split(nodes, config)
    graph = graph.with_nodes(target, y=unknown if nodes.y is None else nodes.y, split=codes)
    here = here or RankContext(progress=progress)
    return _assemble(_check_nodes(graph, config, output, here.owned_ids), config, here)


def rebuild_links(
    graph: Graph, config: RunConfig, *, progress: Progress = NoProgress(), here: RankContext | None = None
) -> BuiltRun:
    """A trained run on links, to evaluate or score; held-out links are found again from the config."""
    here = here or RankContext(progress=progress)
    return _assemble(_check_links(graph, config, here.owned_ids, training=False), config, here)


def _check_nodes(graph: Graph, config: RunConfig, output: OutputSchema, own: OwnedIds) -> ValidatedRun:
    target = output.target_in(graph)
    head = output.head(metric=config.train.metric, smoothing=config.train.label_smoothing)
    model = seeded_model(graph, config, output.num_classes, own)
    return ValidatedRun(graph, NodeTask(target, graph.nodes[target], head), model, output)


def _check_links(graph: Graph, config: RunConfig, own: OwnedIds, *, training: bool) -> ValidatedRun:
    task, model = build_links(graph, config, training=training, own=own)
    return ValidatedRun(task.data.graph, task, model, remarks=() if task.masks_edges else (LEAKAGE_WARNING,))


def _assemble(checked: ValidatedRun, config: RunConfig, here: RankContext) -> BuiltRun:
    graph, task = checked.graph, checked.task
    strategy = build_strategy(config.strategy, make_job(checked, config, here))
    return BuiltRun(strategy, graph, task, checked.output, config.model.file, checked.remarks, here.world)


def make_job(checked: ValidatedRun, config: RunConfig, here: RankContext) -> Job:
    """What a strategy is made of, here."""
    return Job(
        graph=checked.graph,
        model=checked.model,
        task=checked.task,
        train=config.train,
        seed=config.seed,
        precision=config.precision,
        memory=config.memory,
        partition=config.partition,
        workers=config.workers,
        context=here,
    )


def seeded_model(graph: Graph, config: RunConfig, out_channels: int, own: OwnedIds) -> Model:
    """The model with its first weights: drawn in float32 from the seed, whatever the precision."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model: Model
        if config.model.file is None:
            model = build_model(config.model, graph, out_channels=out_channels, owned_ids=own)
        else:
            model = build_custom_model(config.model, graph, out_channels=out_channels)
    return model.to(PRECISIONS[config.precision])


def _embedding_types(config: RunConfig, output: OutputSchema) -> set[str]:
    """The node types for whose nodes the model learns rows; what a model of the user's own learns is not known."""
    if config.model.file is not None:
        return set()
    return {kind for kind, width in output.widths.items() if config.model.embedding or not width}


def _split(nodes: Nodes, config: RunConfig) -> torch.Tensor:
    """[1, N] codes of the split that is asked for."""
    if isinstance(config.split, str) and not config.split.isdigit():
        return split_nodes(nodes, parse_rule(config.split), seed=config.seed)
    if nodes.split is None:
        raise ConfigError("the graph has no split: pass --split 0.6/0.2/0.2 or --split 20-per-class")
    index, count = int(config.split), nodes.split.shape[0]
    if not 0 <= index < count:
        raise ConfigError(f"the splits of this graph are numbered 0 to {count - 1}, found --split {config.split}")
    return nodes.split[index : index + 1]


def _check_labels(nodes: Nodes) -> None:
    assert nodes.y is not None
    if not nodes.y.numel() or int(nodes.y.max()) < 0:
        raise InputError("no node has a label: expected class numbers from 0, found none")
    low, high = int(nodes.y.min()), int(nodes.y.max())
    limit = 2 if nodes.multilabel else len(nodes.classes) or high + 1
    if low < -1 or high >= limit:
        wrong = low if low < -1 else high
        raise InputError(f"label {wrong} is out of range: expected 0 to {limit - 1}, or −1 for no label")


def _check_features(graph: Graph, config: RunConfig) -> None:
    """Of several node types those without features learn rows of their own; a graph without any has to be told so.

    A model of the user's own may do with less.
    """
    if config.model.file is not None:
        return
    if not config.model.embedding and all(nodes.x is None or not nodes.x.shape[1] for nodes in graph.nodes.values()):
        if is_event_graph(graph):
            raise ConfigError(
                "the nodes have no features, but edges have times: train on events with --strategy temporal, or set "
                "model.embedding=64 to learn features"
            )
        raise ConfigError("the nodes have no features: set model.embedding=64 to learn some, or import features")

"""From a graph and a config to a strategy ready to train: the split, the checks on labels and features, the model.

``rebuild`` does the same for a trained run, on its own graph or another one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from gnnfleet.comm.message_store import Post
from gnnfleet.comm.world import World
from gnnfleet.config.schema import RunConfig
from gnnfleet.errors import ConfigError, InputError
from gnnfleet.graph.events.event_stream import is_stream
from gnnfleet.graph.graph import NO_SPLIT, TEST, Graph, Nodes
from gnnfleet.graph.partition.chunk_layout import Layout
from gnnfleet.graph.partition.node_assignment import Deal
from gnnfleet.graph.partition.shard import Shard
from gnnfleet.graph.split import parse_rule, split_nodes
from gnnfleet.nn.base import Model
from gnnfleet.nn.custom_model import build_own
from gnnfleet.nn.model import build_model
from gnnfleet.nn.temporal.model import TemporalModel
from gnnfleet.report.progress import Progress, Silent
from gnnfleet.strategies.job import PRECISIONS, EventJob, Job
from gnnfleet.strategies.protocol import Strategy
from gnnfleet.strategies.registry import make_strategy, make_temporal
from gnnfleet.strategies.temporal.config import TemporalConfig
from gnnfleet.tasks.event import EventTask
from gnnfleet.tasks.link import LinkTask
from gnnfleet.tasks.node import NodeTask
from gnnfleet.training.build_link import SEES_TARGETS, build_links
from gnnfleet.training.build_temporal import build_events
from gnnfleet.training.output_schema import Output


@dataclass(frozen=True, eq=False)
class Built:
    """A strategy and what it was made of."""

    strategy: Strategy
    graph: Graph
    task: NodeTask | LinkTask | EventTask
    output: Output | None  # what nodes are classified as; None for links and events
    model_file: Path | None = None  # of a model of the user's own
    remarks: tuple[str, ...] = ()  # what the user should know
    world: World = field(default_factory=World)  # the ranks that built it together

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


Own = Mapping[str, Tensor] | None
"""Store ids by node type: the nodes for which a rank holds learnable rows; None: all."""


@dataclass(frozen=True, eq=False)
class Here:
    """Where a strategy is built: which of the ranks this is, and its part of the graph where there are parts."""

    world: World = field(default_factory=World)
    shard: Shard | None = None
    progress: Progress = Silent()
    say: Callable[[str], None] = lambda text: None  # to the user
    post: Post | None = None  # how workers that come and go are reached
    deal: Deal | None = None  # who of them has which nodes
    layouts: Sequence[Layout] | None = None  # how nodes may be cut into chunks

    @property
    def own(self) -> Own:
        """The nodes of this part."""
        return (
            None if self.shard is None else {kind: self.shard.nodes(kind).store_ids for kind in self.shard.node_types}
        )


@dataclass(frozen=True, eq=False)
class Checked:
    """What a strategy is made of, found to fit together. ``graph`` is what is trained on."""

    graph: Graph
    task: NodeTask | LinkTask
    model: Model
    output: Output | None = None
    remarks: tuple[str, ...] = ()


def check(graph: Graph, config: RunConfig, own: Own = None) -> Checked:
    """Everything about a run that can be refused before a strategy is made; raises ConfigError or InputError."""
    _check_features(graph, config)
    if config.task == "link":
        checked = _check_links(graph, config, own, training=True)
    else:
        output = Output.of(graph)
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


def build(graph: Graph, config: RunConfig, *, progress: Progress = Silent(), here: Here | None = None) -> Built:
    """Check the graph against the config and build; raises ConfigError or InputError before anything is written.

    Of several ranks each says where it is with ``here``.
    """
    here = here or Here(progress=progress)
    if isinstance(config.strategy, TemporalConfig):
        return _on_events(graph, config, here)
    return _assemble(check(graph, config, here.own), config, here)


def check_events(graph: Graph, config: RunConfig) -> tuple[EventTask, TemporalModel, Tensor | None]:
    """``check`` for events: (the task, the model, what is known of nodes)."""
    task, model, features = build_events(graph, config)
    if config.train.patience and not len(task.items("val")):
        raise ConfigError("train.patience needs val events and there are none: set train.patience=0 or another --split")
    return task, model, features


def _on_events(graph: Graph, config: RunConfig, here: Here) -> Built:
    """A run on a stream of events; the same to train and to ask a trained one."""
    assert isinstance(config.strategy, TemporalConfig)
    job = event_job(graph, config, here)
    return Built(make_temporal(config.strategy, job), graph, job.task, None, world=here.world)


def event_job(graph: Graph, config: RunConfig, here: Here) -> EventJob:
    """What the strategy for events is made of, here."""
    task, model, features = check_events(graph, config)
    return EventJob(
        model, task, config.train, features, seed=config.seed, precision=config.precision, memory=config.memory,
        world=here.world, progress=here.progress, say=here.say,
    )  # fmt: skip


def rebuild(
    graph: Graph,
    config: RunConfig,
    output: Output,
    *,
    split: str | None = None,
    progress: Progress = Silent(),
    here: Here | None = None,
) -> Built:
    """A trained run on a graph: to evaluate a ``split`` of it (or ``all`` of it), without one to predict.

    Predictions need neither labels nor a split. Raises RunError where the graph does not fit, InputError for labels.
    """
    graph = output.fit(graph, learnt=_learnt(config, output))
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
    here = here or Here(progress=progress)
    return _assemble(_check_nodes(graph, config, output, here.own), config, here)


def rebuild_links(graph: Graph, config: RunConfig, *, progress: Progress = Silent(), here: Here | None = None) -> Built:
    """A trained run on links, to evaluate or score; held-out links are found again from the config."""
    here = here or Here(progress=progress)
    return _assemble(_check_links(graph, config, here.own, training=False), config, here)


def _check_nodes(graph: Graph, config: RunConfig, output: Output, own: Own) -> Checked:
    target = output.target_in(graph)
    head = output.head(metric=config.train.metric, smoothing=config.train.label_smoothing)
    model = seeded_model(graph, config, output.num_classes, own)
    return Checked(graph, NodeTask(target, graph.nodes[target], head), model, output)


def _check_links(graph: Graph, config: RunConfig, own: Own, *, training: bool) -> Checked:
    task, model = build_links(graph, config, training=training, own=own)
    return Checked(task.data.graph, task, model, remarks=() if task.hides else (SEES_TARGETS,))


def _assemble(checked: Checked, config: RunConfig, here: Here) -> Built:
    graph, task = checked.graph, checked.task
    strategy = make_strategy(config.strategy, job_of(checked, config, here))
    return Built(strategy, graph, task, checked.output, config.model.file, checked.remarks, here.world)


def job_of(checked: Checked, config: RunConfig, here: Here) -> Job:
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
        progress=here.progress,
        world=here.world,
        shard=here.shard,
        say=here.say,
        workers=config.workers,
        post=here.post,
        deal=here.deal,
        layouts=here.layouts,
    )


def seeded_model(graph: Graph, config: RunConfig, out_channels: int, own: Own) -> Model:
    """The model with its first weights: drawn in float32 from the seed, whatever the precision."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model: Model
        if config.model.file is None:
            model = build_model(config.model, graph, out_channels=out_channels, own=own)
        else:
            model = build_own(config.model, graph, out_channels=out_channels)
    return model.to(PRECISIONS[config.precision])


def _learnt(config: RunConfig, output: Output) -> set[str]:
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
        if is_stream(graph):
            raise ConfigError(
                "the nodes have no features, but edges have times: train on events with --strategy temporal, or set "
                "model.embedding=64 to learn features"
            )
        raise ConfigError("the nodes have no features: set model.embedding=64 to learn some, or import features")

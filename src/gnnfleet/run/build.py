"""From a graph and a config to a strategy ready to train: the split, the checks on labels and features, the model."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from gnnfleet.errors import ConfigError, InputError
from gnnfleet.graph.graph import Graph, Nodes
from gnnfleet.graph.split import parse_rule, split_nodes
from gnnfleet.nn.heads import NodeHead
from gnnfleet.nn.model import GNN, build_model
from gnnfleet.report.progress import Progress, Silent
from gnnfleet.run.config import RunConfig
from gnnfleet.run.link import SEES_TARGETS, build_links
from gnnfleet.run.registry import make_strategy
from gnnfleet.strategies.base import PRECISIONS, Job, Strategy
from gnnfleet.strategies.link_task import LinkTask
from gnnfleet.strategies.task import NodeTask


@dataclass(frozen=True, eq=False)
class Built:
    """A strategy and what it was made of."""

    strategy: Strategy
    graph: Graph
    task: NodeTask | LinkTask
    remarks: tuple[str, ...] = ()  # what the user should know

    @property
    def nodes(self) -> Nodes:
        return self.graph.nodes[self.task.target]

    @property
    def unit(self) -> str:
        """What is counted."""
        return "links" if isinstance(self.task, LinkTask) else "nodes"

    def has(self, split: str) -> bool:
        """Whether a split has anything to learn from or measure."""
        return bool(len(self.task.items(split)))


def build(graph: Graph, config: RunConfig, *, training: bool = True, progress: Progress = Silent()) -> Built:
    """Check the graph against the config and build; raises ConfigError or InputError before anything is written.

    Without ``training`` the graph needs no training nodes: for evaluation and prediction.
    """
    _check_features(graph, config)
    task: NodeTask | LinkTask
    if config.task == "link":
        task, model = build_links(graph, config, training=training)
        graph = task.data.graph
    else:
        task = _node_task(graph, config)
        graph = graph.with_nodes(task.target, split=task.nodes.split)
        model = seeded_model(graph, config)
    job = Job(
        graph=graph,
        model=model,
        task=task,
        train=config.train,
        seed=config.seed,
        precision=config.precision,
        progress=progress,
    )
    remarks = (SEES_TARGETS,) if isinstance(task, LinkTask) and config.link.exclude == "none" else ()
    built = Built(make_strategy(config.strategy, job), graph, task, remarks)
    if training and not built.has("train"):
        raise ConfigError("the training split has no labelled nodes: choose another --split, as 0.6/0.2/0.2")
    if training and config.train.patience and not built.has("val"):
        raise ConfigError(
            f"train.patience needs val {built.unit} and the split has none: set train.patience=0 or another --split"
        )
    return built


def _node_task(graph: Graph, config: RunConfig) -> NodeTask:
    target = graph.labelled_type
    if target is None:
        raise InputError("the graph has no labels: give y to Graph(...) or name a label column in the import")
    nodes = replace(graph.nodes[target], split=_split(graph.nodes[target], config))
    _check_labels(nodes)
    metric = None if config.train.metric == "auto" else config.train.metric
    return NodeTask(target, nodes, NodeHead.of(nodes, metric))


def seeded_model(graph: Graph, config: RunConfig) -> GNN:
    """The model with its first weights: drawn in float32 from the seed, whatever the precision."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = build_model(config.model, graph)
    return model.to(PRECISIONS[config.precision])


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
    """Of several node types those without features learn rows of their own; a graph without any has to be told so."""
    if not config.model.embedding and all(nodes.x is None or not nodes.x.shape[1] for nodes in graph.nodes.values()):
        raise ConfigError("the nodes have no features: set model.embedding=64 to learn some, or import features")

"""Runs on events: the event stream of a graph, its parts by time, the model, the task."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from gnnfleet.config.schema import RunConfig
from gnnfleet.errors import ConfigError
from gnnfleet.graph.events.event_stream import EventStream, event_edge_type
from gnnfleet.graph.events.negatives import NegativeSampler
from gnnfleet.graph.graph import Graph
from gnnfleet.graph.split import SplitShares, parse_rule
from gnnfleet.nn.heads import NodeHead
from gnnfleet.nn.temporal.model import EventDims, TemporalModel
from gnnfleet.strategies.config import EventConfig
from gnnfleet.strategies.job import PRECISIONS
from gnnfleet.tasks.event import EventTask

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
    head, metric = None, config.train.metric
    if config.task == "edge":
        if stream.y is None:
            raise ConfigError("the events have no labels to predict: --task link predicts events, or import labels")
        multilabel = stream.y.dim() == 2
        classes = stream.y.shape[1] if multilabel else int(stream.y.max()) + 1 if len(stream) else 0
        head = NodeHead(classes, multilabel, metric, config.train.label_smoothing)
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

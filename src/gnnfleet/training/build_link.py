"""Runs that predict links: the message-passing graph, the task, the model with its decoder; scores of given pairs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gnnfleet.config.schema import RunConfig
from gnnfleet.errors import ConfigError
from gnnfleet.graph.graph import EdgeType, Graph
from gnnfleet.graph.ingest.clean import add_inverse_edges
from gnnfleet.graph.links import LinkData, Links, has_held_out_links, link_data, split_links
from gnnfleet.graph.split import SplitShares, parse_rule
from gnnfleet.nn.base import Model
from gnnfleet.nn.custom_model import build_custom_model
from gnnfleet.nn.link import make_decoder
from gnnfleet.nn.model import build_model
from gnnfleet.nn.pyg.memory import Propagation
from gnnfleet.nn.pyg.module import PygModule
from gnnfleet.nn.sign import SignModel
from gnnfleet.strategies.job import PRECISIONS, OwnedIds
from gnnfleet.strategies.protocol import NodePredictor
from gnnfleet.tasks.link import LinkTask

LEAKAGE_WARNING = (
    "message passing sees the edges that are trained on (link.exclude=none): "
    "set link.exclude=disjoint:0.3 to exclude 30 % of them in every epoch"
)


def build_links(
    graph: Graph, config: RunConfig, *, training: bool, owned_ids: OwnedIds = None
) -> tuple[LinkTask, Model]:
    """The task, whose data contains the graph to train on, and the model; raises ConfigError or InputError."""
    data = link_data(
        _message_graph(graph, config), [EdgeType.parse(config.link.relation)] if config.link.relation else []
    )
    num_train = len(data.splits["train"])
    if training and not num_train:
        raise ConfigError("the training split has no edges: choose another --split or link.relation")
    batch, link = config.strategy.batch_size, config.link
    if link.exclude == "auto":
        sampled = config.strategy.is_sampled and batch < num_train
        link = link.model_copy(update={"exclude": "batch" if sampled else "none"})
    if link.exclude == "batch" and not 0 < batch < num_train:
        raise ConfigError(
            "link.exclude=batch in a full batch would leave no edges for messages: set strategy.batch, "
            "or use link.exclude=disjoint:0.3"
        )
    model = seeded_model(data.graph, config, config.model.hidden, owned_ids, data)
    assert model.decoder is not None
    task = LinkTask(data, link, model.decoder, seed=config.seed, metric_name=config.train.single_metric)
    return task, model


def _message_graph(graph: Graph, config: RunConfig) -> Graph:
    """The graph without held-out links, with inverse edges if the config has them."""
    if isinstance(config.split, str) and not config.split.isdigit():
        rule = parse_rule(config.split)
        if not isinstance(rule, SplitShares):
            raise ConfigError(f"edges are split by shares, as 0.8/0.1/0.1; found {config.split}")
        graph = split_links(graph, rule, seed=config.seed)
    elif not has_held_out_links(graph):
        raise ConfigError("the graph has no held-out links: pass --split 0.8/0.1/0.1")
    reverse = config.link.reverse
    if reverse == "auto":
        reverse = "inverse" if config.model.is_relational and len(graph.edges) > 1 else "none"
    return add_inverse_edges(graph) if reverse == "inverse" else graph


def seeded_model(
    graph: Graph, config: RunConfig, out_channels: int, owned_ids: OwnedIds, links: LinkData | None = None
) -> Model:
    """The model with its first weights, drawn in float32 from the seed, whatever the precision.

    With ``links`` it has a decoder, and output rows for every node type.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model: Model
        if config.model.is_custom:
            model = build_custom_model(config.model, graph, out_channels=out_channels)
            if isinstance(model, PygModule):
                model.propagation = Propagation(config.model.propagate)
        else:
            every_type = links is not None
            model = build_model(
                config.model, graph, out_channels=out_channels, every_type=every_type, owned_ids=owned_ids
            )
            if isinstance(model, SignModel):
                model.table_memory = config.evaluation_limit
        if links is not None:
            several = len(torch.unique(links.splits["train"].relation)) > 1
            model.decoder = make_decoder(
                config.link, width=out_channels, relations=len(links.edge_types), several=several
            )
    return model.to(PRECISIONS[config.precision])


def score_pairs(
    predictor: NodePredictor, task: LinkTask, pairs: Sequence[tuple[Any, Any]], relation: str = ""
) -> Tensor:
    """Collective. [n] probabilities of links between original ids; the pairs of a rank may be empty.

    All ranks have the same task. ``relation`` names the edge type if several are predicted.
    """
    number, kind = target_edge_type(task, relation)
    nodes = task.data.graph.nodes
    src, dst = (
        torch.from_numpy(nodes[node_type].ids.rows([pair[end] for pair in pairs]))
        for end, node_type in enumerate((kind.src, kind.dst))
    )
    links = Links(torch.full_like(src, number), src, dst, torch.arange(len(src)))
    with torch.no_grad():
        return torch.sigmoid(task.score_links(predictor.exact_lookup(), links))


def target_edge_type(task: LinkTask, relation: str = "") -> tuple[int, EdgeType]:
    """(number, edge type) of a predicted edge type by name; without a name, of the only one."""
    numbers = list(dict.fromkeys(task.data.splits["train"].relation.tolist()))
    by_name = {str(task.data.edge_types[number]): number for number in numbers}
    if relation and relation not in by_name:
        raise ConfigError(f"the run does not predict the edge type {relation!r}: choose one of {', '.join(by_name)}")
    if not relation and len(by_name) > 1:
        raise ConfigError(f"the run predicts several edge types: choose one of {', '.join(by_name)}")
    number = by_name[relation] if relation else numbers[0]
    return number, task.data.edge_types[number]

"""A run that predicts links: the graph that messages run over, the model with its decoder, the task; pairs scored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from gnnfleet.strategies.job import PRECISIONS
from gnnfleet.strategies.protocol import NodePredictor
from gnnfleet.tasks.link import LinkTask

LEAKAGE_WARNING = (
    "message passing sees the edges that are trained on (link.exclude=none); "
    "link.exclude=disjoint:0.3 holds some out in every epoch"
)


def build_links(
    graph: Graph, config: RunConfig, *, training: bool, own: Mapping[str, Tensor] | None = None
) -> tuple[LinkTask, Model]:
    """The task, whose data has the graph to train on, and the model; raises ConfigError or InputError.

    With ``own`` the model has learnable rows of these nodes only, by type.
    """
    graph = _message_graph(graph, config)
    only = [EdgeType.parse(config.link.relation)] if config.link.relation else []
    data = link_data(graph, only)
    if training and not len(data.splits["train"]):
        raise ConfigError("there is no edge to train on: choose another --split or link.relation")
    batch, link = config.strategy.batch_size, config.link
    if link.exclude == "auto":
        sampled = config.strategy.is_sampled and batch < len(data.splits["train"])
        link = link.model_copy(update={"exclude": "batch" if sampled else "none"})
    if link.exclude == "batch" and not 0 < batch < len(data.splits["train"]):
        raise ConfigError(
            "link.exclude=batch in a full batch would leave no edges for messages: set strategy.batch, "
            "or use link.exclude=disjoint:0.3"
        )
    model = _seeded_model(data, config, own)
    assert model.decoder is not None
    task = LinkTask(data, link, model.decoder, seed=config.seed, metric_name=config.train.metric)
    return task, model


def _message_graph(graph: Graph, config: RunConfig) -> Graph:
    if isinstance(config.split, str) and not config.split.isdigit():
        rule = parse_rule(config.split)
        if not isinstance(rule, SplitShares):
            raise ConfigError(f"edges are split by shares, as 0.8/0.1/0.1; found {config.split}")
        graph = split_links(graph, rule, seed=config.seed)
    elif not has_held_out_links(graph):
        raise ConfigError("the graph has no held-out links: pass --split 0.8/0.1/0.1")
    wanted = config.link.reverse
    if wanted == "auto":
        wanted = "inverse" if config.model.name == "rgcn" and len(graph.edges) > 1 else "none"
    return add_inverse_edges(graph) if wanted == "inverse" else graph


def _seeded_model(data: LinkData, config: RunConfig, own: Mapping[str, Tensor] | None) -> Model:
    """Output rows as wide as the hidden ones, for every node type."""
    several = len(torch.unique(data.splits["train"].relation)) > 1
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        width = config.model.hidden
        model: Model
        if config.model.file is None:
            model = build_model(config.model, data.graph, out_channels=width, every_type=True, owned_ids=own)
        else:
            model = build_custom_model(config.model, data.graph, out_channels=width)
        model.decoder = make_decoder(config.link, width=width, relations=len(data.edge_types), several=several)
    return model.to(PRECISIONS[config.precision])


def score_pairs(
    predictor: NodePredictor, task: LinkTask, pairs: Sequence[tuple[Any, Any]], relation: str = ""
) -> Tensor:
    """[n] probabilities of links between original ids; ``relation`` says which where several types are predicted.

    Of several ranks all call it, each with a shared task and pairs of its own or none.
    """
    number, kind = target_edge_type(task, relation)
    nodes = task.data.graph.nodes
    src, dst = (
        torch.from_numpy(nodes[end].ids.rows([pair[place] for pair in pairs]))
        for place, end in enumerate((kind.src, kind.dst))
    )
    links = Links(torch.full_like(src, number), src, dst, torch.arange(len(src)))
    with torch.no_grad():
        return torch.sigmoid(task.score_links(predictor.exact_lookup(), links))


def target_edge_type(task: LinkTask, relation: str = "") -> tuple[int, EdgeType]:
    """The edge type of a name, by number and itself; the only one that is predicted where none is given."""
    kinds = list(dict.fromkeys(task.data.splits["train"].relation.tolist()))
    names = {str(task.data.edge_types[number]): number for number in kinds}
    if relation and relation not in names:
        raise ConfigError(f"{relation!r} is no edge type that was trained on: there are {', '.join(names)}")
    if not relation and len(names) > 1:
        raise ConfigError(f"several edge types are predicted ({', '.join(names)}): name one")
    number = names[relation] if relation else kinds[0]
    return number, task.data.edge_types[number]

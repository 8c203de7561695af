"""What a trainer of ``tma`` works on by itself: the subgraph of its nodes, with the task and the model on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from gnnfleet.config.schema import RunConfig
from gnnfleet.graph.graph import Edges, Graph, Nodes
from gnnfleet.graph.links import link_data
from gnnfleet.graph.subgraph import induced_subgraph
from gnnfleet.nn.base import Model
from gnnfleet.nn.embedding import NodeEmbedding, embedding_ids
from gnnfleet.strategies.job import Job
from gnnfleet.strategies.protocol import Strategy
from gnnfleet.strategies.registry import build_strategy, make_config
from gnnfleet.strategies.tma.config import TmaConfig
from gnnfleet.strategies.tma.trainer import LocalTraining
from gnnfleet.tasks.link import LinkTask
from gnnfleet.tasks.node import NodeTask
from gnnfleet.training.build import RankContext, ValidatedRun, make_job, validate

SEED_STRIDE = 1_000_003
"""Between the seeds of two trainers: the first has the run's own."""


def make_local_training(graph: Graph, config: RunConfig, index: int, own: Mapping[str, Tensor]) -> LocalTraining:
    """For trainer ``index`` with these nodes, by type and store id."""
    strategy = config.strategy
    assert isinstance(strategy, TmaConfig)
    checked = validate(graph, config, own)
    part = induced_subgraph(checked.graph, own)
    target = checked.task.target
    rows = _embedding_rows(checked.model, own, target)
    if strategy.remote_negatives:
        part = _with_isolated(part, target, strategy.remote_negatives)
    _localize_embeddings(checked.model, target, strategy.remote_negatives)
    task = _task(checked, part)
    local = make_config(strategy.local_settings(checked.model.num_layers))
    if isinstance(task, LinkTask) and task.config.exclude == "batch" and local.batch_size >= len(task.items("train")):
        # A batch of all edges would leave none for messages.
        local = local.model_copy(update={"batch": max(1, (len(task.items("train")) + 1) // 2)})
    job = Job(
        graph=part,
        model=checked.model,
        task=task,
        train=config.train,
        seed=config.seed + index * SEED_STRIDE,
        precision=config.precision,
        memory=config.memory,
        processes=max(1, config.workers if strategy.local_trainers is None else strategy.local_trainers),
    )
    made = build_strategy(local, job)

    def show(far: Tensor) -> None:
        _load_remote_rows(part, checked.model, target, far)

    return LocalTraining(made, part.num_edges, rows, show, lambda epoch: len(task.train_items(job.seed, epoch)))


def make_global_training(graph: Graph, config: RunConfig) -> Strategy:
    """A trainer's strategy on the whole graph."""
    assert isinstance(config.strategy, TmaConfig)
    checked = validate(graph, config)
    local = make_config(config.strategy.local_settings(checked.model.num_layers))
    return build_strategy(local, make_job(checked, config, RankContext()))


def _task(checked: ValidatedRun, part: Graph) -> NodeTask | LinkTask:
    task = checked.task
    if isinstance(task, NodeTask):
        return replace(task, nodes=part.nodes[task.target])
    numbers = torch.unique(task.data.splits["train"].relation).tolist()
    kinds = [task.data.edge_types[number] for number in numbers]
    config = task.config.model_copy(update={"ranking": "sampled"})  # trainers rank nothing
    return replace(task, data=link_data(part, kinds), config=config, held_out_cache={}, kinds=tuple(kinds))


def _embedding_rows(model: Model, own: Mapping[str, Tensor], target: str) -> dict[str, Tensor]:
    """{name of a parameter of learnt rows: store ids}; a model of the user's own has those of all nodes until now."""
    for module in model.modules():
        if isinstance(module, NodeEmbedding) and module.ids is None:
            module.ids = own[module.kind or target]
            module.weight = torch.nn.Parameter(module.weight.detach()[module.ids])
    return embedding_ids(model)


def _localize_embeddings(model: Model, target: str, remote: int) -> None:
    """Learnable rows are those of the subgraph's nodes, in their order; of the target rows for other parts' follow."""
    for module in model.modules():
        if isinstance(module, NodeEmbedding):
            assert module.ids is not None
            more = remote if module.kind in ("", target) else 0
            if more:
                room = module.weight.new_zeros(more, module.weight.shape[1])
                module.weight = torch.nn.Parameter(torch.cat([module.weight.detach(), room]))
            module.ids, module.num_nodes = None, len(module.weight)


def _with_isolated(graph: Graph, kind: str, count: int) -> Graph:
    """With more nodes of a type, that have features of their own and no edges."""
    table = graph.nodes[kind]
    x = None if table.x is None else torch.cat([table.x, table.x.new_zeros(count, table.x.shape[1])])
    nodes = {**graph.nodes, kind: Nodes(count=table.count + count, x=x)}

    def longer(edges: Edges) -> Edges:
        return replace(edges, indptr=torch.cat([edges.indptr, edges.indptr[-1:].expand(count)]))

    edges = {name: longer(each) if name.dst == kind else each for name, each in graph.edges.items()}
    return Graph.of(nodes, edges, name=graph.name, undirected=graph.undirected)


def _load_remote_rows(part: Graph, model: Model, kind: str, far: Tensor) -> None:
    """Put rows of other parts' nodes into the last places: features, then learnt rows."""
    x, at = part.nodes[kind].x, 0
    if x is not None:
        x[-len(far) :] = far[:, : x.shape[1]].to(x.dtype)
        at = x.shape[1]
    for module in model.modules():
        if isinstance(module, NodeEmbedding) and module.kind in ("", kind):
            width = module.weight.shape[1]
            with torch.no_grad():
                module.weight[-len(far) :] = far[:, at : at + width]
            at += width

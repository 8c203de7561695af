"""Training of one ``tma`` trainer: the subgraph of its nodes, with the task, the model and a local strategy on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from gnnfleet.config.schema import RunConfig
from gnnfleet.errors import ConfigError
from gnnfleet.graph.graph import Edges, Graph, Nodes
from gnnfleet.graph.links import link_data
from gnnfleet.graph.subgraph import induced_subgraph
from gnnfleet.graph.views.local import LocalView
from gnnfleet.nn.base import Aggregate, Model
from gnnfleet.nn.embedding import NodeEmbedding, embedding_ids
from gnnfleet.ops.gather import gather
from gnnfleet.strategies.job import PRECISIONS, Job
from gnnfleet.strategies.protocol import Strategy
from gnnfleet.strategies.registry import build_strategy, make_config
from gnnfleet.strategies.tma.config import TmaConfig
from gnnfleet.strategies.tma.trainer import LocalTraining
from gnnfleet.tasks.learning_rate import learning_rate
from gnnfleet.tasks.link import LinkTask
from gnnfleet.tasks.node import NodeTask
from gnnfleet.training.build import RankContext, ValidatedRun, make_job, validate

SEED_STRIDE = 1_000_003
"""Difference between the seeds of two trainers; the first has the seed of the run."""


def make_local_training(graph: Graph, config: RunConfig, index: int, nodes: Mapping[str, Tensor]) -> LocalTraining:
    """Build the training of trainer ``index`` on ``nodes``: store ids by node type."""
    strategy = config.strategy
    assert isinstance(strategy, TmaConfig)
    checked = validate(graph, config, nodes)
    model, target, num_remote = checked.model, checked.task.target, strategy.remote_negatives
    subgraph = induced_subgraph(checked.graph, nodes)
    embeddings = _shard_embeddings(model, nodes, target)
    if num_remote:
        subgraph = _with_isolated(subgraph, target, num_remote)
    _localize_embeddings(model, target, num_remote)
    task = _task(checked, subgraph)
    local = make_config(strategy.local_settings(model.num_layers))
    if isinstance(task, LinkTask) and task.config.exclude == "batch" and local.batch_size >= len(task.items("train")):
        # A batch of all edges would leave none for messages.
        local = local.model_copy(update={"batch": max(1, (len(task.items("train")) + 1) // 2)})
    aggregated = _whole_graph_tables(checked, model, nodes, config) if model.is_precomputed else None
    job = Job(
        graph=subgraph,
        aggregated=aggregated,
        model=model,
        task=task,
        train=config.train,
        seed=config.seed + index * SEED_STRIDE,
        precision=config.precision,
        evaluation_memory=config.evaluation_limit,
        processes=max(1, config.workers if strategy.local_trainers is None else strategy.local_trainers),
    )
    return LocalTraining(
        strategy=build_strategy(local, job),
        edges=subgraph.num_edges,
        embeddings=embeddings,
        set_remote_rows=lambda rows: _set_remote_rows(subgraph, model, target, rows),
        count_items=lambda epoch: len(task.train_items(job.seed, epoch)),
        learning_rate=partial(learning_rate, config.train),
    )


def _whole_graph_tables(
    checked: ValidatedRun, model: Model, nodes: Mapping[str, Tensor], config: RunConfig
) -> Aggregate | None:
    """Tables of a model with precomputed hops: over all edges of the store, the rows of the trainer's nodes."""
    strategy = config.strategy
    assert isinstance(strategy, TmaConfig)
    if strategy.remote_negatives:
        raise ConfigError("nodes of other partitions have no hops on a trainer: leave out strategy.remote_negatives")
    dtype = PRECISIONS[config.precision]
    x = {kind: torch.empty(n.count, 0) if n.x is None else n.x.to(dtype) for kind, n in checked.graph.nodes.items()}
    tables = model.precompute(LocalView.of_graph(checked.graph), x if len(x) > 1 else next(iter(x.values())))
    assert isinstance(tables, Mapping)
    return {kind: gather(rows, nodes[kind.dst]) for kind, rows in tables.items()}


def make_global_training(graph: Graph, config: RunConfig) -> Strategy:
    """Build a trainer's strategy on the whole graph."""
    assert isinstance(config.strategy, TmaConfig)
    checked = validate(graph, config)
    local = make_config(config.strategy.local_settings(checked.model.num_layers))
    return build_strategy(local, make_job(checked, config, RankContext()))


def _task(checked: ValidatedRun, subgraph: Graph) -> NodeTask | LinkTask:
    task = checked.task
    if isinstance(task, NodeTask):
        return replace(task, nodes=subgraph.nodes[task.target])
    relations = torch.unique(task.data.splits["train"].relation).tolist()
    kinds = [task.data.edge_types[relation] for relation in relations]
    config = task.config.model_copy(update={"ranking": "sampled"})  # trainers do not evaluate
    return replace(task, data=link_data(subgraph, kinds), config=config, held_out_cache={}, kinds=tuple(kinds))


def _shard_embeddings(model: Model, nodes: Mapping[str, Tensor], target: str) -> dict[str, Tensor]:
    """{parameter name: store ids of its rows}. A custom model has rows for all nodes: the others are removed."""
    for module in model.modules():
        if isinstance(module, NodeEmbedding) and module.ids is None:
            module.ids = nodes[module.kind or target]
            module.weight = torch.nn.Parameter(module.weight.detach()[module.ids])
    return embedding_ids(model)


def _localize_embeddings(model: Model, target: str, num_remote: int) -> None:
    """Index embedding rows by the nodes of the subgraph; for the target type, rows of remote nodes follow."""
    for module in model.modules():
        if isinstance(module, NodeEmbedding):
            if num_remote and module.kind in ("", target):
                remote = module.weight.new_zeros(num_remote, module.weight.shape[1])
                module.weight = torch.nn.Parameter(torch.cat([module.weight.detach(), remote]))
            module.ids, module.num_nodes = None, len(module.weight)


def _with_isolated(graph: Graph, kind: str, count: int) -> Graph:
    """The graph with ``count`` more nodes of a type, without edges, labels and splits."""
    table = graph.nodes[kind]
    x = None if table.x is None else torch.cat([table.x, table.x.new_zeros(count, table.x.shape[1])])

    def extended(edges: Edges) -> Edges:
        return replace(edges, indptr=torch.cat([edges.indptr, edges.indptr[-1:].expand(count)]))

    return Graph.of(
        {**graph.nodes, kind: Nodes(count=table.count + count, x=x)},
        {name: extended(edges) if name.dst == kind else edges for name, edges in graph.edges.items()},
        name=graph.name,
        undirected=graph.undirected,
    )


def _set_remote_rows(graph: Graph, model: Model, kind: str, rows: Tensor) -> None:
    """Write features and embeddings of remote nodes, the columns of ``rows``, to the last rows of their tables."""
    x, column = graph.nodes[kind].x, 0
    if x is not None:
        column = x.shape[1]
        x[-len(rows) :] = rows[:, :column].to(x.dtype)
    for module in model.modules():
        if isinstance(module, NodeEmbedding) and module.kind in ("", kind):
            width = module.weight.shape[1]
            with torch.no_grad():
                module.weight[-len(rows) :] = rows[:, column : column + width]
            column += width

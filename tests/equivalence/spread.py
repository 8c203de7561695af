"""Graphs cut into parts in every unusual way, and the same function run on the whole graph and on its parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gnnfleet.comm.halo_exchange import RingExchange
from gnnfleet.comm.world import World
from gnnfleet.graph.graph import EdgeType, Graph, validated_edges, validated_nodes
from gnnfleet.graph.partition.assign import Assignment, assign_nodes
from gnnfleet.graph.partition.partitioned_graph import Partition, write_partition
from gnnfleet.graph.views.local import LocalView
from gnnfleet.ops.draws import DrawKey
from gnnfleet.sharded.full_batch.ring_view import RingView

NODES, ISOLATED = 60, 8
CUTS = ("random", "mincut", "range", "empty", "edgeless")
KEY = DrawKey(seed=3, epoch=1, step=2)


def plain_graph() -> Graph:
    """Parallel edges, self-loops, nodes without edges; weights and features of edges."""
    random = torch.Generator().manual_seed(0)
    index = torch.randint(0, NODES - ISOLATED, (2, 300), generator=random)
    index = torch.cat([index, index[:, :30], torch.arange(0, 40, 4).repeat(2, 1)], 1)
    count = index.shape[1]
    weight, attr = torch.rand(count, generator=random) + 0.1, torch.randn(count, 3, generator=random)
    x, y = torch.randn(NODES, 5, generator=random), torch.randint(0, 3, (NODES,), generator=random)
    split = torch.randint(-1, 3, (NODES,), generator=random)
    return Graph(index, x=x, y=y, split=split, edge_weight=weight, edge_attr=attr, num_nodes=NODES)


def typed_graph() -> Graph:
    """Three node types, one without edges between some of them, relations that share ends; some have weights."""
    random = torch.Generator().manual_seed(1)
    counts = {"a": 30, "b": 20, "c": 6}
    nodes = {
        node_type: validated_nodes(
            count,
            x=torch.randn(count, 4, generator=random),
            y=torch.randint(0, 3, (count,), generator=random) if node_type == "a" else None,
            split=torch.randint(0, 3, (count,), generator=random) if node_type == "a" else None,
        )
        for node_type, count in counts.items()
    }
    edge_types = [("a", "to", "b", 80), ("b", "back", "a", 70), ("a", "like", "a", 90), ("a", "hate", "a", 40)]
    edge_types += [("c", "on", "b", 15), ("b", "never", "c", 0)]
    edges = {}
    for src, name, dst, count in edge_types:
        ends = [torch.randint(0, counts[node_type], (count,), generator=random) for node_type in (src, dst)]
        weight = torch.rand(count, generator=random) + 0.1 if name in ("to", "like", "never") else None
        sizes = {"num_src": counts[src], "num_dst": counts[dst]}
        edges[EdgeType(src, name, dst)] = validated_edges(torch.stack(ends), **sizes, weight=weight)
    return Graph.of(nodes, edges)


def bare_graph() -> Graph:
    """The typed graph, with one node type without features."""
    graph = typed_graph()
    nodes = {kind: replace(table, x=None if kind == "b" else table.x) for kind, table in graph.nodes.items()}
    return Graph.of(nodes, dict(graph.edges))


def related_graph() -> Graph:
    """One node type, several relations, the odd ones with weights."""
    random = torch.Generator().manual_seed(2)
    edges = {}
    for number in range(4):
        index = torch.randint(0, 40, (2, 60 * (number != 2)), generator=random)
        weight = torch.rand(index.shape[1], generator=random) - 0.2 if number % 2 else None
        edges[EdgeType("node", f"r{number}", "node")] = validated_edges(index, num_src=40, num_dst=40, weight=weight)
    x, y = torch.randn(40, 4, generator=random), torch.randint(0, 3, (40,), generator=random)
    split = torch.randint(0, 3, (40,), generator=random)
    return Graph.of({"node": validated_nodes(40, x=x, y=y, split=split)}, edges)


def cut_graph(graph: Graph, parts: int, method: str, path: Path) -> Path:
    """Write a partition: by a partitioner, with an empty part, or with a part whose nodes have no edges."""
    if method in ("random", "mincut", "range"):
        assignment = assign_nodes(graph, parts, method)
    else:
        total = graph.num_nodes
        last = parts - 1
        part = np.arange(total, dtype=np.int32) % max(last, 1)
        if method == "edgeless" and parts > 1:
            part[total - ISOLATED :] = last
        assignment = Assignment(part=part, parts=parts, method="random")
    write_partition(graph, assignment, path, overwrite=True)
    return path


@dataclass(frozen=True)
class Inputs:
    """Inputs of a case, for the whole graph: tensors by node, by edge, and parameters."""

    nodes: Mapping[str, Tensor] = field(default_factory=dict)
    edges: Mapping[str, Tensor] = field(default_factory=dict)
    params: Mapping[str, Tensor] = field(default_factory=dict)
    frozen: Sequence[str] = ()  # names that need no gradient


Case = Callable[..., Tensor]
"""(view, **tensors) → [n, …]."""


def run_case(view: Any, case: Case, inputs: Inputs) -> dict[str, Tensor]:
    """Output and gradients of all inputs, for the rows and edges of a view."""
    inputs_of_view = {name: tensor[view.node_ids] for name, tensor in inputs.nodes.items()}
    inputs_of_view |= {name: tensor[view.edge_ids] for name, tensor in inputs.edges.items()}
    inputs_of_view |= {name: tensor.clone() for name, tensor in inputs.params.items()}
    leaves = {
        name: t.requires_grad_(t.is_floating_point() and name not in inputs.frozen)
        for name, t in inputs_of_view.items()
    }
    out = case(view, **leaves)
    (out * loss_weights(out)[view.node_ids]).sum().backward() if out.requires_grad else None
    grads = {name: leaf.grad for name, leaf in leaves.items() if leaf.requires_grad}
    return {
        "out": out.detach(),
        **{name: torch.zeros_like(inputs_of_view[name]) if g is None else g for name, g in grads.items()},
    }


def loss_weights(out: Tensor) -> Tensor:
    """Factors that turn the output of all nodes into a loss."""
    random = torch.Generator().manual_seed(7)
    return torch.randn(NODES, *out.shape[1:], generator=random, dtype=out.dtype)


def run_on_whole_graph(graph: Graph, case: Case, inputs: Inputs) -> dict[str, Tensor]:
    return run_case(LocalView.of_graph(graph).with_step(key=KEY, layer=1), case, inputs)


def open_view(world: World, path: str, group: int, depth: int) -> RingView:
    shard = Partition.open(path).shard(world.rank)
    return RingView.open(shard, RingExchange(world, group, depth)).with_step(key=KEY, layer=1)


def join_ranks(graph: Graph, inputs: Inputs, outputs: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Outputs of all ranks in store order; gradients of parameters are summed."""
    total: dict[str, Tensor] = {}
    for name in outputs[0]["values"]:
        if name in inputs.params:
            total[name] = torch.stack([output["values"][name] for output in outputs]).sum(0)
            continue
        ids = "edge_ids" if name in inputs.edges else "node_ids"
        count = graph.num_edges if name in inputs.edges else graph.num_nodes
        first = outputs[0]["values"][name]
        rows = first.new_full((count, *first.shape[1:]), torch.nan)
        for output in outputs:
            rows[output[ids]] = output["values"][name]
        total[name] = rows
    return total

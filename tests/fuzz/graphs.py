"""A graph with every kind of array, and the whole content of a store in a comparable form."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from gnnfleet.graph.graph import EdgeType, Graph, validated_edges, validated_nodes
from gnnfleet.graph.validate import open_validated_store

COUNT = 24


def digest_of(tensors: Iterable[Tensor | None]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        if tensor is not None:
            digest.update(f"{tensor.dtype} {list(tensor.shape)}".encode())
            digest.update(
                tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
            )
    return digest.hexdigest()


def graph_with_all_arrays() -> Graph:
    """Two node types, two edge types, and every array that a store may have."""
    draw = torch.Generator().manual_seed(1)
    ends = torch.stack([torch.randint(COUNT, (90,), generator=draw), torch.randint(9, (90,), generator=draw)])
    nodes = {
        "user": validated_nodes(
            COUNT,
            x=torch.randn(COUNT, 3, generator=draw),
            y=torch.arange(COUNT) % 3,
            split=torch.arange(COUNT) % 3,
            ids=[f"u{i}" for i in range(COUNT)],
            classes=("a", "b", "c"),
        ),
        "item": validated_nodes(9, x=torch.randn(9, 2, generator=draw).bfloat16()),
    }
    held_out = torch.stack([torch.arange(4), torch.arange(4)])
    buys = validated_edges(
        ends,
        num_src=COUNT,
        num_dst=9,
        weight=torch.rand(90, generator=draw),
        attr=torch.randn(90, 2, generator=draw),
        time=torch.arange(90),
        links={"val": held_out, "test": held_out},
    )
    near_edges = validated_edges(torch.randint(COUNT, (2, 60), generator=draw), num_src=COUNT, num_dst=COUNT)
    return Graph.of(nodes, {EdgeType("user", "buys", "item"): buys, EdgeType("user", "near", "user"): near_edges})


def read_graph(path: Path) -> object:
    graph = open_validated_store(path)
    tensors: list[Tensor | None] = []
    values: list[object] = [graph.name, graph.undirected]
    for node_type, nodes in graph.nodes.items():
        tensors += [nodes.x, nodes.y, nodes.split]
        values += [node_type, nodes.count, nodes.classes, nodes.ids.values().to_pylist(), nodes.num_classes]
    for edge_type, edges in graph.edges.items():
        tensors += [edges.indptr, edges.src, edges.weight, edges.attr, edges.time, edges.order, edges.edge_index()]
        values += [edge_type, sorted(edges.links)]
        tensors += [edges.links[name] for name in sorted(edges.links)]
    return digest_of(tensors), values

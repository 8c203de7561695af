"""Brute-force checks of partitions, independent of the package's code for partitions."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch

from gnnfleet.graph.graph import Graph
from gnnfleet.graph.partition.partitioned_graph import Partition


def pairs_of(graph: Graph) -> list[tuple[int, int]]:
    """All edges, with nodes numbered across node types."""
    offsets = graph.node_offsets
    pairs = []
    for kind, edges in graph.edges.items():
        index = edges.edge_index()
        pairs += [(s + offsets[kind.src], d + offsets[kind.dst]) for s, d in index.T.tolist()]
    return pairs


def brute_force(graph: Graph, part: np.ndarray, parts: int) -> dict[str, object]:
    """Σ(λ − 1) from its definition, and the other metrics edge by edge."""
    pairs = pairs_of(graph)
    nets = {j: {int(part[j])} for j in range(graph.num_nodes)}
    need = np.zeros((parts, parts), dtype=np.int64)
    in_edges = np.zeros(parts, dtype=np.int64)
    kept = 0
    rows = set()
    for s, d in pairs:
        nets[s].add(int(part[d]))
        in_edges[part[d]] += 1
        kept += int(part[s] == part[d])
        if part[s] != part[d]:
            rows.add((int(part[d]), s))
    for p, s in rows:
        need[p, part[s]] += 1
    return {
        "volume": sum(len(net) - 1 for net in nets.values()),
        "need": need.tolist(),
        "kept_edges": kept,
        "cut_edges": len(pairs) - kept,
        "edges": in_edges.tolist(),
        "nodes": [int((part == p).sum()) for p in range(parts)],
    }


def check_shards(graph: Graph, partition: Partition) -> None:
    """Parts have every node once, every edge once in each direction, matching plans, and the data of both."""
    shards = [partition.shard(p) for p in range(partition.parts)]
    placed: set[tuple[str, int]] = set()
    for shard in shards:
        for kind in graph.nodes:
            nodes = shard.nodes(kind)
            store_ids = {(kind, store_id) for store_id in nodes.store_ids.tolist()}
            assert len(store_ids) == nodes.count and not store_ids & placed
            placed |= store_ids
            for name in ("x", "y"):
                table = getattr(graph.nodes[kind], name)
                if table is not None:
                    assert torch.equal(getattr(nodes, name), table[nodes.store_ids])
            if graph.nodes[kind].split is not None:
                assert torch.equal(nodes.split, graph.nodes[kind].split[:, nodes.store_ids])
    assert len(placed) == graph.num_nodes

    for kind, edges in graph.edges.items():
        index = edges.edge_index()
        for direction, local_type, remote_type in (("in", kind.dst, kind.src), ("out", kind.src, kind.dst)):
            edge_ids: list[int] = []
            for shard in shards:
                plan = shard.plan(remote_type, direction)
                for q in range(partition.parts):
                    block = shard.block(kind, direction, q)
                    rows = block.rows.tolist()
                    assert rows == sorted(set(rows))
                    starts = block.indptr.tolist()
                    assert starts[0] == 0 and all(a < b for a, b in pairwise(starts))
                    for i, row in enumerate(rows):
                        local = int(shard.nodes(local_type).store_ids[row])
                        for e in range(starts[i], starts[i + 1]):
                            col = int(block.cols[e])
                            remote_row = col if q == shard.part else int(plan.recv[q][col])
                            remote = int(shards[q].nodes(remote_type).store_ids[remote_row])
                            edge = int(block.edge_ids[e])
                            source, target = (remote, local) if direction == "in" else (local, remote)
                            assert index[:, edge].tolist() == [source, target]
                            edge_ids.append(edge)
                            for name, values in block.data.items():
                                assert torch.equal(values[e], getattr(edges, name)[edge])
                    assert ("weight" in block.data) == (edges.weight is not None)
            assert sorted(edge_ids) == list(range(edges.count))

    for kind in graph.nodes:
        for direction in ("in", "out"):
            plans = [shard.plan(kind, direction) for shard in shards]
            for p in range(partition.parts):
                for q in range(partition.parts):
                    assert torch.equal(plans[p].recv[q], plans[q].send[p])
                    rows = plans[p].recv[q].tolist()
                    assert rows == sorted(set(rows))
            used = {(p, q): set() for p in range(partition.parts) for q in range(partition.parts)}
            for shard in shards:
                for edge_type in graph.edges:
                    if (edge_type.src if direction == "in" else edge_type.dst) == kind:
                        for q in range(partition.parts):
                            used[shard.part, q] |= set(shard.block(edge_type, direction, q).cols.tolist())
            for (p, q), cols in used.items():
                if p != q:
                    assert cols == set(range(len(plans[p].recv[q]))), "a row is sent that no edge uses"

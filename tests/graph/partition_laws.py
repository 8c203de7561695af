"""Brute-force statements about partitions, written without any of the package's own machinery for them."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch

from gnnfleet.graph.graph import Graph
from gnnfleet.graph.partition.partitioned_graph import Partition


def pairs_of(graph: Graph) -> list[tuple[int, int]]:
    """All edges with node types numbered through."""
    offsets = graph.node_offsets
    found = []
    for kind, edges in graph.edges.items():
        index = edges.edge_index()
        found += [(s + offsets[kind.src], d + offsets[kind.dst]) for s, d in index.T.tolist()]
    return found


def brute_force(graph: Graph, part: np.ndarray, parts: int) -> dict[str, object]:
    """Σ(λ − 1) from its definition, and the rest by counting edge by edge."""
    pairs = pairs_of(graph)
    nets = {j: {int(part[j])} for j in range(graph.num_nodes)}
    need = np.zeros((parts, parts), dtype=np.int64)
    into = np.zeros(parts, dtype=np.int64)
    kept = 0
    rows = set()
    for s, d in pairs:
        nets[s].add(int(part[d]))
        into[part[d]] += 1
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
        "edges": into.tolist(),
        "nodes": [int((part == p).sum()) for p in range(parts)],
    }


def check_shards(graph: Graph, partition: Partition) -> None:
    """Every node once, every edge once in and once out, plans that fit together, data that follows its node or edge."""
    shards = [partition.shard(p) for p in range(partition.parts)]
    home: dict[tuple[str, int], tuple[int, int]] = {}
    for shard in shards:
        for kind in graph.nodes:
            mine = shard.nodes(kind)
            for row, store_id in enumerate(mine.store_ids.tolist()):
                assert (kind, store_id) not in home
                home[kind, store_id] = (shard.part, row)
            for name in ("x", "y"):
                whole = getattr(graph.nodes[kind], name)
                if whole is not None:
                    assert torch.equal(getattr(mine, name), whole[mine.store_ids])
            if graph.nodes[kind].split is not None:
                assert torch.equal(mine.split, graph.nodes[kind].split[:, mine.store_ids])
    assert len(home) == graph.num_nodes

    for kind, edges in graph.edges.items():
        index = edges.edge_index()
        for direction, near_type, far_type in (("in", kind.dst, kind.src), ("out", kind.src, kind.dst)):
            seen: list[int] = []
            for shard in shards:
                plan = shard.plan(far_type, direction)
                for q in range(partition.parts):
                    block = shard.block(kind, direction, q)
                    rows = block.rows.tolist()
                    assert rows == sorted(set(rows))
                    starts = block.indptr.tolist()
                    assert starts[0] == 0 and all(a < b for a, b in pairwise(starts))
                    for i, row in enumerate(rows):
                        near = int(shard.nodes(near_type).store_ids[row])
                        for e in range(starts[i], starts[i + 1]):
                            col = int(block.cols[e])
                            far_row = col if q == shard.part else int(plan.recv[q][col])
                            far = int(shards[q].nodes(far_type).store_ids[far_row])
                            edge = int(block.edge_ids[e])
                            source, target = (far, near) if direction == "in" else (near, far)
                            assert index[:, edge].tolist() == [source, target]
                            seen.append(edge)
                            for name, values in block.data.items():
                                assert torch.equal(values[e], getattr(edges, name)[edge])
                    assert ("weight" in block.data) == (edges.weight is not None)
            assert sorted(seen) == list(range(edges.count))

    for kind in graph.nodes:
        for direction in ("in", "out"):
            plans = [shard.plan(kind, direction) for shard in shards]
            for p in range(partition.parts):
                for q in range(partition.parts):
                    assert torch.equal(plans[p].recv[q], plans[q].send[p])
                    listed = plans[p].recv[q].tolist()
                    assert listed == sorted(set(listed))
            used = {(p, q): set() for p in range(partition.parts) for q in range(partition.parts)}
            for shard in shards:
                for edge_type in graph.edges:
                    if (edge_type.src if direction == "in" else edge_type.dst) == kind:
                        for q in range(partition.parts):
                            used[shard.part, q] |= set(shard.block(edge_type, direction, q).cols.tolist())
            for (p, q), cols in used.items():
                if p != q:
                    assert cols == set(range(len(plans[p].recv[q]))), "a row is sent that nobody reads"

"""Assignment of nodes to trainers: every node once, and the share of edges that stays inside a part."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from gnnfleet.errors import PartitionError
from gnnfleet.graph.graph import Graph
from gnnfleet.graph.partition.assign import Assignment, assign_nodes
from gnnfleet.graph.partition.edge_scan import measure_partition
from gnnfleet.graph.partition.node_assignment import ClusterMap, NodeAssignment, write_clusters
from gnnfleet.graph.store import open_store, save_store
from tests.graphs import communities

WORKERS = 3


def _part_of_node(graph: Graph, assignment: NodeAssignment) -> torch.Tensor:
    """[nodes] the worker of each node."""
    part = torch.empty(graph.num_nodes, dtype=torch.int32)
    for worker in range(WORKERS):
        part[assignment.nodes_of(worker, WORKERS)["node"]] = worker
    return part


def _kept_share(graph: Graph, part: np.ndarray[tuple[int], np.dtype[np.int32]]) -> float:
    return measure_partition(graph, part, WORKERS).kept_edges / graph.num_edges


@pytest.fixture(scope="module")
def graph() -> Graph:
    return communities(3000)


@pytest.fixture(scope="module")
def assignments(graph: Graph, tmp_path_factory: pytest.TempPathFactory) -> dict[int, NodeAssignment]:
    """By number of clusters: 0 assigns nodes one by one, 3 is a min-cut part for each worker."""
    folder = tmp_path_factory.mktemp("clusters")
    counts = {"node": graph.num_nodes}
    by_clusters = {0: NodeAssignment(counts, None, seed=4)}
    for clusters in (1500, 60, WORKERS):
        if clusters == WORKERS:
            assigned = assign_nodes(graph, WORKERS, "mincut")
        else:
            assigned = assign_nodes(graph, 1, "super", clusters=clusters)
        write_clusters(graph, assigned, folder / str(clusters))
        by_clusters[clusters] = NodeAssignment(counts, ClusterMap.open(folder / str(clusters)), seed=4)
    return by_clusters


@pytest.mark.parametrize("clusters", [0, 1500, 60, WORKERS])
@pytest.mark.parametrize("workers", [3, 2])
def test_every_node_is_assigned_once(
    graph: Graph, assignments: dict[int, NodeAssignment], clusters: int, workers: int
) -> None:
    ids = [assignments[clusters].nodes_of(worker, workers)["node"] for worker in range(workers)]
    assert torch.equal(torch.cat(ids).sort().values, torch.arange(graph.num_nodes))
    assert all(torch.equal(rows, rows.sort().values) for rows in ids)


def test_fewer_clusters_keep_more_edges(graph: Graph, assignments: dict[int, NodeAssignment]) -> None:
    """Single nodes keep one edge in ``WORKERS``, one cluster per worker keeps all but the min-cut."""
    assert not bool((graph.single_edges.src == graph.single_edges.dst()).any())
    shares = [_kept_share(graph, _part_of_node(graph, assignment).numpy()) for assignment in assignments.values()]
    assert shares[0] == pytest.approx(1 / WORKERS, abs=0.03) and shares == sorted(shares)
    assert shares[3] == pytest.approx(_kept_share(graph, assign_nodes(graph, WORKERS, "mincut").part))


def test_clusters_of_another_graph_are_refused(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 2)):
        save_store(communities(300 + seed), tmp_path / name)
    first, second = open_store(tmp_path / "a"), open_store(tmp_path / "b")
    part = np.zeros(first.num_nodes, dtype=np.int32)
    write_clusters(first, Assignment(part=part, parts=1, method="mincut"), tmp_path / "clusters")
    assert len(ClusterMap.open(tmp_path / "clusters", first).sizes) == 1
    with pytest.raises(PartitionError, match="another version"):
        ClusterMap.open(tmp_path / "clusters", second)

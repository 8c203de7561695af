"""Partitions cached in a store, by method and options; made when missing.

``python -m gnnfleet.training.partition_cache`` makes one in another process, for ranks that must keep sending
heartbeats: METIS holds Python's lock while it runs.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from gnnfleet.comm.process_lifetime import die_with_parent
from gnnfleet.config.resolve import resolve
from gnnfleet.config.schema import RunConfig
from gnnfleet.errors import GnnfleetError, PartitionError, StoreError
from gnnfleet.graph.graph import Graph
from gnnfleet.graph.partition.assign import assign_nodes
from gnnfleet.graph.partition.chunk_layout import build_chunk_layout, open_chunk_layouts, write_chunk_layouts
from gnnfleet.graph.partition.node_assignment import ClusterMap, write_clusters
from gnnfleet.graph.partition.partitioned_graph import Partition, write_partition
from gnnfleet.io.bundle import Bundle
from gnnfleet.report.progress import Progress, make_progress
from gnnfleet.report.remarks import print_note

SEED = 0
"""Seed of cached partitions, independent of the run's seed, so that runs share them."""


def partition_name(method: str, parts: int, balance: str, seed: int, options: dict[str, Any]) -> str:
    """Directory name of a partition inside a store."""
    fields = [str(method), str(parts), str(balance), f"seed{seed}"]
    return "-".join([*fields, *(f"{key}{value}" for key, value in sorted(options.items()))])


def empty_parts_warning(graph: Graph, parts: int) -> str | None:
    """A warning if there are more parts than nodes, which is legal but rarely intended."""
    nodes = sum(table.count for table in graph.nodes.values())
    return f"{parts} parts of {nodes} nodes: at least {parts - nodes} are empty" if parts > nodes else None


def ensure_placement(
    graph: Graph, trained: Graph, config: RunConfig, *, progress: Progress = Progress(), quiet: bool = True
) -> Path | None:
    """The partition, clusters or chunk layouts that the strategy of a run needs; None if it needs nothing."""
    if config.spec.placement == "none":
        return None
    ensure = {"partition": ensure_partition, "clusters": ensure_clusters, "chunks": ensure_layouts}
    return ensure[config.spec.placement](graph, trained, config, progress=progress, quiet=quiet)


def ensure_partition(
    graph: Graph, trained: Graph, config: RunConfig, *, progress: Progress = Progress(), quiet: bool = True
) -> Path:
    """The partition of a run in its store, one part per worker; made if missing, damaged or of other data.

    ``trained`` is the graph to partition: the store's graph, or for links the one without held-out links. Of two
    processes that need the same partition, one makes it. Raises StoreError if the store cannot be written.
    """
    method = config.partition or config.strategy.partitioner
    folder, trained, stored_graph = _folder(graph, trained, config)
    path = folder / partition_name(method, config.workers, "nodes", SEED, {})

    def make() -> None:
        assignment = assign_nodes(trained, config.workers, method, seed=SEED, progress=progress)
        write_partition(trained, assignment, path, overwrite=path.exists(), progress=progress)

    return _ensure(path, lambda: Partition.open(path, stored_graph), make, quiet=quiet)


def ensure_clusters(
    graph: Graph, trained: Graph, config: RunConfig, *, progress: Progress = Progress(), quiet: bool = True
) -> Path | None:
    """The clusters that are assigned to trainers, cached like partitions; None if nodes are assigned one by one."""
    method, clusters = config.partition or config.strategy.partitioner, config.strategy.num_clusters
    if method == "random":
        return None
    folder, trained, stored_graph = _folder(graph, trained, config)
    options: dict[str, Any] = {"clusters": clusters} if clusters and method == "super" else {}
    parts = config.workers if method != "super" else 1
    path = folder / f"deal-{partition_name(method, parts, 'nodes', SEED, options)}"

    def make() -> None:
        write_clusters(trained, assign_nodes(trained, parts, method, seed=SEED, progress=progress, **options), path)

    return _ensure(path, lambda: ClusterMap.open(path, stored_graph), make, quiet=quiet)


def ensure_layouts(
    graph: Graph, trained: Graph, config: RunConfig, *, progress: Progress = Progress(), quiet: bool = True
) -> Path:
    """Chunk layouts for every degree of graph parallelism that the strategy may choose."""
    method = config.partition or config.strategy.partitioner
    candidates = config.strategy.layout_candidates(config.workers, local_rows_only=config.task != "link")
    folder, trained, stored_graph = _folder(graph, trained, config)
    path = folder / f"chunks-{method}-{'-'.join(f'{replicas}x{chunks}' for replicas, chunks in candidates)}"

    def make() -> None:
        layouts = [
            build_chunk_layout(trained, replicas, chunks, method=method, progress=progress)
            for replicas, chunks in candidates
        ]
        write_chunk_layouts(trained, layouts, path)

    return _ensure(path, lambda: open_chunk_layouts(path, stored_graph), make, quiet=quiet)


def _ensure(path: Path, open_it: Callable[[], object], make: Callable[[], None], *, quiet: bool) -> Path:
    """Make what is missing or damaged at the path; only one of several processes does."""

    def is_usable() -> bool:
        try:
            return bool(path.is_dir() and open_it())
        except PartitionError:
            return False

    if not is_usable():
        with _file_lock(path, quiet):
            if not is_usable():
                make()
    return path


def _folder(graph: Graph, trained: Graph, config: RunConfig) -> tuple[Path, Graph, Graph | None]:
    """(cache directory, graph to partition, the store's graph if it is the same)."""
    store = _store(graph)
    has_all_edges = graph.edges.keys() == trained.edges.keys()
    if has_all_edges and all(trained.edges[kind] is edges for kind, edges in graph.edges.items()):
        return store.path / "parts", graph, graph
    # Held-out links make another graph; the directory name is a digest of what decides them.
    fields = [store.digest, config.split, config.seed, config.link.model_dump(mode="json"), config.model.name]
    digest = hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:8]
    return store.path / "parts" / f"links-{digest}", trained, None


def prepare_placement(
    graph: Graph, config: RunConfig, *, trained: Graph | None = None, quiet: bool, in_subprocess: bool = False
) -> Path | None:
    """``ensure_placement`` with progress; ``in_subprocess`` for a caller that must keep sending heartbeats."""
    if in_subprocess:
        return ensure_placement_in_subprocess(graph, config, quiet=quiet)
    with make_progress(quiet) as progress:
        trained = trained_graph(graph, config) if trained is None else trained
        return ensure_placement(graph, trained, config, progress=progress, quiet=quiet)


def ensure_placement_in_subprocess(graph: Graph, config: RunConfig, *, quiet: bool) -> Path | None:
    """Run ``ensure_placement`` in another process; its errors are raised here."""
    if config.spec.placement == "none":
        return None
    request = json.dumps({"store": str(_store(graph).path), "config": config.model_dump(mode="json"), "quiet": quiet})
    command = [sys.executable, "-m", "gnnfleet.training.partition_cache"]
    done = subprocess.run(command, input=request, stdout=subprocess.PIPE, text=True, check=False)
    try:
        answer = json.loads(done.stdout)
    except ValueError as error:
        raise PartitionError(
            f"the partitioning process ended with exit code {done.returncode}: see its output above"
        ) from error
    if "error" in answer:
        raise error_for_exit_code(answer["exit_code"])(answer["error"])
    return None if answer["path"] is None else Path(answer["path"])


def error_for_exit_code(exit_code: int) -> type[GnnfleetError]:
    return next((kind for kind in GnnfleetError.__subclasses__() if kind.exit_code == exit_code), GnnfleetError)


def trained_graph(graph: Graph, config: RunConfig) -> Graph:
    """The graph used for message passing in training."""
    if config.task != "link":
        return graph
    from gnnfleet.training.build_link import build_links

    none = {kind: torch.empty(0, dtype=torch.int64) for kind in graph.nodes}
    return build_links(graph, config, training=True, owned_ids=none)[0].data.graph


def _store(graph: Graph) -> Bundle:
    assert graph.store is not None, "a graph in memory is saved before it is partitioned"
    return graph.store


@contextmanager
def _file_lock(path: Path, quiet: bool) -> Iterator[None]:
    """A lock of the kernel: it disappears with its process."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = (path.parent / f".{path.name}.lock").open("w")
    except OSError as error:
        raise StoreError(
            f"cannot save a partition in {path.parent}: {error.strerror}. Make the store writable or copy it"
        ) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            print_note(f"another process is partitioning this store ({path.name}): waiting for it", quiet=quiet)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _main() -> None:
    from gnnfleet.graph.store import open_store

    die_with_parent()
    request = json.loads(sys.stdin.read())
    try:
        graph, config = open_store(request["store"]), resolve(request["config"])
        path = prepare_placement(graph, config, quiet=request["quiet"])
        answer: dict[str, Any] = {"path": None if path is None else str(path)}
    except GnnfleetError as error:
        answer = {"error": str(error), "exit_code": error.exit_code}
    sys.stdout.write(json.dumps(answer))


if __name__ == "__main__":
    _main()

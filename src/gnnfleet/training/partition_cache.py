"""Partitions kept in a store: found again by what was asked for, made when there is none.

``python -m gnnfleet.training.partition_cache`` makes one in a process of its own, for a rank that must
go on beating: METIS holds Python's lock for as long as it takes.
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
from gnnfleet.errors import ConfigError, GnnfleetError, PartitionError, StoreError
from gnnfleet.graph.graph import Graph
from gnnfleet.graph.partition.assign import assign_nodes
from gnnfleet.graph.partition.chunk_layout import build_chunk_layout, open_chunk_layouts, write_chunk_layouts
from gnnfleet.graph.partition.node_assignment import ClusterMap, write_clusters
from gnnfleet.graph.partition.partitioned_graph import Partition, write_partition
from gnnfleet.io.bundle import Bundle
from gnnfleet.report.progress import NoProgress, Progress, make_progress
from gnnfleet.report.remarks import print_note

SEED = 0
"""Of partitions that are made unasked: runs that differ in their own seed share one."""


def partition_name(method: str, parts: int, balance: str, seed: int, options: dict[str, Any]) -> str:
    """Where a store keeps a partition: the same request finds the same directory."""
    words = [str(method), str(parts), str(balance), f"seed{seed}"]
    return "-".join([*words, *(f"{key}{value}" for key, value in sorted(options.items()))])


def empty_parts_warning(graph: Graph, parts: int) -> str | None:
    """What the user should know where some parts can have no nodes: that is legal, and seldom meant."""
    nodes = sum(table.count for table in graph.nodes.values())
    return f"{parts} parts of {nodes} nodes: at least {parts - nodes} are empty" if parts > nodes else None


def ensure_placement(
    graph: Graph, trained: Graph, config: RunConfig, *, progress: Progress = NoProgress(), quiet: bool = True
) -> Path | None:
    """What the strategy of a run needs of this kind; None where that is nothing."""
    if config.spec.placement == "none":
        return None
    ensure = {"partition": ensure_partition, "clusters": ensure_clusters, "chunks": ensure_layouts}
    return ensure[config.spec.placement](graph, trained, config, progress=progress, quiet=quiet)


def ensure_partition(
    graph: Graph, trained: Graph, config: RunConfig, *, progress: Progress = NoProgress(), quiet: bool = True
) -> Path:
    """The partition of a run in its store, one part per worker; made if it is not there, damaged or of other data.

    ``trained`` is what is cut: the store's graph, or for links the one that messages run over. Two processes that want
    the same one make it once. Raises StoreError where the store cannot be written.
    """
    method = config.partition or config.strategy.partitioner
    folder, trained, known = _folder(graph, trained, config)
    path = folder / partition_name(method, config.workers, "nodes", SEED, {})

    def make() -> None:
        assignment = assign_nodes(trained, config.workers, method, seed=SEED, progress=progress)
        write_partition(trained, assignment, path, overwrite=path.exists(), progress=progress)

    _ensure(path, lambda: Partition.open(path, known), make, quiet=quiet)
    return path


def ensure_clusters(
    graph: Graph, trained: Graph, config: RunConfig, *, progress: Progress = NoProgress(), quiet: bool = True
) -> Path | None:
    """The clusters in which nodes are dealt, kept in the store like partitions; None where nodes go one by one."""
    method, clusters = config.partition or config.strategy.partitioner, config.strategy.num_clusters
    if method == "random":
        return None
    folder, trained, known = _folder(graph, trained, config)
    options: dict[str, Any] = {"clusters": clusters} if clusters and method == "super" else {}
    parts = config.workers if method != "super" else 1
    path = folder / f"deal-{partition_name(method, parts, 'nodes', SEED, options)}"

    def make() -> None:
        write_clusters(trained, assign_nodes(trained, parts, method, seed=SEED, progress=progress, **options), path)

    _ensure(path, lambda: ClusterMap.open(path, known), make, quiet=quiet)
    return path


def ensure_layouts(
    graph: Graph, trained: Graph, config: RunConfig, *, progress: Progress = NoProgress(), quiet: bool = True
) -> Path:
    """The chunks that nodes may stream in, for every number of ways that may be planned with."""
    if len(graph.nodes) > 1:
        raise ConfigError(f"strategy pipe works on one node type, found {', '.join(graph.nodes)}: use sar")
    method, stays = config.partition or config.strategy.partitioner, config.task != "link"
    wanted = config.strategy.layout_candidates(config.workers, local_rows_only=stays)
    folder, trained, known = _folder(graph, trained, config)
    path = folder / f"chunks-{method}-{'-'.join(f'{ways}x{chunks}' for ways, chunks in wanted)}"

    def make() -> None:
        found = [build_chunk_layout(trained, ways, chunks, method=method, progress=progress) for ways, chunks in wanted]
        write_chunk_layouts(trained, found, path)

    _ensure(path, lambda: open_chunk_layouts(path, known), make, quiet=quiet)
    return path


def _ensure(path: Path, look: Callable[[], object], make: Callable[[], None], *, quiet: bool) -> None:
    """Make what is not there, or damaged; of two processes one does."""

    def is_there() -> bool:
        try:
            return bool(path.is_dir() and look())
        except PartitionError:
            return False

    if not is_there():
        with _file_lock(path, quiet):
            if not is_there():
                make()


def _folder(graph: Graph, trained: Graph, config: RunConfig) -> tuple[Path, Graph, Graph | None]:
    """(where cuts of the graph that is trained on are kept, that graph, the store's graph where it is that)."""
    store = _store(graph)
    if _same_edges(graph, trained):
        return store.path / "parts", graph, graph
    # Apart from those of the store's own graph; the name says what these were made from.
    return store.path / "parts" / f"links-{_links_key(store, config)}", trained, None


def ensure_placement_in_subprocess(graph: Graph, config: RunConfig, *, quiet: bool) -> Path | None:
    """``ensure_placement`` in another process, whose errors are raised here."""
    if config.spec.placement == "none":
        return None
    words = json.dumps({"store": str(_store(graph).path), "config": config.model_dump(mode="json"), "quiet": quiet})
    command = [sys.executable, "-m", "gnnfleet.training.partition_cache"]
    done = subprocess.run(command, input=words, stdout=subprocess.PIPE, text=True, check=False)
    try:
        answer = json.loads(done.stdout)
    except ValueError as error:
        raise PartitionError(f"partitioning ended with exit code {done.returncode}: see above") from error
    if "error" in answer:
        raise error_for_exit_code(answer["exit_code"])(answer["error"])
    return None if answer["path"] is None else Path(answer["path"])


def error_for_exit_code(exit_code: int) -> type[GnnfleetError]:
    """The error that ends with an exit code."""
    return next((kind for kind in GnnfleetError.__subclasses__() if kind.exit_code == exit_code), GnnfleetError)


def trained_graph(graph: Graph, config: RunConfig) -> Graph:
    """The graph that messages run over in training."""
    if config.task != "link":
        return graph
    from gnnfleet.training.build_link import build_links

    none = {kind: torch.empty(0, dtype=torch.int64) for kind in graph.nodes}
    return build_links(graph, config, training=True, own=none)[0].data.graph


def _store(graph: Graph) -> Bundle:
    assert graph.store is not None, "a graph in memory is stored before it is cut"
    return graph.store


def _same_edges(one: Graph, two: Graph) -> bool:
    return one.edges.keys() == two.edges.keys() and all(two.edges[kind] is edges for kind, edges in one.edges.items())


def _links_key(store: Bundle, config: RunConfig) -> str:
    """What decides which edges are held out."""
    words = [store.digest, config.split, config.seed, config.link.model_dump(mode="json"), config.model.name]
    return hashlib.sha256(json.dumps(words, sort_keys=True).encode()).hexdigest()[:8]


@contextmanager
def _file_lock(path: Path, quiet: bool) -> Iterator[None]:
    """The kernel's lock: a process that is killed leaves none behind."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = (path.parent / f".{path.name}.lock").open("w")
    except OSError as error:
        raise StoreError(
            f"cannot keep a partition in {path.parent}: {error.strerror}. Make the store writable or copy it"
        ) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            print_note(f"another process is cutting this store ({path.name}): waiting for it", quiet=quiet)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _main() -> None:
    from gnnfleet.graph.store import open_store

    die_with_parent()
    words = json.loads(sys.stdin.read())
    try:
        graph, config = open_store(words["store"]), resolve(words["config"])
        with make_progress(words["quiet"]) as progress:
            trained = trained_graph(graph, config)
            path = ensure_placement(graph, trained, config, progress=progress, quiet=words["quiet"])
        answer: dict[str, Any] = {"path": None if path is None else str(path)}
    except GnnfleetError as error:
        answer = {"error": str(error), "exit_code": error.exit_code}
    sys.stdout.write(json.dumps(answer))


if __name__ == "__main__":
    _main()

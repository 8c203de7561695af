"""What is read from disk: how a good one is made, what is done to it, how it is read.

``read`` returns all that a reader got, in a form that can be compared. Where ``exact`` holds, it must be what was
written: whatever differs has to be refused. Files that users write themselves have no checksums; there anything that
is accepted must come out as a store that is sound.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from gnnfleet.api import train
from gnnfleet.graph.datasets import make_dataset
from gnnfleet.graph.partition.assign import assign_nodes
from gnnfleet.graph.partition.chunk_layout import build_chunk_layout, open_chunk_layouts, write_chunk_layouts
from gnnfleet.graph.partition.node_assignment import ClusterMap, write_clusters
from gnnfleet.graph.partition.partitioned_graph import Partition, write_partition
from gnnfleet.graph.store import save_store
from gnnfleet.graph.validate import validate_shard
from gnnfleet.report.metrics import MetricsFile
from gnnfleet.strategies.protocol import IDS_SUFFIX, RANK_LOCAL, SHARDED
from gnnfleet.training.checkpoint import (
    TrainState,
    load_checkpoint,
    load_rank_local,
    load_sharded,
    save_checkpoint,
    sharded_ids,
)
from gnnfleet.training.run_dir import RunDirectory
from tests.fuzz import damage
from tests.fuzz.damage import Hurt
from tests.fuzz.graphs import bytes_of, everything, read_graph
from tests.fuzz.written import (
    hurt_csv,
    hurt_foreign,
    hurt_npz,
    hurt_ogb,
    hurt_parquet,
    hurt_words,
    make_csv,
    make_foreign,
    make_npz,
    make_ogb,
    make_parquet,
    make_words,
    read_foreign,
    read_ogb,
    read_tables,
    read_whole_into,
    read_words,
)


@dataclass(frozen=True)
class Subject:
    """Something on disk and its reader."""

    make: Callable[[Path], object]
    hurt: Hurt
    read: Callable[[Path], object]
    exact: bool = True


# Stores and what is kept in them.


def hurt_bundle(folder: Path, draw: random.Random) -> str:
    """Damage to any file, or to manifests in a way that their digests do not show."""
    manifests = sorted(folder.rglob("*.json"))
    how = draw.random()
    if how < 0.45:
        return damage.forge(draw.choice(manifests), draw)
    if how < 0.5:
        return damage.nest_deep(draw.choice(manifests), draw)
    return damage.hurt_files(folder, draw)


def make_partition(folder: Path) -> None:
    graph = everything()
    write_partition(graph, assign_nodes(graph, 2, "random", seed=0), folder / "parts")


def read_partition(folder: Path) -> object:
    partition = Partition.open(folder / "parts")
    tensors: list[Tensor | None] = [partition.assignment()]
    for part in range(partition.parts):
        shard = partition.shard(part)
        validate_shard(shard)
        for kind in shard.node_types:
            nodes = shard.nodes(kind)
            tensors += [nodes.store_ids, nodes.x, nodes.y, nodes.split]
        for direction in ("in", "out"):
            for edge_type in shard.edge_types:
                for q in range(shard.parts):
                    block = shard.block(edge_type, direction, q)
                    tensors += [block.rows, block.indptr, block.cols, block.edge_ids, *block.data.values()]
    return bytes_of(tensors), partition.parts


def make_kept(folder: Path) -> None:
    """What tma and pipe keep in a store: clusters and layouts."""
    graph = make_dataset("communities", nodes=60, mean_degree=4, seed=1)
    write_clusters(graph, assign_nodes(graph, 2, "super", seed=0, clusters=6), folder / "clusters")
    write_chunk_layouts(graph, [build_chunk_layout(graph, 2, 4), build_chunk_layout(graph, 1, 3)], folder / "layouts")


def read_kept(folder: Path) -> object:
    clusters = ClusterMap.open(folder / "clusters")
    layouts = open_chunk_layouts(folder / "layouts")
    tensors = [
        clusters.cluster_of_node,
        clusters.sizes,
        *(t for layout in layouts for t in (layout.order, layout.starts)),
    ]
    return bytes_of(tensors), clusters.method, [(layout.partitions, layout.halo_rows) for layout in layouts]


# Runs.


def make_checkpoint(folder: Path) -> None:
    draw = torch.Generator().manual_seed(2)
    state = {
        "model": {"lin.weight": torch.randn(4, 3, generator=draw), "lin.bias": torch.zeros(4)},
        "optimizer": {"step": torch.tensor(3.0)},
        SHARDED: {"rows": torch.randn(5, 2, generator=draw), f"rows{IDS_SUFFIX}": torch.arange(5)},
        RANK_LOCAL: {"cache": torch.arange(7)},
    }
    save_checkpoint(folder / "last", state, TrainState(epoch=3, step=9, best_metric=0.5), seed=7)


def read_checkpoint(folder: Path) -> object:
    state, position, seed = load_checkpoint(folder / "last")
    own = load_sharded(folder / "last", rank=0, ids={"rows": torch.tensor([3, 1])})
    private = load_rank_local(folder / "last", 0)
    trees = [state, own, private, {"ids": sharded_ids(folder / "last")}]
    found = sorted(
        (f"{part}/{key}", t) for tree in trees for part, tensors in tree.items() for key, t in tensors.items()
    )
    return [name for name, _ in found], bytes_of(t for _, t in found), position, seed


def make_run(folder: Path) -> None:
    graph = make_dataset("communities", nodes=60, mean_degree=4, features=4, seed=1)
    save_store(graph, folder / "store")
    train(folder / "store", model={"name": "sage", "hidden": 4, "layers": 1}, epochs=2, run_dir=folder / "run")
    shutil.move(folder / "store", folder.parent / "store")


def read_run(folder: Path) -> object:
    directory = RunDirectory(folder / "run")
    about, config, output = directory.info(), directory.config(), directory.output()
    found = [directory.load(name) for name in ("last", "best")]
    file = MetricsFile(directory.metrics, epochs=2)
    file.close()
    tensors = [t for pair in found if pair for tree in pair[0].values() for t in tree.values()]
    return about, config, output, bytes_of(tensors), [pair and pair[1] for pair in found]


def hurt_run(folder: Path, draw: random.Random) -> str:
    if draw.random() < 0.3:
        target = folder / "run" / draw.choice(("config.json", "metrics.jsonl"))
        return f"{draw.choice((damage.flip, damage.cut, damage.blank, damage.nest_deep))(target, draw)} {target.name}"
    return damage.hurt_files(folder / "run" / draw.choice(("", "checkpoints")), draw)


SUBJECTS = {
    "store": Subject(lambda folder: save_store(everything(), folder / "s"), hurt_bundle, lambda f: read_graph(f / "s")),
    "partition": Subject(make_partition, hurt_bundle, read_partition),
    "kept": Subject(make_kept, hurt_bundle, read_kept),
    "checkpoint": Subject(make_checkpoint, hurt_bundle, read_checkpoint),
    "run": Subject(make_run, hurt_run, read_run),
    "words": Subject(make_words, hurt_words, read_words, exact=False),
    "csv": Subject(make_csv, hurt_csv, read_tables, exact=False),
    "parquet": Subject(make_parquet, hurt_parquet, read_tables, exact=False),
    "npz": Subject(make_npz, hurt_npz, read_whole_into("a.npz"), exact=False),
    "ogb": Subject(make_ogb, hurt_ogb, read_ogb, exact=False),
    "foreign": Subject(make_foreign, hurt_foreign, read_foreign, exact=False),
}

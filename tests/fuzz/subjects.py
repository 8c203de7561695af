"""Everything that is read from disk: how an undamaged one is made, how it is damaged, how it is read.

``read`` returns the whole content in a comparable form. If ``exact``, it must equal the content written: any difference
must be refused. Files that users write have no checksums; an accepted one must give a valid store.
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
from tests.fuzz.damage import Damage
from tests.fuzz.graphs import digest_of, graph_with_all_arrays, read_graph
from tests.fuzz.written import (
    damage_csv,
    damage_foreign,
    damage_npz,
    damage_ogb,
    damage_parquet,
    damage_settings,
    make_csv,
    make_foreign,
    make_npz,
    make_ogb,
    make_parquet,
    make_settings,
    read_foreign,
    read_in_memory,
    read_ogb,
    read_settings,
    read_tables,
)


@dataclass(frozen=True)
class Subject:
    """A kind of file or folder, its damage and its reader."""

    make: Callable[[Path], object]
    damage: Damage
    read: Callable[[Path], object]
    exact: bool = True


# Stores and the partitions saved in them.


def damage_bundle(folder: Path, draw: random.Random) -> str:
    """Damage to any file, or to manifests in a way that their digests do not show."""
    manifests = sorted(folder.rglob("*.json"))
    choice = draw.random()
    if choice < 0.45:
        return damage.forge(draw.choice(manifests), draw)
    if choice < 0.5:
        return damage.nest_deep(draw.choice(manifests), draw)
    return damage.damage_files(folder, draw)


def make_partition(folder: Path) -> None:
    graph = graph_with_all_arrays()
    write_partition(graph, assign_nodes(graph, 2, "random", seed=0), folder / "parts")


def read_partition(folder: Path) -> object:
    partition = Partition.open(folder / "parts")
    tensors: list[Tensor | None] = [partition.assignment()]
    for part in range(partition.parts):
        shard = partition.shard(part)
        validate_shard(shard)
        for node_type in shard.node_types:
            nodes = shard.nodes(node_type)
            tensors += [nodes.store_ids, nodes.x, nodes.y, nodes.split]
        for direction in ("in", "out"):
            for edge_type in shard.edge_types:
                for q in range(shard.parts):
                    block = shard.block(edge_type, direction, q)
                    tensors += [block.rows, block.indptr, block.cols, block.edge_ids, *block.data.values()]
    return digest_of(tensors), partition.parts


def make_placements(folder: Path) -> None:
    """Write what tma and pipe save in a store: clusters and chunk layouts."""
    graph = make_dataset("communities", nodes=60, mean_degree=4, seed=1)
    write_clusters(graph, assign_nodes(graph, 2, "super", seed=0, clusters=6), folder / "clusters")
    write_chunk_layouts(graph, [build_chunk_layout(graph, 2, 4), build_chunk_layout(graph, 1, 3)], folder / "layouts")


def read_placements(folder: Path) -> object:
    clusters = ClusterMap.open(folder / "clusters")
    layouts = open_chunk_layouts(folder / "layouts")
    tensors = [
        clusters.cluster_of_node,
        clusters.sizes,
        *(t for layout in layouts for t in (layout.order, layout.starts)),
    ]
    return digest_of(tensors), clusters.method, [(layout.partitions, layout.halo_rows) for layout in layouts]


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
    sharded = load_sharded(folder / "last", rank=0, ids={"rows": torch.tensor([3, 1])})
    rank_local = load_rank_local(folder / "last", 0)
    trees = [state, sharded, rank_local, {"ids": sharded_ids(folder / "last")}]
    named_tensors = sorted(
        (f"{group}/{key}", t) for tree in trees for group, tensors in tree.items() for key, t in tensors.items()
    )
    return [name for name, _ in named_tensors], digest_of(t for _, t in named_tensors), position, seed


def make_run(folder: Path) -> None:
    graph = make_dataset("communities", nodes=60, mean_degree=4, features=4, seed=1)
    save_store(graph, folder / "store")
    train(folder / "store", model={"name": "sage", "hidden": 4, "layers": 1}, epochs=2, run_dir=folder / "run")
    shutil.move(folder / "store", folder.parent / "store")


def read_run(folder: Path) -> object:
    directory = RunDirectory(folder / "run")
    info, config, output = directory.info(), directory.config(), directory.output()
    checkpoints = [directory.load(name) for name in ("last", "best")]
    file = MetricsFile(directory.metrics, epochs=2)
    file.close()
    tensors = [t for checkpoint in checkpoints if checkpoint for tree in checkpoint[0].values() for t in tree.values()]
    return info, config, output, digest_of(tensors), [checkpoint and checkpoint[1] for checkpoint in checkpoints]


def damage_run(folder: Path, draw: random.Random) -> str:
    if draw.random() < 0.3:
        target = folder / "run" / draw.choice(("config.json", "metrics.jsonl"))
        return f"{draw.choice((damage.flip, damage.cut, damage.blank, damage.nest_deep))(target, draw)} {target.name}"
    return damage.damage_files(folder / "run" / draw.choice(("", "checkpoints")), draw)


# The names are seeds of the cases.
SUBJECTS = {
    "store": Subject(
        lambda folder: save_store(graph_with_all_arrays(), folder / "s"), damage_bundle, lambda f: read_graph(f / "s")
    ),
    "partition": Subject(make_partition, damage_bundle, read_partition),
    "kept": Subject(make_placements, damage_bundle, read_placements),
    "checkpoint": Subject(make_checkpoint, damage_bundle, read_checkpoint),
    "run": Subject(make_run, damage_run, read_run),
    "words": Subject(make_settings, damage_settings, read_settings, exact=False),
    "csv": Subject(make_csv, damage_csv, read_tables, exact=False),
    "parquet": Subject(make_parquet, damage_parquet, read_tables, exact=False),
    "npz": Subject(make_npz, damage_npz, read_in_memory("a.npz"), exact=False),
    "ogb": Subject(make_ogb, damage_ogb, read_ogb, exact=False),
    "foreign": Subject(make_foreign, damage_foreign, read_foreign, exact=False),
}

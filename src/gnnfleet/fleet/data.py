"""A worker's part of a graph, and sampled batches of it, with the names of torch_geometric's Data."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gnnfleet.comm.collectives import all_gather_json, all_gather_rows, broadcast_json
from gnnfleet.comm.halo_exchange import RingExchange
from gnnfleet.comm.world import World
from gnnfleet.config.schema import RunConfig
from gnnfleet.errors import ConfigError, StoreError
from gnnfleet.graph.graph import SPLITS, Graph, labelled_rows
from gnnfleet.graph.ingest.pyg import from_pyg
from gnnfleet.graph.sampling.batches import count_batches, epoch_batches
from gnnfleet.graph.sampling.sampler import NeighborSampler
from gnnfleet.graph.store import open_store, save_store
from gnnfleet.graph.validate import open_validated_part, validate_graph
from gnnfleet.graph.views.local import LocalEdges, LocalView
from gnnfleet.graph.views.view_base import NodeRows
from gnnfleet.nn.pyg.source_index import SourceIndex
from gnnfleet.ops import buffers
from gnnfleet.ops.csr import CSR, offsets_of
from gnnfleet.ops.draws import DrawKey
from gnnfleet.sharded.full_batch.ring_view import RingView
from gnnfleet.sharded.sampling.dist_sampler import DistNeighborSampler
from gnnfleet.training.build import split_codes
from gnnfleet.training.partition_cache import prepare_placement

View = LocalView | RingView


@dataclass(eq=False)
class PartData:
    """Nodes of a worker and their in-edges: those it owns with all edges, or a batch, whose seeds are the first rows.

    ``edge_index`` is for modules that ``Fleet.prepare`` returned: its sources may be nodes of other workers.
    """

    view: View = field(repr=False)
    graph: Graph = field(repr=False)  # the whole graph; its arrays may be on disk
    x: Tensor | None  # [N, F]
    y: Tensor | None  # [N] or [N, C]; of a batch, the rows of its seeds
    dtype: torch.dtype
    batch_size: int = 0  # seeds of this worker
    split: Tensor | None = field(default=None, repr=False)  # [N] codes

    def __post_init__(self) -> None:
        edges = self.view.edge_list()
        self.edge_index = SourceIndex.of(edges)  # [2, E]
        self.edge_index.fetcher.view = self.view
        self.edge_weight = None if edges.weight is None else edges.weight.to(self.dtype)
        self.edge_attr = None if edges.attr is None else edges.attr.to(self.dtype)
        self.edge_index.fetcher.inputs |= {"edge_weight": self.edge_weight, "edge_attr": self.edge_attr}
        self.n_id = self.view.node_ids  # [N] store ids
        self.num_nodes, self.num_classes = len(self.n_id), self.graph.single_nodes.num_classes
        self.num_features = 0 if self.x is None else int(self.x.shape[1])

    def __getattr__(self, name: str) -> Tensor:
        """``train_mask``, ``val_mask``, ``test_mask``: [N] bool, labelled nodes of a split."""
        if (split := name.removesuffix("_mask")) == name or split not in SPLITS:
            raise AttributeError(f"PartData has no attribute {name!r}")
        if self.split is None:
            raise ConfigError('there is no split: expected fleet.open(…, split="0.6/0.2/0.2") of a graph without one')
        mask = self.split == SPLITS[split]
        return mask if self.y is None else mask & labelled_rows(self.y)


def open_part(source: Any, config: RunConfig, world: World, dtype: torch.dtype) -> PartData:
    """Collective. Open this rank's part; rank 0 saves a graph in memory in a new folder, and partitions the store."""
    graph = open_store(source) if isinstance(source, str | Path) else source
    graph = graph if isinstance(graph, Graph) else from_pyg(graph)
    if world.size > 1 and graph.store is None:
        path = ""
        if world.is_first:
            path = tempfile.mkdtemp(prefix="gnnfleet-")
            atexit.register(shutil.rmtree, path, ignore_errors=True)
            save_store(graph, path)
        graph = open_store(broadcast_json(world, {"path": path})["path"])
    validate_graph(graph)
    nodes = graph.single_nodes
    view, x = (LocalView.of_graph(graph), nodes.x) if world.size == 1 else _open_shard(graph, config, world)
    has_split = nodes.split is not None or not str(config.split).isdigit()
    split = split_codes(nodes, config)[0][view.node_ids] if has_split else None
    y = None if nodes.y is None else nodes.y[view.node_ids]
    return PartData(view, graph, None if x is None else x.to(dtype), y, dtype, split=split)


def _open_shard(graph: Graph, config: RunConfig, world: World) -> tuple[View, Tensor | None]:
    assert graph.store is not None
    if len(set(all_gather_json(world, graph.store.digest))) > 1:
        raise StoreError(f"{graph.store.path} differs between ranks: all machines need the same store")
    holds_lock = config.partition != "random"  # Python's, which heartbeats need
    path = prepare_placement(graph, config, quiet=True, in_subprocess=holds_lock) if world.is_first else None
    name = broadcast_json(world, {"path": "" if path is None else str(path.relative_to(graph.store.path))})["path"]
    shard = open_validated_part(graph.store.path / name, world.rank)
    return RingView.open(shard, RingExchange(world, 1, 1, buffers.empty_buffer)), shard.nodes(*graph.nodes).x


@dataclass(eq=False)
class FleetLoader:
    """Sampled batches of seed nodes. Collective, as is iterating, which is one epoch.

    A batch is a slice of one permutation of all seeds; every rank has the seeds it owns. Owners draw neighbours, keyed
    by node, so batches depend neither on the number of ranks nor on the partition.
    """

    world: World
    seed: int
    data: PartData
    num_neighbors: Sequence[int]
    batch_size: int
    input_nodes: Tensor | None = None
    shuffle: bool = False
    replace: bool = False
    epoch: int = 0  # of the next iteration

    def __post_init__(self) -> None:
        data, view = self.data, self.data.view
        own = data.n_id if self.input_nodes is None else data.n_id[self.input_nodes]
        self._ids = torch.cat(all_gather_rows(self.world, own)).sort().values
        self._is_owned = torch.isin(self._ids, own)
        self._sample: Callable[[dict[str, Tensor], DrawKey], list[LocalView]]
        if isinstance(view, RingView):
            sampler = DistNeighborSampler(view, view.ring, self.num_neighbors, replace=self.replace)
            self._sample = lambda seeds, key: sampler.blocks([(seeds, key)])[0].views
        else:
            self._sample = NeighborSampler(data.graph, self.num_neighbors, replace=self.replace).blocks

    def __len__(self) -> int:
        return count_batches(len(self._ids), self.batch_size)

    def __iter__(self) -> Iterator[PartData]:
        epoch, self.epoch = self.epoch, self.epoch + 1
        in_order = enumerate(torch.split(self._ids, self.batch_size))
        shuffled = epoch_batches(self._ids, self.batch_size, seed=self.seed, epoch=epoch)
        for step, ids in shuffled if self.shuffle else in_order:
            seeds = ids[self._is_owned[torch.searchsorted(self._ids, ids)]]
            yield self._batch(seeds, DrawKey(self.seed, epoch, step))

    def _batch(self, seeds: Tensor, key: DrawKey) -> PartData:
        (kind,), data = self.data.graph.nodes, self.data
        view = _stack_hops(self._sample({kind: seeds}, key), data.view)
        x = None if data.x is None else data.view.gather_rows(data.x, view.node_ids)
        y = None if data.y is None else data.y[data.view.nodes[kind].row_index.rows(seeds)]
        return PartData(view, data.graph, x, y, data.dtype, len(seeds))


def _stack_hops(views: Sequence[LocalView], source: View) -> LocalView:
    """One view of all hops, for a module that runs all layers on the same edges.

    A node that several hops reach has a row for each, with the neighbours drawn in that hop: the output of a seed does
    not depend on the other seeds of the batch.
    """
    ((kind, nodes),), (edge_type,) = views[0].nodes.items(), views[0].relations
    rows, count = torch.arange(views[-1].num_dst), 0
    ids, scales, hops = [], list[Tensor](), list[LocalEdges]()
    for view in views[::-1]:  # from the seeds outward
        edges, count = view.relations[edge_type], count + len(rows)
        indptr = edges.structure.indptr
        offsets = offsets_of(indptr.diff()[rows])
        kept = torch.repeat_interleave(indptr[rows] - offsets[:-1], offsets.diff())
        kept += torch.arange(len(kept))
        ids.append(nodes.node_ids[rows])
        scales.append(edges.sampling_scale()[rows] if edges.sampling_scale else torch.ones(len(rows)))
        rows, src = torch.unique(edges.structure.col[kept].long(), return_inverse=True)
        hops.append(edges.select(CSR(offsets, src + count, count + len(rows)), kept))
    n_id = torch.cat([*ids, nodes.node_ids[rows]])
    scale = torch.cat([*scales, torch.ones(len(rows))]).double()
    degrees = [*(hop.structure.indptr.diff() for hop in hops), torch.zeros_like(rows)]
    structure = CSR(offsets_of(torch.cat(degrees)), torch.cat([hop.structure.col for hop in hops]), len(n_id))
    weights = [hop.weight for hop in hops if hop.weight is not None]
    attrs = [hop.attr for hop in hops if hop.attr is not None]

    @cache
    def degree(number: int) -> Tensor:
        return source.gather_rows(source.nodes[kind].degree(number)[:, None], n_id)[:, 0]

    edges = LocalEdges(
        structure,
        torch.cat([hop.edge_ids for hop in hops]),
        torch.cat(weights) if weights else None,
        torch.cat(attrs) if attrs else None,
        sampling_scale=lambda: scale,
    )
    return LocalView({kind: NodeRows(n_id, len(n_id), degree)}, {edge_type: edges}, key=views[0].key)

"""Estimate the cost of a ``macrobatch`` epoch from the blocks of the first batches.

Draws go by store id, so blocks are sampled without ranks; the partitions say which of their rows are remote.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gnnfleet.errors import ConfigError
from gnnfleet.graph.sampling.batches import count_batches, epoch_batches
from gnnfleet.graph.sampling.sampler import NeighborSampler
from gnnfleet.graph.views.local import LocalView
from gnnfleet.ops.draws import DrawKey
from gnnfleet.strategies.estimates import CostEstimate, PlanningContext
from gnnfleet.strategies.macrobatch.config import MacrobatchConfig
from gnnfleet.strategies.macrobatch.fetch import WarmupSample, choose_batches_per_fetch, owned_items
from gnnfleet.strategies.sampling_options import parse_fanouts
from gnnfleet.strategies.step_costs import (
    ProbeBlocks,
    WeightBytes,
    caches_aggregate,
    evaluation_bytes,
    feature_bytes,
    step_peak_bytes,
)

PROBED_BATCHES = 24
"""Batches sampled for every worker."""

BYTES_PER_PART_EDGE = 72.0
"""Bytes of an in-edge of a partition: as mapped, and in the sampler's index."""


def estimate(config: MacrobatchConfig, context: PlanningContext) -> list[CostEstimate]:
    """Estimate one batch per fetch, and as many as the buffer holds."""
    if context.job.model.batch_norm and context.workers > 1:
        raise ConfigError("batch norm would count rows that several workers compute more than once: model.norm=layer")
    epoch = _EpochEstimator(config, context)
    if config.batches_per_fetch != "auto":
        return [epoch.estimate(config.batches_per_fetch)]
    return [epoch.estimate(batches) for batches in dict.fromkeys((1, epoch.max_batches))]


@dataclass(frozen=True)
class _ProbedBatches:
    blocks: ProbeBlocks
    remote_ids: Sequence[dict[str, Tensor]]  # by batch and node type, store ids of remote rows
    request_bytes: float  # bytes of requests and replies while a batch is sampled


class _EpochEstimator:
    def __init__(self, config: MacrobatchConfig, context: PlanningContext) -> None:
        self.config, self.context, self.job = config, context, context.job
        self.is_cached = caches_aggregate(self.job, config.cache_inputs) and config.split == "nodes"
        items = self.job.task.train_items(self.job.seed, 0)
        self.steps = count_batches(len(items), config.batch)
        self.prefetch = config.prefetch if config.prefetch != "auto" else int(context.overlaps)
        self.owner = self._owners()
        self.probes = [self._probe(rank, items) for rank in range(context.workers)]
        self.warmups = []
        for probe in self.probes:
            reads = (([ids[kind] for ids in probe.remote_ids], self._row_bytes(kind)) for kind in self.owner)
            self.warmups.append(WarmupSample.of_reads(reads, len(probe.remote_ids), probe.blocks.structure_bytes))
        self.max_batches = min(
            choose_batches_per_fetch(warmup, config.buffer, self.steps, prefetch=self.prefetch, lookahead=0)
            for warmup in self.warmups
        )
        largest = max(self.probes, key=lambda probe: probe.blocks.num_edges_and_rows)
        self.tensor_bytes = step_peak_bytes(self.job, largest.blocks.views[0], is_cached=self.is_cached)

    def _owners(self) -> dict[str, Tensor]:
        """[N] the partition of every node, by type."""
        owner = {kind: torch.zeros(table.count, dtype=torch.int16) for kind, table in self.job.graph.nodes.items()}
        for part, shard in enumerate(self.context.parts()):
            for kind in shard.node_types:
                owner[kind][shard.nodes(kind).store_ids] = part
        return owner

    def _probe(self, rank: int, items: Tensor) -> _ProbedBatches:
        job, config = self.job, self.config
        sampler = NeighborSampler(
            job.graph, parse_fanouts(config.fanouts, job.model.num_layers), replace=config.replace
        )
        is_owned = owned_items(job.task, items, rank, lambda kind, ids: self.owner[kind][ids])
        views: list[Sequence[LocalView]] = []
        remote_ids: list[dict[str, Tensor]] = []
        request_bytes = 0.0
        for number, global_items in epoch_batches(items, config.batch, seed=job.seed, epoch=0):
            if number >= PROBED_BATCHES:
                break
            local_items = global_items[is_owned[torch.searchsorted(items, global_items)]]
            batch = job.task.batch(local_items, DrawKey(job.seed, 0, number), global_items)
            blocks = sampler.blocks(batch.seeds, batch.key, skip_last_hop=self.is_cached)
            if len(views) < 2:
                views.append(blocks)
            nodes = blocks[0].nodes
            is_remote = {kind: self.owner[kind][rows.node_ids] != rank for kind, rows in nodes.items()}
            remote_ids.append({kind: nodes[kind].node_ids[mask] for kind, mask in is_remote.items()})
            request_bytes += self._request_bytes(blocks, is_remote)
        return _ProbedBatches(ProbeBlocks(views), remote_ids, request_bytes / max(1, len(remote_ids)))

    def _request_bytes(self, views: Sequence[LocalView], is_remote: dict[str, Tensor]) -> float:
        """Bytes of sampling a batch: ids of nodes new in a hop, one reply per node, and drawn edges in every hop."""
        total, requested = 0.0, dict.fromkeys(is_remote, 0)
        for view in reversed(views[1:] if self.is_cached else views):
            for kind, relation in view.relations.items():
                count = len(view.nodes[kind.dst].node_ids[: view.nodes[kind.dst].num_dst])
                remote = is_remote[kind.dst][:count]
                total += 4.0 * float(relation.structure.indptr.diff()[remote].sum())
                total += 16.0 * (int(remote.sum()) - requested[kind.dst])
            for name, mask in is_remote.items():
                reached = int(mask[: view.nodes[name].num_dst].sum())
                total += 4.0 * (reached - requested[name])
                requested[name] = reached
        return total

    def _row_bytes(self, kind: str) -> float:
        """Bytes of a fetched row: features as stored, their aggregate, the degree."""
        x = self.job.graph.nodes[kind].x
        width = 0 if x is None else int(x.shape[1])
        aggregate = width * self.job.dtype.itemsize if self.is_cached else 0
        return (0 if x is None else width * x.element_size()) + aggregate + 8.0

    def estimate(self, batches: int) -> CostEstimate:
        context, workers, several = self.context, self.context.workers, self.context.workers > 1
        profile, weights = context.shared_profile, WeightBytes.of(self.job.model)
        fetches = -(-self.steps // batches)
        id_overhead = 1 + 8 / max(self._row_bytes(kind) for kind in self.owner)
        fetched = [warmup.rows_per_fetch(batches) * fetches * id_overhead for warmup in self.warmups]
        sampled = [probe.request_bytes * self.steps for probe in self.probes]
        sums = self.steps * (weights.allreduce + self.job.dtype.itemsize)
        hops = self.job.model.num_layers - self.is_cached
        rounds = (fetches * (2 * hops + 2) + 2 * self.steps) * several
        work = max(profile.block_seconds * probe.blocks.num_edges_and_rows for probe in self.probes)
        sampling = max(profile.sampling_seconds * probe.blocks.num_edges_and_rows for probe in self.probes)
        transfer = profile.transfer_seconds(max(map(sum, zip(fetched, sampled, strict=True))), fetches * (2 * hops + 2))
        fetching = self.steps * sampling + transfer
        layers = self.steps * (work + profile.allreduce_seconds(weights.replicated))
        return CostEstimate(
            settings=self.config.settings_with(batches_per_fetch=batches),
            kind="sampled",
            workers=workers,
            memory=max(self._memory(rank, batches) for rank in range(workers)),
            bytes=(sum(fetched) + sum(sampled) + workers * sums) * several,
            rounds=rounds,
            seconds=max(layers, fetching) if self.prefetch else layers + fetching,
            steps=self.steps,
            batches_per_fetch=min(batches, self.steps),
            reasons=self._reasons(batches, sampling, work, transfer),
        )

    def _memory(self, rank: int, batches: int) -> float:
        job, profile, weights = self.job, self.context.shared_profile, WeightBytes.of(self.job.model)
        shard = self.context.parts()[rank]
        rows = sum(shard.nodes(kind).count for kind in shard.node_types)
        share = rows / max(1, job.graph.num_nodes)
        itemsize = job.dtype.itemsize
        features = feature_bytes(job.graph) + self.is_cached * 2 * feature_bytes(job.graph, itemsize)
        partition = share * (features + job.graph.num_edges * BYTES_PER_PART_EDGE)
        macrobatches = self.warmups[rank].bytes(batches, prefetch=self.prefetch, lookahead=0)
        evaluation = evaluation_bytes(job, rows) + share * feature_bytes(job.graph, itemsize)
        return (
            profile.base_memory + partition + max(self.tensor_bytes + macrobatches, evaluation) + weights.state(share)
        )

    def _reasons(self, batches: int, sampling: float, work: float, transfer: float) -> tuple[str, ...]:
        steps = f"{self.steps} steps: sampling {sampling:.2g} s, layers {work:.2g} s each; transfer {transfer:.2g} s"
        duplication = max(warmup.duplication(batches) for warmup in self.warmups)
        return (steps, f"each fetched row is used {duplication:.1f} times") if batches > 1 else (steps,)

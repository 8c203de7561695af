"""What an epoch of ``macrobatch`` takes, from the blocks that the first batches would draw.

Draws go by store id, so blocks are known without ranks; what of them lies elsewhere, the parts say.
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
from gnnfleet.strategies.job import PRECISIONS
from gnnfleet.strategies.macrobatch.batch_count import WarmupSample, choose_batches_per_fetch
from gnnfleet.strategies.macrobatch.config import MacrobatchConfig
from gnnfleet.strategies.macrobatch.fetch import owned_items
from gnnfleet.strategies.step_costs import (
    ProbeBlocks,
    WeightBytes,
    caches_aggregate,
    evaluation_bytes,
    feature_bytes,
    parse_fanouts,
    step_peak_bytes,
)

PROBED_BATCHES = 24
"""Batches drawn for every worker."""

BYTES_PER_PART_EDGE = 72.0
"""Bytes of an in-edge of a part: as it is mapped, and as it is drawn from."""


def estimate(config: MacrobatchConfig, outlook: PlanningContext) -> list[CostEstimate]:
    """Every batch by itself, and as many in one relay as the buffer holds."""
    if outlook.job.model.batch_norm and outlook.workers > 1:
        raise ConfigError("batch norm would count rows that several workers compute more than once: model.norm=layer")
    epoch = _EpochEstimator(config, outlook)
    if config.batches_per_fetch != "auto":
        return [epoch.estimate(config.batches_per_fetch)]
    return [epoch.estimate(together) for together in dict.fromkeys((1, epoch.most))]


@dataclass(frozen=True)
class _ProbedBatches:
    """What the blocks of a worker's first batches are."""

    drawn: ProbeBlocks
    far: Sequence[dict[str, Tensor]]  # by batch and node type, store ids of rows elsewhere
    told: float  # bytes of questions and answers while a batch is drawn


class _EpochEstimator:
    def __init__(self, config: MacrobatchConfig, outlook: PlanningContext) -> None:
        self.config, self.outlook, self.job = config, outlook, outlook.job
        self.given = caches_aggregate(self.job, config.cache_inputs) and config.split == "nodes"
        items = self.job.task.train_items(self.job.seed, 0)
        self.steps = count_batches(len(items), config.batch)
        self.ahead = config.prefetch if config.prefetch != "auto" else int(outlook.overlaps)
        self.owner = self._owners()
        self.tastes = [self._probe(rank, items) for rank in range(outlook.workers)]
        foretastes = [self._warmup_sample(taste) for taste in self.tastes]
        self.foretastes = foretastes
        fits = [
            choose_batches_per_fetch(each, config.buffer, self.steps, ahead=self.ahead, window=0) for each in foretastes
        ]
        self.most = min(fits)
        largest = max(self.tastes, key=lambda taste: taste.drawn.num_edges_and_rows)
        self.tensors = step_peak_bytes(self.job, largest.drawn.views[0], given=self.given)

    def _owners(self) -> dict[str, Tensor]:
        """[N] the part of every node, by type."""
        found = {kind: torch.zeros(table.count, dtype=torch.int16) for kind, table in self.job.graph.nodes.items()}
        for part, shard in enumerate(self.outlook.parts()):
            for kind in shard.node_types:
                found[kind][shard.nodes(kind).store_ids] = part
        return found

    def _probe(self, rank: int, items: Tensor) -> _ProbedBatches:
        job, config = self.job, self.config
        sampler = NeighborSampler(
            job.graph, parse_fanouts(config.fanouts, job.model.num_layers), replace=config.replace
        )
        mine = owned_items(job.task, items, rank, lambda kind, ids: self.owner[kind][ids])
        views: list[Sequence[LocalView]] = []
        far: list[dict[str, Tensor]] = []
        told = 0.0
        for number, every in epoch_batches(items, config.batch, seed=job.seed, epoch=0):
            if number >= PROBED_BATCHES:
                break
            own = every[mine[torch.searchsorted(items, every)]]
            batch = job.task.batch(own, DrawKey(job.seed, 0, number), every)
            blocks = sampler.blocks(batch.seeds, batch.key, given=self.given)
            if len(views) < 2:
                views.append(blocks)
            rows = blocks[0].nodes
            away = {kind: self.owner[kind][each.node_ids] != rank for kind, each in rows.items()}
            far.append({kind: rows[kind].node_ids[mask] for kind, mask in away.items()})
            told += self._told(blocks, away)
        return _ProbedBatches(ProbeBlocks(views), far, told / max(1, len(far)))

    def _told(self, views: Sequence[LocalView], away: dict[str, Tensor]) -> float:
        """Ids of nodes that are new in a hop go out; where their edges are comes back once, what is drawn every hop."""
        total, known = 0.0, dict.fromkeys(away, 0)
        for view in reversed(views[1:] if self.given else views):
            for kind, relation in view.relations.items():
                count = len(view.nodes[kind.dst].node_ids[: view.nodes[kind.dst].num_dst])
                elsewhere = away[kind.dst][:count]
                total += 4.0 * float(relation.structure.indptr.diff()[elsewhere].sum())
                total += 16.0 * (int(elsewhere.sum()) - known[kind.dst])
            for name, mask in away.items():
                now = int(mask[: view.nodes[name].num_dst].sum())
                total += 4.0 * (now - known[name])
                known[name] = now
        return total

    def _row(self, kind: str) -> float:
        """Bytes of a row that is fetched: features as they are stored, their aggregate, the degree."""
        x = self.job.graph.nodes[kind].x
        wide = 0 if x is None else int(x.shape[1])
        near = wide * PRECISIONS[self.job.precision].itemsize if self.given else 0
        return (0 if x is None else wide * x.element_size()) + near + 8.0

    def _warmup_sample(self, taste: _ProbedBatches) -> WarmupSample:
        reads = (([far[kind] for far in taste.far], self._row(kind)) for kind in self.owner)
        return WarmupSample.of_reads(reads, len(taste.far), taste.drawn.structure_bytes)

    def estimate(self, together: int) -> CostEstimate:
        outlook, workers, several = self.outlook, self.outlook.workers, self.outlook.workers > 1
        pace, weights = outlook.shared_profile, WeightBytes.of(self.job.model)
        relays = -(-self.steps // together)
        fetched = [each.rows_per_fetch(together) * relays * (1 + 8 / self._widest()) for each in self.foretastes]
        told = [taste.told * self.steps for taste in self.tastes]
        sums = self.steps * (weights.allreduce_bytes + PRECISIONS[self.job.precision].itemsize)
        hops = self.job.model.num_layers - self.given
        rounds = (relays * (2 * hops + 2) + 2 * self.steps) * several
        work = max(pace.sampled_step_seconds(taste.drawn.layer_loads) for taste in self.tastes)
        making = max(pace.sampling_seconds * taste.drawn.num_edges_and_rows for taste in self.tastes)
        travel = pace.transfer_seconds(max(map(sum, zip(fetched, told, strict=True))), relays * (2 * hops + 2))
        shown = self.steps * making + travel
        layers = self.steps * (work + pace.allreduce_seconds)
        return CostEstimate(
            words={
                **self.config.model_dump(exclude_defaults=True),
                "name": "macrobatch",
                "batches_per_fetch": together,
            },
            kind="sampled",
            workers=workers,
            memory=max(self._memory(rank, together) for rank in range(workers)),
            bytes=(sum(fetched) + sum(told) + workers * sums) * several,
            rounds=rounds,
            seconds=max(layers, shown) if self.ahead else layers + shown,
            steps=self.steps,
            relay=min(together, self.steps),
            reasons=self._reasons(together, making, work, travel),
        )

    def _widest(self) -> float:
        return max(self._row(kind) for kind in self.owner)

    def _memory(self, rank: int, together: int) -> float:
        job, pace, weights = self.job, self.outlook.shared_profile, WeightBytes.of(self.job.model)
        shard = self.outlook.parts()[rank]
        rows = sum(shard.nodes(kind).count for kind in shard.node_types)
        share = rows / max(1, job.graph.num_nodes)
        itemsize = PRECISIONS[job.precision].itemsize
        features = feature_bytes(job.graph) + self.given * 2 * feature_bytes(job.graph, itemsize)
        held = share * (features + job.graph.num_edges * BYTES_PER_PART_EDGE)
        relays = self.foretastes[rank].bytes(together, ahead=self.ahead, window=0)
        most = max(self.tensors + relays, evaluation_bytes(job, rows) + share * feature_bytes(job.graph, itemsize))
        return pace.base_memory + held + most + weights.state(share)

    def _reasons(self, together: int, making: float, work: float, travel: float) -> tuple[str, ...]:
        duplication = max(each.duplication(together) for each in self.foretastes)
        found = [
            f"{self.steps} steps: blocks {making:.2g} s, layers {work:.2g} s each; rows on their way {travel:.2g} s"
        ]
        if together > 1:
            found.append(f"a row comes once for {duplication:.1f} uses")
        return tuple(found)

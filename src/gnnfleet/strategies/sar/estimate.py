"""What an epoch of ``sar`` takes: exchanges from a scouted step, rows and edges from the parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gnnfleet.comm.compression import WireCodec
from gnnfleet.comm.halo_exchange import ExchangePlan
from gnnfleet.graph.partition.shard import Shard
from gnnfleet.sharded.full_batch.active_row_counts import ActiveRowCounts, LayerLoad, count_active_rows
from gnnfleet.sharded.step_tracer import RouteKey, StepTrace, TracedExchange
from gnnfleet.strategies.estimates import CostEstimate, PlanningContext
from gnnfleet.strategies.job import PRECISIONS
from gnnfleet.strategies.sar.config import SarConfig
from gnnfleet.strategies.sar.memory_plan import MemoryChoice, MemoryNeeds
from gnnfleet.strategies.step_costs import WeightBytes, trace_full_batch


def estimate(config: SarConfig, outlook: PlanningContext) -> list[CostEstimate]:
    """For the leanest way, with prefetch, with rows kept, with all parts in one group."""
    config.check_task(outlook.job.task)
    step = _StepEstimator(config, outlook)
    return [step.estimate(choice) for choice in _choices(config, outlook.workers, step.sketch)]


def _choices(config: SarConfig, workers: int, sketch: StepTrace) -> list[MemoryChoice]:
    groups = [1, workers] if config.group == "auto" else [config.group]
    ahead = [0, 1] if config.prefetch == "auto" else [config.prefetch]
    kept = tuple(sorted({trip.layer for trip in sketch.exchanges if trip.cached_bytes}))
    keeps = [(), kept] if config.cache_for_backward == "auto" else [kept if config.cache_for_backward else ()]
    found = [MemoryChoice(group, depth, keep) for group in groups for depth in ahead for keep in keeps]
    return list(dict.fromkeys(found if workers > 1 else found[-1:]))


class _StepEstimator:
    """A step on every part."""

    def __init__(self, config: SarConfig, outlook: PlanningContext) -> None:
        self.config, self.outlook, self.job = config, outlook, outlook.job
        self.shards: Sequence[Shard] = outlook.parts()
        levels: ActiveRowCounts = outlook.cached(f"levels {config.restrict_rows}", self._levels)
        self.levels = levels.loads
        self.sketch: StepTrace = trace_full_batch(outlook, config.cache_inputs, levels.many)
        self.code = WireCodec(config.wire_dtype)

    def _levels(self) -> ActiveRowCounts:
        job, reach = self.job, self.job.task.reachable_mask()
        if not self.config.restrict_rows or reach is None or job.model.batch_norm:
            return count_active_rows(self.shards, None, job.model.num_layers)
        wanted = []
        for shard in self.shards:
            masks = {kind: torch.zeros(shard.nodes(kind).count, dtype=torch.bool) for kind in shard.node_types}
            masks[job.task.target] = reach[shard.nodes(job.task.target).store_ids]
            wanted.append(masks)
        return count_active_rows(self.shards, wanted, job.model.num_layers)

    def estimate(self, choice: MemoryChoice) -> CostEstimate:
        outlook, ranks = self.outlook, range(len(self.shards))
        pace, workers = outlook.shared_profile, outlook.workers
        sent = [sum(self._sent(trip, rank, choice) for trip in self.sketch.exchanges) for rank in ranks]
        rounds = len(self.sketch.exchanges) * -(-workers // choice.group) if workers > 1 else 0
        work = [pace.layer_seconds([(load.rows, load.edges) for load in self._of(rank)]) for rank in ranks]
        seconds = max(self._seconds(*each, rounds, choice) for each in zip(work, sent, strict=True))
        weights = WeightBytes.of(self.job.model)
        # Gradients, how many have each of them, the count of items, the loss, sums over all nodes, a norm.
        number = PRECISIONS[self.job.precision].itemsize
        clips = bool(self.job.train.clip and weights.embedding_rows)
        extra = weights.allreduce_bytes + 8 + number * (1 + clips) + sum(self.sketch.sums)
        several = workers > 1
        return CostEstimate(
            words=self._words(choice),
            kind="exact",
            workers=workers,
            memory=max(self._needs(rank).bytes(choice) for rank in ranks),
            bytes=sum(sent) + extra * workers * several,
            rounds=rounds + (3 + clips + len(self.sketch.sums)) * several,
            seconds=seconds + pace.optimizer_seconds + pace.allreduce_seconds,
            reasons=self._reasons(work, sent, rounds),
        )

    def _words(self, choice: MemoryChoice) -> dict[str, Any]:
        given = self.config.model_dump(exclude_defaults=True)
        return {
            **given,
            "name": "sar",
            "group": choice.group,
            "prefetch": choice.prefetch,
            "cache_for_backward": bool(choice.cached_layers),
        }

    def _of(self, rank: int) -> list[LayerLoad]:
        return [level[rank] for level in self.levels]

    def _sent(self, trip: TracedExchange, rank: int, choice: MemoryChoice) -> int:
        """Bytes of an exchange that a rank hands over."""
        load = self.levels[trip.layer][rank]
        there = () if trip.is_refetch and trip.layer in choice.cached_layers else trip.sent_bytes
        total = sum(sum(load.sent_rows[way]) * self._written(each) for way, each in there)
        return total + sum(sum(load.received_rows[way]) * self._written(each) for way, each in trip.returned_bytes)

    def _written(self, nbytes: int) -> int:
        """A row as it travels."""
        dtype = PRECISIONS[self.job.precision]
        return sum(width * kind.itemsize for width, kind in self.code.encoded_shapes(nbytes // dtype.itemsize, dtype))

    def _seconds(self, work: float, sent: float, rounds: int, choice: MemoryChoice) -> float:
        pace = self.outlook.shared_profile
        travel = pace.transfer_seconds(sent, rounds)
        if not self.outlook.overlaps or not choice.prefetch:
            return work + travel
        # The first rows of an exchange have nothing but own edges to hide behind.
        return max(work, travel) + min(work, travel) / self.outlook.workers

    def _needs(self, rank: int) -> MemoryNeeds:
        shard, levels = self.shards[rank], self._of(rank)
        rows = sum(load.rows for load in levels) / len(levels)
        tensors = self.sketch.peak_bytes(int(rows)) + WeightBytes.of(self.job.model).state(
            rows / max(1, self.job.graph.num_nodes)
        )

        def routes(way: RouteKey) -> ExchangePlan:
            plan = shard.plan(*way)
            return ExchangePlan(plan.send, tuple(map(len, plan.recv)))

        return MemoryNeeds(
            self.outlook.shared_profile.base_memory + self._held(shard, levels), tensors, self.sketch, routes
        )

    def _held(self, shard: Shard, levels: Sequence[LayerLoad]) -> float:
        """Bytes of a part that is open: features and their aggregate, edges both ways and those of narrower layers."""
        features = 0
        for kind in shard.node_types:
            x = shard.nodes(kind).x
            features += 0 if x is None else shard.nodes(kind).count * int(x.shape[1])
        edges = max(load.edges for load in levels)
        narrow = sum(load.edges for load in levels if load.edges < edges)
        itemsize = PRECISIONS[self.job.precision].itemsize
        return features * itemsize * FEATURE_BYTES + edges * BYTES_PER_SAR_EDGE + narrow * BYTES_PER_ACTIVE_EDGE

    def _reasons(self, work: Sequence[float], sent: Sequence[int], rounds: int) -> tuple[str, ...]:
        travel = max(self.outlook.shared_profile.transfer_seconds(each, rounds) for each in sent)
        rows = [sum(load.rows for load in level) for level in self.levels]
        share = min(rows) / max(1, max(rows))
        found = [f"layers {max(work):.2g} s, rows on their way {travel:.2g} s"]
        if share < 1:
            found.append(f"labelled nodes need {share:.0%} of the rows of the last layer")
        return tuple(found)


FEATURE_BYTES, BYTES_PER_SAR_EDGE, BYTES_PER_ACTIVE_EDGE = 4.0, 80.0, 48.0
"""Copies of features (as mapped, in order, with their aggregate, while it is made), bytes of an in-edge with what
backward keeps of it, and of one that a layer has for itself."""

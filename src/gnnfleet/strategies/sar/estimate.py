"""Estimate the cost of a ``sar`` epoch: exchanges from a traced step, rows and edges from the partitions."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gnnfleet.comm.compression import WireCodec
from gnnfleet.comm.halo_exchange import ExchangePlan
from gnnfleet.graph.partition.shard import Shard
from gnnfleet.sharded.full_batch.active_row_counts import ActiveRowCounts, LayerLoad, count_active_rows
from gnnfleet.sharded.step_tracer import RouteKey, StepTrace, TracedExchange
from gnnfleet.strategies.estimates import CostEstimate, PlanningContext
from gnnfleet.strategies.sar.config import SarConfig
from gnnfleet.strategies.sar.memory_plan import MemoryChoice, MemoryNeeds
from gnnfleet.strategies.step_costs import WeightBytes, trace_full_batch


def estimate(config: SarConfig, context: PlanningContext) -> list[CostEstimate]:
    """Estimate the settings of least memory, with prefetch, with cached rows, with all partitions in one group."""
    config.check_task(context.job.task)
    step = _StepEstimator(config, context)
    return [step.estimate(choice) for choice in _choices(config, context.workers, step.trace)]


def _choices(config: SarConfig, workers: int, trace: StepTrace) -> list[MemoryChoice]:
    groups = [1, workers] if config.group == "auto" else [config.group]
    depths = [0, 1] if config.prefetch == "auto" else [config.prefetch]
    layers = tuple(sorted({exchange.layer for exchange in trace.exchanges if exchange.is_cacheable}))
    cached = [(), layers] if config.cache_for_backward == "auto" else [layers if config.cache_for_backward else ()]
    choices = [MemoryChoice(group, depth, cache) for group in groups for depth in depths for cache in cached]
    return list(dict.fromkeys(choices if workers > 1 else choices[-1:]))


class _StepEstimator:
    def __init__(self, config: SarConfig, context: PlanningContext) -> None:
        self.config, self.context, self.job = config, context, context.job
        self.shards: Sequence[Shard] = context.parts()
        levels: ActiveRowCounts = context.cached(f"levels {config.restrict_rows}", self._levels)
        self.levels = levels.loads
        self.trace: StepTrace = trace_full_batch(context, config.cache_inputs, levels.many)
        self.codec = WireCodec(config.wire_dtype)

    def _levels(self) -> ActiveRowCounts:
        job, reach = self.job, self.job.task.reachable_mask()
        if not self.config.restrict_rows or reach is None or job.model.batch_norm:
            return count_active_rows(self.shards, None, job.model.num_layers)
        loss_rows = []
        for shard in self.shards:
            masks = {kind: torch.zeros(shard.nodes(kind).count, dtype=torch.bool) for kind in shard.node_types}
            masks[job.task.target] = reach[shard.nodes(job.task.target).store_ids]
            loss_rows.append(masks)
        return count_active_rows(self.shards, loss_rows, job.model.num_layers)

    def estimate(self, choice: MemoryChoice) -> CostEstimate:
        context, ranks = self.context, range(len(self.shards))
        profile, workers = context.shared_profile, context.workers
        sent = [sum(self._sent_bytes(exchange, rank, choice) for exchange in self.trace.exchanges) for rank in ranks]
        rounds = len(self.trace.exchanges) * -(-workers // choice.group) if workers > 1 else 0
        work = [profile.full_batch_seconds([(load.rows, load.edges) for load in self._loads(rank)]) for rank in ranks]
        seconds = max(self._seconds(*work_and_bytes, rounds, choice) for work_and_bytes in zip(work, sent, strict=True))
        weights = WeightBytes.of(self.job.model)
        # Gradients and the number of ranks that have each, the count of items, the loss, sums over all nodes, a norm.
        itemsize = self.job.dtype.itemsize
        clips = bool(self.job.train.clip and weights.embedding_rows)
        extra = weights.allreduce + 8 + itemsize * (1 + clips) + sum(self.trace.sums)
        several = workers > 1
        return CostEstimate(
            settings=self.config.settings_with(
                group=choice.group, prefetch=choice.prefetch, cache_for_backward=bool(choice.cached_layers)
            ),
            kind="exact",
            workers=workers,
            memory=max(self._needs(rank).bytes(choice) for rank in ranks),
            bytes=sum(sent) + extra * workers * several,
            rounds=rounds + (3 + clips + len(self.trace.sums)) * several,
            seconds=seconds + profile.allreduce_seconds(weights.replicated),
            reasons=self._reasons(work, sent, rounds),
        )

    def _loads(self, rank: int) -> list[LayerLoad]:
        return [level[rank] for level in self.levels]

    def _sent_bytes(self, exchange: TracedExchange, rank: int, choice: MemoryChoice) -> int:
        load, row_bytes = self.levels[exchange.layer][rank], self._encoded_bytes
        sent = () if exchange.is_refetch and exchange.layer in choice.cached_layers else exchange.sent_bytes
        total = sum(load.sent_rows[route] * row_bytes(size) for route, size in sent)
        return total + sum(load.received_rows[route] * row_bytes(size) for route, size in exchange.returned_bytes)

    def _encoded_bytes(self, nbytes: int) -> int:
        dtype = self.job.dtype
        return sum(width * kind.itemsize for width, kind in self.codec.encoded_shapes(nbytes // dtype.itemsize, dtype))

    def _seconds(self, work: float, sent: float, rounds: int, choice: MemoryChoice) -> float:
        profile = self.context.shared_profile
        transfer = profile.transfer_seconds(sent, rounds)
        if not self.context.overlaps or not choice.prefetch:
            return work + transfer
        # The first rows of an exchange overlap only with the local block.
        return max(work, transfer) + min(work, transfer) / self.context.workers

    def _needs(self, rank: int) -> MemoryNeeds:
        shard, levels = self.shards[rank], self._loads(rank)
        rows = sum(load.rows for load in levels) / len(levels)
        received = [shard.plan(kind, "in").recv for kind in shard.node_types]
        remote_rows = sum(len(nodes) for by_rank in received for q, nodes in enumerate(by_rank) if q != rank)
        tensors = self.trace.peak_bytes(int(rows), remote_rows) + WeightBytes.of(self.job.model).state(
            rows / max(1, self.job.graph.num_nodes)
        )

        def exchange_plan(route: RouteKey) -> ExchangePlan:
            plan = shard.plan(*route)
            return ExchangePlan(plan.send, tuple(map(len, plan.recv)))

        resident = self.context.shared_profile.base_memory + self._partition_bytes(shard, levels)
        return MemoryNeeds(resident, tensors, self.trace, exchange_plan)

    def _partition_bytes(self, shard: Shard, levels: Sequence[LayerLoad]) -> float:
        """Memory of an open partition: features and their aggregate, edges in both directions and of active rows."""
        features = 0
        for kind in shard.node_types:
            x = shard.nodes(kind).x
            features += 0 if x is None else shard.nodes(kind).count * int(x.shape[1])
        edges = max(load.edges for load in levels)
        active_edges = sum(load.edges for load in levels if load.edges < edges)
        itemsize = self.job.dtype.itemsize
        return features * itemsize * FEATURE_BYTES + edges * BYTES_PER_SAR_EDGE + active_edges * BYTES_PER_ACTIVE_EDGE

    def _reasons(self, work: Sequence[float], sent: Sequence[int], rounds: int) -> tuple[str, ...]:
        transfer = max(self.context.shared_profile.transfer_seconds(nbytes, rounds) for nbytes in sent)
        rows = [sum(load.rows for load in level) for level in self.levels]
        share = min(rows) / max(1, max(rows))
        seconds = f"layers {max(work):.2g} s, transfer {transfer:.2g} s"
        return (seconds, f"labelled nodes need {share:.0%} of the rows of the last layer") if share < 1 else (seconds,)


FEATURE_BYTES, BYTES_PER_SAR_EDGE, BYTES_PER_ACTIVE_EDGE = 4.0, 80.0, 48.0
"""Copies of features (mapped, reordered, aggregated, and while aggregating), bytes of an in-edge with its copy for
backward, and of an in-edge of active rows."""

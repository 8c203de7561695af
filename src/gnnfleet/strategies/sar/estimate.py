"""What an epoch of ``sar`` takes: exchanges from a scouted step, rows and edges from the parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gnnfleet.comm.compression import Code
from gnnfleet.comm.halo_exchange import Routes
from gnnfleet.graph.partition.shard import Shard
from gnnfleet.sharded.full_batch.active_row_counts import Levels, Load, find_levels
from gnnfleet.sharded.step_tracer import Sketch, Trip, Way
from gnnfleet.strategies.estimates import Forecast, Outlook
from gnnfleet.strategies.job import PRECISIONS
from gnnfleet.strategies.sar.config import SarConfig
from gnnfleet.strategies.sar.memory_plan import Choice, Needs
from gnnfleet.strategies.step_costs import Weights, sketch_of


def foresee(config: SarConfig, outlook: Outlook) -> list[Forecast]:
    """For the leanest way, with prefetch, with rows kept, with all parts in one group."""
    config.check(outlook.job.task)
    step = _Step(config, outlook)
    return [step.forecast(choice) for choice in _choices(config, outlook.workers, step.sketch)]


def _choices(config: SarConfig, workers: int, sketch: Sketch) -> list[Choice]:
    groups = [1, workers] if config.group == "auto" else [config.group]
    ahead = [0, 1] if config.prefetch == "auto" else [config.prefetch]
    kept = tuple(sorted({trip.layer for trip in sketch.trips if trip.kept}))
    keeps = [(), kept] if config.keep == "auto" else [kept if config.keep else ()]
    found = [Choice(group, depth, keep) for group in groups for depth in ahead for keep in keeps]
    return list(dict.fromkeys(found if workers > 1 else found[-1:]))


class _Step:
    """A step on every part."""

    def __init__(self, config: SarConfig, outlook: Outlook) -> None:
        self.config, self.outlook, self.job = config, outlook, outlook.job
        self.shards: Sequence[Shard] = outlook.parts()
        levels: Levels = outlook.once(f"levels {config.flow}", self._levels)
        self.levels = levels.loads
        self.sketch: Sketch = sketch_of(outlook, config.cache_inputs, levels.many)
        self.code = Code(config.wire)

    def _levels(self) -> Levels:
        job, reach = self.job, self.job.task.reach()
        if not self.config.flow or reach is None or job.model.batch_norm:
            return find_levels(self.shards, None, job.model.num_layers)
        wanted = []
        for shard in self.shards:
            masks = {kind: torch.zeros(shard.nodes(kind).count, dtype=torch.bool) for kind in shard.node_types}
            masks[job.task.target] = reach[shard.nodes(job.task.target).store_ids]
            wanted.append(masks)
        return find_levels(self.shards, wanted, job.model.num_layers)

    def forecast(self, choice: Choice) -> Forecast:
        outlook, ranks = self.outlook, range(len(self.shards))
        pace, workers = outlook.together, outlook.workers
        sent = [sum(self._sent(trip, rank, choice) for trip in self.sketch.trips) for rank in ranks]
        rounds = len(self.sketch.trips) * -(-workers // choice.group) if workers > 1 else 0
        work = [pace.walk([(load.rows, load.edges) for load in self._of(rank)]) for rank in ranks]
        seconds = max(self._seconds(*each, rounds, choice) for each in zip(work, sent, strict=True))
        weights = Weights.of(self.job.model)
        # Gradients, how many have each of them, the count of items, the loss, sums over all nodes, a norm.
        number = PRECISIONS[self.job.precision].itemsize
        clips = bool(self.job.train.clip and weights.rows)
        extra = weights.summed + 8 + number * (1 + clips) + sum(self.sketch.sums)
        several = workers > 1
        return Forecast(
            words=self._words(choice),
            kind="exact",
            workers=workers,
            memory=max(self._needs(rank).bytes(choice) for rank in ranks),
            bytes=sum(sent) + extra * workers * several,
            rounds=rounds + (3 + clips + len(self.sketch.sums)) * several,
            seconds=seconds + pace.step + pace.sums,
            reasons=self._reasons(work, sent, rounds),
        )

    def _words(self, choice: Choice) -> dict[str, Any]:
        given = self.config.model_dump(exclude_defaults=True)
        return {**given, "name": "sar", "group": choice.group, "prefetch": choice.prefetch, "keep": bool(choice.keep)}

    def _of(self, rank: int) -> list[Load]:
        return [level[rank] for level in self.levels]

    def _sent(self, trip: Trip, rank: int, choice: Choice) -> int:
        """Bytes of an exchange that a rank hands over."""
        load = self.levels[trip.layer][rank]
        there = () if trip.again and trip.layer in choice.keep else trip.there
        total = sum(sum(load.give[way]) * self._written(each) for way, each in there)
        return total + sum(sum(load.need[way]) * self._written(each) for way, each in trip.home)

    def _written(self, nbytes: int) -> int:
        """A row as it travels."""
        dtype = PRECISIONS[self.job.precision]
        return sum(width * kind.itemsize for width, kind in self.code.forms(nbytes // dtype.itemsize, dtype))

    def _seconds(self, work: float, sent: float, rounds: int, choice: Choice) -> float:
        pace = self.outlook.together
        travel = pace.travel(sent, rounds)
        if not self.outlook.overlaps or not choice.prefetch:
            return work + travel
        # The first rows of an exchange have nothing but own edges to hide behind.
        return max(work, travel) + min(work, travel) / self.outlook.workers

    def _needs(self, rank: int) -> Needs:
        shard, levels = self.shards[rank], self._of(rank)
        rows = sum(load.rows for load in levels) / len(levels)
        tensors = self.sketch.tensors(int(rows)) + Weights.of(self.job.model).state(
            rows / max(1, self.job.graph.num_nodes)
        )

        def routes(way: Way) -> Routes:
            plan = shard.plan(*way)
            return Routes(plan.give, tuple(map(len, plan.need)))

        return Needs(self.outlook.together.resident + self._held(shard, levels), tensors, self.sketch, routes)

    def _held(self, shard: Shard, levels: Sequence[Load]) -> float:
        """Bytes of a part that is open: features and their aggregate, edges both ways and those of narrower layers."""
        features = 0
        for kind in shard.node_types:
            x = shard.nodes(kind).x
            features += 0 if x is None else shard.nodes(kind).count * int(x.shape[1])
        edges = max(load.edges for load in levels)
        narrow = sum(load.edges for load in levels if load.edges < edges)
        itemsize = PRECISIONS[self.job.precision].itemsize
        return features * itemsize * FEATURES + edges * EDGE + narrow * NARROW

    def _reasons(self, work: Sequence[float], sent: Sequence[int], rounds: int) -> tuple[str, ...]:
        travel = max(self.outlook.together.travel(each, rounds) for each in sent)
        rows = [sum(load.rows for load in level) for level in self.levels]
        share = min(rows) / max(1, max(rows))
        found = [f"layers {max(work):.2g} s, rows on their way {travel:.2g} s"]
        if share < 1:
            found.append(f"labelled nodes need {share:.0%} of the rows of the last layer")
        return tuple(found)


FEATURES, EDGE, NARROW = 4.0, 80.0, 48.0
"""Copies of features (as mapped, in order, with their aggregate, while it is made), bytes of an in-edge with what
backward keeps of it, and of one that a layer has for itself."""

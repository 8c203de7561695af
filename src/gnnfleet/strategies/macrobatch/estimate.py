"""What an epoch of ``macrobatch`` takes, from the blocks that the first batches would draw.

Draws go by store id, so blocks are known without ranks; what of them lies elsewhere, the parts say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gnnfleet.errors import ConfigError
from gnnfleet.graph.sampling.batches import batches, count_batches
from gnnfleet.graph.sampling.sampler import Sampler
from gnnfleet.graph.views.local import LocalView
from gnnfleet.ops.draws import DrawKey
from gnnfleet.strategies.estimates import Forecast, Outlook
from gnnfleet.strategies.job import PRECISIONS
from gnnfleet.strategies.macrobatch.batch_count import Foretaste, choose_together
from gnnfleet.strategies.macrobatch.config import MacrobatchConfig
from gnnfleet.strategies.macrobatch.fetch import items_of
from gnnfleet.strategies.step_costs import (
    Drawn,
    Weights,
    evaluation_bytes,
    fanouts_of,
    feature_bytes,
    keeps_aggregate,
    step_tensors,
)

TASTED = 24
"""Batches drawn for every worker."""

PART_EDGE = 72.0
"""Bytes of an in-edge of a part: as it is mapped, and as it is drawn from."""


def foresee(config: MacrobatchConfig, outlook: Outlook) -> list[Forecast]:
    """Every batch by itself, and as many in one relay as the buffer holds."""
    if outlook.job.model.batch_norm and outlook.workers > 1:
        raise ConfigError("batch norm would count rows that several workers compute more than once: model.norm=layer")
    epoch = _Epoch(config, outlook)
    if config.together != "auto":
        return [epoch.forecast(config.together)]
    return [epoch.forecast(together) for together in dict.fromkeys((1, epoch.most))]


@dataclass(frozen=True)
class _Taste:
    """What the blocks of a worker's first batches are."""

    drawn: Drawn
    far: Sequence[dict[str, Tensor]]  # by batch and node type, store ids of rows elsewhere
    told: float  # bytes of questions and answers while a batch is drawn


class _Epoch:
    def __init__(self, config: MacrobatchConfig, outlook: Outlook) -> None:
        self.config, self.outlook, self.job = config, outlook, outlook.job
        self.given = keeps_aggregate(self.job, config.cache_inputs) and config.split == "nodes"
        items = self.job.task.trained(self.job.seed, 0)
        self.steps = count_batches(len(items), config.batch)
        self.ahead = config.prefetch if config.prefetch != "auto" else int(outlook.overlaps)
        self.owner = self._owners()
        self.tastes = [self._taste(rank, items) for rank in range(outlook.workers)]
        foretastes = [self._foretaste(taste) for taste in self.tastes]
        self.foretastes = foretastes
        fits = [choose_together(each, config.buffer, self.steps, ahead=self.ahead, window=0) for each in foretastes]
        self.most = min(fits)
        largest = max(self.tastes, key=lambda taste: taste.drawn.amount)
        self.tensors = step_tensors(self.job, largest.drawn.views[0], given=self.given)

    def _owners(self) -> dict[str, Tensor]:
        """[N] the part of every node, by type."""
        found = {kind: torch.zeros(table.count, dtype=torch.int16) for kind, table in self.job.graph.nodes.items()}
        for part, shard in enumerate(self.outlook.parts()):
            for kind in shard.node_types:
                found[kind][shard.nodes(kind).store_ids] = part
        return found

    def _taste(self, rank: int, items: Tensor) -> _Taste:
        job, config = self.job, self.config
        sampler = Sampler(job.graph, fanouts_of(config.fanouts, job.model.num_layers), replace=config.replace)
        mine = items_of(job.task, items, rank, lambda kind, ids: self.owner[kind][ids])
        views: list[Sequence[LocalView]] = []
        far: list[dict[str, Tensor]] = []
        told = 0.0
        for number, every in batches(items, config.batch, seed=job.seed, epoch=0):
            if number >= TASTED:
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
        return _Taste(Drawn(views), far, told / max(1, len(far)))

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

    def _foretaste(self, taste: _Taste) -> Foretaste:
        reads = (([far[kind] for far in taste.far], self._row(kind)) for kind in self.owner)
        return Foretaste.reading(reads, len(taste.far), taste.drawn.structure)

    def forecast(self, together: int) -> Forecast:
        outlook, workers, several = self.outlook, self.outlook.workers, self.outlook.workers > 1
        pace, weights = outlook.together, Weights.of(self.job.model)
        relays = -(-self.steps // together)
        fetched = [each.rows_of(together) * relays * (1 + 8 / self._widest()) for each in self.foretastes]
        told = [taste.told * self.steps for taste in self.tastes]
        sums = self.steps * (weights.summed + PRECISIONS[self.job.precision].itemsize)
        hops = self.job.model.num_layers - self.given
        rounds = (relays * (2 * hops + 2) + 2 * self.steps) * several
        work = max(pace.sampled(taste.drawn.loads) for taste in self.tastes)
        making = max(pace.draw * taste.drawn.amount for taste in self.tastes)
        travel = pace.travel(max(map(sum, zip(fetched, told, strict=True))), relays * (2 * hops + 2))
        shown = self.steps * making + travel
        layers = self.steps * (work + pace.sums)
        return Forecast(
            words={**self.config.model_dump(exclude_defaults=True), "name": "macrobatch", "together": together},
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
        job, pace, weights = self.job, self.outlook.together, Weights.of(self.job.model)
        shard = self.outlook.parts()[rank]
        rows = sum(shard.nodes(kind).count for kind in shard.node_types)
        share = rows / max(1, job.graph.num_nodes)
        itemsize = PRECISIONS[job.precision].itemsize
        features = feature_bytes(job.graph) + self.given * 2 * feature_bytes(job.graph, itemsize)
        held = share * (features + job.graph.num_edges * PART_EDGE)
        relays = self.foretastes[rank].bytes(together, ahead=self.ahead, window=0)
        most = max(self.tensors + relays, evaluation_bytes(job, rows) + share * feature_bytes(job.graph, itemsize))
        return pace.resident + held + most + weights.state(share)

    def _reasons(self, together: int, making: float, work: float, travel: float) -> tuple[str, ...]:
        duplication = max(each.duplication(together) for each in self.foretastes)
        found = [
            f"{self.steps} steps: blocks {making:.2g} s, layers {work:.2g} s each; rows on their way {travel:.2g} s"
        ]
        if together > 1:
            found.append(f"a row comes once for {duplication:.1f} uses")
        return tuple(found)

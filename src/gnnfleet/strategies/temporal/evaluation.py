"""Evaluation by TGB's rule: events are ranked among destinations in batches, then update the memory.

A batch does not see its events. Ties share the middle rank. A batch may end between events of the same time, as in TGB:
memories of the next batch then include events of the same time, neighbours never do.

n events of a batch, N destinations, K negatives.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

import torch
from torch import Tensor

from gnnfleet.comm.collectives import all_gather_rows
from gnnfleet.comm.world import World
from gnnfleet.graph.events.event_stream import AllDestinations, EventStream
from gnnfleet.nn.link import link_loss
from gnnfleet.nn.metrics import MetricState
from gnnfleet.nn.ranking import average_precision, edgebank_ranks, mrr, ranks_in_own_list, time_window
from gnnfleet.nn.temporal.decoders import ClassDecoder
from gnnfleet.nn.temporal.model import TemporalModel
from gnnfleet.ops.draws import DrawKey
from gnnfleet.strategies.job import autocast
from gnnfleet.strategies.temporal.batch_step import EventBatch, NeighborhoodBuilder, embed, replay, update_memory
from gnnfleet.strategies.temporal.memory import NodeMemory
from gnnfleet.tasks.event import EventTask, link_scores

QUERIES_AT_ONCE, PAIRS_AT_ONCE = 1 << 15, 1 << 17
"""Queries built at a time, and pairs scored at a time if each node is queried once per batch. They limit memory and do
not change results."""

Range = tuple[int, int]
"""Numbers of the first event and of the one after the last."""


@dataclass(frozen=True, eq=False)
class EventEvaluator:
    """Evaluates a stream in order with fixed weights: ``batch`` events are scored, then replayed.

    Each rank scores a share of every batch; all ranks replay the whole batch.
    """

    model: TemporalModel
    task: EventTask
    builder: NeighborhoodBuilder
    batch: int
    negatives: int
    precision: str
    world: World = field(default_factory=World)

    def measure(self, memory: NodeMemory, static: Tensor | None, split: str, *, full: bool) -> dict[str, float]:
        """Collective. {"loss", "count", metrics} of a split; ``memory`` advances from its start to its end.

        ``full``: rank among all destinations, else among sampled ones, the same in every evaluation.
        """
        part = self.task.parts[split]
        if self.task.head is not None:
            return self._classes(memory, static, part)
        rows, rank, size = [], self.world.rank, self.world.size
        for low, high in self._batches(part):
            share = low + (high - low) * rank // size, low + (high - low) * (rank + 1) // size
            rows.append(self._ranked(memory, static, share, (low, high), full=full))
            self._replay_batch(memory, low, high)
        table = torch.cat(all_gather_rows(self.world, torch.cat(rows)))
        _, positive, negative, ranks = table[torch.argsort(table[:, 0])].t()
        metrics = {"loss": float(link_loss(positive, negative[:, None])) / len(part), "count": float(len(part))}
        metrics |= {"mrr": mrr(ranks), "ap": average_precision(positive, negative)}
        return metrics | self._edgebank(split, full=full)

    def _ranked(
        self, memory: NodeMemory, static: Tensor | None, share: Range, global_batch: Range, *, full: bool
    ) -> Tensor:
        """[n, 4] float64: number, logit, logit of one negative, and rank of each event."""
        low, high = share
        if low == high:
            return torch.empty(0, 4, dtype=torch.float64)
        numbers = torch.arange(low, high)
        rule = self.task.negatives
        sampled = rule.for_evaluation(numbers, self.task.stream.dst[low:high], count=self._count)
        candidates = self._all.destinations if full else sampled
        positive, scores = self._scores(memory, static, share, global_batch, candidates)
        ranks = ranks_in_own_list(positive, scores, self._all.mask(low, high) if full else None)
        column = rule.single_column(numbers, self._count)[:, None]
        if full:
            column = torch.searchsorted(self._all.destinations, sampled.gather(1, column))
        negative = scores.gather(1, column)[:, 0]
        return torch.stack([numbers.double(), positive.double(), negative.double(), ranks.double()], 1)

    def replay(self, memory: NodeMemory, bounds: Sequence[int]) -> None:
        """Replay the batches between ``bounds`` without scoring them."""
        for low, high in itertools.pairwise(bounds):
            self._replay_batch(memory, low, high)

    def _batches(self, part: EventStream) -> Iterator[Range]:
        bounds = part.batches(self.batch, keep_ties=False)
        for low, high in itertools.pairwise(bounds):
            yield part.first + low, part.first + high

    def _replay_batch(self, memory: NodeMemory, low: int, high: int) -> None:
        with autocast(self.precision):
            replay(self.model, self.task.stream, memory, low, high)

    def _scores(
        self, memory: NodeMemory, static: Tensor | None, share: Range, global_batch: Range, candidates: Tensor
    ) -> tuple[Tensor, Tensor]:
        """([n], [n, K]) logits of events and of candidate destinations: [K] for all events, or [n, K]."""
        low, high = share
        rows_per_query = (self.builder.neighbours + 1) ** max(self.builder.num_hops - 1, 0)
        limit = PAIRS_AT_ONCE if self.builder.queries == "batch" else QUERIES_AT_ONCE // rows_per_query
        size = max(1, limit // (candidates.shape[-1] + 2))
        scores = []
        for first in range(low, high, size):
            last = min(first + size, high)
            is_shared = candidates.dim() == 1
            chunk = candidates.expand(last - first, -1) if is_shared else candidates[first - low : last - low]
            batch, z = self._embedded(memory, static, (first, last), global_batch, chunk)
            with torch.no_grad(), autocast(self.precision):
                scores.append(link_scores(self.model, z, batch.count, batch.pairs))
        positive, negative = zip(*scores, strict=True)
        return torch.cat(positive), torch.cat(negative)

    def _embedded(
        self, memory: NodeMemory, static: Tensor | None, share: Range, global_batch: Range, candidates: Tensor
    ) -> tuple[EventBatch, Tensor]:
        self.model.eval()
        batch = self.builder.batch(*share, candidates, global_batch=global_batch)
        with torch.no_grad(), autocast(self.precision):
            updated, _ = update_memory(self.model, self.task.stream, batch, memory.read(batch.block.nodes))
            return batch, embed(self.model, batch, updated, static, DrawKey())

    def probabilities(self, memory: NodeMemory, static: Tensor | None, low: int, high: int) -> Tensor:
        """[n] probabilities of events, or [n, C] of their classes; ``memory`` advances past them."""
        if self.task.head is None:
            no_candidates = torch.empty(high - low, 0, dtype=torch.int64)
            logits = self._scores(memory, static, (low, high), (low, high), no_candidates)[0]
        else:
            logits = self._logits(memory, static, low, high)
        softmax = self.task.head is not None and not self.task.head.multilabel
        self._replay_batch(memory, low, high)
        return torch.softmax(logits, 1) if softmax else torch.sigmoid(logits)

    def _logits(self, memory: NodeMemory, static: Tensor | None, low: int, high: int) -> Tensor:
        no_candidates = torch.empty(high - low, 0, dtype=torch.int64)
        batch, z = self._embedded(memory, static, (low, high), (low, high), no_candidates)
        assert isinstance(self.model.decoder, ClassDecoder)
        with torch.no_grad(), autocast(self.precision):
            logits: Tensor = self.model.decoder(z[: batch.count], z[batch.count :])
        return logits

    def _classes(self, memory: NodeMemory, static: Tensor | None, part: EventStream) -> dict[str, float]:
        head, y = self.task.head, self.task.stream.y
        assert head is not None and y is not None
        state: MetricState | None = None
        loss, count = 0.0, 0.0
        for low, high in self._batches(part):
            logits, labels = self._logits(memory, static, low, high), y[low:high]
            batch_state = head.metric(logits, labels)
            state = batch_state if state is None else state + batch_state
            loss += float(head.loss(logits, labels))
            count += float(head.is_labelled(labels).sum())
            self._replay_batch(memory, low, high)
        metrics = dict.fromkeys(head.metrics, float("nan")) if state is None else head.compute(state)
        return {"loss": loss / max(count, 1.0), "count": count, **metrics}

    def _edgebank(self, split: str, *, full: bool) -> dict[str, float]:
        """MRR of the EdgeBank baseline by the same rule."""
        key = split, full
        if key not in self._edgebank_cache:
            part, rule = self.task.parts[split], self._all if full else self.task.negatives
            windows = {"edgebank": None, "edgebank_window": time_window(self.task.parts["train"])}
            rank = partial(edgebank_ranks, self.task.stream, part, negatives=rule, batch=self.batch, count=self._count)
            self._edgebank_cache[key] = {name: mrr(rank(window=window)) for name, window in windows.items()}
        return self._edgebank_cache[key]

    @property
    def _count(self) -> int:
        """Number of sampled negatives of an event; at most the number of other destinations."""
        return min(self.negatives, len(self.task.negatives.destinations) - 1)

    @cached_property
    def _edgebank_cache(self) -> dict[tuple[str, bool], dict[str, float]]:
        return {}

    @cached_property
    def _all(self) -> AllDestinations:
        return AllDestinations(self.task.stream)

"""Measured as TGB does: an event is ranked among other destinations, in batches that do not see themselves, and the
state moves on with what truly happened. Ties share the middle of their places. A batch may end within a moment, as
TGB's do: memories then know of events of the same time, which neighbours never do.

n events of a batch, N destinations, K negatives.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from gnnfleet.comm.collectives import all_gather_rows
from gnnfleet.comm.world import World
from gnnfleet.graph.events.event_stream import EventStream
from gnnfleet.graph.events.negatives import AllDestinations
from gnnfleet.nn.edgebank import edgebank_ranks, time_window
from gnnfleet.nn.heads import MetricState
from gnnfleet.nn.link import link_loss
from gnnfleet.nn.ranking import average_precision, mrr, ranks_in_own_list
from gnnfleet.nn.temporal.decoders import ClassDecoder
from gnnfleet.nn.temporal.model import TemporalModel
from gnnfleet.ops.draws import DrawKey
from gnnfleet.strategies.job import autocast
from gnnfleet.strategies.temporal.batch_step import EventBatch, NeighborhoodBuilder, embed, replay, update_memory
from gnnfleet.strategies.temporal.memory import NodeMemory
from gnnfleet.tasks.event import EventTask, link_scores

QUERIES_AT_ONCE, PAIRS_AT_ONCE = 1 << 15, 1 << 17
"""Nodes at times that are looked at together, pairs that are scored together where each node is looked at once; they
decide the memory of an evaluation, not its result."""


@dataclass(frozen=True, eq=False)
class EventEvaluator:
    """Walks a stream with the present weights. ``batch`` events are scored, then become known.

    Of several ranks each scores a piece of every batch; all of them move the state past all of it.
    """

    model: TemporalModel
    task: EventTask
    builder: NeighborhoodBuilder
    batch: int
    negatives: int
    precision: str
    world: World = field(default_factory=World)

    def measure(self, memory: NodeMemory, static: Tensor | None, split: str, *, full: bool) -> dict[str, float]:
        """{"loss", "count", metrics}; ``memory`` stands where the split begins and ends where it ends.

        ``full``: among all destinations, else among a few drawn ones, the same in every evaluation.
        """
        part = self.task.parts[split]
        if self.task.head is not None:
            return self._classes(memory, static, part)
        rows = []
        for low, high, whole in self._pieces(part):
            rows.append(self._ranked(memory, static, (low, high), whole, full=full))
            self._replay_batch(memory, *whole)
        found = torch.cat(all_gather_rows(self.world, torch.cat(rows)))
        _, positive, negative, ranks = found[torch.argsort(found[:, 0])].t()
        measured = {"loss": float(link_loss(positive, negative[:, None])) / len(part), "count": float(len(part))}
        measured |= {"mrr": mrr(ranks), "ap": average_precision(positive, negative)}
        return measured | self._edgebank(split, full=full)

    def _ranked(
        self, memory: NodeMemory, static: Tensor | None, piece: tuple[int, int], whole: tuple[int, int], *, full: bool
    ) -> Tensor:
        """[n, 4] float64: number, logit, that of one negative, and rank of each event."""
        low, high = piece
        if low == high:
            return torch.empty(0, 4, dtype=torch.float64)
        numbers = torch.arange(low, high)
        rule = self.task.negatives
        drawn = rule.for_evaluation(numbers, self.task.stream.dst[low:high], count=self._count)
        others = self._all.destinations if full else drawn
        positive, among = self._scores(memory, static, piece, whole, others)
        ranks = ranks_in_own_list(positive, among, self._all.mask(low, high) if full else None)
        place = rule.one_of(numbers, self._count)[:, None]
        if full:
            place = torch.searchsorted(self._all.destinations, drawn.gather(1, place))
        one = among.gather(1, place)[:, 0]
        return torch.stack([numbers.double(), positive.double(), one.double(), ranks.double()], 1)

    def replay(self, memory: NodeMemory, bounds: Sequence[int]) -> None:
        """Move the state past batches of events without scoring them."""
        for low, high in itertools.pairwise(bounds):
            self._replay_batch(memory, low, high)

    def _batches(self, part: EventStream) -> Iterator[tuple[int, int]]:
        bounds = part.batches(self.batch, keep_ties=False)
        for low, high in itertools.pairwise(bounds):
            yield part.first + low, part.first + high

    def _pieces(self, part: EventStream) -> Iterator[tuple[int, int, tuple[int, int]]]:
        """This rank's events of every batch, and the batch."""
        rank, size = self.world.rank, self.world.size
        for low, high in self._batches(part):
            yield low + (high - low) * rank // size, low + (high - low) * (rank + 1) // size, (low, high)

    def _replay_batch(self, memory: NodeMemory, low: int, high: int) -> None:
        with autocast(self.precision):
            replay(self.model, self.task.stream, memory, low, high)

    def _scores(
        self, memory: NodeMemory, static: Tensor | None, piece: tuple[int, int], whole: tuple[int, int], others: Tensor
    ) -> tuple[Tensor, Tensor]:
        """([n], [n, K]) logits of events and of others in place of their destinations: [K] for all, or [n, K]."""
        low, high = piece
        near = (self.builder.neighbours + 1) ** max(self.builder.num_hops - 1, 0)
        most = PAIRS_AT_ONCE if self.builder.queries == "batch" else QUERIES_AT_ONCE // near
        size = max(1, most // (others.shape[-1] + 2))
        found = []
        for first in range(low, high, size):
            last = min(first + size, high)
            each = others[first - low : last - low] if others.dim() == 2 else others.expand(last - first, -1)
            found.append(self._piece(memory, static, first, last, each, whole))
        positive, negative = zip(*found, strict=True)
        return torch.cat(positive), torch.cat(negative)

    def _piece(
        self, memory: NodeMemory, static: Tensor | None, low: int, high: int, others: Tensor, whole: tuple[int, int]
    ) -> tuple[Tensor, Tensor]:
        batch, z = self._embedded(memory, static, low, high, others, whole)
        with torch.no_grad(), autocast(self.precision):
            return link_scores(self.model, z, batch.count, batch.pairs)

    def _embedded(
        self, memory: NodeMemory, static: Tensor | None, low: int, high: int, others: Tensor, whole: tuple[int, int]
    ) -> tuple[EventBatch, Tensor]:
        self.model.eval()
        batch = self.builder.batch(low, high, others, whole=whole)
        with torch.no_grad(), autocast(self.precision):
            fresh, _ = update_memory(self.model, self.task.stream, batch, memory.read(batch.block.nodes))
            return batch, embed(self.model, batch, fresh, static, DrawKey())

    def probabilities(self, memory: NodeMemory, static: Tensor | None, low: int, high: int) -> Tensor:
        """[n], or [n, C] of classes, of events that are then known; ``memory`` stands before them."""
        nobody = torch.empty(high - low, 0, dtype=torch.int64)
        if self.task.head is None:
            found = torch.sigmoid(self._scores(memory, static, (low, high), (low, high), nobody)[0])
        else:
            logits = self._logits(memory, static, low, high)
            found = torch.sigmoid(logits) if self.task.head.multilabel else torch.softmax(logits, 1)
        self._replay_batch(memory, low, high)
        return found

    def _logits(self, memory: NodeMemory, static: Tensor | None, low: int, high: int) -> Tensor:
        nobody = torch.empty(high - low, 0, dtype=torch.int64)
        batch, z = self._embedded(memory, static, low, high, nobody, (low, high))
        assert isinstance(self.model.decoder, ClassDecoder)
        with torch.no_grad(), autocast(self.precision):
            logits: Tensor = self.model.decoder(z[: batch.count], z[batch.count :])
        return logits

    def _classes(self, memory: NodeMemory, static: Tensor | None, part: EventStream) -> dict[str, float]:
        head, y = self.task.head, self.task.stream.y
        assert head is not None and y is not None
        tally: MetricState | None = None
        loss, count = 0.0, 0.0
        for low, high in self._batches(part):
            logits = self._logits(memory, static, low, high)
            found = head.metric(logits, y[low:high])
            tally = found if tally is None else tally + found
            loss, count = (
                loss + float(head.loss(logits, y[low:high])),
                count + float(head.is_labelled(y[low:high]).sum()),
            )
            self._replay_batch(memory, low, high)
        value = float("nan") if tally is None else head.compute(tally)
        return {"loss": loss / max(count, 1.0), "count": count, head.name: value}

    def _edgebank(self, split: str, *, full: bool) -> dict[str, float]:
        """What the baseline without weights comes to, by the same rule."""
        key = split, full
        if key not in self._known:
            window = time_window(self.task.parts["train"])
            rule = self._all if full else self.task.negatives
            part, stream = self.task.parts[split], self.task.stream
            self._known[key] = {
                name: mrr(
                    edgebank_ranks(stream, part, window=width, negatives=rule, batch=self.batch, count=self._count)
                )
                for name, width in (("edgebank", None), ("edgebank_window", window))
            }
        return self._known[key]

    @property
    def _count(self) -> int:
        """Negatives of an event, where there are as many."""
        return min(self.negatives, len(self.task.negatives.destinations) - 1)

    @cached_property
    def _known(self) -> dict[tuple[str, bool], dict[str, float]]:
        return {}

    @cached_property
    def _all(self) -> AllDestinations:
        return AllDestinations(self.task.stream)

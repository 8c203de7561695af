"""Link prediction as a task: items are numbers of target edges, a step draws their negatives, ranks are the metric.

Everything drawn goes by the store edge id of the positive. L links, K negatives for each, D columns.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from gnnfleet.comm.collectives import all_gather_counts, all_gather_rows, sum_over_ranks
from gnnfleet.comm.world import World
from gnnfleet.errors import ConfigError
from gnnfleet.graph.edge_keys import EdgeKeys, EdgeMask
from gnnfleet.graph.graph import EdgeType
from gnnfleet.graph.links import HELD_OUT, LinkData, Links
from gnnfleet.graph.sampling.negatives import EVALUATION, LinkNegativeSampler, NegativeEnds
from gnnfleet.graph.views.local import LocalView
from gnnfleet.nn.link import Decoder, link_loss, softmax_loss
from gnnfleet.nn.link_config import LinkConfig, disjoint_share
from gnnfleet.nn.ranking import (
    KnownTriples,
    filtered_ranks,
    hits_at_k,
    mrr,
    ogb_hits_at_k,
    ranks_in_own_list,
    ranks_in_shared_list,
)
from gnnfleet.ops.draws import DrawKey, Purpose
from gnnfleet.ops.dropout import dropout
from gnnfleet.tasks.base import Batch, RowLookup

# Pairs scored at a time in evaluation, and scores of all candidates in memory at a time.
PAIRS_AT_ONCE, SCORES_AT_ONCE = 1 << 16, 1 << 25
# Model layers are numbered below this; the decoder's dropout has a layer of its own, negatives places of their own.
_DECODER_LAYER, _NEGATIVE_PLACE = 255, 128


@dataclass(frozen=True, eq=False)
class LinkBatch(Batch):
    """Target edges with their negatives; ``shared`` [K] nodes stand in for ``negatives`` where all links share them."""

    links: Links
    negatives: Links | None
    shared: Tensor | None


@dataclass(eq=False)
class _HeldOut:
    """What ``disjoint`` holds out in one epoch; the last view asked about and what is left of it."""

    items: Tensor
    edges: EdgeMask
    view: LocalView | None = None
    cut: LocalView | None = None


@dataclass(frozen=True, eq=False)
class LinkTask:
    """Edges of some types; ``decoder`` belongs to the model that is trained."""

    data: LinkData
    config: LinkConfig
    decoder: Decoder
    seed: int = 0
    metric_name: str = "auto"  # the metric: mrr, hits@K, or auto
    held_out_share: dict[tuple[int, int], _HeldOut] = field(
        default_factory=dict, repr=False
    )  # of the present (seed, epoch)
    kinds: tuple[EdgeType, ...] = ()  # those that are predicted, where the links at hand may not have all of them
    world: World = field(default_factory=World)  # of several ranks each has as many links as another, in order

    def __post_init__(self) -> None:
        if self.metric_name not in ("auto", "mrr") and not re.fullmatch(r"hits@[1-9]\d*", self.metric_name):
            raise ConfigError(f"links are measured by mrr or hits@K, as hits@20; found train.metric={self.metric_name}")
        if self.config.ranking == "given" and not self.data.negatives:
            raise ConfigError("link.ranking=given needs negatives with the data, found none: use sampled or filtered")
        if self._mode == "shared" and len({end for kind in self._kinds for end in (kind.src, kind.dst)}) > 1:
            raise ConfigError("link.negative_mode=shared needs one node type: use either")

    @property
    def metric(self) -> str:
        if self.metric_name != "auto":
            return self.metric_name
        return "hits@20" if self.ranking == "given" and not self._per_link("test") else "mrr"

    @property
    def target(self) -> str:
        return self._kinds[0].dst

    @property
    def ranking(self) -> str:
        """given, sampled or filtered."""
        if self.config.ranking != "auto":
            return self.config.ranking
        if self.data.negatives:
            return "given"
        return "filtered" if len(self._kinds) > 1 else "sampled"

    @property
    def has_shared_embeddings(self) -> float | None:
        """What val comes to where every link scores as its negatives do; None where the metric does not tell."""
        if self.metric != "mrr" or self.ranking == "filtered":
            return None
        count = self.config.eval_negatives
        if self.ranking == "given" and "val" in self.data.negatives:
            count = self._per_link("val") or len(self.data.negatives["val"])
        return 1 / (1 + count / 2)

    def items(self, split: str) -> Tensor:
        return torch.arange(len(self.data.splits[split]))[self._mine(len(self.data.splits[split]))]

    def _mine(self, count: int) -> slice:
        """This rank's share of a list."""
        rank, size = self.world.rank, self.world.size
        return slice(rank * count // size, (rank + 1) * count // size)

    @property
    def reads_only_local_rows(self) -> bool:
        return False

    def shard(self, world: World, own: Mapping[str, Tensor]) -> LinkTask:
        return replace(self, world=world)

    def reachable_mask(self) -> Tensor | None:
        return None

    def train_items(self, seed: int, epoch: int) -> Tensor:
        if not disjoint_share(self.config.exclude):
            return self.items("train")
        items = self._held(seed, epoch).items
        return items[self._mine(len(items))]

    def _held(self, seed: int, epoch: int) -> _HeldOut:
        if (seed, epoch) not in self.held_out_share:
            draws = DrawKey(seed, epoch).draws(Purpose.HOLD_OUT)
            links = self.data.splits["train"]
            chosen = draws.uniforms_at(links.draw_ids)[:, 0] < disjoint_share(self.config.exclude)
            items = chosen.nonzero()[:, 0]
            self.held_out_share.clear()
            self.held_out_share[seed, epoch] = _HeldOut(items, EdgeMask.of(self._keys, links.select(items)))
        return self.held_out_share[seed, epoch]

    def batch(self, items: Tensor, key: DrawKey, global_items: Tensor | None = None) -> LinkBatch:
        links = self.data.splits["train"].select(items)
        global_items = items if global_items is None else global_items
        if self._mode == "shared":
            count = self.data.graph.nodes[self.target].count
            shared = self._draws.shared_nodes(key, self.config.negatives, count)
            return LinkBatch(items, self._seeds([links], shared), key, global_items, links, None, shared)
        negatives = self._draws.corrupt(links, key, count=self.config.negatives, ends=self._ends)
        return LinkBatch(items, self._seeds([links, negatives], None), key, global_items, links, negatives, None)

    def owners_of_items(self, items: Tensor) -> Iterator[tuple[str, Tensor | slice, Tensor]]:
        links = self.data.splits["train"].select(items)
        for kind, which in self._by_type(links.relation, "dst"):
            yield kind, which, links.dst[which]

    @property
    def masks_edges(self) -> bool:
        return self.config.exclude != "none"

    def mask_edges(self, view: LocalView, batch: Batch) -> LocalView:
        assert isinstance(batch, LinkBatch)
        if self.config.exclude == "none":
            return view
        if self.config.exclude == "batch":
            links = (
                batch.links
                if batch.global_items is batch.items
                else self.data.splits["train"].select(batch.global_items)
            )
            return EdgeMask.of(self._keys, links).apply(view)
        held = self._held(batch.key.seed, batch.key.epoch)
        if held.view is not view:
            held.view, held.cut = view, held.edges.apply(view)
        assert held.cut is not None
        return held.cut

    def loss(self, lookup: RowLookup, batch: Batch) -> Tensor:
        assert isinstance(batch, LinkBatch)
        src, dst = self._rows(lookup, batch.links)
        relation = batch.links.relation
        positive = self._score(src, dst, batch.links, key=batch.key)
        zero = positive.new_zeros(())
        if batch.shared is not None:
            table = lookup(self.target, batch.shared)
            loss = sum(
                (self._loss(positive, self.decoder.score_all(rows, relation, table)) for rows in (src, dst)), zero
            )
        else:
            assert batch.negatives is not None
            ends = self._rows(lookup, batch.negatives)
            negative = self._score(*ends, batch.negatives, key=batch.key, negative=True)
            loss = self._loss(positive, negative.view(len(positive), self.config.negatives))
        if self.config.l2 and len(batch.items):  # a worker may have none of a batch
            loss = loss + self.config.l2 * len(batch.items) * self.decoder.penalty(torch.cat([src, dst]))
        return loss

    def _loss(self, positive: Tensor, negative: Tensor) -> Tensor:
        return (softmax_loss if self.config.loss == "softmax" else link_loss)(positive, negative)

    def measure(self, lookup: RowLookup, split: str) -> dict[str, float]:
        every = self.data.splits[split]
        mine = self._mine(len(every))
        links = every.select(mine)
        positive = self.score_links(lookup, links)
        if self.ranking == "filtered":
            negative, ranks = self.score_links(lookup, self._drawn(links, 1)), self._filtered(lookup, links)
            values = self._values(self._every(ranks))
        elif self.ranking == "given" and split in self.data.negatives:
            per_link, given = self._per_link(split), self.data.negatives[split]
            own = slice(mine.start * per_link, mine.stop * per_link) if per_link else self._mine(len(given))
            negative = self.score_links(lookup, given.select(own))
            values = self._against_given(positive, negative, per_link=per_link)
        else:
            negative = self.score_links(lookup, self._drawn(links, self.config.eval_negatives))
            values = self._values(
                self._every(ranks_in_own_list(positive, negative.view(len(links), self.config.eval_negatives)))
            )
        return {"loss": self._mean_loss(positive, negative), "count": float(len(every)), **values}

    def _mean_loss(self, positive: Tensor, negative: Tensor) -> float:
        empty = torch.empty(0)
        own = [float(link_loss(positive, empty)), len(positive), float(link_loss(empty, negative)), len(negative)]
        good, goods, bad, bads = sum_over_ranks(self.world, torch.tensor(own, dtype=torch.float64)).tolist()
        return float(good / max(goods, 1) + bad / max(bads, 1))

    def _every(self, values: Tensor) -> Tensor:
        """The values of all ranks, in order."""
        return torch.cat(all_gather_rows(self.world, values))

    def score_links(self, take: RowLookup, links: Links) -> Tensor:
        """[L] logits of exact rows, in as many pieces on all ranks."""
        most = max(all_gather_counts(self.world, len(links)))
        parts = [links.select(slice(low, low + PAIRS_AT_ONCE)) for low in range(0, most, PAIRS_AT_ONCE)]
        found = [self.decoder(*self._rows(take, part), part.relation) for part in parts]
        return torch.cat(found) if found else torch.empty(0)

    @cached_property
    def _kinds(self) -> list[EdgeType]:
        """The edge types that are predicted."""
        if self.kinds:
            return list(self.kinds)
        links = Links.concat(list(self.data.splits.values()))
        numbers = torch.unique(links.relation).tolist()
        return [self.data.edge_types[number] for number in numbers]

    @cached_property
    def _keys(self) -> EdgeKeys:
        return EdgeKeys.of(self.data.graph)

    @cached_property
    def _draws(self) -> LinkNegativeSampler:
        return LinkNegativeSampler.of(self.data.graph, avoid=self.config.avoid_edges)

    @cached_property
    def _measuring(self) -> LinkNegativeSampler:
        """Knows held-out links as well; training must not."""
        return self._draws.avoiding(Links.concat([self.data.splits[name] for name in HELD_OUT]))

    @property
    def _mode(self) -> str:
        mode = self.config.negative_mode
        return mode if mode != "auto" else "either" if len(self._kinds) > 1 else "dst"

    @property
    def _ends(self) -> NegativeEnds:
        mode = self._mode
        assert mode in ("dst", "src", "either", "pair")
        return mode  # type: ignore[return-value]

    def _seeds(self, parts: list[Links], shared: Tensor | None) -> dict[str, Tensor]:
        wanted: dict[str, list[Tensor]] = {kind: [] for kind in self.data.graph.nodes}
        for links in parts:
            for end, ids in (("src", links.src), ("dst", links.dst)):
                for name, rows in self._by_type(links.relation, end):
                    wanted[name].append(ids[rows])
        if shared is not None:
            wanted[self.target].append(shared)
        found = {kind: torch.unique(torch.cat(ids)) for kind, ids in wanted.items() if ids}
        return {kind: ids for kind, ids in found.items() if len(ids)}

    def _by_type(self, relation: Tensor, end: str) -> Iterator[tuple[str, Tensor | slice]]:
        """(node type of an end, the links that have it there)."""
        kinds = list(dict.fromkeys(getattr(kind, end) for kind in self._kinds))
        if len(kinds) == 1:
            yield kinds[0], slice(None)
            return
        names = [getattr(kind, end) for kind in self.data.edge_types]
        code = torch.tensor([kinds.index(name) if name in kinds else -1 for name in names])[relation]
        for number, name in enumerate(kinds):  # also those without links here: ranks ask together
            yield name, (code == number).nonzero()[:, 0]

    def _rows(self, take: RowLookup, links: Links) -> tuple[Tensor, Tensor]:
        """([L, D], [L, D]) rows of the sources and destinations."""
        src, dst = (
            self._collect(take, links.relation, ids, end) for end, ids in (("src", links.src), ("dst", links.dst))
        )
        return src, dst

    def _collect(self, take: RowLookup, relation: Tensor, ids: Tensor, end: str) -> Tensor:
        parts = [(rows, take(name, ids[rows])) for name, rows in self._by_type(relation, end)]
        if len(parts) == 1:
            return parts[0][1]
        place = torch.cat([rows for rows, _ in parts if isinstance(rows, Tensor)])
        return torch.cat([found for _, found in parts])[torch.argsort(place)]

    def _score(self, src: Tensor, dst: Tensor, links: Links, *, key: DrawKey, negative: bool = False) -> Tensor:
        p = self.config.dropout
        count = self.config.negatives if negative else 1
        numbers = links.draw_ids * count + torch.arange(len(links)) % count

        def drop(x: Tensor, place: int) -> Tensor:
            place += _NEGATIVE_PLACE if negative else 0
            return dropout(x, p, ids=numbers, draws=key.draws(Purpose.DROPOUT, _DECODER_LAYER, place))

        logits: Tensor = self.decoder(src, dst, links.relation, drop=drop if p else None)
        return logits

    def _drawn(self, links: Links, count: int) -> Links:
        """Negatives of held-out links: a function of the run's seed, so every evaluation meets the same."""
        ends: NegativeEnds = "either" if len(self._kinds) > 1 else "dst"
        return self._measuring.corrupt(links, DrawKey(self.seed), count=count, ends=ends, layer=EVALUATION)

    def _per_link(self, split: str) -> int:
        """Given negatives of each link, in a row; 0 where one list is for all."""
        given, links = self.data.negatives.get(split), self.data.splits[split]
        if given is None or not len(links) or len(given) % len(links) or len(given) == len(links):
            return 0
        return len(given) // len(links)

    def _against_given(self, positive: Tensor, negative: Tensor, *, per_link: int) -> dict[str, float]:
        if per_link:
            return self._values(self._every(ranks_in_own_list(positive, negative.view(-1, per_link))))
        positive, negative = self._every(positive), self._every(negative)
        values = self._values(ranks_in_shared_list(positive, negative))
        return {k: ogb_hits_at_k(positive, negative, int(k[5:])) if k != "mrr" else v for k, v in values.items()}

    def _values(self, ranks: Tensor) -> dict[str, float]:
        names = dict.fromkeys(["mrr", "hits@1", "hits@10", self.metric])
        return {name: mrr(ranks) if name == "mrr" else hits_at_k(ranks, int(name[5:])) for name in names}

    def _filtered(self, take: RowLookup, links: Links) -> Tensor:
        """[2 L] ranks of the destinations for (source, type, ?) and of the sources for (?, type, destination)."""
        every, parts = Links.concat(list(self.data.splits.values())), []
        turned = every.select(self.data.symmetric[every.relation])
        true = Links.concat([every, Links(turned.relation, turned.dst, turned.src, turned.ids)])
        for asks, finds in (("src", "dst"), ("dst", "src")):
            number = true.relation * self._keys.width + getattr(true, asks)
            known = KnownTriples.of(number, getattr(true, finds))
            for name, chosen in self._by_type(links.relation, finds):
                table = take(name, torch.arange(self.data.graph.nodes[name].count))
                parts.append(self._rank(take, links.select(chosen), (asks, finds), table=table, known=known))
        return torch.cat(parts)

    def _rank(
        self, take: RowLookup, links: Links, ends: tuple[str, str], *, table: Tensor, known: KnownTriples
    ) -> Tensor:
        asked, truth = (getattr(links, end) for end in ends)
        rows = self._collect(take, links.relation, asked, ends[0])

        def score(which: Tensor) -> Tensor:
            return self.decoder.score_all(rows[which], links.relation[which], table)

        queries = links.relation * self._keys.width + asked
        return filtered_ranks(score, queries, truth, known, chunk=max(1, SCORES_AT_ONCE // max(len(table), 1)))

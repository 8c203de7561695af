"""Link prediction: items are numbers of target edges, a step draws their negatives, the metric is a ranking.

All random draws are keyed by the store edge id of the positive. L links, K negatives for each, D columns.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import cast

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
from gnnfleet.nn.link import LINK_LOSSES, Decoder, link_loss
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
from gnnfleet.ops.draws import DrawKey, Purpose, dropout
from gnnfleet.tasks.base import Batch, RowLookup

# Evaluation: pairs scored at a time, and scores in memory at a time when all nodes are candidates.
PAIRS_AT_ONCE, SCORES_AT_ONCE = 1 << 16, 1 << 25
# Keys of the decoder's dropout: a layer number above those of the model, and an offset for negatives.
_DECODER_LAYER, _NEGATIVE_OFFSET = 255, 128


@dataclass(frozen=True, eq=False)
class LinkBatch(Batch):
    """Target edges with their negatives, or with ``shared`` [K] nodes as the negatives of all links."""

    links: Links
    negatives: Links | None
    shared: Tensor | None


@dataclass(eq=False)
class _HeldOut:
    """Target edges that ``disjoint`` holds out in an epoch, and the last view with its masked version."""

    items: Tensor
    edges: EdgeMask
    view: LocalView | None = None
    masked_view: LocalView | None = None


@dataclass(frozen=True, eq=False)
class LinkTask:
    """Prediction of edges of some types; ``decoder`` is part of the trained model."""

    data: LinkData
    config: LinkConfig
    decoder: Decoder
    seed: int = 0
    metric_name: str = "auto"  # the metric: mrr, hits@K, or auto
    # by (seed, epoch), at most one entry
    held_out_cache: dict[tuple[int, int], _HeldOut] = field(default_factory=dict, repr=False)
    kinds: tuple[EdgeType, ...] = ()  # predicted edge types if ``data`` may lack links of some of them
    world: World = field(default_factory=World)  # ranks have equal contiguous shares of the links

    reads_only_local_rows = False

    def __post_init__(self) -> None:
        if self.metric_name not in ("auto", "mrr") and not re.fullmatch(r"hits@[1-9]\d*", self.metric_name):
            raise ConfigError(f"the metric of links must be mrr or hits@K, found train.metric={self.metric_name}")
        if self.config.ranking == "given" and not self.data.negatives:
            raise ConfigError("link.ranking=given needs negatives with the data, found none: set sampled or filtered")
        if self._mode == "shared" and len({end for kind in self._kinds for end in (kind.src, kind.dst)}) > 1:
            raise ConfigError("link.negative_mode=shared needs one node type, found several: set either")

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
    def tied_val_metric(self) -> float | None:
        """Metric on val if every link ties with all its negatives; None if the metric does not show ties."""
        if self.metric != "mrr" or self.ranking == "filtered":
            return None
        count = self.config.eval_negatives
        if self.ranking == "given" and "val" in self.data.negatives:
            count = self._per_link("val") or len(self.data.negatives["val"])
        return 1 / (1 + count / 2)

    def items(self, split: str) -> Tensor:
        return torch.arange(len(self.data.splits[split]))[self._local_slice(len(self.data.splits[split]))]

    def _local_slice(self, count: int) -> slice:
        rank, size = self.world.rank, self.world.size
        return slice(rank * count // size, (rank + 1) * count // size)

    def shard(self, world: World, owned_ids: Mapping[str, Tensor]) -> LinkTask:
        return replace(self, world=world)

    def reachable_mask(self) -> Tensor | None:
        return None

    def train_items(self, seed: int, epoch: int) -> Tensor:
        if not disjoint_share(self.config.exclude):
            return self.items("train")
        items = self._held_out(seed, epoch).items
        return items[self._local_slice(len(items))]

    def _held_out(self, seed: int, epoch: int) -> _HeldOut:
        if (seed, epoch) not in self.held_out_cache:
            draws = DrawKey(seed, epoch).draws(Purpose.HOLD_OUT)
            links = self.data.splits["train"]
            is_held_out = draws.uniforms_at(links.draw_ids)[:, 0] < disjoint_share(self.config.exclude)
            items = is_held_out.nonzero()[:, 0]
            self.held_out_cache.clear()
            self.held_out_cache[seed, epoch] = _HeldOut(items, EdgeMask.of(self._keys, links.select(items)))
        return self.held_out_cache[seed, epoch]

    def batch(self, items: Tensor, key: DrawKey, global_items: Tensor | None = None) -> LinkBatch:
        links = self.data.splits["train"].select(items)
        global_items = items if global_items is None else global_items
        if self._mode == "shared":
            count = self.data.graph.nodes[self.target].count
            shared = self._train_sampler.shared_nodes(key, self.config.negatives, count)
            return LinkBatch(items, self._seeds([links], shared), key, global_items, links, None, shared)
        ends = cast(NegativeEnds, self._mode)
        negatives = self._train_sampler.corrupt(links, key, count=self.config.negatives, ends=ends)
        return LinkBatch(items, self._seeds([links, negatives], None), key, global_items, links, negatives, None)

    def owners_of_items(self, items: Tensor) -> Iterator[tuple[str, Tensor | slice, Tensor]]:
        links = self.data.splits["train"].select(items)
        for kind, selected in self._by_type(links.relation, "dst"):
            yield kind, selected, links.dst[selected]

    @property
    def masks_edges(self) -> bool:
        return self.config.exclude != "none"

    def mask_edges(self, view: LocalView, batch: Batch) -> LocalView:
        assert isinstance(batch, LinkBatch)
        if self.config.exclude == "none":
            return view
        if self.config.exclude == "batch":
            is_local = batch.global_items is batch.items
            links = batch.links if is_local else self.data.splits["train"].select(batch.global_items)
            return EdgeMask.of(self._keys, links).apply(view)
        held = self._held_out(batch.key.seed, batch.key.epoch)
        if held.view is not view:
            held.view, held.masked_view = view, held.edges.apply(view)
        assert held.masked_view is not None
        return held.masked_view

    def loss(self, lookup: RowLookup, batch: Batch) -> Tensor:
        assert isinstance(batch, LinkBatch)
        src, dst = self._rows(lookup, batch.links)
        loss_of = LINK_LOSSES[self.config.loss]
        positive = self._score(src, dst, batch.links, key=batch.key)
        if batch.shared is not None:
            relation, table = batch.links.relation, lookup(self.target, batch.shared)
            of_src, of_dst = (self.decoder.score_all(rows, relation, table) for rows in (src, dst))
            loss = loss_of(positive, of_src) + loss_of(positive, of_dst)
        else:
            assert batch.negatives is not None
            ends = self._rows(lookup, batch.negatives)
            negative = self._score(*ends, batch.negatives, key=batch.key, negative=True)
            loss = loss_of(positive, negative.view(len(positive), self.config.negatives))
        if self.config.l2 and len(batch.items):  # a rank may have no items of a batch
            loss = loss + self.config.l2 * len(batch.items) * self.decoder.penalty(torch.cat([src, dst]))
        return loss

    def measure(self, lookup: RowLookup, split: str) -> dict[str, float]:
        all_links = self.data.splits[split]
        local = self._local_slice(len(all_links))
        links = all_links.select(local)
        positive = self.score_links(lookup, links)
        if self.ranking == "filtered":
            negative, ranks = self.score_links(lookup, self._eval_negatives(links, 1)), self._filtered(lookup, links)
            metrics = self._metrics(self._all_gather(ranks))
        elif self.ranking == "given" and split in self.data.negatives:
            per_link, negatives = self._per_link(split), self.data.negatives[split]
            rows = (
                slice(local.start * per_link, local.stop * per_link) if per_link else self._local_slice(len(negatives))
            )
            negative = self.score_links(lookup, negatives.select(rows))
            metrics = self._metrics_of_given(positive, negative, per_link=per_link)
        else:
            count = self.config.eval_negatives
            negative = self.score_links(lookup, self._eval_negatives(links, count))
            metrics = self._metrics(self._all_gather(ranks_in_own_list(positive, negative.view(len(links), count))))
        return {"loss": self._mean_loss(positive, negative), "count": float(len(all_links)), **metrics}

    def _mean_loss(self, positive: Tensor, negative: Tensor) -> float:
        empty = torch.empty(0)
        losses = float(link_loss(positive, empty)), float(link_loss(empty, negative))
        sums = torch.tensor([losses[0], len(positive), losses[1], len(negative)], dtype=torch.float64)
        positive_loss, positives, negative_loss, negatives = sum_over_ranks(self.world, sums).tolist()
        return float(positive_loss / max(positives, 1) + negative_loss / max(negatives, 1))

    def _all_gather(self, rows: Tensor) -> Tensor:
        """Collective. Rows of all ranks, in order."""
        return torch.cat(all_gather_rows(self.world, rows))

    def score_links(self, lookup: RowLookup, links: Links) -> Tensor:
        """Collective. [L] logits of links from exact rows, in the same number of chunks on all ranks."""
        most = max(all_gather_counts(self.world, len(links)))
        chunks = [links.select(slice(low, low + PAIRS_AT_ONCE)) for low in range(0, most, PAIRS_AT_ONCE)]
        logits = [self.decoder(*self._rows(lookup, chunk), chunk.relation) for chunk in chunks]
        return torch.cat(logits) if logits else torch.empty(0)

    @cached_property
    def _kinds(self) -> list[EdgeType]:
        """Predicted edge types."""
        if self.kinds:
            return list(self.kinds)
        links = Links.concat(list(self.data.splits.values()))
        return [self.data.edge_types[number] for number in torch.unique(links.relation).tolist()]

    @cached_property
    def _keys(self) -> EdgeKeys:
        return EdgeKeys.of(self.data.graph)

    @cached_property
    def _train_sampler(self) -> LinkNegativeSampler:
        return LinkNegativeSampler.of(self.data.graph, avoid=self.config.avoid_edges)

    @cached_property
    def _eval_sampler(self) -> LinkNegativeSampler:
        """Sampler that also avoids held-out links, which training must not know."""
        return self._train_sampler.avoiding(Links.concat([self.data.splits[name] for name in HELD_OUT]))

    @property
    def _mode(self) -> str:
        mode = self.config.negative_mode
        return mode if mode != "auto" else "either" if len(self._kinds) > 1 else "dst"

    def _seeds(self, parts: list[Links], shared: Tensor | None) -> dict[str, Tensor]:
        ids_by_type: dict[str, list[Tensor]] = {kind: [] for kind in self.data.graph.nodes}
        for links in parts:
            for end, ids in (("src", links.src), ("dst", links.dst)):
                for name, rows in self._by_type(links.relation, end):
                    ids_by_type[name].append(ids[rows])
        if shared is not None:
            ids_by_type[self.target].append(shared)
        seeds = {kind: torch.unique(torch.cat(ids)) for kind, ids in ids_by_type.items() if ids}
        return {kind: ids for kind, ids in seeds.items() if len(ids)}

    def _by_type(self, relation: Tensor, end: str) -> Iterator[tuple[str, Tensor | slice]]:
        """Yield (node type of an end, the links with that type at this end)."""
        kinds = list(dict.fromkeys(getattr(kind, end) for kind in self._kinds))
        if len(kinds) == 1:
            yield kinds[0], slice(None)
            return
        names = [getattr(kind, end) for kind in self.data.edge_types]
        code = torch.tensor([kinds.index(name) if name in kinds else -1 for name in names])[relation]
        for number, name in enumerate(kinds):  # types without local links too: lookups are collective
            yield name, (code == number).nonzero()[:, 0]

    def _rows(self, lookup: RowLookup, links: Links) -> tuple[Tensor, Tensor]:
        """([L, D], [L, D]) rows of the sources and destinations."""
        src, dst = (
            self._collect(lookup, links.relation, ids, end) for end, ids in (("src", links.src), ("dst", links.dst))
        )
        return src, dst

    def _collect(self, lookup: RowLookup, relation: Tensor, ids: Tensor, end: str) -> Tensor:
        parts = [(rows, lookup(name, ids[rows])) for name, rows in self._by_type(relation, end)]
        if len(parts) == 1:
            return parts[0][1]
        order = torch.cat([rows for rows, _ in parts if isinstance(rows, Tensor)])
        return torch.cat([rows_of_type for _, rows_of_type in parts])[torch.argsort(order)]

    def _score(self, src: Tensor, dst: Tensor, links: Links, *, key: DrawKey, negative: bool = False) -> Tensor:
        p = self.config.dropout
        count = self.config.negatives if negative else 1
        numbers = links.draw_ids * count + torch.arange(len(links)) % count

        def drop(x: Tensor, index: int) -> Tensor:
            index += _NEGATIVE_OFFSET if negative else 0
            return dropout(x, p, ids=numbers, draws=key.draws(Purpose.DROPOUT, _DECODER_LAYER, index))

        logits: Tensor = self.decoder(src, dst, links.relation, drop=drop if p else None)
        return logits

    def _eval_negatives(self, links: Links, count: int) -> Links:
        """Negatives of held-out links by the run's seed: the same in every evaluation."""
        ends: NegativeEnds = "either" if len(self._kinds) > 1 else "dst"
        return self._eval_sampler.corrupt(links, DrawKey(self.seed), count=count, ends=ends, layer=EVALUATION)

    def _per_link(self, split: str) -> int:
        """Number of consecutive given negatives of each link; 0 if all links share one list."""
        negatives, links = self.data.negatives.get(split), self.data.splits[split]
        if negatives is None or not len(links) or len(negatives) % len(links) or len(negatives) == len(links):
            return 0
        return len(negatives) // len(links)

    def _metrics_of_given(self, positive: Tensor, negative: Tensor, *, per_link: int) -> dict[str, float]:
        if per_link:
            return self._metrics(self._all_gather(ranks_in_own_list(positive, negative.view(-1, per_link))))
        positive, negative = self._all_gather(positive), self._all_gather(negative)
        metrics = self._metrics(ranks_in_shared_list(positive, negative))
        return {k: ogb_hits_at_k(positive, negative, int(k[5:])) if k != "mrr" else v for k, v in metrics.items()}

    def _metrics(self, ranks: Tensor) -> dict[str, float]:
        names = dict.fromkeys(["mrr", "hits@1", "hits@10", self.metric])
        return {name: mrr(ranks) if name == "mrr" else hits_at_k(ranks, int(name[5:])) for name in names}

    def _filtered(self, lookup: RowLookup, links: Links) -> Tensor:
        """[2 L] ranks of destinations for queries (source, type, ?) and of sources for (?, type, destination)."""
        all_links, ranks = Links.concat(list(self.data.splits.values())), []
        symmetric = all_links.select(self.data.symmetric[all_links.relation])
        true = Links.concat([all_links, Links(symmetric.relation, symmetric.dst, symmetric.src, symmetric.ids)])
        for query, answer in (("src", "dst"), ("dst", "src")):
            queries = true.relation * self._keys.width + getattr(true, query)
            known = KnownTriples.of(queries, getattr(true, answer))
            for name, selected in self._by_type(links.relation, answer):
                table = lookup(name, torch.arange(self.data.graph.nodes[name].count))
                ranks.append(self._rank(lookup, links.select(selected), (query, answer), table=table, known=known))
        return torch.cat(ranks)

    def _rank(
        self, lookup: RowLookup, links: Links, ends: tuple[str, str], *, table: Tensor, known: KnownTriples
    ) -> Tensor:
        query_ids, truth = (getattr(links, end) for end in ends)
        rows = self._collect(lookup, links.relation, query_ids, ends[0])

        def score(selected: Tensor) -> Tensor:
            return self.decoder.score_all(rows[selected], links.relation[selected], table)

        queries = links.relation * self._keys.width + query_ids
        return filtered_ranks(score, queries, truth, known, chunk=max(1, SCORES_AT_ONCE // max(len(table), 1)))

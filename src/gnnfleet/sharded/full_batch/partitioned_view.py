"""The verbs of a GraphView on a part of a graph: edges cut by where their far ends are, blocks visited one by one.

Whoever has the rows of the far ends hands them over block by block (``Visits``): other ranks in ``RingView``, the rest
of a way in ``ChunkView``. Each verb begins an exchange of its own, which serves its forward and its backward.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from gnnfleet.comm.halo_exchange import Visits
from gnnfleet.errors import ConfigError
from gnnfleet.graph.graph import EdgeType
from gnnfleet.graph.views.view import first_rows
from gnnfleet.graph.views.view_base import CommonView, Rows
from gnnfleet.ops.aggregate import REDUCES
from gnnfleet.ops.attend import Counts, prepare
from gnnfleet.ops.attend_blocks import Inputs
from gnnfleet.ops.draws import DrawKey, Purpose
from gnnfleet.ops.message import REDUCES as MESSAGE_REDUCES
from gnnfleet.ops.message import Message, precision_now
from gnnfleet.sharded.full_batch.aggregate import Aggregation, Reverse, Strand, max_strands, sum_strands, sum_with_own
from gnnfleet.sharded.full_batch.attention import Attention, attend_ring
from gnnfleet.sharded.full_batch.merged_relations import MergedEdges
from gnnfleet.sharded.full_batch.partition_blocks import Part, PartEdges
from gnnfleet.sharded.full_batch.propagate import Propagation, propagate_ring


class MergedOnce:
    """Merges the edge types when first asked."""

    def __init__(self, part: Part) -> None:
        self._part = part
        self._found: MergedEdges | None = None

    def get(self) -> MergedEdges:
        if self._found is None:
            self._found = MergedEdges.of(list(self._part.edges.values()))
        return self._found


@dataclass(frozen=True, eq=False, kw_only=True)
class PartView(CommonView[PartEdges]):
    """A part of a graph; what is missing is who visits."""

    part: Part
    nodes: Mapping[str, Rows]
    relations: Mapping[EdgeType, PartEdges]
    merged: MergedOnce = field(repr=False)
    key: DrawKey = field(default_factory=DrawKey)
    layer: int = 0
    training: bool = True
    many_sources: bool = False
    keep: bool = False  # rows that backward needs again are kept instead of fetched again

    @abstractmethod
    def _visits(self) -> Visits:
        """Begin the exchange of one verb."""

    @property
    def edge_ids(self) -> Tensor:
        return self._edges.edge_ids

    @property
    def weight(self) -> Tensor | None:
        return self._edges.weight

    @property
    def attr(self) -> Tensor | None:
        return self._edges.attr

    @property
    def in_degree(self) -> Tensor:
        return self._edges.degree(loops=False)

    def aggregate(self, x: Tensor, *, reduce: str = "sum", weight: Tensor | None = None, loops: bool = False) -> Tensor:
        edges = self._edges
        _check_reduce(reduce, weight)
        call = self._aggregation(x, reduce, weight, loops=loops)
        if weight is not None:
            weight = edges.with_loops(weight.reshape(-1), fill=1.0) if loops else weight.reshape(-1)
        (out,) = max_strands(call, [_flat(x)]) if reduce == "max" else sum_strands(call, [_flat(x)], weight)
        return out.view(edges.num_rows, *x.shape[1:])

    def near_and_own(self, x: Tensor, *, reduce: str = "sum") -> tuple[Tensor, Tensor]:
        if reduce == "max" or x.dim() != 2:
            return self.aggregate(x, reduce=reduce), first_rows(x, self.num_dst)
        _check_reduce(reduce, None)
        return sum_with_own(self._aggregation(x, reduce, None, loops=False), x)

    def _aggregation(self, x: Tensor, reduce: str, weight: Tensor | None, *, loops: bool) -> Aggregation:
        edges = self._edges
        self._check_rows("features", x, edges.kind.src)
        strand = Strand(edges.cuts(loops=loops), 0, edges.degree(loops=loops) if reduce == "mean" else None)
        reverse = None
        # Sources know the store's weights of their out-edges, and no others.
        if reduce != "max" and (weight is None or (weight is edges.weight and not weight.requires_grad)):
            routes = self.part.routes(edges.kind.dst, "out")
            reverse = Reverse(edges.out_cuts(loops=loops), routes, weighted=weight is not None)
        return Aggregation(self._visits(), (self.part.routes(edges.kind.src, "in"),), (strand,), reverse, self.keep)

    def aggregate_relations(
        self, x: Mapping[str, Tensor], *, reduce: str = "sum", into: str | None = None
    ) -> dict[EdgeType, Tensor]:
        _check_reduce(reduce, None)
        relations = {kind: edges for kind, edges in self.relations.items() if into in (None, kind.dst)}
        kinds = [kind for kind in self.nodes if any(edge.src == kind for edge in relations)]
        for kind in kinds:
            self._check_rows("features", x[kind], kind)
        strands = tuple(
            Strand(edges.inward, kinds.index(kind.src), edges.degree(loops=False) if reduce == "mean" else None)
            for kind, edges in relations.items()
        )
        call = Aggregation(self._visits(), tuple(self.part.routes(kind, "in") for kind in kinds), strands)
        xs = [_flat(x[kind]) for kind in kinds]
        found = max_strands(call, xs) if reduce == "max" else sum_strands(call, xs)
        return {kind: out.view(len(out), *x[kind.src].shape[1:]) for kind, out in zip(relations, found, strict=True)}

    def combine_relations(self, x: Tensor, coefficient: Tensor, *, reduce: str = "sum") -> Tensor:
        merged = self.merged.get()
        routes = (self.part.routes(self._kind, "in"),)
        call = Aggregation(self._visits(), routes, (Strand(merged.cuts, 0),), keep=self.keep)
        (out,) = sum_strands(call, [x], merged.weight(coefficient, reduce=reduce))
        return out

    def attend(
        self,
        value: Tensor,
        *,
        src: Tensor,
        dst: Tensor,
        score: str = "add",
        vector: Tensor | None = None,
        edge: Tensor | None = None,
        heads: int | None = None,
        slope: float = 0.2,
        dropout: float = 0.0,
        loops: bool = False,
    ) -> Tensor:
        edges = self._edges
        counts = Counts(self.num_src, self.num_dst, edges.num_edges)
        given = Inputs(value=value, src=src, dst=first_rows(dst, self.num_dst), edge=edge, vector=vector)
        draws = self.key.draws(Purpose.ATTENTION, self.layer)
        rate = dropout if self.training else 0.0
        form, flat = prepare(given, counts, score=score, heads=heads, slope=slope, dropout=rate, draws=draws)
        if loops and flat.edge is not None:
            flat = replace(flat, edge=edges.with_mean_loops(flat.edge))
        if src is value:
            flat = replace(flat, src=flat.value)
        call = Attention(
            self._visits(),
            form,
            edges.cuts(loops=loops),
            self.part.routes(edges.kind.src, "in"),
            edges.out_cuts(loops=loops),
            self.part.routes(edges.kind.dst, "out"),
            self.keep,
        )
        out = attend_ring(call, flat)
        return out if value.dim() == 2 else out.view(len(out), form.heads, form.channels)

    def propagate(
        self,
        message: Message,
        *,
        src: Mapping[str, Tensor] | None = None,
        dst: Mapping[str, Tensor] | None = None,
        edge: Mapping[str, Tensor] | None = None,
        params: Sequence[Tensor] = (),
        reduce: str = "sum",
    ) -> Tensor:
        if reduce not in MESSAGE_REDUCES:
            raise ConfigError(f"cannot reduce by {reduce!r}: choose one of {', '.join(MESSAGE_REDUCES)}")
        edges = self._edges
        ends = {name: first_rows(tensor, self.num_dst) for name, tensor in (dst or {}).items()}
        groups = {"src": dict(src or {}), "dst": ends, "edge": dict(edge or {})}
        expected = {"src": self.num_src, "dst": self.num_dst, "edge": edges.num_edges}
        for group, tensors in groups.items():
            for name, tensor in tensors.items():
                if tensor.shape[0] != expected[group]:
                    raise ConfigError(f"{group}[{name!r}] has {tensor.shape[0]} rows, expected {expected[group]}")
        plan = Propagation(
            ring=self._visits(),
            cuts=edges.inward,
            routes=self.part.routes(edges.kind.src, "in"),
            num_dst=self.num_dst,
            message=message,
            reduce=reduce,
            precision=precision_now(),
            keep=self.keep,
            names=tuple((group, name) for group, tensors in groups.items() for name in tensors),
        )
        return propagate_ring(plan, groups, params)

    def _check_rows(self, name: str, x: Tensor, kind: str) -> None:
        expected = len(self.part.nodes[kind].node_ids)
        if x.shape[0] != expected:
            raise ConfigError(f"expected {expected} rows of {name}, found {x.shape[0]}")


def _check_reduce(reduce: str, weight: Tensor | None) -> None:
    if reduce not in REDUCES:
        raise ConfigError(f"cannot reduce by {reduce!r}: choose one of {', '.join(REDUCES)}")
    if reduce == "max" and weight is not None:
        raise ConfigError("max takes no edge weights: multiply the features, or use propagate")


def _flat(x: Tensor) -> Tensor:
    return x.flatten(1)

"""Convolutions over several node types: one conv per relation, and HGT (https://arxiv.org/abs/2003.01332)."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from gnnfleet.errors import ConfigError
from gnnfleet.graph.graph import EdgeType
from gnnfleet.graph.views.view import GraphView, first_rows
from gnnfleet.nn.conv.gat import AttentionConv, GATConv
from gnnfleet.nn.conv.gin import GINConv
from gnnfleet.nn.conv.sage import SAGEConv
from gnnfleet.nn.linear import apply_linear, to_float32
from gnnfleet.ops.linear import sum_linear


def type_key(kind: str | EdgeType) -> str:
    """Name of a node or edge type in a ``state_dict``, as in PyG."""
    key = kind if isinstance(kind, str) else f"<{'___'.join(kind)}>"
    return (f"<{key}>" if hasattr(torch.nn.ModuleDict, key) else key).replace(".", "#")


class HeteroConv(torch.nn.Module):
    """x'_t = Σ_r conv_r(x_src, x_t) over the relations r into node type t, plus Θ_t x_t with ``roots``.

    Parameters ``convs.<src___relation___dst>.*`` as PyG's HeteroConv with aggr="sum"; ``roots.<type>.*``. Convs are
    SAGEConv, GINConv, GATConv, GATv2Conv, without self-loops. Rows of types without relations and roots do not change.
    All sums of a layer are one exchange, and so are all GATConvs; a GATv2Conv is one each.
    """

    def __init__(
        self, convs: Mapping[EdgeType, torch.nn.Module], *, roots: Mapping[str, torch.nn.Module] | None = None
    ) -> None:
        super().__init__()
        for kind, conv in convs.items():
            is_sum = isinstance(conv, GINConv) or (isinstance(conv, SAGEConv) and not conv.project)
            if not is_sum and (not isinstance(conv, AttentionConv) or conv.add_self_loops):
                raise ConfigError(
                    f"a relation takes SAGEConv without project, GINConv, or GATConv or GATv2Conv with "
                    f"add_self_loops=False, found {type(conv).__name__} for {kind}"
                )
        self.edge_types = tuple(convs)
        self.convs = torch.nn.ModuleDict({type_key(kind): conv for kind, conv in convs.items()})
        self.roots = torch.nn.ModuleDict({type_key(kind): root for kind, root in (roots or {}).items()})

    def reset_parameters(self) -> None:
        for module in (*self.convs.values(), *self.roots.values()):
            module.reset_parameters()  # type: ignore[operator]

    def forward(
        self,
        view: GraphView,
        x: Mapping[str, Tensor],
        *,
        only: Collection[str] | None = None,
        weighted: bool = False,
    ) -> dict[str, Tensor]:
        """{node type: [N_src, in]} → {node type: [N_dst, out]}; ``only`` limits the output to some types.

        With ``weighted`` edge weights sums are Σ w x and means Σ w x / Σ |w|; attention and maxima do not read them.
        """
        convs = {kind: self.convs[type_key(kind)] for kind in self.edge_types if only is None or kind.dst in only}
        missing = [str(kind) for kind in convs if kind not in view.edge_types]
        if missing:
            raise ConfigError(f"the layer has edge types that the graph lacks: {', '.join(missing)}")
        attention = {kind: conv for kind, conv in convs.items() if isinstance(conv, AttentionConv)}
        sums = {kind: conv for kind, conv in convs.items() if kind not in attention}
        outs = self._sums(view, x, sums, weighted=weighted)
        outs |= self._attention(view, x, attention)
        out: dict[str, Tensor] = {}
        for kind in [kind for kind in x if only is None or kind in only]:
            rows = first_rows(x[kind], view.for_type(kind).num_dst)
            terms = [outs[edge_type] for edge_type in convs if edge_type.dst == kind]
            if type_key(kind) in self.roots:
                terms.append(apply_linear(self.roots[type_key(kind)], rows))
            out[kind] = torch.stack(terms).sum(0) if len(terms) > 1 else terms[0] if terms else rows.clone()
        return out

    def _sums(
        self, view: GraphView, x: Mapping[str, Tensor], convs: Mapping[EdgeType, torch.nn.Module], *, weighted: bool
    ) -> dict[EdgeType, Tensor]:
        reduce = {kind: conv.aggr if isinstance(conv, SAGEConv) else "sum" for kind, conv in convs.items()}
        outs: dict[EdgeType, Tensor] = {}
        types = {kind.dst for kind in convs}
        for name in dict.fromkeys(reduce.values()):
            into, reads = min(types) if len(types) == 1 else None, weighted and name != "max"
            aggregates = view.aggregate_relations(x, reduce=name, into=into, weighted=reads)
            for kind in [kind for kind in convs if reduce[kind] == name]:
                outs[kind] = convs[kind](view.for_type(kind.dst), x[kind.dst], aggregated=aggregates[kind])
        return outs

    def _attention(
        self, view: GraphView, x: Mapping[str, Tensor], convs: Mapping[EdgeType, AttentionConv]
    ) -> dict[EdgeType, Tensor]:
        """Run convs with equal options together; each relation has a softmax of its own."""
        groups: dict[object, list[EdgeType]] = {}
        for kind, conv in convs.items():
            options = (conv.heads, conv.out_channels, conv.negative_slope, conv.dropout, conv.training)
            groups.setdefault(options if isinstance(conv, GATConv) else kind, []).append(kind)
        outs: dict[EdgeType, Tensor] = {}
        for kinds in groups.values():
            conv = convs[kinds[0]]
            num_dst = {kind: view.for_type(kind.dst).num_dst for kind in kinds}
            ends = {kind: (x[kind.src], first_rows(x[kind.dst], num_dst[kind])) for kind in kinds}
            terms = [convs[kind].terms(*ends[kind]) for kind in kinds]
            value, src, dst = (dict(zip(kinds, rows, strict=True)) for rows in zip(*terms, strict=True))
            same = all(src[kind] is value[kind] for kind in kinds)
            attended = view.attend_relations(
                value,
                src=value if same else src,
                dst=dst,
                heads=conv.heads,
                slope=conv.negative_slope,
                dropout=conv.dropout if conv.training else 0.0,
                mask_id=conv.mask_id,
                **conv.score_options,
            )
            for kind, rows in attended.items():
                outs[kind] = convs[kind].finish(rows, ends[kind][1], rows=num_dst[kind])
        return outs


class HGTConv(torch.nn.Module):
    """Heterogeneous graph transformer: attention with keys and values per relation, one softmax over all relations.

    x'_t = s Θ_t gelu(Σ_j softmax_j(⟨q_i, K_r k_j⟩ p_r / √D) V_r v_j) + (1 − s) x_t, s = sigmoid(skip_t), where k, q, v
    are linear maps by node type; the skip needs equal widths. Parameters ``kqv_lin``, ``out_lin``, ``k_rel``,
    ``v_rel``, ``skip``, ``p_rel``, as PyG's. Rows of types without relations into them do not change.
    """

    def __init__(
        self,
        in_channels: int | Mapping[str, int],
        out_channels: int,
        metadata: tuple[Sequence[str], Sequence[EdgeType]],
        heads: int = 1,
        *,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if out_channels % heads:
            raise ConfigError(f"out_channels must be a multiple of heads, found {out_channels} and {heads}")
        node_types, edge_types = metadata
        widths = {kind: in_channels if isinstance(in_channels, int) else in_channels[kind] for kind in node_types}
        self.out_channels, self.heads, self.dropout = out_channels, heads, dropout
        self.edge_types = tuple(map(EdgeType._make, edge_types))
        depth, count = out_channels // heads, heads * len(self.edge_types)
        self.kqv_lin = _TypedLinear({kind: (width, 3 * out_channels) for kind, width in widths.items()})
        self.out_lin = _TypedLinear(dict.fromkeys(node_types, (out_channels, out_channels)))
        self.k_rel, self.v_rel = _RelationMatrices(count, depth), _RelationMatrices(count, depth)
        self.skip = torch.nn.ParameterDict({type_key(kind): torch.ones(1) for kind in node_types})
        keys = map("__".join, self.edge_types)
        self.p_rel = torch.nn.ParameterDict({type_key(key): torch.ones(1, heads) for key in keys})

    def forward(
        self, view: GraphView, x: Mapping[str, Tensor], *, only: Collection[str] | None = None
    ) -> dict[str, Tensor]:
        """{node type: [N_src, in]} → {node type: [N_dst, out]}; ``only`` limits the output to some types."""
        types = [kind for kind in x if only is None or kind in only]
        kinds = [kind for kind in self.edge_types if kind.dst in types]
        rows = {kind: first_rows(x[kind], view.for_type(kind).num_dst) for kind in types}
        attended: dict[str, Tensor] = {}
        if kinds:
            keys, values = ({kind: self._source_rows(kind, x[kind.src], part) for kind in kinds} for part in (0, 2))
            reached = [kind for kind in types if any(edge.dst == kind for edge in kinds)]
            maps = {kind: self.kqv_lin.part(kind, 1) for kind in reached}
            queries = {kind: to_float32(sum_linear([(rows[kind], lin[0])], lin[1])) for kind, lin in maps.items()}
            rate = self.dropout if self.training else 0.0
            src = {kind: to_float32(key) for kind, key in keys.items()}
            attended = view.attend_relations(values, src=src, dst=queries, heads=self.heads, score="dot", dropout=rate)
        return {kind: self._finish(kind, attended.get(kind), rows[kind]) for kind in types}

    def _finish(self, kind: str, attended: Tensor | None, rows: Tensor) -> Tensor:
        if attended is None:
            return rows.clone()
        out = apply_linear(self.out_lin.lins[type_key(kind)], functional.gelu(attended))
        if rows.shape[1] != self.out_channels:
            return out
        share = self.skip[type_key(kind)].sigmoid()
        mixed: Tensor = share * out + (1 - share) * rows
        return mixed

    def _source_rows(self, kind: EdgeType, x: Tensor, part: int) -> Tensor:
        """[N_src, H·D] keys (part 0) or values (part 2) of a relation: both maps as one, p_r included."""
        heads, number = self.heads, self.edge_types.index(kind)
        with torch.autocast("cpu", enabled=False):
            weight, bias = self.kqv_lin.part(kind.src, part)
            matrices = (self.v_rel if part else self.k_rel).weight[number :: len(self.edge_types)]
            if part == 0:
                matrices = matrices * self.p_rel[type_key("__".join(kind))].view(-1, 1, 1)
            weight = torch.einsum("hde,hdi->hei", matrices, weight.view(heads, -1, weight.shape[1])).flatten(0, 1)
            bias = torch.einsum("hde,hd->he", matrices, bias.view(heads, -1)).flatten()
        return sum_linear([(x, weight)], bias)


class _TypedLinear(torch.nn.Module):
    """A linear map for each node type. Parameters ``lins.<type>.*``."""

    def __init__(self, sizes: Mapping[str, tuple[int, int]]) -> None:
        super().__init__()
        self.lins = torch.nn.ModuleDict({type_key(kind): torch.nn.Linear(*size) for kind, size in sizes.items()})

    def part(self, kind: str, number: int) -> tuple[Tensor, Tensor]:
        """(weight, bias) of a third of the outputs."""
        lin = self.lins[type_key(kind)]
        return lin.weight.chunk(3)[number], lin.bias.chunk(3)[number]  # type: ignore[operator]


class _RelationMatrices(torch.nn.Module):
    """``weight`` [heads · relations, D, D]."""

    def __init__(self, count: int, depth: int) -> None:
        super().__init__()
        bound = 1 / math.sqrt(depth)
        self.weight = torch.nn.Parameter(torch.empty(count, depth, depth).uniform_(-bound, bound))

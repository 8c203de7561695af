"""Modules over several node types or relations: their inputs by type, and the node type of rows during a pass.

The keys of torch_geometric are node types and (source, relation, destination). Each relation has an index of its own,
which fetches rows of its source type. Draws need the ids of a tensor's rows, and so their node type: it is known for
inputs, for results of convolutions and for mappings by node type, and follows row-wise operations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from itertools import accumulate, chain
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from gnnfleet.errors import ConfigError
from gnnfleet.graph.views.edge_list import EdgeList
from gnnfleet.graph.views.view import GraphView
from gnnfleet.nn.norm import mean_over_nodes
from gnnfleet.nn.pyg.source_index import FetchCache, SourceIndex, plain

# Edges of joined relations are drawn for by their store edge id plus a multiple of this.
_RELATION_IDS = 1 << 50
_MOVES_ROWS = {
    "index_select", "gather", "take", "take_along_dim", "flip", "roll", "sort", "argsort", "topk", "permute",
    "transpose", "movedim", "t", "__get__", "masked_select", "repeat_interleave",
}  # fmt: skip


def takes_mappings(module: torch.nn.Module, arguments: Mapping[str, bool]) -> bool:
    """True for forward(x_dict, edge_index_dict), and for a module of ``to_hetero``, which has plain names."""
    nodes = module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ()
    return "x_dict" in arguments or any(getattr(node.target, "__name__", "") == "get_dict" for node in nodes)


def inputs_by_type(view: GraphView, tables: Mapping[str, Tensor]) -> dict[str, Any]:
    """Inputs of a module that takes mappings by node and edge type: {name: mapping, or None where it is empty}."""
    caches: dict[str, FetchCache] = {kind: [] for kind in tables}
    edges = {tuple(kind): view.edge_list(kind) for kind in view.edge_types}

    def edge_data(name: str) -> dict[Any, Tensor] | None:
        values = {kind: getattr(edges[kind], name) for kind in edges}
        return {kind: v.to(tables[kind[0]].dtype) for kind, v in values.items() if v is not None} or None

    return {
        "x": {kind: RowTypes.mark(rows.view_as(rows), kind) for kind, rows in tables.items()},
        "edge_index": {kind: SourceIndex.of(edges[kind], caches[kind[0]]) for kind in edges},
        "edge_weight": edge_data("weight"),
        "edge_attr": edge_data("attr"),
    }


class OutputRows(dict[str, Tensor]):
    """Rows by node type that a module returned."""

    @classmethod
    def of(cls, out: Mapping[str, Any]) -> OutputRows:
        return cls({kind: rows for kind, rows in out.items() if isinstance(rows, Tensor)})

    def __missing__(self, kind: str) -> Tensor:
        raise ConfigError(f"the module returned no rows of type {kind}: found those of {', '.join(self) or 'no type'}")


def joined_edge_list(view: GraphView) -> tuple[EdgeList, Tensor]:
    """All edges of one node type, and the number of the relation of each, as relational convolutions take them."""
    lists = [view.edge_list(kind) for kind in view.edge_types]

    def join(name: str) -> Any:
        values = [getattr(edges, name) for edges in lists]
        return None if any(value is None for value in values) else torch.cat(values)

    numbers = torch.cat([torch.full_like(edges.edge_ids, number) for number, edges in enumerate(lists)])
    ids = join("edge_ids") + numbers * _RELATION_IDS
    if lists[0].sampling_scale is not None:
        raise ConfigError(
            "a module with edge_type reads all neighbours: set strategy.fanouts to −1, or use sar or pipe"
        )
    index = torch.cat([edges.index for edges in lists], 1)
    return replace(lists[0], index=index, weight=join("weight"), attr=join("attr"), edge_ids=ids), numbers


class RowTypes:
    """Node types of the rows of tensors during a pass over a view of several types; kept on the tensors."""

    def __init__(self, view: GraphView) -> None:
        self._counts = {kind: view.for_type(kind).num_src for kind in view.node_types}

    @staticmethod
    def mark(rows: Tensor, kind: str) -> Tensor:
        rows.__dict__["node_type"] = kind
        return rows

    @staticmethod
    def type_of(rows: Tensor) -> str:
        kind: str | None = rows.__dict__.get("node_type")
        if kind is None:
            raise ConfigError(
                "a module drops elements of rows whose node type is unknown: apply dropout to rows of x_dict, to the "
                "result of a convolution, or to a mapping by node type that a module returned"
            )
        return kind

    def follow(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Mark the results of a row-wise operation like its operands."""
        name = getattr(func, "__name__", "")
        if name in _MOVES_ROWS or (name == "__getitem__" and not _keeps_rows(args[1])):
            return
        operands = [
            (len(t), t.__dict__["node_type"]) for t in _tensors((*args, *kwargs.values())) if "node_type" in t.__dict__
        ]
        for table in _tensors((out,)) if operands else ():
            kinds = {kind for count, kind in operands if table.dim() and count == len(table)}
            if len(kinds) == 1:
                self.mark(table, kinds.pop())
            else:
                table.__dict__.pop("node_type", None)

    def mark_result(self, index: Any, out: Any) -> None:
        """Mark the rows that a convolution computed from the edges of a relation."""
        kind = index.fetcher.edges.edge_type if isinstance(index, SourceIndex) else None
        if kind is not None and isinstance(out, Tensor):
            self._mark(out, kind.src if index.sources[-1] else kind.dst)

    def mark_mapping(self, module: Any, inputs: Any, out: Any) -> None:
        """Hook of modules: mark the values of a mapping by node type."""
        if isinstance(out, Mapping):
            for kind, rows in out.items():
                if kind in self._counts and isinstance(rows, Tensor):
                    self._mark(rows, kind)

    def _mark(self, rows: Tensor, kind: str) -> None:
        if rows.dim() and len(rows) == self._counts[kind]:
            self.mark(rows, kind)


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    """Tensors with rows among values and in the lists and tuples of values."""
    flat = chain.from_iterable(value if isinstance(value, tuple | list) else (value,) for value in values)
    return [v for v in flat if isinstance(v, Tensor) and not isinstance(v, SourceIndex)]


def _keeps_rows(at: Any) -> bool:
    first = at[0] if isinstance(at, tuple) and at else at
    return isinstance(first, slice)


def _join_relations(view: GraphView) -> Callable[..., tuple[SourceIndex, Tensor]]:
    """``construct_bipartite_edge_index`` for remote sources: those of one relation follow those of another."""

    def construct(
        indices: Mapping[Any, SourceIndex], src_offsets: Mapping[Any, int], dst_offsets: Mapping[str, int],
        edge_attr_dict: Mapping[str, Tensor], num_nodes: int,
    ) -> tuple[SourceIndex, Tensor]:  # fmt: skip
        relations = {kind: indices[kind] for kind in src_offsets}
        lists = [index.fetcher.edges for index in relations.values()]
        num_local, num_fetched = [len(edges.source_ids) for edges in lists], [edges.num_fetched for edges in lists]
        starts = accumulate(num_fetched, initial=0)
        ends, ids, attr = [], [], []
        for number, (kind, start) in enumerate(zip(relations, starts, strict=False)):
            index = relations[kind]
            ends.append(plain(index) + torch.tensor([[start], [dst_offsets[kind[-1]]]]))
            ids.append(index.edge_ids + number * _RELATION_IDS)
            attr.append(edge_attr_dict["__".join(kind)].expand(index.shape[1], -1))

        def exchange(name: str, sizes: list[int], x: Tensor) -> Tensor:
            parts = zip(lists, torch.split(x, sizes), strict=True)
            return torch.cat([getattr(edges, name)(rows) for edges, rows in parts])

        source_ids = torch.cat([edges.source_ids for edges in lists])
        num_dst = sum(dst_offsets.values())
        joined = EdgeList(torch.cat(ends, 1), torch.cat(ids), source_ids, num_dst, sum(num_fetched))
        if any(edges.has_remote_sources for edges in lists):
            fetch, send_back = partial(exchange, "fetch", num_local), partial(exchange, "send_back", num_fetched)
            joined = replace(joined, fetch=fetch, send_back=send_back)
        return SourceIndex.of(joined), torch.cat(attr)

    return construct


def _attention_over_relations(view: GraphView) -> Callable[..., Any]:
    """``group`` of HANConv, with a mean over the nodes of all ranks."""

    def group(xs: list[Tensor], q: Tensor, k_lin: torch.nn.Module) -> tuple[Tensor | None, Tensor | None]:
        if not xs:
            return None, None
        rows = torch.stack(xs, 1)  # [N, relations, F]
        mean = mean_over_nodes(view, torch.tanh(k_lin(rows)).flatten(1)).view(rows.shape[1:])
        weight = torch.softmax((q * mean).sum(-1), dim=0)
        return (weight.view(-1, 1) * rows).sum(1), weight

    return group


def with_function(name: str, make: Callable[[GraphView], Callable[..., Any]]) -> Callable[..., Any]:
    """Call a forward with another function under the name of one of its module."""

    def rule(view: GraphView, module: Any, forward: Any, *args: Any, **kwargs: Any) -> Any:
        method = forward.__func__
        names = {**method.__globals__, name: make(view)}
        copied = FunctionType(method.__code__, names, name, method.__defaults__, method.__closure__)
        copied.__kwdefaults__ = method.__kwdefaults__
        return copied(module, *args, **kwargs)

    return rule


TYPED_MODULES: dict[str, Callable[..., Any]] = {
    "HGTConv": with_function("construct_bipartite_edge_index", _join_relations),
    "HANConv": with_function("group", _attention_over_relations),
}

"""Modules over several node types or relations: their inputs by type, and the node type of rows during a pass.

The keys of torch_geometric are node types and (source, relation, destination). Each relation has an index of its own,
which fetches rows of its source type. Draws need the ids of a tensor's rows, and so their node type: it is known for
inputs, for results of convolutions and for mappings by node type, and follows row-wise operations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import chain
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from gnnfleet.errors import ConfigError
from gnnfleet.graph.views.edge_list import EdgeList
from gnnfleet.graph.views.merged_relations import RELATION_IDS
from gnnfleet.graph.views.view import GraphView
from gnnfleet.nn.norm import mean_over_nodes
from gnnfleet.nn.pyg.source_index import FetchCache, SourceIndex, plain

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
    rows = {kind: table.view_as(table) for kind, table in tables.items()}
    RowTypes(view).mark_mapping(None, None, rows)
    edges = {tuple(kind): view.edge_list(kind) for kind in view.edge_types}

    def edge_data(name: str) -> dict[Any, Tensor] | None:
        values = {kind: getattr(edges[kind], name) for kind in edges}
        return {kind: v.to(tables[kind[0]].dtype) for kind, v in values.items() if v is not None} or None

    return {
        "x": rows,
        "edge_index": {kind: SourceIndex.of(edges[kind], caches[kind[0]]) for kind in edges},
        "edge_weight": edge_data("weight"),
        "edge_attr": edge_data("attr"),
    }


class OutputRows(dict[str, Tensor]):
    """Rows by node type that a module returned."""

    def __missing__(self, kind: str) -> Tensor:
        raise ConfigError(f"the module returned no rows of type {kind}: found those of {', '.join(self) or 'no type'}")


def joined_edge_list(view: GraphView) -> tuple[EdgeList, Tensor]:
    """All edges of one node type, and the number of the relation of each, as relational convolutions take them."""
    lists = [view.edge_list(kind) for kind in view.edge_types]

    def join(name: str) -> Any:
        values = [getattr(edges, name) for edges in lists]
        return None if any(value is None for value in values) else torch.cat(values)

    numbers = torch.cat([torch.full_like(edges.edge_ids, number) for number, edges in enumerate(lists)])
    ids = join("edge_ids") + numbers * RELATION_IDS
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
    def type_of(rows: Tensor) -> str:
        kind: str | None = rows.__dict__.get("node_type")
        if kind is None:
            raise ConfigError(
                "a module drops elements of rows whose node type is unknown: apply dropout to rows of x_dict, to the "
                "result of a convolution, or to a mapping by node type that a module returned"
            )
        return kind

    def follow(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Mark the results of a row-wise operation like its operands; rows of several types become unknown."""
        name = getattr(func, "__name__", "")
        at = args[1] if name == "__getitem__" else slice(None)
        if name in _MOVES_ROWS or not isinstance(at[0] if isinstance(at, tuple) else at, slice):
            return
        operands = [t for t in _tensors(*args, *kwargs.values()) if "node_type" in t.__dict__]
        for table in _tensors(out) if operands else ():
            kinds = {t.__dict__["node_type"] for t in operands if len(t) == len(table)}
            table.__dict__["node_type"] = kinds.pop() if len(kinds) == 1 else None

    def mark_result(self, index: Any, out: Any) -> None:
        """Mark the rows that a convolution computed from the edges of a relation."""
        kind = index.fetcher.edges.edge_type if isinstance(index, SourceIndex) else None
        if kind is not None:
            self.mark_mapping(None, None, {kind.src if index.sources[-1] else kind.dst: out})

    def mark_mapping(self, module: Any, inputs: Any, out: Any) -> None:
        """Hook of modules: mark the values of a mapping by node type."""
        for kind, rows in out.items() if isinstance(out, Mapping) else ():
            if isinstance(rows, Tensor) and rows.dim() and len(rows) == self._counts.get(kind):
                rows.__dict__["node_type"] = kind


def _tensors(*values: Any) -> list[Tensor]:
    """Tensors with rows among values and in their lists and tuples."""
    flat = chain.from_iterable(value if isinstance(value, tuple | list) else (value,) for value in values)
    return [t for t in flat if isinstance(t, Tensor) and not isinstance(t, SourceIndex) and t.dim()]


def _join_relations(view: GraphView) -> Callable[..., tuple[SourceIndex, Tensor]]:
    """``construct_bipartite_edge_index`` for remote sources: those of one relation follow those of another."""

    def construct(
        indices: Mapping[Any, SourceIndex], src_offsets: Mapping[Any, int], dst_offsets: Mapping[str, int],
        edge_attr_dict: Mapping[str, Tensor], num_nodes: int,
    ) -> tuple[SourceIndex, Tensor]:  # fmt: skip
        lists = [indices[kind].fetcher.edges for kind in src_offsets]
        num_local, num_fetched = [len(edges.source_ids) for edges in lists], [edges.num_fetched for edges in lists]
        ends, ids, attr = [], [], []
        for number, kind in enumerate(src_offsets):
            shift = torch.tensor([[sum(num_fetched[:number])], [dst_offsets[kind[-1]]]])
            ends.append(plain(indices[kind]) + shift)
            ids.append(indices[kind].edge_ids + number * RELATION_IDS)
            attr.append(edge_attr_dict["__".join(kind)].expand(len(ids[-1]), -1))

        def exchange(name: str, sizes: list[int], x: Tensor) -> Tensor:
            parts = zip(lists, torch.split(x, sizes), strict=True)
            return torch.cat([getattr(edges, name)(rows) for edges, rows in parts])

        source_ids = torch.cat([edges.source_ids for edges in lists])
        joined = EdgeList(torch.cat(ends, 1), torch.cat(ids), source_ids, sum(dst_offsets.values()), sum(num_fetched))
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

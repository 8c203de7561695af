"""``edge_index`` for unchanged torch_geometric modules: an integer tensor whose sources may be rows of other ranks.

A part of the graph has all in-edges of its nodes, and its own rows have the same numbers as sources and destinations.
So whatever a module computes from destinations is local. Where it gathers rows by sources, the remote rows are fetched
first, by a differentiable exchange. Operations that have no meaning on numbers of remote rows raise ConfigError.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.overrides import resolve_name

from gnnfleet.errors import ConfigError
from gnnfleet.graph.views.edge_list import EdgeList
from gnnfleet.graph.views.local import SELF_LOOP_IDS
from gnnfleet.graph.views.view import GraphView

_CACHED_FETCHES = 2
FetchCache = list[tuple[Tensor, int, Tensor]]
"""The last rows fetched: input, its version, result. A function of the calls, so ranks agree on it."""


class SourceFetcher:
    """Rows of sources during one pass of a module; edge lists with sources of one node type may share the cache."""

    def __init__(self, edges: EdgeList, cache: FetchCache | None = None) -> None:
        self.edges = edges
        self._cache = [] if cache is None else cache
        self.inputs: dict[str, Tensor | None] = {}  # edge_weight and edge_attr of the module
        # The features and, if it was computed before, what the first convolution aggregates of them.
        self.features: Tensor | None = None
        self.aggregated: Tensor | None = None
        self.view: GraphView | None = None  # that a fleet opened, with these edges
        self.is_by_edge = False  # sources have been gathered: tensors have a row for every edge

    def forget(self) -> None:
        """Begin another pass: rows that were fetched before belong to its graph."""
        self._cache.clear()

    @property
    def num_local(self) -> int:
        return len(self.edges.source_ids)

    @cached_property
    def is_whole_graph(self) -> bool:
        """True if the rows of nodes are numbered as in the store, so that their numbers mean what a module expects."""
        ids, edges = self.edges.source_ids, self.edges
        is_local = not edges.has_remote_sources and edges.num_dst == len(ids)
        return is_local and bool((ids == torch.arange(len(ids), device=ids.device)).all())

    def fetch(self, x: Tensor, dim: int = 0) -> Tensor:
        """Collective. x with a row for every source along ``dim``."""
        if not self.edges.has_remote_sources:
            return x
        if dim % x.dim():
            return self.fetch(x.movedim(dim, 0)).movedim(0, dim)
        if x.shape[0] != self.num_local:
            raise ConfigError(
                f"a module gathers rows by the sources of edges from a tensor of {x.shape[0]} rows: "
                f"expected one row for each of {self.num_local} nodes"
            )
        for source, version, rows in self._cache:
            if source is x and version == x._version:
                return rows
        flat = x.reshape(len(x), x.shape[1:].numel())
        flat = flat.to(torch.uint8) if flat.dtype == torch.bool else flat
        rows = self.edges.fetch(flat).view(-1, *x.shape[1:]).to(x.dtype)
        self._cache[:] = [*self._cache[1 - _CACHED_FETCHES :], (x, x._version, rows)]
        return rows

    @contextmanager
    def uncached(self) -> Iterator[None]:
        """Fetch rows that are not kept."""
        self.forget()
        try:
            yield
        finally:
            self.forget()


class SourceIndex(Tensor):
    """[2, E] or [E] row numbers, of which those of sources may be remote."""

    fetcher: SourceFetcher
    sources: tuple[bool, ...]  # for each row of [2, E], or for [E]: are they sources?
    edge_ids: Tensor  # [E] store edge ids; self-loops that a module adds have ids of their own

    @staticmethod
    def make(data: Tensor, fetcher: SourceFetcher, sources: tuple[bool, ...], edge_ids: Tensor) -> SourceIndex:
        index = torch.Tensor._make_subclass(SourceIndex, data)
        index.fetcher, index.sources, index.edge_ids = fetcher, sources, edge_ids
        return index

    @classmethod
    def of(cls, edges: EdgeList, cache: FetchCache | None = None) -> SourceIndex:
        return cls.make(edges.index, SourceFetcher(edges, cache), (True, False), edges.edge_ids)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        handler = _HANDLERS.get(func)
        if handler is not None:
            return handler(func, *args, **(kwargs or {}))
        if getattr(func, "__name__", "") in _PLAIN_RESULTS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        index = next((value for value in args if isinstance(value, SourceIndex)), None)
        if index is not None and index.fetcher.is_whole_graph:
            return func(*plain(args), **(kwargs or {}))
        name = resolve_name(func) or getattr(func, "__name__", str(func))
        raise ConfigError(f"{name} is applied to the sources of edges, whose numbers differ between parts of the graph")

    def like(self, data: Tensor, edge_ids: Tensor | None = None) -> SourceIndex:
        """Wrap other numbers of the same edges, or of those with ``edge_ids``."""
        return SourceIndex.make(data, self.fetcher, self.sources, self.edge_ids if edge_ids is None else edge_ids)


def plain(value: Any) -> Any:
    """Unwrap indices, also in tuples, lists and dictionaries."""
    if isinstance(value, SourceIndex):
        with torch._C.DisableTorchFunctionSubclass():
            return value.as_subclass(Tensor)
    if isinstance(value, tuple | list):
        return type(value)(plain(element) for element in value)
    return {key: plain(element) for key, element in value.items()} if isinstance(value, dict) else value


# Results of these say nothing about the numbering of remote rows: shapes, comparisons of ends, new tensors.
_PLAIN_RESULTS = {
    "__get__", "eq", "ne", "__eq__", "__ne__", "numel", "nelement", "size", "dim", "ndimension", "stride",
    "is_contiguous", "is_floating_point", "is_complex", "get_device", "new_zeros", "new_ones", "new_full", "new_empty",
    "zeros_like", "ones_like", "__len__", "__repr__", "__hash__", "storage_offset", "is_same_size",
}  # fmt: skip
_HANDLERS: dict[Any, Callable[..., Any]] = {}


def _handles(*functions: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(handler: Callable[..., Any]) -> Callable[..., Any]:
        _HANDLERS.update(dict.fromkeys(functions, handler))
        return handler

    return register


@_handles(Tensor.clone, torch.clone, Tensor.contiguous, Tensor.detach, Tensor.long, Tensor.int, Tensor.to, Tensor.cpu)
@_handles(Tensor.view, Tensor.reshape, Tensor.expand, Tensor.expand_as, Tensor.unsqueeze, torch.unsqueeze)
@_handles(Tensor.squeeze, torch.squeeze, Tensor.flatten, torch.flatten)
def _keep_edges(func: Any, index: Any, *args: Any, **kwargs: Any) -> Any:
    data = func(plain(index), *plain(args), **kwargs)
    return index.like(data) if isinstance(index, SourceIndex) else data


@_handles(Tensor.__getitem__)
def _get_item(func: Any, x: Any, at: Any) -> Any:
    if not isinstance(x, SourceIndex):  # rows of nodes by the sources of edges
        first, *others = at if isinstance(at, tuple) else (at,)
        if not isinstance(first, SourceIndex) or any(isinstance(other, SourceIndex) for other in others):
            raise ConfigError("a module gathers rows by the sources of edges along another dimension than the first")
        return func(first.fetcher.fetch(x), plain(at))
    data = plain(x)
    if x.dim() == 1:
        return data[at] if isinstance(at, int) else x.like(data[plain(at)], x.edge_ids[plain(at)])
    if isinstance(at, int):
        return SourceIndex.make(data[at], x.fetcher, (True,), x.edge_ids) if x.sources[at] else data[at]
    if isinstance(at, tuple) and len(at) == 2:
        end, edges = at[0], plain(at[1])
        if isinstance(end, int):
            return x[end][edges]
        if end is Ellipsis or end == slice(None):
            return x.like(data[:, edges], x.edge_ids[edges])
    raise ConfigError(f"a module takes edge_index[{at!r}]: expected one end of all edges, or both ends of some")


@_handles(Tensor.__setitem__)
def _set_item(func: Any, x: Any, at: Any, value: Any) -> Any:
    rows = plain(at)
    if isinstance(x, SourceIndex) and not x.fetcher.is_whole_graph:
        raise ConfigError("a module changes the numbers of sources of edges, which differ between parts of the graph")
    if isinstance(at, SourceIndex) and rows.numel() and int(rows.max()) >= at.fetcher.num_local:
        raise ConfigError("a module assigns rows of nodes by the sources of edges, some of which are on other ranks")
    return func(plain(x), rows, plain(value))


@_handles(Tensor.index_select, torch.index_select)
def _index_select(func: Any, x: Any, dim: Any, index: Any) -> Any:
    if not isinstance(x, SourceIndex):
        return x if index.fetcher.is_by_edge else func(index.fetcher.fetch(x, dim), dim, plain(index))
    if dim % x.dim() != x.dim() - 1:
        raise ConfigError("a module selects among the ends of edges with index_select: use edge_index[0] or [1]")
    return x.like(func(plain(x), dim, plain(index)), x.edge_ids[plain(index)])


@_handles(torch.gather, Tensor.gather)
def _gather(func: Any, x: Tensor, dim: int, index: SourceIndex) -> Any:
    return func(index.fetcher.fetch(x, dim), dim, plain(index))


@_handles(torch.nn.functional.embedding)
def _embedding(func: Any, *args: Any, **kwargs: Any) -> Any:
    raise ConfigError("a module looks up an embedding by node number: set model.embedding instead")


@_handles(torch.cat)
def _concatenate(func: Any, tensors: Iterable[Tensor], dim: int = 0) -> Any:
    """Append edges; those that a module adds are self-loops of local nodes, drawn for by their store id."""
    tensors = list(tensors)
    first = next(tensor for tensor in tensors if isinstance(tensor, SourceIndex))
    if dim % first.dim() != first.dim() - 1:
        raise ConfigError(
            "a module concatenates the ends of edges: expected edges to be appended along the last dimension"
        )
    if first.fetcher.edges.is_bipartite and len(tensors) > 1:
        raise ConfigError(
            "a module appends edges, as self-loops, to those between two node types: set add_self_loops=False there"
        )
    ids = first.fetcher.edges.source_ids

    def ids_of(t: Tensor) -> Tensor:
        return t.edge_ids if isinstance(t, SourceIndex) else SELF_LOOP_IDS + ids[t[-1] if t.dim() == 2 else t]

    edge_ids = torch.cat([ids_of(tensor) for tensor in tensors])
    return first.like(func(plain(tensors), dim), edge_ids)


@_handles(torch.stack)
def _stack(func: Any, tensors: Iterable[Tensor], dim: int = 0) -> Any:
    tensors = list(tensors)
    first = next(tensor for tensor in tensors if isinstance(tensor, SourceIndex))
    if len(tensors) != 2 or dim or first.dim() != 1:
        raise ConfigError("a module stacks the sources of edges: expected the two ends of edges, along dimension 0")
    sources = tuple(isinstance(tensor, SourceIndex) for tensor in tensors)
    return SourceIndex.make(func(plain(tensors), dim), first.fetcher, sources, first.edge_ids)


@_handles(Tensor.flip, torch.flip)
def _flip(func: Any, index: SourceIndex, *dims: Any) -> Any:
    if plain(dims) not in ((0,), ([0],), ((0,),)):
        raise ConfigError("a module reverses the order of edges: expected a flip of their ends, along dimension 0")
    return SourceIndex.make(func(plain(index), *dims), index.fetcher, index.sources[::-1], index.edge_ids)


@_handles(Tensor.__iter__, Tensor.unbind, torch.unbind)
def _unbind(func: Any, index: SourceIndex, dim: int = 0) -> Any:
    if dim or index.dim() != 2:
        raise ConfigError("a module iterates over single edges: expected the two ends of all edges")
    ends = (index[0], index[1])
    return iter(ends) if func is Tensor.__iter__ else ends


@_handles(Tensor.scatter_add_, Tensor.scatter_add, torch.scatter_add)
def _scatter_add(func: Any, x: Tensor, dim: int, index: SourceIndex, src: Tensor) -> Any:
    """Sum over the out-edges of every source: sums for remote sources are sent to their owners."""
    fetcher = index.fetcher
    if fetcher.edges.num_dst != fetcher.num_local and not fetcher.edges.is_bipartite:
        raise ConfigError("a module sums over the out-edges of nodes, of which a block or a layer has some only")
    if not fetcher.edges.has_remote_sources:
        return func(x, dim, plain(index), src)
    if dim % x.dim() or x.shape[0] != fetcher.num_local:
        raise ConfigError("a module sums over sources along another dimension than the first")
    rows = x.new_zeros(fetcher.edges.num_fetched, *x.shape[1:]).scatter_add(0, plain(index), src)
    total = fetcher.edges.send_back(rows.reshape(len(rows), x.shape[1:].numel())).view(-1, *x.shape[1:])
    return x.add_(total) if func is Tensor.scatter_add_ else x + total


@_handles(Tensor.index_add_, Tensor.index_add, torch.index_add)
def _index_add(func: Any, x: Tensor, dim: int, index: SourceIndex, source: Tensor) -> Any:
    column = index.view(-1, *([1] * (source.dim() - 1))).expand(*source.shape)
    scatter = Tensor.scatter_add_ if func is Tensor.index_add_ else Tensor.scatter_add
    return _scatter_add(scatter, x, dim, column, source)

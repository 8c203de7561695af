"""Message passing of unchanged convolutions in less memory: backward computes messages again instead of storing them.

* ``rebuilt``: a propagate runs again as a whole, and fetches remote rows again. For any convolution.
* ``chunked``: some destinations at a time, with all their in-edges. Remote rows are kept.
* ``routed``: through ``view.propagate``, which keeps neither messages nor remote rows. For a sum, mean or maximum of
  messages of single edges, over the graph's own edges.

A convolution that cannot be routed is chunked, and one that cannot be chunked is rebuilt. This must not depend on the
rows of a rank, since all ranks run the same exchanges.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.func import functional_call
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from gnnfleet.errors import ConfigError
from gnnfleet.graph.views.edge_list import EdgeList
from gnnfleet.nn.pyg.rules import PassRules, pass_over
from gnnfleet.nn.pyg.source_index import SourceFetcher, SourceIndex, plain
from gnnfleet.ops.csr import CSR
from gnnfleet.ops.message import MessageBlock, MessageCall, build_message, chunk_of

PropagateMode = Literal["auto", "plain", "chunked", "rebuilt", "routed"]
PROPAGATIONS: tuple[PropagateMode, ...] = ("plain", "rebuilt", "chunked", "routed")
"""By time of a step (benchmarks/pyg_memory.py)."""
_REDUCES = {"SumAggregation": "sum", "MeanAggregation": "mean", "MaxAggregation": "max"}
_BY_DESTINATION = {
    *_REDUCES, "MinAggregation", "MulAggregation", "VarAggregation", "StdAggregation", "SoftmaxAggregation",
    "PowerMeanAggregation", "MedianAggregation", "QuantileAggregation", "MultiAggregation", "FusedAggregation",
    "DegreeScalerAggregation",
}  # fmt: skip
"""Aggregations of one destination at a time; others may pad to the largest degree, for example."""
_SRC, _DST, _EDGE = range(3)


@dataclass(frozen=True)
class Propagation:
    """The mode of computing messages, and the edges in one chunk; ``auto`` is plain unless memory is limited."""

    mode: PropagateMode = "auto"
    edges_at_once: int = 1 << 17

    def scaled(self, share: float) -> Propagation:
        """The same number of chunks on a share of the edges."""
        return replace(self, edges_at_once=max(1, round(share * self.edges_at_once)))

    def methods(self, rules: PassRules, module: Any) -> dict[str, Callable[..., Any]]:
        """The methods of a module to replace during a pass."""
        is_standard = hasattr(module, "edge_updater") and "propagate" not in vars(module)  # no explanation, for example
        if self.mode in ("auto", "plain") or not is_standard or len(rules.view.node_types) > 1:
            return {}
        has_hooks = any(hooks for name, hooks in vars(module).items() if name.endswith("_hooks"))
        conv = _Convolution(rules, module, self.edges_at_once, module.propagate)
        updater = partial(conv.rebuilt, inner=module.edge_updater)
        return {"propagate": conv.rebuilt if has_hooks else getattr(conv, self.mode), "edge_updater": updater}


@dataclass(frozen=True)
class _Arguments:
    """Arguments of a propagate, and the tensors among them that messages read."""

    edge_index: SourceIndex
    values: Mapping[str, Any]
    tables: dict[tuple[str, int], Tensor]  # by argument, and _SRC, _DST or _EDGE
    num_rows: int  # of the result

    @classmethod
    def of(cls, conv: Any, edge_index: SourceIndex, size: Any, values: Mapping[str, Any]) -> _Arguments:
        names, rows = _read_names(conv), list(size or (None, None))
        tables: dict[tuple[str, int], Tensor] = {}
        for name, value in values.items():
            is_read = [f"{name}_j" in names, f"{name}_i" in names]
            for kind, end in enumerate(_pair(value) if any(is_read) else ()):
                if isinstance(end, Tensor) and (is_read[kind] or end is not value):
                    rows[kind] = end.shape[conv.node_dim]
                    tables |= {(name, kind): end} if is_read[kind] else {}
            if not any(is_read) and isinstance(value, Tensor) and value.shape[:1] == edge_index.shape[1:]:
                tables[name, _EDGE] = value
        return cls(edge_index, values, tables, rows[_SRC] if rows[_DST] is None else rows[_DST])

    def of_kind(self, kind: int) -> dict[str, Tensor]:
        return {name: table for (name, k), table in self.tables.items() if k == kind}

    def is_separable(self, conv: Any) -> bool:
        """True if sizes tell tensors of nodes from those of edges, and messages read no tensor of all nodes."""
        sizes, names = {self.num_rows, self.edge_index.fetcher.num_local}, {name for name, _ in self.tables}
        others = [*conv.parameters(), *conv.buffers()]
        others += [end for name, value in self.values.items() if name not in names for end in _pair(value)]
        has_others = any(len(t) in sizes for t in others if isinstance(t, Tensor) and t.dim())
        return self.edge_index.shape[1] not in sizes and not has_others


@dataclass(frozen=True)
class _Convolution:
    """A convolution during a pass, with other implementations of its ``propagate``."""

    rules: PassRules
    conv: Any
    edges_at_once: int
    propagate: Callable[..., Any]

    def rebuilt(self, edge_index: Any, *args: Any, inner: Callable[..., Any] | None = None, **values: Any) -> Any:
        def work() -> Any:
            with edge_index.fetcher.uncached() if isinstance(edge_index, SourceIndex) else nullcontext():
                return (inner or self.propagate)(edge_index, *args, **values)

        return self._recomputed(work, [end for value in values.values() for end in _pair(value)], self.resume_later())

    def chunked(self, edge_index: Any, size: Any = None, **values: Any) -> Any:
        if not self._can_chunk(edge_index):
            return self.rebuilt(edge_index, size=size, **values)
        arguments = _Arguments.of(self.conv, edge_index, size, values)
        fetch, dim, num_rows = edge_index.fetcher.fetch, self.conv.node_dim, arguments.num_rows
        tables = {key: fetch(rows, dim) if key[1] == _SRC else rows for key, rows in arguments.tables.items()}
        arguments = replace(arguments, tables=tables)
        dst, order, bounds = plain(edge_index)[1], None, [(0, 0), (num_rows, edge_index.shape[1])]
        if arguments.is_separable(self.conv):
            if bool((dst.diff() < 0).any()):
                dst, order = dst.sort(stable=True)
            bounds = _chunk_bounds(dst, num_rows, self.edges_at_once)
        out, resume, rest = [], self.resume_later(), list(tables.values())
        with _unchanged(self.conv) if len(bounds) > 2 else nullcontext():
            for (low, first), (high, last) in pairwise(bounds):
                edges = torch.arange(first, last) if order is None else order[first:last]
                work = partial(self._chunk, arguments, range(low, high), edges)
                rows, *rest = self._recomputed(work, list(tables.values()), resume, *rest)
                out.append(rows)
        return torch.cat(out, dim) if len(out) > 1 else out[0]

    def _chunk(self, arguments: _Arguments, rows: range, edges: Tensor, *tables: Tensor) -> tuple[Any, ...]:
        """(the result of some destinations, tables for the next chunk)."""
        index = arguments.edge_index
        src, dst = plain(index)[:, edges]
        at = {_SRC: src, _DST: torch.arange(rows.start, rows.stop), _EDGE: edges}
        taken: dict[tuple[str, int], Tensor] = {}
        rest: list[Tensor] = []
        for (name, kind), table in zip(arguments.tables, tables, strict=True):
            dim = 0 if kind == _EDGE else self.conv.node_dim
            taken[name, kind], alias = _Take.apply(table, at[kind], dim)  # type: ignore[no-untyped-call]
            rest.append(alias)
        pairs = {name: (taken.get((name, _SRC)), taken.get((name, _DST))) for name, _ in taken}
        values = {**arguments.values, **{name: taken.get((name, _EDGE), pair) for name, pair in pairs.items()}}
        fetcher = SourceFetcher(replace(index.fetcher.edges, fetch=EdgeList.fetch))
        fetcher.is_by_edge = True
        chunk = SourceIndex.make(torch.stack([src, dst - rows.start]), fetcher, index.sources, index.edge_ids[edges])
        return self.propagate(chunk, size=(None, len(rows)), **values), *rest

    def routed(self, edge_index: Any, size: Any = None, **values: Any) -> Any:
        if not self._can_route(edge_index):
            return self.chunked(edge_index, size, **values)
        arguments = _Arguments.of(self.conv, edge_index, size, values)
        src, dst, edge = (arguments.of_kind(kind) for kind in (_SRC, _DST, _EDGE))
        if any(self.conv.node_dim % rows.dim() for rows in (*src.values(), *dst.values())):
            return self.chunked(edge_index, size, **values)
        order, reduce = edge_index.fetcher.edges.view_order, _REDUCES[type(self.conv.aggr_module).__name__]
        num_dropouts = self.rules.num_dropouts
        try:
            message = _RoutedMessage(self.conv, arguments, self.resume_later(), self.edges_at_once).with_params()
        except (ConfigError, RuntimeError, IndexError, ValueError):  # it fails without edges, or reads other gradients
            self.rules.num_dropouts = num_dropouts
            return self.chunked(edge_index, size, **values)
        edge = {name: rows if order is None else rows.index_select(0, order) for name, rows in edge.items()}
        inputs: Any = {"src": src, "dst": dst, "edge": edge, "params": [*message.params.values()]}
        out = self.rules.view.propagate(message, reduce=reduce, **inputs)
        return functional.pad(out, (0, 0) * (out.dim() - 1) + (0, arguments.num_rows - len(out)))

    def _can_chunk(self, edge_index: Any) -> bool:
        """True if propagate is torch_geometric's and reads only what belongs to the in-edges of a destination."""
        from torch_geometric.nn import Aggregation, MessagePassing

        kind, modules, names = type(self.conv), list(self.conv.modules()), _read_names(self.conv)
        ends = {name[:-2] for name in names if name[-2:] in ("_i", "_j")} - {"size", "edge_index"}
        generated = (MessagePassing.__module__, f"{kind.__module__}_{kind.__name__}_")
        return (
            isinstance(edge_index, SourceIndex)
            and edge_index.sources == (True, False)
            and edge_index.fetcher.edges.sampling_scale is None
            and self.propagate.__module__.startswith(generated)
            and kind.update is MessagePassing.update
            and bool(ends)
            and not names & (ends | {"edge_index", "edge_index_j", "adj_t", "size", "size_j"})
            and all(type(m).__name__ in _BY_DESTINATION for m in modules if isinstance(m, Aggregation))
            and not any("Norm" in type(m).__name__ and not isinstance(m, torch.nn.LayerNorm) for m in modules)
            and not any(isinstance(value, Tensor) for m in modules for value in vars(m).values())
        )

    def _can_route(self, edge_index: Any) -> bool:
        """True if moreover edges are the graph's, and rows are a sum, mean or maximum of messages of single edges."""
        from torch_geometric.nn import MessagePassing

        conv = self.conv
        return (
            self._can_chunk(edge_index)
            and edge_index.edge_ids is edge_index.fetcher.edges.edge_ids
            and edge_index.fetcher.edges.edge_type is not None
            and type(conv).aggregate is MessagePassing.aggregate
            and type(conv.aggr_module).__name__ in _REDUCES
            and not set(conv.inspector.get_param_names("message")) & conv.special_args
        )

    def _recomputed(self, work: Callable[..., Any], inputs: list[Any], resume: _Resume, *tables: Tensor) -> Any:
        """``work(*tables)``, of which backward has the inputs only."""
        versions = [t._version for t in inputs if isinstance(t, Tensor)]

        def run(*tables: Tensor) -> Any:
            if versions != [t._version for t in inputs if isinstance(t, Tensor)]:
                name = type(self.conv).__name__
                raise ConfigError(f"the module changes inputs of {name} in place later: set model.propagate=plain")
            with resume():
                return work(*tables)

        if not torch.is_grad_enabled():
            return run(*tables)
        return checkpoint(run, *tables, use_reentrant=False, preserve_rng_state=False)

    def resume_later(self) -> _Resume:
        """Return a context with the present state of the rules, for now and for backward."""
        rules, before = self.rules, self.rules.num_dropouts

        @contextmanager
        def resume() -> Iterator[PassRules]:
            if rules.is_active:
                rules.num_dropouts = before
                yield rules
                return
            with _unchanged(self.conv), pass_over(rules.view, self.conv, num_dropouts=before) as again:
                yield again

        return resume


_Resume = Callable[[], AbstractContextManager[PassRules]]


@contextmanager
def _unchanged(module: torch.nn.Module) -> Iterator[None]:
    """Restore attributes and buffers, which messages may set."""
    attributes = [(child, dict(vars(child))) for child in module.modules()]
    buffers = [(buffer, buffer._version, buffer.clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        for child, values in attributes:
            vars(child).clear()
            vars(child).update(values)
        for buffer, version, value in buffers:
            if buffer._version != version:
                buffer.copy_(value)


class _Take(torch.autograd.Function):
    """(rows of a table, the table): the table goes to the next chunk, so that all gradients add to one tensor."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, at: Tensor, dim: int) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(at)
        ctx.shape, ctx.dim = table.shape, dim
        ctx.set_materialize_grads(False)
        return table.index_select(dim, at), table.view_as(table)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, total: Tensor | None) -> tuple[Tensor | None, None, None]:
        if grad is not None:
            total = grad.new_zeros(ctx.shape) if total is None else total
            total.index_add_(ctx.dim, ctx.saved_tensors[0], grad)
        return total, None, None


class _Message(torch.nn.Module):
    def __init__(self, conv: Any) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, **values: Any) -> Any:
        return self.conv.message(**values)


@dataclass(frozen=True)
class _RoutedMessage:
    """The message of a convolution as one of ``view.propagate``."""

    conv: Any
    arguments: _Arguments
    resume: _Resume
    edges_at_once: int
    params: Mapping[str, Tensor] = field(default_factory=dict)

    def __call__(self, src: Mapping[str, Any], dst: Mapping[str, Any], edge: Mapping[str, Any], *params: Tensor) -> Any:
        inspector, ids, index = self.conv.inspector, edge["id"], self.arguments.edge_index
        names = inspector.get_param_names("message")
        ends = {n: (src if n[-2:] == "_j" else dst).get(n[:-2]) for n in names if n[-2:] in ("_i", "_j")}
        values = inspector.collect_param_data("message", {**self.arguments.values, **edge, **ends})
        with self.resume() as rules:
            rules.begin_edges(index.like(ids.new_zeros(2, len(ids)), ids))
            try:
                return functional_call(_Message(self.conv), dict(zip(self.params, params, strict=True)), kwargs=values)
            finally:
                rules.edges = None

    def with_params(self) -> _RoutedMessage:
        """Add the parameters that the message uses; raises an error if it does not work without edges."""
        none, params = torch.zeros(0, dtype=torch.int64), self.conv.named_parameters("conv")
        message = replace(self, params={name: value for name, value in params if value.requires_grad})
        src, dst, edge = ({n: rows[:0] for n, rows in self.arguments.of_kind(k).items()} for k in (_SRC, _DST, _EDGE))
        call = MessageCall(message=message, reduce="sum", num_dst=0, dst=dst, params=[*message.params.values()])
        block = MessageBlock(structure=CSR(none.new_zeros(1), none, 0), edge_ids=none, src=src, edge=edge)
        with torch.enable_grad():
            keys = [("params", index) for index in range(len(call.params))]
            (value,), leaves = build_message(call, block, chunk_of(block, 0, 0), keys)
            total = value.sum() + torch.zeros((), requires_grad=True)  # also without parameters
            grads = torch.autograd.grad(total, [leaves[key] for key in keys], allow_unused=True) if keys else ()
        used = [pair for pair, grad in zip(message.params.items(), grads, strict=True) if grad is not None]
        return replace(self, params=dict(used))


def _read_names(conv: Any) -> set[str]:
    """Arguments of message and aggregate."""
    return {name for step in ("message", "aggregate") for name in conv.inspector.get_param_names(step)}


def _pair(value: Any) -> Any:
    """(source, destination) of an argument."""
    return value if isinstance(value, tuple | list) else (value, value)


def _chunk_bounds(dst: Tensor, num_rows: int, edges_at_once: int) -> list[tuple[int, int]]:
    """(row, edge) at the ends of chunks of whole rows, of at least one row and at most ``edges_at_once`` edges."""
    indptr = torch.searchsorted(dst, torch.arange(num_rows + 1))
    rows = [0]
    while rows[-1] < num_rows or len(rows) == 1:
        limit = indptr[rows[-1]] + edges_at_once
        following = int(torch.searchsorted(indptr, limit, right=True)) - 1
        rows.append(min(max(following, rows[-1] + 1), num_rows))
    return [(row, int(indptr[row])) for row in rows]

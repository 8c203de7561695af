"""SIGN: hops of the features are computed once, before training; training then reads each node's own rows only.

Frasca et al., https://arxiv.org/abs/2004.11198. With one edge type hop k is P^k x, P the normalised adjacency of GCN.
With several, as in R-SIGN, NARS and SeHGNN, there is a table for each metapath of up to ``hops`` edge types that ends
at the labelled node type, and an edge type takes the mean over in-edges. Tables that exceed ``table_memory`` lie in
unnamed memory-mapped files.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gnnfleet.errors import ConfigError
from gnnfleet.graph.graph import EdgeType
from gnnfleet.graph.views.view import GraphView, first_rows
from gnnfleet.nn.base import Aggregate, BuiltInModel, Features, RowsByType
from gnnfleet.nn.conv.gcn import normalized_sum
from gnnfleet.nn.layerwise import allocate_rows
from gnnfleet.nn.norm import InputNorm, make_norm

MAX_PATHS = 200
"""Metapaths of a model; each is a table as wide as the features of its first node type."""

_ROWS_PER_CHUNK = 1 << 16  # of an evaluation
_COPIES = 4  # tensors of a hop alive at the same time: source rows, scaled rows, aggregate and a copy into the table

Path = tuple[EdgeType, ...]
"""A metapath, in the direction of messages. The empty one is the node itself."""


class SignModel(BuiltInModel):
    """MLP on hops: a linear map of each hop → norm → activation → dropout, concatenated, then ``layers`` − 1 maps.

    Takes the arguments of ``GNN``. Node types without features get two fixed ones: 1 and log(1 + in-degree).
    """

    num_layers, is_precomputed = 1, True
    target: str

    def _build(self, widths: dict[str, int], target: str | None, owned_ids: Mapping[str, Tensor] | None) -> None:
        config = self.config
        if config.embedding:
            raise ConfigError("sign computes hops once, and embeddings change in every step: leave out model.embedding")
        if not self.edge_types or (target is None and len(widths) > 1):
            raise ConfigError("sign needs the edge types and one labelled node type: use build_model, or model rgcn")
        self.target = self.edge_types[0].dst if len(widths) == 1 else str(target)
        self._widths = {edge_type.src: next(iter(widths.values())) for edge_type in self.edge_types}
        self._widths |= widths if len(widths) > 1 else {}
        hops = config.hops if config.hops is not None else 3 if len(self.edge_types) == 1 else 2
        self.paths = _metapaths(self.edge_types, self.target, hops)
        self.table_memory = 4 << 30
        self.input_norm = InputNorm(config.input_norm, widths)

        inputs = [self._width(path) for path in ((), *self.paths)]
        maps = [*[config.hidden] * (config.layers - 1), self.out_channels]
        self.hops = torch.nn.ModuleList(torch.nn.Linear(width, maps[0]) for width in inputs)
        norm = config.norm, config.hidden
        self.norms = torch.nn.ModuleList(make_norm(*norm) for _ in inputs if config.layers > 1)
        joined = [maps[0] * len(inputs), *maps[1:-1]]
        self.lins = torch.nn.ModuleList(torch.nn.Linear(*sizes) for sizes in zip(joined, maps[1:], strict=False))
        self.lin_norms = torch.nn.ModuleList(make_norm(*norm) for _ in self.lins[1:])

    def _width(self, path: Path) -> int:
        return self._widths[path[0].src if path else self.target] or 2

    @property
    def width(self) -> int:
        return max(self.config.hidden, *(self._width(path) for path in self.paths), 1)

    # -- before training --

    def precompute(self, view: GraphView, x: Features) -> Aggregate:
        """Collective. The table of each metapath, [N_dst, F]; also of features that the model makes for the target."""
        features = self._features(view, x)
        counts = {kind: len(rows) for kind, rows in features.items()}
        paths = [path for path in ((), *self.paths) if path or not self._widths[self.target]]
        share = self.table_memory // max(1, len(paths))
        tables = {}
        for path in paths:
            like = features[self.target].new_empty(0, self._width(path))
            tables[path] = allocate_rows(like, counts[self.target], limit=share)
        with torch.no_grad():
            parts = self._column_parts(view, counts)
            for part in range(parts):
                columns = {kind: rows.tensor_split(parts, 1)[part] for kind, rows in features.items()}
                for path, rows in self._hops(view, columns):
                    if path in tables:
                        tables[path].tensor_split(parts, 1)[part][:] = rows
        return {self._table_name(path): table for path, table in tables.items()}

    def _features(self, view: GraphView, x: Features) -> dict[str, Tensor]:
        """Rows by node type under the names of the edge types, normalised, or made from degrees."""
        tables = x if isinstance(x, Mapping) else {self.target: x}
        dtype, out = next(self.parameters()).dtype, {}
        for kind in self._widths:
            rows = tables.get(kind)
            if rows is None or not rows.shape[1]:
                degree = view.for_type(kind).graph_degree().to(dtype)
                rows = torch.stack([torch.ones_like(degree), degree.log1p()], 1)
            out[kind] = self.input_norm(rows, kind)
        return out

    def _column_parts(self, view: GraphView, counts: Mapping[str, int]) -> int:
        """Number of parts of columns, so many that a hop stays within ``table_memory``; equal on all ranks."""
        rows = float(view.for_type(view.node_types[0]).sum_over_nodes(torch.tensor([float(sum(counts.values()))])))
        lengths = [len(path) for path in self._prefixes]
        fan = max([lengths.count(length) for length in lengths], default=1)
        itemsize = next(self.parameters()).element_size()
        width = max(self._widths.values())
        parts = math.ceil(_COPIES * fan * rows * width * itemsize / self.table_memory)
        return max(1, min(parts, width))

    @property
    def _prefixes(self) -> set[Path]:
        return {path[:length] for path in self.paths for length in range(1, len(path) + 1)}

    def _hops(self, view: GraphView, x: Mapping[str, Tensor]) -> Iterator[tuple[Path, Tensor]]:
        """The rows of all metapaths that end at the target, some columns of each."""
        prefixes = self._prefixes
        inner = {path[:-1] for path in prefixes}
        rows: dict[str, dict[Path, Tensor]] = {kind: {(): table} for kind, table in x.items()}
        yield (), x[self.target]
        for _ in range(max(map(len, self.paths), default=0)):
            ends = {kind: {path: table for path, table in of.items() if path in inner} for kind, of in rows.items()}
            rows = {kind: {} for kind in x}
            for edge_type, totals in self._hop(view, ends, x).items():
                for path, total in zip(ends[edge_type.src], totals, strict=True):
                    if (*path, edge_type) in prefixes:
                        rows[edge_type.dst][*path, edge_type] = total
            yield from rows[self.target].items()

    def _hop(
        self, view: GraphView, ends: Mapping[str, Mapping[Path, Tensor]], x: Mapping[str, Tensor]
    ) -> dict[EdgeType, tuple[Tensor, ...]]:
        """One hop over all edge types, in one exchange: the rows of every path that an edge type continues."""
        widths = {kind: [table.shape[1] for table in of.values()] for kind, of in ends.items()}
        sources = {
            kind: torch.cat([x[kind][:, :0], *of.values()], 1) if len(of) != 1 else next(iter(of.values())).contiguous()
            for kind, of in ends.items()
        }
        if len(self.edge_types) > 1 or len(sources) > 1:
            out = view.aggregate_relations(sources, reduce="mean", weighted=self.config.edge_weight)
            return {edge_type: torch.split(rows, widths[edge_type.src], 1) for edge_type, rows in out.items()}
        weight = view.weight if self.config.edge_weight else None
        (rows,) = sources.values()
        return {self.edge_types[0]: (normalized_sum(view, rows, weight, loop=1.0, fresh=False),)}

    def _table_name(self, path: Path) -> EdgeType:
        ends = (edge_type.relation + ":" + edge_type.dst for edge_type in path[:-1])
        first, last = (path[0].src, path[-1].relation) if path else (self.target, "")
        return EdgeType(first, ":".join([*ends, last]), self.target)

    # -- steps --

    def compute(
        self, layer_index: int, view: GraphView, x: Any, carry: Tensor | None, *, aggregated: Aggregate | None = None
    ) -> tuple[RowsByType, Tensor | None]:
        return self._classify(self._hidden(view, self._inputs(view, x, aggregated))), None

    def embed(
        self, views: GraphView | Sequence[GraphView], x: Features, *, aggregated: Aggregate | None = None
    ) -> RowsByType:
        """Input rows of the last linear map."""
        view = (views if isinstance(views, Sequence) else [views])[0].with_step(layer=0)
        return self._hidden(view, self._inputs(view, x, aggregated))

    def exact(self, view: GraphView, x: Features, *, aggregated: Aggregate | None = None) -> tuple[RowsByType, Any]:
        """(output, input of the last linear map) of all rows, in chunks of rows."""
        view = view.with_step(layer=0, training=False)
        with torch.no_grad():
            inputs = [torch.split(rows, _ROWS_PER_CHUNK) for rows in self._inputs(view, x, aggregated)]
            hidden = torch.cat([self._hidden(view, chunk) for chunk in zip(*inputs, strict=True)])
            out = [self._classify(rows) for rows in torch.split(hidden, _ROWS_PER_CHUNK)]
        return torch.cat(out), hidden

    def _inputs(self, view: GraphView, x: Features, aggregated: Aggregate | None) -> list[Tensor]:
        """Rows of every hop of the destinations."""
        nodes = view.for_type(self.target)
        if aggregated is None:
            if nodes.num_src != nodes.num_dst:
                raise ConfigError("sign reads hops of the whole graph: pass a block the rows of precompute")
            aggregated = self.precompute(view, x)
        assert isinstance(aggregated, Mapping)
        own = aggregated.get(self._table_name(()))
        if own is None:
            own = x[self.target] if isinstance(x, Mapping) else x
            assert own is not None
            own = self.input_norm(first_rows(own, nodes.num_dst), self.target)
        return [own, *(aggregated[self._table_name(path)] for path in self.paths)]

    def _hidden(self, view: GraphView, inputs: Sequence[Tensor]) -> Tensor:
        nodes, rate = view.for_type(self.target), self.config.input_dropout
        dropped = (self._drop(nodes, x, 2 * i, rate) for i, x in enumerate(inputs))
        maps = [lin(x) for lin, x in zip(self.hops, dropped, strict=True)]
        if self.config.layers == 1:
            return torch.stack(maps).sum(0)
        rows = torch.cat([self._after(nodes, x, self.norms[i], 2 * i + 1) for i, x in enumerate(maps)], 1)
        for i, (lin, norm) in enumerate(zip(self.lins, self.lin_norms, strict=False)):
            rows = self._after(nodes, lin(rows), norm, 2 * (len(inputs) + i))
        return rows

    def _classify(self, rows: Tensor) -> Tensor:
        out: Tensor = self.lins[-1](rows) if len(self.lins) else rows
        return out

    def _after(self, view: GraphView, x: Tensor, norm: torch.nn.Module, mask_id: int) -> Tensor:
        x = x if isinstance(norm, torch.nn.Identity) else norm(view, x)
        return self._drop(view, self.act(x), mask_id)


def _metapaths(edge_types: Sequence[EdgeType], target: str, hops: int) -> tuple[Path, ...]:
    """Metapaths of 1 to ``hops`` edge types that end at ``target``, the short ones first; raises ConfigError."""
    paths: list[Path] = []
    latest: list[Path] = [()]
    for _ in range(hops):
        latest = [
            (kind, *path) for path in latest for kind in edge_types if kind.dst == (path[0].src if path else target)
        ]
        paths += latest
        if len(paths) > MAX_PATHS:
            raise ConfigError(f"{hops} hops have more than {MAX_PATHS} metapaths: set a lower model.hops")
    return tuple(paths)

"""GNN: all built-in models of static graphs as one ordered list of layers.

A hidden layer is conv → norm → activation → dropout, the last is the conv alone, as in PyG's BasicGNN. gcn2, res+ and
the heterogeneous models have a linear map before the first conv and after the last, inside the first and last layer.
Dropout is drawn from the view's key. Dropout and batch statistics apply if both the model and the view are in training
mode.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from gnnfleet.errors import ConfigError, InputError
from gnnfleet.graph.graph import EdgeType, Graph
from gnnfleet.graph.views.view import GraphView, first_rows
from gnnfleet.nn.base import Aggregate, BuiltInModel, Features, RowsByType
from gnnfleet.nn.config import HETERO_MODELS, ModelConfig
from gnnfleet.nn.embedding import NodeEmbedding
from gnnfleet.nn.layers import make_layers
from gnnfleet.nn.norm import InputNorm, make_norm, module_name
from gnnfleet.nn.sign import SignModel

_T = TypeVar("_T")

# ``mask_id`` of the dropouts of one layer: after the conv, before it, at the end, on the input. Node types differ by a
# multiple of the stride.
_AFTER, _BEFORE, _LAST, _INPUT, _MASK_STRIDE = 0, 1, 2, 3, 4
# A type is small if it has at most this fraction of the nodes of the largest type.
_SMALL_TYPE = 10
# Models that read the edge weight as a column of the edge features, since their sums have weights of their own.
_WEIGHT_AS_COLUMN = ("gat", "gatv2", "res+")
# Convolutions with a fused ReLU.
_FUSES_RELU = ("sage", "gcn", "gat", "gatv2")


class GNN(BuiltInModel):
    """Model on node rows, [N_src, in] → [N_dst, out]; the convs name their papers.

    ``in_channels`` is the width of the features, by node type if there are several. Nodes of width 0 get learnable
    embeddings, ``num_nodes`` of each type. ``edge_types`` orders the relations; ``target`` is the node type of the
    output, None for all. ``edge_dim`` is the width of edge features; with ``edge_weight`` the layers that transform
    these read the weights as one more column. With ``owned_ids`` the embedding tables hold the rows of these nodes
    only, by type. Raises ConfigError.
    """

    def _build(self, widths: dict[str, int], target: str | None, owned_ids: Mapping[str, Tensor] | None) -> None:
        config = self.config
        self.edge_weight = self.edge_weight and config.name in _WEIGHT_AS_COLUMN
        self.hetero = len(widths) > 1 or config.name in HETERO_MODELS
        self._check(widths, target)
        self._read_types = _read_types(widths, self.edge_types, target, config.layers)
        self.embeddings = torch.nn.ModuleDict()
        self._normalised: dict[str, tuple[Tensor, int, Tensor]] = {}
        self._has_type_vectors = config.name in HETERO_MODELS and any(widths.values())
        self.input_norm = InputNorm(config.input_norm, widths)
        for kind in widths:
            widths[kind] += self._add_embedding(kind, widths[kind], owned_ids)
        self.projections = torch.nn.ModuleDict()
        if self.hetero:
            for kind, width in widths.items():
                projection = torch.nn.Linear(width or config.hidden, config.hidden)
                if not width:  # the bias is the vector of the type
                    projection.weight = torch.nn.Parameter(projection.weight.detach()[:, :0].clone())
                self.projections[module_name(kind)] = projection
        first = config.hidden if self.hetero else next(iter(widths.values()))
        kinds = tuple(widths) if self.hetero else ()
        columns = (self.edge_dim or 0) + self.edge_weight or None
        sizes = first, self.out_channels
        self.convs, self.lins = make_layers(config, *sizes, self.edge_types, self._read_types, edge_dim=columns)
        self.norms = torch.nn.ModuleList(self._make_norm(index, kinds) for index in range(self.num_layers))

    def _check(self, widths: Mapping[str, int], target: str | None) -> None:
        name = self.config.name
        if not self.config.is_relational and (self.hetero or len(self.edge_types) > 1):
            counts = f"{len(widths)} node types and {len(self.edge_types)} edge types"
            models = ", ".join(("rgcn", *HETERO_MODELS))
            raise ConfigError(f"{name} needs one node type and one edge type, found {counts}: use one of {models}")
        if self.config.is_relational and not self.edge_types:
            raise ConfigError(f"{name} needs the edge types: give edge_types, or use build_model")
        if self.hetero and target is not None and target not in widths:
            raise ConfigError(f"target must be one of the node types {', '.join(widths)}, found {target!r}")

    def _add_embedding(self, kind: str, num_features: int, owned_ids: Mapping[str, Tensor] | None) -> int:
        """Create the embedding table of a node type if it needs one; return its width.

        In heterogeneous models, nodes without features begin with a vector of their type if others have features and
        the type is not small: few nodes have many edges each, from which to learn a row.
        """
        count = self._of_type(kind, self.num_nodes)
        is_small = count is not None and _SMALL_TYPE * count <= max((self.num_nodes or {}).values(), default=0)
        needs_rows = not num_features and (is_small or not self._has_type_vectors)
        width = self.config.embedding or (self.config.hidden if needs_rows else 0)
        if not width:
            return 0
        if count is None:
            raise ConfigError(f"embeddings of nodes {kind!r} need the number of nodes: give num_nodes")
        self.embeddings[module_name(kind)] = NodeEmbedding(count, width, ids=self._of_type(kind, owned_ids), kind=kind)
        return width

    def _of_type(self, kind: str, by_type: Mapping[str, _T] | None) -> _T | None:
        """Look up a node type; a single type may have any name."""
        by_type = by_type or {}
        return by_type.get(kind) if self.hetero or kind else next(iter(by_type.values()), None)

    def _make_norm(self, index: int, kinds: Sequence[str]) -> torch.nn.Module:
        name, hidden = self.config.name, self.config.hidden
        last = index == self.num_layers - 1 and name not in ("gcn2", *HETERO_MODELS)
        if name == "res+" or last or self.config.norm == "none":  # blocks of res+ contain their norms
            return torch.nn.Identity()
        if not kinds:
            return make_norm(self.config.norm, hidden)
        kinds = [kind for kind in kinds if name == "rgcn" or kind in self._read_types[index]]
        return torch.nn.ModuleDict({module_name(kind): make_norm(self.config.norm, hidden) for kind in kinds})

    @property
    def num_layers(self) -> int:
        return self.config.layers

    @property
    def width(self) -> int:
        return self.config.hidden

    # -- running --

    def embed(
        self, views: GraphView | Sequence[GraphView], x: Features, *, aggregated: Aggregate | None = None
    ) -> RowsByType:
        """Input rows of the last layer, by node type if there are several; embeddings are part of the input."""
        if self.num_layers == 1:
            return self._input_rows((views if isinstance(views, Sequence) else [views])[0].with_step(layer=0), x)
        return super().embed(views, x, aggregated=aggregated)

    def compute(
        self, layer_index: int, view: GraphView, x: Any, carry: Tensor | None, **first_layer: Any
    ) -> tuple[RowsByType, Tensor | None]:
        """Run a conv with its norm, activation and dropout: (rows of the view's destinations, carry of these rows).

        The last layer of a heterogeneous model returns rows of the target only. ``first_layer`` are ``aggregated`` or
        ``precomputed_product``, as in ``layer``.
        """
        rows: Any = x if layer_index or "precomputed_product" in first_layer else self._input_rows(view, x)
        if self.hetero:
            return self._hetero_layer(layer_index, view, rows, **first_layer), None
        if self.config.name == "res+":
            return self._block_layer(layer_index, view, rows), None
        if self.config.name == "gcn2":
            return self._deep_layer(layer_index, view, rows, carry)
        if layer_index == self.num_layers - 1:
            return self._convolve(layer_index, view, rows, **first_layer), None
        relu = self.config.name in _FUSES_RELU and isinstance(self.norms[layer_index], torch.nn.Identity)
        relu = relu and self.config.act == "relu"
        rows = self._convolve(layer_index, view, rows, **first_layer, **({"relu": True} if relu else {}))
        return (self._drop(view, rows, _AFTER) if relu else self._after(layer_index, view, rows)), None

    def _convolve(self, index: int, view: GraphView, x: Tensor, **options: Any) -> Tensor:
        relational = self.config.name == "rgcn"
        edge_data = {"weighted": self.config.edge_weight} if relational else self._edge_data(view)
        out: Tensor = self.convs[index](view, x, **options, **edge_data)
        return out

    def _edge_data(self, view: GraphView) -> dict[str, Tensor]:
        """Weights and features of the edges, as arguments of a conv."""
        weight, attr = self._weight(view), view.attr if self.edge_dim else None
        if self.config.name in _WEIGHT_AS_COLUMN:
            if self.edge_weight and weight is None:
                raise InputError("the model was built for edge weights, and this graph has none: import them")
            columns = [attr, weight[:, None]] if self.edge_weight and weight is not None else [attr]
            rows = [table for table in columns if table is not None]
            return {"edge_attr": torch.cat(rows, 1) if len(rows) > 1 else rows[0]} if rows else {}
        data = {"weight": weight, "edge_attr": attr}
        return {name: values for name, values in data.items() if values is not None}

    def _deep_layer(self, index: int, view: GraphView, x: Tensor, first: Tensor | None) -> tuple[Tensor, Tensor | None]:
        if index == 0:
            x = first = self.act(self.lins[0](x))
            x = self._drop(view, x, _BEFORE)
        assert first is not None
        x = self._after(index, view, self.convs[index](view, x, first, weight=self._weight(view)))
        if index == self.num_layers - 1:
            return self.lins[1](x), None
        return x, first_rows(first, view.num_dst)

    def _block_layer(self, index: int, view: GraphView, x: Tensor) -> Tensor:
        block: Any = self.convs[index]
        data = self._edge_data(view)
        x = block.conv(view, self.lins[0](x), **data) if index == 0 else block(view, x, **data)
        if index < self.num_layers - 1:
            return x
        first: Any = self.convs[0]  # layer 0 skips its norm: PyG's DeeperGCN applies it after the last block
        out: Tensor = self.lins[1](first.before(view, x, mask_id=_LAST))
        return out

    def _hetero_layer(
        self, index: int, view: GraphView, x: RowsByType, aggregated: Mapping[EdgeType, Tensor] | None = None
    ) -> RowsByType:
        conv, last = self.convs[index], index == self.num_layers - 1
        rows_by_type = {self.node_types[0]: x} if isinstance(x, Tensor) else x
        read = self._read_types[index]
        options: dict[str, Any] = {"only": read}
        if self.config.name == "rgcn":
            options["only"] = self.target if last else None
        if self.config.name != "hgt":
            options["weighted"] = self.config.uses_edge_weight
        if aggregated is not None:
            options["aggregated"] = {kind: self._project(kind.src, rows) for kind, rows in aggregated.items()}
        out = {kind: rows for kind, rows in conv(view, rows_by_type, **options).items() if kind in read}
        if not last or self.lins:
            for kind, rows in out.items():
                mask_id = _AFTER + _MASK_STRIDE * self.node_types.index(kind)
                out[kind] = self._after(index, view.for_type(kind), rows, kind=kind, mask_id=mask_id)
                if self.config.residual and self.config.name != "rgcn":
                    out[kind] = out[kind] + first_rows(rows_by_type[kind], len(rows))
        if last and self.lins:
            out = {kind: self.lins[0](rows) for kind, rows in out.items()}
        only = self.target if last else self.node_types[0] if len(self.node_types) == 1 else None
        return out if only is None else out[only]

    def _after(
        self, index: int, view: GraphView, x: Tensor, *, kind: str | None = None, mask_id: int = _AFTER
    ) -> Tensor:
        """Apply norm → activation → dropout in place: x is the fresh output of a conv."""
        norm: Any = self.norms[index]
        norm = norm[module_name(kind)] if kind is not None and isinstance(norm, torch.nn.ModuleDict) else norm
        x = x if isinstance(norm, torch.nn.Identity) else norm(view, x)
        return self._drop(view, self.act(x), mask_id)

    def _input_rows(self, view: GraphView, x: Features) -> RowsByType:
        """Join features and embeddings, apply input dropout, and project node types to one width."""
        if not self.hetero:
            if isinstance(x, Mapping):
                x = next(iter(x.values()), None)
            return self._input(view, x, next(iter(self.embeddings), ""), _INPUT)
        x = {self.node_types[0]: x} if isinstance(x, Tensor) else x or {}
        out = {}
        for index, kind in enumerate(self.node_types):
            of_type = view.for_type(kind)
            rows = self._input(of_type, x.get(kind), module_name(kind), _INPUT + _MASK_STRIDE * index)
            rows = self.projections[module_name(kind)](rows)
            if self.lins:
                rows = self._drop(of_type, self.act(rows), _BEFORE + _MASK_STRIDE * index)
            out[kind] = rows
        return out

    @property
    def node_types(self) -> tuple[str, ...]:
        return () if isinstance(self.in_channels, int) else tuple(self.in_channels)

    def _input(self, view: GraphView, x: Tensor | None, key: str, mask_id: int) -> Tensor:
        if x is not None and self.config.input_norm != "none":
            x = self._normalise(x, key)
        if key in self.embeddings:
            embedding: Tensor = self.embeddings[key](view)
            x = embedding if x is None or not x.shape[1] else torch.cat([x.to(embedding.dtype), embedding], 1)
        elif self._has_type_vectors and (x is None or not x.shape[1]):
            return self.lins[0].weight.new_empty(view.num_src, 0)  # type: ignore[operator]
        if x is None:
            raise InputError("the model expects node features, found none: set model.embedding to a width")
        return self._drop(view, x, mask_id, self.config.input_dropout)

    def _normalise(self, x: Tensor, key: str) -> Tensor:
        """Rows as ``input_norm`` says. Cached, because a full batch is the same tensor in every step."""
        features, version, cached = self._normalised.get(key, (None, 0, x))
        if features is x and version == x._version:
            return cached
        rows: Tensor = self.input_norm(x, key)
        if self.training and not x.requires_grad:
            self._normalised[key] = (x, x._version, rows)
        return rows

    def _weight(self, view: GraphView) -> Tensor | None:
        return view.weight if self.config.uses_edge_weight else None

    def precompute(self, view: GraphView, x: Features) -> Aggregate | None:
        """Aggregate of the features in the first layer if no step changes it, else None.

        It is constant for gcn, sage (mean, max), gin and rgcn on node features alone, without input dropout. Pass it
        back as ``aggregated`` with the same view and features.
        """
        name = self.config.name
        if self.embeddings or self.config.input_dropout or name not in ("gcn", "sage", "gin", "rgcn"):
            return None
        if self.hetero and self.config.input_norm != "none":  # ``_raw`` has features as they are
            return None
        conv: Any = self.convs[0]
        with torch.no_grad():
            if name == "rgcn":
                relations: Aggregate = conv.aggregate(view, self._raw(view, x), weighted=self.config.edge_weight)
                return relations
            rows = self._input_rows(view, x)
            out: Tensor | None = conv.aggregate(view, rows, weight=self._weight(view))
        return out

    @property
    def supports_column_split(self) -> bool:
        plain = not (self.embeddings or self.config.input_dropout or self.config.input_norm != "none" or self.hetero)
        conv: Any = self.convs[0]
        is_sum = self.config.name == "sage" and not conv.project and conv.lin_edge is None
        return plain and (self.config.name == "gcn" or is_sum)

    def column_partial(self, view: GraphView, x: Tensor, columns: slice) -> Tensor:
        conv: Any = self.convs[0]
        out: Tensor = conv.column_partial(view.with_step(layer=0), x, columns, weight=self._weight(view))
        return out

    def _raw(self, view: GraphView, x: Features) -> dict[str, Tensor]:
        """Features by node type before the projection, with a column of ones for its bias; rgcn aggregates these."""
        if not self.hetero:
            rows = self._input_rows(view, x)
            assert isinstance(rows, Tensor)
            return {view.node_types[0]: rows}
        assert isinstance(x, Mapping)
        return {kind: torch.cat([rows, rows.new_ones(rows.shape[0], 1)], 1) for kind, rows in x.items()}

    def _project(self, kind: str, aggregate: Tensor) -> Tensor:
        """Turn the aggregate of ``_raw`` into that of projected rows; the column of ones carries the bias."""
        lin: Any = self.projections[module_name(kind)]
        return functional.linear(aggregate, torch.cat([lin.weight, lin.bias[:, None]], 1))


def build_model(
    config: ModelConfig,
    graph: Graph,
    *,
    out_channels: int | None = None,
    every_type: bool = False,
    owned_ids: Mapping[str, Tensor] | None = None,
) -> GNN | SignModel:
    """Build the model of a graph: widths from its features, output for its labelled node type, or for ``every_type``.

    Parameters are drawn from torch's generator: call torch.manual_seed first. Raises ConfigError or InputError.
    """
    assert config.file is None, "see build_custom_model"
    target = graph.labelled_type
    if target is None and len(graph.nodes) == 1:
        target = next(iter(graph.nodes))
    if out_channels is None:
        if target is None or graph.nodes[target].y is None:
            raise InputError("the number of outputs is unknown: the graph has no labels; give out_channels")
        out_channels = graph.nodes[target].num_classes
    widths = {kind: 0 if table.x is None else int(table.x.shape[1]) for kind, table in graph.nodes.items()}
    counts = {kind: table.count for kind, table in graph.nodes.items()}
    edges = next(iter(graph.edges.values())) if len(graph.edges) == 1 else None
    attr = None if edges is None or not config.uses_edge_features else edges.attr
    model = (SignModel if config.name == "sign" else GNN)(
        config,
        widths if len(widths) > 1 or config.name in HETERO_MODELS else next(iter(widths.values())),
        out_channels,
        edge_types=tuple(graph.edges),
        num_nodes=counts,
        target=None if every_type else target,
        edge_dim=None if attr is None else int(attr.shape[1]) or None,
        edge_weight=edges is not None and edges.weight is not None and config.uses_edge_weight,
        owned_ids=owned_ids,
    )
    model.input_norm.fit(table.x for table in graph.nodes.values())
    return model


def _read_types(
    kinds: Collection[str], edge_types: Sequence[EdgeType], target: str | None, layers: int
) -> list[Collection[str]]:
    """For each layer, the node types whose output rows are read later, in order; others are not computed."""
    read: list[Collection[str]] = [[kind for kind in kinds if target in (None, kind)]]
    for _ in range(layers - 1):
        sources = {edge.src for edge in edge_types if edge.dst in read[0]}
        read.insert(0, [kind for kind in kinds if kind in read[0] or kind in sources])
    return read

"""Model: the interface between strategies and models. GNN implements it, and so do custom models (docs/models.md).

A model is an ordered list of layers. Each layer reads its own view, so a strategy can run layers one by one, on parts
of the graph, or on other machines. A model keeps no state between layers except the returned rows and carry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor

from gnnfleet.errors import ConfigError
from gnnfleet.graph.graph import EdgeType, Graph
from gnnfleet.graph.views.local import LocalView
from gnnfleet.graph.views.view import GraphView
from gnnfleet.nn.config import HETERO_MODELS, ModelConfig
from gnnfleet.nn.linear import activation
from gnnfleet.nn.link import Decoder
from gnnfleet.ops.draws import DrawKey

Features = Tensor | Mapping[str, Tensor] | None
RowsByType = Tensor | dict[str, Tensor]
Aggregate = Tensor | Mapping[EdgeType, Tensor]
"""Neighbour aggregate of a first layer: [N_dst, F], by edge type if there are several."""


class Model(torch.nn.Module):
    """Layers in order, each called as ``layer(view, x)``, with activation and dropout after all but the last.

    Override ``compute`` for residuals, several maps per layer, or a tensor carried past layers. Take randomness from
    ``view.dropout`` and batch norm from ``gf.nn.BatchNorm``: both are independent of the number of machines.
    With several node types x is a dictionary by type; the last layer returns one, or the labelled type's rows alone.
    """

    out_channels: int | None = None  # output width of the last layer; set when the model is built for a graph

    def __init__(
        self,
        layers: Iterable[torch.nn.Module] = (),
        *,
        act: Callable[[Tensor], Tensor] = torch.relu,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(layers)
        self.act, self.dropout = act, dropout
        self.decoder: Decoder | None = None  # scores pairs of output rows, for link tasks

    @property
    def num_layers(self) -> int:
        """Number of message-passing rounds; a step reads one view for each."""
        return len(self.layers)

    @property
    def width(self) -> int:
        """Width of the widest rows a layer reads or writes, for memory budgets."""
        return max((int(p.shape[-1]) for p in self.parameters() if p.dim()), default=1)

    @property
    def batch_norm(self) -> bool:
        """True if a layer reads statistics of all rows, so that no row may be skipped."""
        return any(isinstance(module, torch.nn.BatchNorm1d) for module in self.modules())

    @property
    def reads_whole_graph(self) -> bool:
        """True if layers cannot run one by one: no sampled blocks, no stages, no evaluation in chunks of rows."""
        return False

    @property
    def is_precomputed(self) -> bool:
        """True if all hops are in ``precompute``: a step reads rows of its own nodes only, and needs the tables."""
        return False

    def precompute(self, view: GraphView, x: Features) -> Aggregate | None:
        """Part of the first layer that no step changes; ``compute`` receives it as ``aggregated``."""
        return None

    @property
    def supports_column_split(self) -> bool:
        """True if the first layer is a sum over feature columns; see ``column_partial``."""
        return False

    def column_partial(self, view: GraphView, x: Tensor, columns: slice) -> Tensor:
        """Return [N_dst, ·], the contribution of some feature columns to the first layer's product.

        ``compute`` receives the sum over all columns as ``precomputed_product``, in place of x. Models that do not
        ``supports_column_split`` leave this out.
        """
        raise NotImplementedError

    def compute(
        self, layer_index: int, view: GraphView, x: Any, carry: Tensor | None
    ) -> tuple[RowsByType, Tensor | None]:
        """Run one layer: return rows of the view's destinations, and the ``carry`` of later layers for those rows.

        x has a row for every source, the destinations first. The view is bound to the layer, so layers draw separately.
        """
        rows = self.layers[layer_index](view, x)
        if layer_index == self.num_layers - 1:
            return rows, None
        if not isinstance(rows, Mapping):
            return self._drop(view, self.act(rows), 0), None
        by_type = enumerate(rows.items())
        return {kind: self._drop(view.for_type(kind), self.act(x), index) for index, (kind, x) in by_type}, None

    def _drop(self, view: GraphView, x: Tensor, mask_id: int, p: float | None = None) -> Tensor:
        p = self.dropout if p is None else p
        return view.dropout(x, p, mask_id=mask_id) if self.training and p else x

    # -- called by strategies --

    @final
    def layer(
        self,
        index: int,
        view: GraphView,
        x: Features,
        carry: Tensor | None = None,
        *,
        aggregated: Aggregate | None = None,
        precomputed_product: Tensor | None = None,
    ) -> tuple[RowsByType, Tensor | None]:
        """Run ``compute`` with the view of that layer and check the rows.

        Layer 0 may take ``aggregated`` of ``precompute`` or the ``precomputed_product`` of ``column_partial``.
        """
        first_layer = {"aggregated": aggregated, "precomputed_product": precomputed_product}
        inputs: dict[str, Any] = {name: rows for name, rows in first_layer.items() if rows is not None}
        out = self.compute(index, view.with_step(layer=index), x, carry, **inputs)
        if not isinstance(out, tuple) or len(out) != 2:
            raise ConfigError(f"compute must return (rows, carry), found {type(out).__name__} in layer {index}")
        self._check_rows(index, view, out[0])
        return out

    def _check_rows(self, index: int, view: GraphView, rows: RowsByType) -> None:
        """Check shapes: rows of all sources instead of destinations would pass on a whole graph and fail on a block."""
        if isinstance(rows, Mapping):
            return
        if not isinstance(rows, Tensor):
            raise ConfigError(f"layer {index} of the model must return rows, found {type(rows).__name__}")
        if len(view.node_types) == 1 and rows.shape[0] != view.num_dst:
            raise ConfigError(
                f"layer {index} of the model must return a row for each of {view.num_dst} destinations, "
                f"found {rows.shape[0]}: select the destinations with x[:view.num_dst]"
            )
        last = index == self.num_layers - 1
        if last and self.out_channels is not None and rows.shape[1:] != (self.out_channels,):
            raise ConfigError(
                f"the last layer of the model must return {self.out_channels} columns, "
                f"found rows of shape {list(rows.shape[1:])}"
            )

    def forward(
        self,
        views: GraphView | Sequence[GraphView] | Tensor | dict[str, Tensor],
        x: Any,
        edge_weight: Tensor | None = None,
        edge_attr: Tensor | None = None,
        *,
        aggregated: Aggregate | None = None,
        precomputed_product: Tensor | None = None,
    ) -> RowsByType:
        """Output rows of the last view's destinations; a single view is used for all layers.

        Called as ``model(x, edge_index)``, with ``edge_weight`` and ``edge_attr``, as in torch_geometric: all rows.
        """
        if isinstance(views, Tensor | dict):
            return self._on_edges(views, x, edge_weight=edge_weight, edge_attr=edge_attr)
        first_layer = {"aggregated": aggregated, "precomputed_product": precomputed_product}
        return self._run(views, x, first_layer, num_layers=self.num_layers)

    def _on_edges(self, x: Any, edge_index: Any, **edge_data: Any) -> RowsByType:
        view = LocalView.of_graph(Graph(edge_index, num_nodes=len(x), **edge_data))
        key = DrawKey(seed=int(torch.randint(2**31, ())))
        return self.forward(view.with_step(key=key, training=self.training), x)

    @torch.no_grad()
    def exact(self, view: GraphView, x: Features, *, aggregated: Aggregate | None = None) -> tuple[RowsByType, Any]:
        """Exact (output, input of the last layer) of all rows of a view, as for evaluation."""
        view, rows, last, carry = view.with_step(training=False), x, x, None
        for index in range(self.num_layers):
            last = rows
            rows, carry = self.layer(index, view, rows, carry, aggregated=aggregated if index == 0 else None)
        assert rows is not None
        return rows, last  # type: ignore[return-value]

    def embed(
        self, views: GraphView | Sequence[GraphView], x: Features, *, aggregated: Aggregate | None = None
    ) -> RowsByType:
        """Input rows of the last layer: the output of the last hidden layer, by node type if there are several."""
        return self._run(views, x, {"aggregated": aggregated}, num_layers=self.num_layers - 1)

    def _run(
        self, views: GraphView | Sequence[GraphView], x: Any, first_layer: dict[str, Any], *, num_layers: int
    ) -> RowsByType:
        layer_views = list(views) if isinstance(views, Sequence) else [views] * self.num_layers
        if len(layer_views) < num_layers:
            raise ConfigError(
                f"the model has {self.num_layers} layers and needs a view for each, found {len(layer_views)}"
            )
        carry: Tensor | None = None
        for index in range(num_layers):
            x, carry = self.layer(index, layer_views[index], x, carry, **({} if index else first_layer))
        return x  # type: ignore[no-any-return]


class BuiltInModel(Model):
    """Model of a configuration; subclasses add their layers in ``_build``."""

    out_channels: int

    def __init__(
        self,
        config: ModelConfig,
        in_channels: int | Mapping[str, int],
        out_channels: int,
        *,
        edge_types: Sequence[EdgeType] | None = None,
        num_nodes: Mapping[str, int] | None = None,
        target: str | None = None,
        edge_dim: int | None = None,
        edge_weight: bool = False,
        owned_ids: Mapping[str, Tensor] | None = None,
    ) -> None:
        super().__init__(act=activation(config.act), dropout=config.dropout)
        if isinstance(in_channels, int) and config.name in HETERO_MODELS and edge_types:
            in_channels = {edge_types[0].src: in_channels}
        self.config, self.in_channels, self.out_channels = config, in_channels, out_channels
        self.edge_types, self.num_nodes, self.target = tuple(edge_types or ()), num_nodes, target
        self.edge_dim, self.edge_weight = edge_dim, edge_weight
        self._build({"": in_channels} if isinstance(in_channels, int) else dict(in_channels), target, owned_ids)

    def _build(self, widths: dict[str, int], target: str | None, owned_ids: Mapping[str, Tensor] | None) -> None:
        raise NotImplementedError

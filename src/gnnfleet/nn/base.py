"""Model: all that strategies know of a model. GNN is one; a model of your own is another (docs/models.md).

A model is an ordered list of layers, each a function of its own view, so that a strategy can run them one by one, on
pieces of the graph, or on other machines. It keeps nothing between layers but what it returns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor

from gnnfleet.errors import ConfigError
from gnnfleet.graph.graph import EdgeType
from gnnfleet.graph.views.view import GraphView
from gnnfleet.nn.link import Decoder

Features = Tensor | Mapping[str, Tensor] | None
RowsByType = Tensor | dict[str, Tensor]
Aggregate = Tensor | Mapping[EdgeType, Tensor]
"""What a first layer gathers of its neighbours: [N_dst, F], by edge type where there are several."""


class Model(torch.nn.Module):
    """Layers one after the other, each called as ``layer(view, x)``; activation and dropout after all but the last.

    Override ``compute`` for anything else: residuals, several maps per layer, a tensor carried past layers. Randomness
    comes from ``view.dropout``, batch norm from ``gf.nn.BatchNorm``: both give the same on any number of machines.
    With several node types x is a dictionary by type; the last layer returns one, or the labelled type's rows alone.
    """

    out_channels: int | None = None  # numbers per node that the last layer gives; set by whoever builds the model

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
        self.decoder: Decoder | None = None  # what reads the output rows in pairs, for links

    @property
    def num_layers(self) -> int:
        """Rounds of message passing: a step asks for as many views."""
        return len(self.layers)

    @property
    def width(self) -> int:
        """The widest rows a layer reads or makes, for memory budgets; here the last dimension of any parameter."""
        return max((int(p.shape[-1]) for p in self.parameters() if p.dim()), default=1)

    @property
    def batch_norm(self) -> bool:
        """Whether a layer looks at all rows, so that none may be left out."""
        return any(isinstance(module, torch.nn.BatchNorm1d) for module in self.modules())

    def precompute(self, view: GraphView, x: Features) -> Aggregate | None:
        """What of the first layer stays the same from step to step; ``compute`` gets it back as ``aggregated``."""
        return None

    @property
    def supports_column_split(self) -> bool:
        """Whether the first layer is a sum over columns of the features, each worked on by itself: see ``column_partial``."""
        return False

    def column_partial(self, view: GraphView, x: Tensor, columns: slice) -> Tensor:
        """[N_dst, ·] what some columns of the features add to the first layer's product; where it ``supports_column_split``.

        ``compute`` gets the sum over all columns as ``made``, in place of x.
        """
        raise NotImplementedError

    def compute(
        self, layer_index: int, view: GraphView, x: Any, carry: Tensor | None
    ) -> tuple[RowsByType, Tensor | None]:
        """One layer: rows of the view's destinations, and what later layers get as ``carry``, cut to those rows.

        x has a row for every source, the destinations first. The view knows the layer: its draws are its own.
        """
        rows = self.layers[layer_index](view, x)
        if layer_index == self.num_layers - 1:
            return rows, None
        if not isinstance(rows, Mapping):
            return self._finish(view, rows, place=0), None
        return {
            kind: self._finish(view.for_type(kind), each, place=place)
            for place, (kind, each) in enumerate(rows.items())
        }, None

    def _finish(self, view: GraphView, x: Tensor, *, place: int) -> Tensor:
        x = self.act(x)
        return view.dropout(x, self.dropout, place=place) if self.training and self.dropout else x

    # -- what strategies call --

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
        """``compute`` with the view of that layer; ``aggregated`` is for layer 0 and comes from ``precompute``, or
        ``made``, from ``column_partial``."""
        given: dict[str, Any] = {} if aggregated is None else {"aggregated": aggregated}
        if precomputed_product is not None:
            given["made"] = precomputed_product
        out = self.compute(index, view.with_step(layer=index), x, carry, **given)
        if not isinstance(out, tuple) or len(out) != 2:
            raise ConfigError(f"compute of a model returns (rows, carry), found {type(out).__name__} in layer {index}")
        self._check_rows(index, view, out[0])
        return out

    def _check_rows(self, index: int, view: GraphView, rows: RowsByType) -> None:
        """Rows of all sources in place of the destinations would pass on a whole graph and fail on a piece."""
        last = index == self.num_layers - 1
        if isinstance(rows, Mapping):
            return
        if not isinstance(rows, Tensor):
            raise ConfigError(f"layer {index} of the model must give rows, found {type(rows).__name__}")
        one_type = len(view.node_types) == 1
        if one_type and rows.shape[0] != view.num_dst:
            raise ConfigError(
                f"layer {index} of the model must give a row for each of {view.num_dst} destinations, "
                f"found {rows.shape[0]}: cut sources with x[:view.num_dst]"
            )
        if last and self.out_channels is not None and rows.shape[1:] != (self.out_channels,):
            raise ConfigError(
                f"the last layer of the model must give {self.out_channels} numbers per node, "
                f"found rows of shape {list(rows.shape[1:])}"
            )

    def forward(
        self,
        views: GraphView | Sequence[GraphView],
        x: Features,
        *,
        aggregated: Aggregate | None = None,
        precomputed_product: Tensor | None = None,
    ) -> RowsByType:
        """Output of the destinations of the last view; one view serves all layers. See ``precompute``, ``column_partial``."""
        return self._run(views, x, aggregated, precomputed_product, upto=self.num_layers)

    @final
    @torch.no_grad()
    def exact(self, view: GraphView, x: Features, *, aggregated: Aggregate | None = None) -> tuple[RowsByType, Any]:
        """(output, what the last layer read) of all rows of a view, as for evaluation."""
        view, rows, last, carry = view.with_step(training=False), x, x, None
        for index in range(self.num_layers):
            last = rows
            rows, carry = self.layer(index, view, rows, carry, aggregated=aggregated if index == 0 else None)
        assert rows is not None
        return rows, last  # type: ignore[return-value]

    def embed(
        self, views: GraphView | Sequence[GraphView], x: Features, *, aggregated: Aggregate | None = None
    ) -> RowsByType:
        """What the last layer reads: the output of the last hidden layer, by node type where there are several."""
        return self._run(views, x, aggregated, None, upto=self.num_layers - 1)

    def _run(
        self,
        views: GraphView | Sequence[GraphView],
        x: Features,
        aggregated: Aggregate | None,
        made: Tensor | None,
        *,
        upto: int,
    ) -> RowsByType:
        every = list(views) if isinstance(views, Sequence) else [views] * self.num_layers
        if len(every) < upto:
            raise ConfigError(f"the model has {self.num_layers} layers and needs a view for each, found {len(every)}")
        carry: Tensor | None = None
        rows: Any = x
        for index in range(upto):
            rows, carry = self.layer(index, every[index], rows, carry, aggregated=aggregated, precomputed_product=made)
            aggregated = made = None
        return rows  # type: ignore[no-any-return]

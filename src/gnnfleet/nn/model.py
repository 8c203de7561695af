"""The models: an ordered list of layers, each with norm, activation and dropout behind it, keyed like PyG's models.

``layer`` runs one of them, which is what layer-wise evaluation and pipelines call; ``forward`` runs all. One view per
layer; a single view serves every layer. Rows travel as one tensor, or as {node type: tensor} in a relational model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gnnfleet.errors import ConfigError
from gnnfleet.graph.graph import Graph
from gnnfleet.graph.view import GraphView
from gnnfleet.nn.config import ModelConfig
from gnnfleet.nn.conv import GATConv, GATv2Conv, GCN2Conv, GCNConv, GINConv, ResPlus, RGCNConv, SAGEConv
from gnnfleet.nn.linear import Linear, Mlp
from gnnfleet.nn.norm import BatchNorm, LayerNorm

Rows = Tensor | dict[str, Tensor]


class GNN(nn.Module):
    """A model of ``config``; state_dict keys as PyG's (``convs.0.lin.weight``)."""

    def __init__(
        self,
        config: ModelConfig,
        in_channels: int | Mapping[str, int],
        out_channels: int,
        *,
        num_relations: int = 1,
        num_nodes: Mapping[str, int] | None = None,
        target: str | None = None,
    ) -> None:
        super().__init__()
        self.config, self.target = config, target
        self.num_layers = config.layers
        self.inputs, self.tables = nn.ModuleDict(), nn.ParameterDict()
        self.first: Linear | None = None
        self.last: Linear | None = None
        widths = {"": in_channels} if isinstance(in_channels, int) else dict(in_channels)
        for kind, width in widths.items():
            if width == 0 or (config.embedding and config.name != "rgcn"):
                rows = (num_nodes or {}).get(kind, 0)
                own = config.embedding or config.hidden
                self.tables[_key(kind)] = nn.Parameter(torch.randn(rows, own) / own**0.5)
                widths[kind] = own
        if config.name == "rgcn":
            self.inputs.update({_key(kind): Linear(width, config.hidden) for kind, width in widths.items()})
            start = config.hidden
        else:
            start = widths[next(iter(widths))]
        self.convs = nn.ModuleList(self._convs(start, out_channels, num_relations))
        self.norms = nn.ModuleList(self._norm() for _ in range(config.layers - 1) if config.norm != "none")

    def _convs(self, start: int, end: int, num_relations: int) -> list[nn.Module]:
        config = self.config
        if config.name in ("gcn2", "res+"):
            self.first, self.last = Linear(start, config.hidden), Linear(config.hidden, end)
            if config.name == "res+":
                return [ResPlus(config.hidden, dropout=config.dropout) for _ in range(config.layers)]
            return [GCN2Conv(config.hidden, config.alpha, config.theta, layer=i + 1) for i in range(config.layers)]
        sizes = [start, *[config.hidden] * (config.layers - 1), end]
        return [self._conv(i, sizes[i], sizes[i + 1], num_relations) for i in range(config.layers)]

    def _conv(self, index: int, width_in: int, width_out: int, num_relations: int) -> nn.Module:
        config, last = self.config, index == self.config.layers - 1
        if config.name == "gcn":
            return GCNConv(width_in, width_out)
        if config.name == "sage":
            pool = config.aggr == "pool"
            return SAGEConv(width_in, width_out, "max" if pool else config.aggr, project=pool)
        if config.name == "gin":
            return GINConv(Mlp(width_in, width_out))
        if config.name == "rgcn":
            return RGCNConv(width_in, width_out, num_relations, config.bases or None)
        kind = GATConv if config.name == "gat" else GATv2Conv
        heads = (config.out_heads or config.heads) if last else config.heads
        return kind(
            width_in,
            width_out if last else width_out // heads,
            heads,
            concat=not last,
            dropout=config.attention_dropout,
            residual=config.residual,
        )

    def _norm(self) -> nn.Module:
        return BatchNorm(self.config.hidden) if self.config.norm == "batch" else LayerNorm(self.config.hidden)

    def precompute(self, view: GraphView, x: Rows) -> Tensor | None:
        """The first layer's aggregate of static features, where no parameter or dropout comes before it."""
        conv = self.convs[0]
        if self.config.input_dropout or self.tables or not isinstance(x, Tensor) or not hasattr(conv, "precompute"):
            return None
        with torch.no_grad():
            found: Tensor | None = conv.precompute(view, x)  # type: ignore[operator]
        return found

    def start(self, x: Any) -> Rows:
        """The rows the first layer reads: features, or learnable rows where there are none."""
        if self.config.name == "rgcn":
            return {
                _name(key): linear(self.tables[key] if key in self.tables else x[_name(key)])
                for key, linear in self.inputs.items()
            }
        if self.tables:
            table: Tensor = next(iter(self.tables.values()))
            return table
        assert isinstance(x, Tensor)
        return x

    def layer(
        self, index: int, view: GraphView, x: Rows, carry: Tensor | None = None, *, gathered: Tensor | None = None
    ) -> tuple[Rows, Tensor | None]:
        """One layer with what follows it; ``carry`` is what travels past layers (gcn2's first rows)."""
        conv, last = self.convs[index], index == self.num_layers - 1
        if index == 0:
            x = _drop(view, x, self.config.input_dropout, place=1000)
        if self.first is not None and index == 0:
            assert isinstance(x, Tensor)
            x = first = self.first(x)
            if self.config.name == "gcn2":
                carry = x = _drop(view, torch.relu(first), self.config.dropout, place=2000)
        if self.config.name == "gcn2":
            assert isinstance(x, Tensor) and carry is not None
            x = torch.relu(conv(view, x, carry))
            x = view.dropout(x, self.config.dropout)
            carry = carry[: view.num_dst]
        elif self.config.name == "res+":
            x = conv(view, x)
        else:
            x = conv(view, x) if gathered is None else conv(view, x, gathered=gathered)
            if not last:
                x = self._between(index, view, x)
        if last and self.last is not None:
            assert isinstance(x, Tensor)
            x = self.last(x)
        return x, carry

    def _between(self, index: int, view: GraphView, x: Rows) -> Rows:
        if self.norms:
            x = _each(x, lambda rows: self.norms[index](view, rows))
        act = torch.relu_ if self.config.activation == "relu" else torch.nn.functional.elu
        dropped: Rows = _drop(view, _each(x, act), self.config.dropout)
        return dropped

    def forward(self, views: Any, x: Any, *, gathered: Tensor | None = None) -> Tensor:
        """Logits of the last view's destinations (of the target type in a relational model)."""
        steps = self._views(views)
        rows, carry = self.start(x), None
        for index, view in enumerate(steps):
            rows, carry = self.layer(index, view, rows, carry, gathered=gathered if index == 0 else None)
        return self.pick(rows)

    def pick(self, rows: Rows) -> Tensor:
        """The rows of the labelled type."""
        if isinstance(rows, Tensor):
            return rows
        return rows[self.target if self.target is not None else next(iter(rows))]

    def _views(self, views: Any) -> Sequence[GraphView]:
        if isinstance(views, (list, tuple)):
            if len(views) != self.num_layers:
                raise ConfigError(f"a model of {self.num_layers} layers takes as many views, found {len(views)}")
            return [view.at(layer=index) for index, view in enumerate(views)]
        return [views.at(layer=index) for index in range(self.num_layers)]


def build_model(config: ModelConfig, graph: Graph, *, out_channels: int | None = None) -> GNN:
    """A model for a graph; raises ConfigError when the two do not fit."""
    target = graph.labelled_type or next(iter(graph.nodes))
    out = graph.nodes[target].num_classes if out_channels is None else out_channels
    widths = {kind: 0 if nodes.x is None else int(nodes.x.shape[1]) for kind, nodes in graph.nodes.items()}
    counts = {kind: nodes.count for kind, nodes in graph.nodes.items()}
    if config.name == "rgcn":
        return GNN(config, widths, out, num_relations=len(graph.edges), num_nodes=counts, target=target)
    if graph.is_hetero:
        raise ConfigError(
            f"model {config.name} takes graphs of one node and one edge type, this one has {len(graph.nodes)} and "
            f"{len(graph.edges)}: use --model rgcn"
        )
    if not widths[target] and not config.embedding:
        raise ConfigError("this graph has no features: give nodes learnable rows with --set model.embedding=64")
    return GNN(config, widths[target], out, num_nodes={"": counts[target]}, target=target)


def _each(x: Rows, change: Callable[[Tensor], Tensor]) -> Rows:
    return change(x) if isinstance(x, Tensor) else {kind: change(rows) for kind, rows in x.items()}


def _drop(view: GraphView, x: Rows, p: float, *, place: int = 0) -> Any:
    """Dropout of all rows; node types draw apart by their number."""
    if isinstance(x, Tensor):
        return view.dropout(x, p, place=place)
    return {kind: view.dropout(x[kind], p, place=place + i, kind=kind) for i, kind in enumerate(x)}


def _key(kind: str) -> str:
    """A node type as a name that torch takes: no dots."""
    return "rows" if not kind else "type " + kind.replace(".", "․")


def _name(key: str) -> str:
    return key.removeprefix("type ").replace("․", ".") if key != "rows" else ""

"""Output schema: the classes and feature columns of a run, saved with it to predict on stores without labels.

Classes and feature columns are matched by name if they have names, so a store may number its labels differently, or
have its columns in another order.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch
from pydantic import TypeAdapter
from torch import Tensor

from gnnfleet.errors import ConfigError, InputError, RunError
from gnnfleet.graph.graph import ColumnGroups, Edges, EdgeType, Graph, Nodes, validated_edges
from gnnfleet.graph.validate import FULL_CHECK_BYTES
from gnnfleet.nn.heads import NodeHead, training_statistics
from gnnfleet.tasks.train_options import TrainConfig

MAX_NAMES_SHOWN = 10
"""Names of columns in one message."""


@dataclass(frozen=True, kw_only=True)
class OutputSchema:
    """The labelled node type, its classes or values; widths, node counts and edge types of the training graph."""

    target: str
    num_classes: int
    multilabel: bool
    classes: tuple[str, ...]
    widths: Mapping[str, int]
    counts: Mapping[str, int]
    edge_types: tuple[str, ...]
    columns: Mapping[str, ColumnGroups] = field(default_factory=dict)  # by node type, if the features have names
    edge_columns: Mapping[str, ColumnGroups] = field(default_factory=dict)  # by edge type
    regression: bool = False  # then ``num_classes`` is the number of values, and ``classes`` are their names
    mean: tuple[float, ...] = ()  # of the training labels of a regression, and their standard deviation
    std: tuple[float, ...] = ()
    class_weights: tuple[float, ...] = ()

    @classmethod
    def of(cls, graph: Graph) -> OutputSchema:
        """The schema of a graph with labels; raises InputError without labels."""
        target = graph.labelled_type
        if target is None:
            raise InputError("the graph has no labels: give y to Graph(...) or name a label column in the import")
        nodes = graph.nodes[target]
        return cls(
            target=target,
            num_classes=nodes.num_classes,
            multilabel=nodes.multilabel,
            regression=nodes.regression,
            classes=nodes.classes,
            widths={kind: _width(table) for kind, table in graph.nodes.items()},
            counts={kind: table.count for kind, table in graph.nodes.items()},
            edge_types=tuple(map(str, graph.edges)),
            columns={kind: table.columns for kind, table in graph.nodes.items() if table.columns},
            edge_columns={str(kind): table.columns for kind, table in graph.edges.items() if table.columns},
        )

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> OutputSchema:
        return TypeAdapter(cls).validate_python(content)

    def fitted(self, nodes: Nodes, train: TrainConfig) -> OutputSchema:
        """The schema with the statistics of the training labels that the loss needs."""
        assert nodes.y is not None
        option = train.class_weights
        if self.regression and option != "none":
            raise ConfigError("train.class_weights weighs classes, and these labels are values: leave it out")
        statistics = training_statistics(nodes.y[nodes.mask("train")], self.num_classes)
        if self.regression:
            return replace(self, mean=statistics["mean"], std=statistics["std"])
        weights = () if option == "none" else statistics["balanced"] if option == "balanced" else option
        if weights and (
            len(weights) != self.num_classes or not all(0 <= w < math.inf for w in weights) or not any(weights)
        ):
            raise ConfigError(
                f"train.class_weights needs {self.num_classes} finite weights from 0, one per class, found {weights}"
            )
        return replace(self, class_weights=tuple(map(float, weights)))

    def head(self, train: TrainConfig) -> NodeHead:
        """Loss and metrics of the output."""
        statistics = (self.regression, train.loss, self.class_weights, self.mean, self.std)
        return NodeHead(self.num_classes, self.multilabel, train.metrics, train.label_smoothing, *statistics)

    def unlabelled(self, count: int) -> Tensor:
        """Labels of nodes that have none."""
        if self.regression:
            return torch.full((count, self.num_classes), torch.nan)
        if self.multilabel:
            return torch.full((count, self.num_classes), -1, dtype=torch.int8)
        return torch.full((count,), -1)

    def target_in(self, graph: Graph) -> str:
        """The node type that the run predicts in a graph; a single type may have another name."""
        if len(graph.nodes) == len(self.widths) == 1:
            return next(iter(graph.nodes))
        if self.target not in graph.nodes:
            raise RunError(
                f"the run predicts nodes of type {self.target!r}, this store has {', '.join(graph.nodes)}: "
                "name another store"
            )
        return self.target

    def fit(self, graph: Graph, *, embedded: Collection[str] = ()) -> Graph:
        """The graph as the model of the run reads it: labels under the run's class numbers, other types unlabelled.

        ``embedded`` names the node types with a learnable embedding per node. Raises RunError if the graph differs from
        the training graph in more than nodes and edges.
        """
        graph = self.adapt(graph)
        target = self.target_in(graph)
        self._check(graph, target, embedded)
        for kind, nodes in graph.nodes.items():
            if kind != target and nodes.y is not None:
                graph = graph.with_nodes(kind, y=None, classes=())
        return graph.with_nodes(target, y=self._labels(graph.nodes[target]), classes=self.classes)

    def adapt(self, graph: Graph) -> Graph:
        """The graph with features and edge types in the order of the run; ``graph`` itself if they are already.

        Edge types of the run that the store lacks become empty, unless the store has unknown ones: a name may be
        misspelt. Features are reordered in memory. Raises RunError if they are too large or have other names.
        """
        orders, absent = self._orders(graph), self._absent(graph)
        if self.edge_columns:  # an edge type without edges may lack the columns
            absent += [kind for kind, table in graph.edges.items() if not table.count and table.attr is None]
        edges = {**graph.edges, **{kind: self._no_edges(graph, kind) for kind in absent}}
        if len(self.edge_types) > 1 and set(self.edge_types) == set(map(str, edges)):
            edges = dict(sorted(edges.items(), key=lambda item: self.edge_types.index(str(item[0]))))
        if not orders and not absent and list(edges) == list(graph.edges):
            return graph
        nodes = dict(graph.nodes)
        for kind, (order, columns) in orders.items():
            if isinstance(kind, EdgeType):
                edges[kind] = replace(edges[kind], attr=_reordered(edges[kind].attr, order), columns=columns)
            else:
                nodes[kind] = replace(nodes[kind], x=_reordered(nodes[kind].x, order), columns=columns)
        return Graph.of(nodes, edges, name=graph.name, undirected=graph.undirected)

    def _orders(self, graph: Graph) -> dict[str | EdgeType, tuple[Tensor, ColumnGroups]]:
        """(positions of the run's features, the run's columns) by node or edge type, for features in another order."""
        target, several = self.target_in(graph), len(graph.nodes) > 1
        tables: list[tuple[str | EdgeType, Nodes | Edges, ColumnGroups]] = [
            (kind, nodes, self.columns.get(self.target if kind == target else kind, ()))
            for kind, nodes in graph.nodes.items()
        ]
        only = self.edge_types[0] if len(self.edge_types) == len(graph.edges) == 1 else None
        tables += [(kind, edges, self.edge_columns.get(only or str(kind), ())) for kind, edges in graph.edges.items()]
        orders: dict[str | EdgeType, tuple[Tensor, ColumnGroups]] = {}
        for kind, table, columns in tables:
            suffix = f" of {kind}" if several or isinstance(kind, EdgeType) else ""
            order = column_order(columns, table.columns, suffix)
            if order is not None:
                orders[kind] = order, columns
        return orders

    def _absent(self, graph: Graph) -> list[EdgeType]:
        """Edge types of the run that the graph lacks and that count as empty."""
        run_types = [EdgeType.parse(name) for name in self.edge_types if name.count(":") == 2]
        if len(self.edge_types) == len(run_types) == 1 and len(graph.nodes) == 1:
            only = next(iter(graph.nodes))
            return [] if graph.edges else [run_types[0]._replace(src=only, dst=only)]
        if not set(graph.edges) <= set(run_types):
            return []
        return [kind for kind in run_types if kind not in graph.edges and {kind.src, kind.dst} <= set(graph.nodes)]

    def _no_edges(self, graph: Graph, kind: EdgeType) -> Edges:
        only = self.edge_types[0] if len(self.edge_types) == 1 else str(kind)
        columns = self.edge_columns.get(only, ())
        attr = torch.empty((0, sum(width for _, width in columns))) if columns else None
        num_src, num_dst = graph.nodes[kind.src].count, graph.nodes[kind.dst].count
        edges = validated_edges(torch.empty((2, 0), dtype=torch.int64), num_src=num_src, num_dst=num_dst, attr=attr)
        return replace(edges, columns=columns)

    def _check(self, graph: Graph, target: str, embedded: Collection[str]) -> None:
        if len(self.widths) > 1 and set(self.widths) != set(graph.nodes):
            raise RunError(
                f"the run was trained on nodes of types {', '.join(self.widths)}, this store has "
                f"{', '.join(graph.nodes)}: name another store"
            )
        missing = [name for name in self.edge_types if name not in map(str, graph.edges)]
        if missing and (len(self.edge_types) > 1 or len(graph.edges) != 1):
            raise RunError(
                f"the run was trained with edges {missing[0]}, this store has "
                f"{', '.join(map(str, graph.edges)) or 'none'}: import a table of them, if only with a header src,dst"
            )
        for kind, nodes in graph.nodes.items():
            run_kind = self.target if kind == target else kind
            suffix = f" of {kind}" if len(graph.nodes) > 1 else ""
            if _width(nodes) != self.widths[run_kind]:
                raise RunError(
                    f"the run was trained on {self.widths[run_kind]} features{suffix} per node, this store has "
                    f"{_width(nodes)}: import it with the same feature columns"
                )
            if run_kind in embedded and nodes.count != self.counts[run_kind]:
                raise RunError(
                    f"the run has an embedding for each of its {self.counts[run_kind]} nodes{suffix} and cannot serve "
                    f"the {nodes.count} nodes of this store: train without model.embedding, on features"
                )

    def _labels(self, nodes: Nodes) -> Tensor | None:
        """Labels under the run's class numbers."""
        y, renamed = nodes.y, bool(nodes.classes and self.classes and nodes.classes != self.classes)
        if y is None:
            return None
        if self.regression:
            y = as_values(y)
            if y.numel() != nodes.count * self.num_classes:
                raise RunError(f"the run was trained on {self.num_classes} values per node: import them as its labels")
            return y
        if nodes.regression:
            raise RunError(
                "the run was trained on classes, the labels of this store have fractions: name another store"
            )
        if nodes.multilabel != self.multilabel:
            kinds = ("one label per node", "several labels per node")
            raise RunError(f"the run was trained on {kinds[self.multilabel]}, this store has {kinds[nodes.multilabel]}")
        if self.multilabel:
            if y.shape[1] != self.num_classes:
                raise RunError(
                    f"the run was trained on {self.num_classes} labels per node, this store has {y.shape[1]}"
                )
            if renamed:
                column = next(i for i, name in enumerate(self.classes) if nodes.classes[i] != name)
                raise RunError(
                    f"label {column} of the run is {self.classes[column]!r}, of this store {nodes.classes[column]!r}: "
                    "import it with the same labels in the same order"
                )
            return y
        if renamed:
            return self._renumber(y, nodes.classes)
        if y.numel() and int(y.max()) >= self.num_classes:
            raise RunError(f"the run has classes 0 to {self.num_classes - 1}, this store has class {int(y.max())}")
        return y

    def _renumber(self, y: Tensor, names: tuple[str, ...]) -> Tensor:
        numbers = {name: i for i, name in enumerate(self.classes)}
        used = set(torch.unique(y).tolist()) - {-1}
        unknown = [name for i, name in enumerate(names) if i in used and name not in numbers]
        if unknown:
            raise RunError(f"class {unknown[0]!r} of this store is not among those the run was trained on")
        table = torch.tensor([*(numbers.get(name, -1) for name in names), -1])  # the last is for no label
        return table[y]


def as_values(y: Tensor) -> Tensor:
    """Labels as values, NaN for none."""
    return y if y.is_floating_point() else torch.where(y < 0, torch.nan, y.float())


def with_objective(graph: Graph, train: TrainConfig) -> Graph:
    """The graph with labels as classes or values, as the option asks."""
    target, objective = graph.labelled_type, train.objective
    if target is None or objective == "auto" or (objective == "regression") == graph.nodes[target].regression:
        return graph
    nodes = graph.nodes[target]
    if nodes.y is None or nodes.regression or (nodes.classes and not nodes.multilabel):
        kind = "have fractions" if nodes.regression else f"are names such as {nodes.classes[0]!r}"
        raise ConfigError(f"train.objective={objective} does not fit these labels, which {kind}: leave it out")
    return graph.with_nodes(target, y=as_values(nodes.y))


def column_order(run: ColumnGroups, store: ColumnGroups, suffix: str = "") -> Tensor | None:
    """[F] positions of the run's features among those of a store; None if the order is the same or has no names.

    A single list column has one name for all its features, which does not tell their order. Raises RunError if the
    columns differ; ``suffix`` names their table.
    """
    if run == store or any(not groups or (len(groups) == 1 and groups[0][1] != 1) for groups in (run, store)):
        return None
    if sorted(run) != sorted(store):
        missing = [column for column in run if column not in store]
        added = [column for column in store if column not in run]
        sides = (("without", missing), ("with", added))
        differences = [f"{side} {_shown(columns)}" for side, columns in sides if columns]
        raise RunError(
            f"the run was trained on feature columns{suffix} {_shown(run)}; this store has {_shown(store)} "
            f"({', '.join(differences)}): import it with the same feature columns (--features, --like)"
        )
    ends = accumulate(width for _, width in store)
    positions = {name: torch.arange(end - width, end) for (name, width), end in zip(store, ends, strict=True)}
    return torch.cat([positions[name] for name, _ in run])


def _reordered(values: Tensor | None, order: Tensor) -> Tensor:
    assert values is not None
    if values.nbytes > FULL_CHECK_BYTES:
        raise RunError(
            "feature columns of this store are in another order than those of the run and too large to reorder in "
            "memory: import it with --features (of edges --edge-features) naming them in the order of the run"
        )
    return values[:, order]


def _shown(columns: Iterable[tuple[str, int]]) -> str:
    names = [name if width == 1 else f"{name} [{width}]" for name, width in columns]
    return ", ".join(names[:MAX_NAMES_SHOWN]) + (f", … ({len(names)} in all)" if len(names) > MAX_NAMES_SHOWN else "")


def _width(nodes: Nodes) -> int:
    return 0 if nodes.x is None else int(nodes.x.shape[1])

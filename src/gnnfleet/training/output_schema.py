"""What a run predicts and what it read, kept with it: enough to predict on a store that has no labels.

Classes and feature columns are known by name where they have names, so a store whose labels were numbered otherwise,
or whose columns come in another order, is read rightly.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from gnnfleet.errors import InputError, RunError
from gnnfleet.graph.graph import ColumnGroups, Edges, EdgeType, Graph, Nodes, validated_edges
from gnnfleet.graph.validate import FULL_CHECK_BYTES
from gnnfleet.nn.heads import NodeHead

MAX_NAMES_SHOWN = 10
"""Names of columns in one message."""


@dataclass(frozen=True, kw_only=True)
class OutputSchema:
    """The labelled node type and its classes; feature widths, node counts and edge types of the graph trained on."""

    target: str
    num_classes: int
    multilabel: bool
    classes: tuple[str, ...]
    widths: Mapping[str, int]
    counts: Mapping[str, int]
    edge_types: tuple[str, ...]
    columns: Mapping[str, ColumnGroups] = field(default_factory=dict)  # of node types whose features have names
    edge_columns: Mapping[str, ColumnGroups] = field(default_factory=dict)  # likewise of edge types

    @classmethod
    def of(cls, graph: Graph) -> OutputSchema:
        """Of a graph with labels; raises InputError without any."""
        target = graph.labelled_type
        if target is None:
            raise InputError("the graph has no labels: give y to Graph(...) or name a label column in the import")
        nodes = graph.nodes[target]
        return cls(
            target=target,
            num_classes=nodes.num_classes,
            multilabel=nodes.multilabel,
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
        words = {**content, "classes": tuple(content["classes"]), "edge_types": tuple(content["edge_types"])}
        for name in ("columns", "edge_columns"):  # runs of before have none
            words[name] = {kind: tuple(map(tuple, found)) for kind, found in words.get(name, {}).items()}
        return cls(**words)

    def head(self, *, metric: str, smoothing: float) -> NodeHead:
        """What the output is trained on and measured by; ``auto`` chooses the metric."""
        if metric == "auto":
            metric = "micro_f1" if self.multilabel else "accuracy"
        return NodeHead(self.num_classes, self.multilabel, metric, smoothing)

    def target_in(self, graph: Graph) -> str:
        """The node type of a graph that the run predicts; an only type may have another name."""
        if len(graph.nodes) == len(self.widths) == 1:
            return next(iter(graph.nodes))
        if self.target not in graph.nodes:
            raise RunError(
                f"the run predicts nodes of type {self.target!r}, this store has {', '.join(graph.nodes)}: "
                "name another store"
            )
        return self.target

    def fit(self, graph: Graph, *, learnt: Collection[str] = ()) -> Graph:
        """A graph as the run's model reads it: labels under the run's numbers, or none; no other type is labelled.

        ``learnt`` names the node types of which the model has a row for every node. Raises RunError where the graph
        differs from what was trained on in more than nodes and edges.
        """
        graph = self.adapt(graph)
        target = self.target_in(graph)
        self._check(graph, target, learnt)
        for kind, nodes in graph.nodes.items():
            if kind != target and nodes.y is not None:
                graph = graph.with_nodes(kind, y=None, classes=())
        return graph.with_nodes(target, y=self._labels(graph.nodes[target]), classes=self.classes)

    def adapt(self, graph: Graph) -> Graph:
        """A graph with features and edge types in the order of the run; itself where it has them so.

        Edge types of the run that a store lacks have no edges there yet, unless it has others, which may be misspelt.
        Features are turned in memory; raises RunError where there are too many, or for columns with other names.
        """
        orders, absent = self._orders(graph), self._absent(graph)
        edges = {**graph.edges, **{kind: self._no_edges(graph, kind) for kind in absent}}
        if len(self.edge_types) > 1 and set(self.edge_types) == set(map(str, edges)):
            edges = dict(sorted(edges.items(), key=lambda item: self.edge_types.index(str(item[0]))))
        if not orders and list(edges) == list(graph.edges):
            return graph
        nodes = dict(graph.nodes)
        for kind, (order, columns) in orders.items():
            if isinstance(kind, EdgeType):
                edges[kind] = replace(edges[kind], attr=_turned(edges[kind].attr, order), columns=columns)
            else:
                nodes[kind] = replace(nodes[kind], x=_turned(nodes[kind].x, order), columns=columns)
        return Graph.of(nodes, edges, name=graph.name, undirected=graph.undirected)

    def _orders(self, graph: Graph) -> dict[str | EdgeType, tuple[Tensor, ColumnGroups]]:
        """Of node and edge types with features in another order: where the run's are found, and its columns."""
        target, several = self.target_in(graph), len(graph.nodes) > 1
        tables: list[tuple[str | EdgeType, Nodes | Edges, ColumnGroups]] = [
            (kind, nodes, self.columns.get(self.target if kind == target else kind, ()))
            for kind, nodes in graph.nodes.items()
        ]
        only = self.edge_types[0] if len(self.edge_types) == len(graph.edges) == 1 else None
        tables += [(kind, edges, self.edge_columns.get(only or str(kind), ())) for kind, edges in graph.edges.items()]
        found: dict[str | EdgeType, tuple[Tensor, ColumnGroups]] = {}
        for kind, table, known in tables:
            of = f" of {kind}" if several or isinstance(kind, EdgeType) else ""
            order = column_order(known, table.columns, of)
            if order is not None:
                found[kind] = order, known
        return found

    def _absent(self, graph: Graph) -> list[EdgeType]:
        """Edge types of the run that may be taken for empty."""
        known = [EdgeType.parse(name) for name in self.edge_types if name.count(":") == 2]
        if len(self.edge_types) == len(known) == 1 and len(graph.nodes) == 1:
            only = next(iter(graph.nodes))
            return [] if graph.edges else [known[0]._replace(src=only, dst=only)]
        if not set(graph.edges) <= set(known):
            return []
        return [kind for kind in known if kind not in graph.edges and {kind.src, kind.dst} <= set(graph.nodes)]

    def _no_edges(self, graph: Graph, kind: EdgeType) -> Edges:
        only = self.edge_types[0] if len(self.edge_types) == 1 else str(kind)
        columns = self.edge_columns.get(only, ())
        width = sum(width for _, width in columns)
        return replace(
            validated_edges(
                torch.empty((2, 0), dtype=torch.int64),
                num_src=graph.nodes[kind.src].count,
                num_dst=graph.nodes[kind.dst].count,
                attr=torch.empty((0, width)) if columns else None,
            ),
            columns=columns,
        )

    def _check(self, graph: Graph, target: str, learnt: Collection[str]) -> None:
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
            known = self.target if kind == target else kind
            of = f" of {kind}" if len(graph.nodes) > 1 else ""
            if _width(nodes) != self.widths[known]:
                raise RunError(
                    f"the run was trained on {self.widths[known]} features{of} per node, this store has "
                    f"{_width(nodes)}: import it with the same feature columns"
                )
            if known in learnt and nodes.count != self.counts[known]:
                raise RunError(
                    f"the run learnt a row for each of its {self.counts[known]} nodes{of} and cannot serve the "
                    f"{nodes.count} nodes of this store: train without model.embedding, on features"
                )

    def _labels(self, nodes: Nodes) -> Tensor | None:
        y = nodes.y
        if y is None:
            return None
        if nodes.multilabel != self.multilabel:
            one, several = "one label per node", "several labels per node"
            wanted, found = (several, one) if self.multilabel else (one, several)
            raise RunError(f"the run was trained on {wanted}, this store has {found}")
        if self.multilabel:
            if y.shape[1] != self.num_classes:
                raise RunError(
                    f"the run was trained on {self.num_classes} labels per node, this store has {y.shape[1]}"
                )
            if nodes.classes and self.classes and nodes.classes != self.classes:
                wrong = next(
                    i for i, pair in enumerate(zip(nodes.classes, self.classes, strict=True)) if len({*pair}) > 1
                )
                raise RunError(
                    f"label {wrong} of the run is {self.classes[wrong]!r}, of this store {nodes.classes[wrong]!r}: "
                    "import it with the same labels in the same order"
                )
            return y
        if nodes.classes and self.classes and nodes.classes != self.classes:
            return self._by_name(nodes.classes, y)
        if y.numel() and int(y.max()) >= self.num_classes:
            raise RunError(f"the run knows classes 0 to {self.num_classes - 1}, this store has class {int(y.max())}")
        return y

    def _by_name(self, names: tuple[str, ...], y: Tensor) -> Tensor:
        number = {name: i for i, name in enumerate(self.classes)}
        used = set(torch.unique(y).tolist()) - {-1}
        strange = [name for i, name in enumerate(names) if i in used and name not in number]
        if strange:
            raise RunError(f"class {strange[0]!r} of this store is not among those the run was trained on")
        table = torch.tensor([*(number.get(name, -1) for name in names), -1])  # the last is for no label
        return table[y]


def column_order(known: ColumnGroups, found: ColumnGroups, of: str = "") -> Tensor | None:
    """[F] where a run finds its features among those of a store; None where they are as they were, or without names.

    The items of a single list have no names of their own: what its column is called says nothing of their order.
    Raises RunError for other columns.
    """
    if known == found or any(len(side) == 0 or (len(side) == 1 and side[0][1] != 1) for side in (known, found)):
        return None
    if sorted(known) != sorted(found):
        without, more = (
            [column for column in one if column not in two] for one, two in ((known, found), (found, known))
        )
        differing = [f"{word} {_shown(each)}" for word, each in (("without", without), ("with", more)) if each]
        raise RunError(
            f"the run was trained on feature columns{of} {_shown(known)}; this store has {_shown(found)} "
            f"({', '.join(differing)}): import it with the same feature columns, --features names them"
        )
    start, starts = 0, {}
    for name, width in found:
        starts[name] = start
        start += width
    return torch.cat([torch.arange(starts[name], starts[name] + width) for name, width in known])


def _turned(values: Tensor | None, order: Tensor) -> Tensor:
    assert values is not None
    if values.nbytes > FULL_CHECK_BYTES:
        raise RunError(
            "feature columns of this store are in another order than those of the run and too many to be turned in "
            "memory: import it with --features (of edges --edge-features) naming them in the order of the run"
        )
    return values[:, order]


def _shown(columns: Iterable[tuple[str, int]]) -> str:
    words = [name if width == 1 else f"{name} [{width}]" for name, width in columns]
    return ", ".join(words[:MAX_NAMES_SHOWN]) + (f", … ({len(words)} in all)" if len(words) > MAX_NAMES_SHOWN else "")


def _width(nodes: Nodes) -> int:
    return 0 if nodes.x is None else int(nodes.x.shape[1])

"""What a run predicts and what it read, kept with it: enough to predict on a store that has no labels.

Classes are known by name where they have names, so a store whose labels were numbered otherwise is read rightly.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from gnnfleet.errors import InputError, RunError
from gnnfleet.graph.graph import Graph, Nodes
from gnnfleet.nn.heads import NodeHead


@dataclass(frozen=True, kw_only=True)
class Output:
    """The labelled node type and its classes; feature widths, node counts and edge types of the graph trained on."""

    target: str
    num_classes: int
    multilabel: bool
    classes: tuple[str, ...]
    widths: Mapping[str, int]
    counts: Mapping[str, int]
    edge_types: tuple[str, ...]

    @classmethod
    def of(cls, graph: Graph) -> Output:
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
        )

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Output:
        words = dict(content)
        return cls(**{**words, "classes": tuple(words["classes"]), "edge_types": tuple(words["edge_types"])})

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
        target = self.target_in(graph)
        self._check(graph, target, learnt)
        for kind, nodes in graph.nodes.items():
            if kind != target and nodes.y is not None:
                graph = graph.with_nodes(kind, y=None, classes=())
        return graph.with_nodes(target, y=self._labels(graph.nodes[target]), classes=self.classes)

    def _check(self, graph: Graph, target: str, learnt: Collection[str]) -> None:
        if len(self.widths) > 1 and set(self.widths) != set(graph.nodes):
            raise RunError(
                f"the run was trained on nodes of types {', '.join(self.widths)}, this store has "
                f"{', '.join(graph.nodes)}: name another store"
            )
        missing = [name for name in self.edge_types if name not in map(str, graph.edges)]
        if missing and (len(self.edge_types) > 1 or len(graph.edges) != 1):
            raise RunError(f"the run was trained with edges {missing[0]}, which this store does not have")
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


def _width(nodes: Nodes) -> int:
    return 0 if nodes.x is None else int(nodes.x.shape[1])

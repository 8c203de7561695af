"""Any torch_geometric module as a model, called with x and edge_index as there, exact on parts of a graph."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gnnfleet.errors import ConfigError
from gnnfleet.graph.graph import Graph, validated_edges, validated_nodes
from gnnfleet.graph.views.local import LocalView
from gnnfleet.graph.views.view import GraphView
from gnnfleet.nn.base import Model, RowsByType
from gnnfleet.nn.pyg.hetero import OutputRows, inputs_by_type, joined_edge_list, takes_mappings
from gnnfleet.nn.pyg.layers import INPUTS, ModuleLayers, NotSplitError
from gnnfleet.nn.pyg.memory import Propagation
from gnnfleet.nn.pyg.native import aggregate_features
from gnnfleet.nn.pyg.rules import has_lazy_parameters, pass_over, reads_all_nodes
from gnnfleet.nn.pyg.source_index import SourceIndex, plain

NODES, ISOLATED, _EDGES = 40, 6, 160
"""Of random graphs, by type: nodes, of which the last are isolated, and edges."""


class PygModule(Model):
    """A module that runs layer by layer after ``split``, else as a whole: one layer that reads all rows of a graph."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module
        self.propagation = Propagation()
        arguments, name = _arguments(module), type(module).__name__
        self.takes_mappings = takes_mappings(module, arguments)
        inputs = {name: name.removesuffix("_dict") if self.takes_mappings else name for name in arguments}
        if not {"x", "edge_index"} <= set(inputs.values()):
            raise ConfigError(f"{name}.forward takes {', '.join(arguments)}: expected arguments x and edge_index")
        others = [argument for argument in arguments if arguments[argument] and inputs[argument] not in INPUTS]
        if others:
            raise ConfigError(
                f"{name}.forward needs {', '.join(others)}: expected x, edge_index, edge_weight, edge_attr, edge_type, "
                "and defaults for other arguments"
            )
        self._inputs = {
            argument: (inputs[argument], is_required)
            for argument, is_required in arguments.items()
            if inputs[argument] in INPUTS and getattr(module, f"supports_{argument}", True)
        }
        self.separate_layers: ModuleLayers | None = None
        self.reason_whole = ""  # why it runs as a whole; empty if the user chose it

    @property
    def inputs(self) -> set[str]:
        """Names in ``INPUTS`` that the module takes."""
        return {name for name, _ in self._inputs.values()}

    def split(self, graph: Graph) -> None:
        """Run layer by layer from now on, or set ``reason_whole``. ``graph`` has the widths of the inputs."""
        reader = next(filter(reads_all_nodes, self.module.modules()), None)
        try:
            if reader is not None:
                raise NotSplitError(f"{type(reader).__name__} reads all nodes")
            if self.takes_mappings or len(graph.nodes) > 1:
                raise NotSplitError("it takes several node types")
            sample = random_graph_like(graph)
            inputs = self._named_inputs(LocalView.of_graph(sample), {"": sample.single_nodes.x})
            dtype = next((p.dtype for p in self.module.parameters()), torch.float32)
            values = {name: t.to(dtype) if t.is_floating_point() else t for name, t in plain(inputs).items()}
            self.separate_layers = ModuleLayers(self.module, values)
        except NotSplitError as error:
            self.reason_whole = str(error)

    def run_whole(self, reason: str) -> None:
        self.separate_layers, self.reason_whole = None, reason

    @property
    def num_layers(self) -> int:
        return 1 if self.separate_layers is None else self.separate_layers.num_layers

    @property
    def batch_norm(self) -> bool:
        """True as well if the module runs as a whole: it may read any row, so none may be left out."""
        norms = torch.nn.modules.batchnorm._BatchNorm
        return self.separate_layers is None or any(isinstance(module, norms) for module in self.modules())

    @property
    def reads_whole_graph(self) -> bool:
        return self.separate_layers is None

    def prepare(self, graph: Graph) -> None:
        """Check that the module takes the graph, and initialize its lazy parameters by a small pass."""
        name, takes_relations = type(self.module).__name__, "edge_type" in self._inputs
        if not self.takes_mappings and (len(graph.nodes) > 1 or (len(graph.edges) > 1 and not takes_relations)):
            raise ConfigError(
                f"{name} takes one node type and one edge type: this graph has {len(graph.nodes)} and "
                f"{len(graph.edges)}. Use torch_geometric.nn.to_hetero(module, graph.metadata()), a module that takes "
                "x_dict and edge_index_dict, or a model such as rgcn or hgt"
            )
        missing = [kind for kind, nodes in graph.nodes.items() if nodes.x is None or not nodes.x.shape[1]]
        if missing:
            raise ConfigError(
                f"nodes of type {', '.join(missing)} have no features, and {name} needs x: import features, as ones or "
                "degrees, or use a gf.nn model with model.embedding"
            )
        if has_lazy_parameters(self.module):
            sample, was_training = random_graph_like(graph), self.module.training
            with torch.no_grad():
                tables: Any = {kind: nodes.x for kind, nodes in sample.nodes.items()}
                self.module.eval()(**plain(self._named_inputs(LocalView.of_graph(sample), tables)))
            self.train(was_training)

    def _on_edges(self, x: Any, edge_index: Any, **edge_data: Any) -> RowsByType:
        values = {name: rows for name, rows in edge_data.items() if rows is not None}
        rows: RowsByType = self.module(x, edge_index, **values)
        return rows

    def precompute(self, view: GraphView, x: Any) -> Tensor | None:
        """Aggregate of the features in the first layer, if a convolution on our kernels reads them as they are."""
        reader = self.separate_layers.feature_reader if self.separate_layers is not None else None
        if reader is None or not isinstance(x, Tensor):
            return None
        name, reads_weight = reader
        weight = view.weight if reads_weight else None
        return aggregate_features(view, self.module.get_submodule(name), x, weight=weight)

    def compute(
        self, layer_index: int, view: GraphView, x: Any, carry: Tensor | None, *, aggregated: Tensor | None = None
    ) -> tuple[RowsByType, Tensor | None]:
        tables = dict(x) if isinstance(x, Mapping) else {view.node_types[0]: x}
        inputs = self._named_inputs(view, tables)
        if aggregated is not None:
            fetcher = next(value.fetcher for value in inputs.values() if isinstance(value, SourceIndex))
            fetcher.features, fetcher.aggregated = x, aggregated
        with pass_over(view, self.module, self.propagation.methods):
            if self.separate_layers is not None:
                return self.separate_layers.run(layer_index, self.module, inputs, carry, view.num_dst)
            out = self.module(**inputs)
        if isinstance(out, Mapping):
            out = OutputRows({kind: rows for kind, rows in out.items() if isinstance(rows, Tensor)})
        return out, None

    def _named_inputs(self, view: GraphView, tables: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments of the module's forward."""
        values = inputs_by_type(view, tables) if self.takes_mappings else self._inputs_of_one_type(view, tables)
        for argument, (name, is_required) in self._inputs.items():
            if is_required and values.get(name) is None:
                module = type(self.module).__name__
                raise ConfigError(f"{module}.forward needs {argument}, which this graph does not have")
        return {argument: values[name] for argument, (name, _) in self._inputs.items() if values.get(name) is not None}

    def _inputs_of_one_type(self, view: GraphView, tables: Mapping[str, Tensor]) -> dict[str, Any]:
        (x,) = tables.values()
        edges, numbers = joined_edge_list(view) if "edge_type" in self._inputs else (view.edge_list(), None)
        values = {"edge_weight": edges.weight, "edge_attr": edges.attr}
        index = SourceIndex.of(edges)
        index.fetcher.inputs |= {name: None if t is None else t.to(x.dtype) for name, t in values.items()}
        index.fetcher.inputs["edge_type"] = numbers
        return {"x": x, "edge_index": index, **index.fetcher.inputs}


def random_graph_like(graph: Graph) -> Graph:
    """A small random graph of the same types and widths, with self-loops and parallel edges."""
    random, ends = torch.Generator().manual_seed(0), NODES - ISOLATED
    nodes = {}
    for kind, table in graph.nodes.items():
        x = torch.randn(NODES, 0 if table.x is None else int(table.x.shape[1]), generator=random)
        nodes[kind] = validated_nodes(NODES, x=x, y=None if table.y is None else torch.zeros(NODES, dtype=torch.int64))
    edges = {}
    for edge_type, like in graph.edges.items():
        index = torch.randint(0, ends, (2, _EDGES), generator=random)
        loops = torch.arange(0, ends, 5 if edge_type.src == edge_type.dst else ends).repeat(2, 1)
        index = torch.cat([index, index[:, :20], loops], 1)
        count = index.shape[1]
        weight = None if like.weight is None else torch.rand(count, generator=random) + 0.1
        attr = None if like.attr is None else torch.randn(count, like.attr.shape[1], generator=random)
        edges[edge_type] = validated_edges(index, num_src=NODES, num_dst=NODES, weight=weight, attr=attr)
    return Graph.of(nodes, edges)


def _arguments(module: torch.nn.Module) -> dict[str, bool]:
    """{argument of forward: is it required?}"""
    sequential = getattr(module, "signature", None)  # torch_geometric.nn.Sequential takes its inputs by name
    if sequential is not None and hasattr(sequential, "param_dict"):
        return dict.fromkeys(sequential.param_dict, True)
    if type(module).__name__ == "HeteroConv":
        return {"x_dict": True, "edge_index_dict": True}
    parameters = inspect.signature(module.forward).parameters.values()
    named = (p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD))
    return {parameter.name: parameter.default is parameter.empty for parameter in named}

"""Layers of an unchanged torch_geometric module: its forward pass, traced by torch.fx and cut behind convolutions.

A convolution is a MessagePassing module; it and modules without one inside are single operations of the trace. The
level of a tensor is the number of convolutions before it. Layer i has the convolutions that lead to level i + 1 and the
row-wise operations behind them; layer 0 also has those before the first convolution. Tensors that a later layer needs
are flattened and concatenated: those that a convolution reads travel as x, with rows of all sources, the others as
carry. Operations on edges alone, such as an encoder of edge features, run in every layer that reads their result.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch.nn import functional

from gnnfleet.errors import first_line
from gnnfleet.graph.views.view import first_rows
from gnnfleet.nn.pyg.native import fuses_relu, is_convolution

INPUTS = ("x", "edge_index", "edge_weight", "edge_attr", "edge_type")


class NotSplitError(Exception):
    """A module has no separate layers, for the reason in the message."""


class ModuleLayers:
    """The layers of a module; ``run`` computes one of them."""

    def __init__(self, module: torch.nn.Module, sample: Mapping[str, Tensor]) -> None:
        """Trace ``module`` and run it on ``sample``, inputs by name. Raises NotSplitError."""
        self._traces: dict[bool, _Trace] = {}
        for training in (False, True):  # ``self.training`` becomes a constant of a trace
            try:
                with torch.random.fork_rng(devices=[]):
                    self._traces[training] = _Trace(copy.deepcopy(module).train(training), sample)
            except NotSplitError:
                raise
            except Exception as error:
                raise NotSplitError(f"its forward pass cannot be traced ({first_line(error)})") from error
        if self._traces[True].num_layers != self._traces[False].num_layers:
            raise NotSplitError("it has other convolutions in evaluation than in training")

    def __deepcopy__(self, memo: Any) -> ModuleLayers:
        return self  # traces do not change, and refer to modules by name

    @property
    def num_layers(self) -> int:
        return self._traces[True].num_layers

    @property
    def feature_reader(self) -> tuple[str, bool] | None:
        """Name of the convolution that reads the features as they are, if there is one, and if it reads weights."""
        readers = {trace.feature_reader for trace in self._traces.values()}
        return readers.pop() if len(readers) == 1 else None

    def run(
        self, index: int, module: torch.nn.Module, inputs: Mapping[str, Any], carry: Tensor | None, num_dst: int
    ) -> tuple[Tensor, Tensor | None]:
        """Run a layer for the first ``num_dst`` rows of the input x; the other inputs are those of edges, by name."""
        return self._traces[module.training].run(index, _Root(module), inputs, carry, num_dst)


class _Root(torch.nn.Module):
    """Calls a module with its inputs by name."""

    def __init__(self, module: torch.nn.Module, names: Sequence[str] = ()) -> None:
        super().__init__()
        self.module, self.names = module, names

    def forward(self, x: Any, edge_index: Any, edge_weight: Any, edge_attr: Any, edge_type: Any) -> Any:
        inputs = zip(INPUTS, (x, edge_index, edge_weight, edge_attr, edge_type), strict=True)
        return self.module(**{name: value for name, value in inputs if name in self.names})


class _Tracer(fx.Tracer):
    def is_leaf_module(self, module: torch.nn.Module, name: str) -> bool:
        return is_convolution(module) or not any(map(is_convolution, module.modules()))


class _Trace:
    def __init__(self, module: torch.nn.Module, sample: Mapping[str, Tensor]) -> None:
        root = _Root(module, list(sample))
        graph = _Tracer().trace(root)
        if any(node.op == "get_attr" and str(node.target).startswith("_tensor_constant") for node in graph.nodes):
            raise NotSplitError("it computes with tensors that are made in its forward pass")
        self._level: dict[fx.Node, int] = {}  # of tensors with node rows
        self._edges: dict[str, fx.Node] = {}  # edge inputs
        self._convolutions: set[fx.Node] = set()
        self._assign_levels(graph, root)
        (self._x,) = (node for node in graph.nodes if node.target == "x" and node.op == "placeholder")
        (result,) = (node.args[0] for node in graph.nodes if node.op == "output")
        if not isinstance(result, fx.Node):
            raise NotSplitError(f"it returns a {type(result).__name__}, expected one tensor")
        self._result, self.num_layers = result, self._level.get(result, 0)
        if not self.num_layers:
            raise NotSplitError("no convolution leads to its result")
        nodes = [node for node in graph.nodes if self._layer(node) < self.num_layers and node.op != "output"]
        self._layers = [[node for node in nodes if self._layer(node) == index] for index in range(self.num_layers)]
        # By layer: tensors that later layers read, those of convolutions and the others.
        self._rows: list[list[fx.Node]] = []
        self._carried: list[list[fx.Node]] = []
        for index in range(self.num_layers - 1):
            users = {node: [u for u in node.users if index < self._layer(u) < self.num_layers] for node in nodes}
            live = [node for node in nodes if self._layer(node) <= index and users[node]]
            self._rows.append([node for node in live if not self._convolutions.isdisjoint(users[node])])
            self._carried.append([node for node in live if self._convolutions.isdisjoint(users[node])])
        self._shapes = self._measure(root, sample)
        self._relus = {conv: relu for conv in self._convolutions if (relu := _relu_behind(conv, root)) is not None}

    @property
    def feature_reader(self) -> tuple[str, bool] | None:
        first, *others = (node for node in self._convolutions if self._level[node] == 1)
        weight = self._edges.get("edge_weight")
        inputs = (self._x, self._edges["edge_index"], weight, None)
        if others or not all(
            any(value is known for known in inputs) for value in (*first.args, *first.kwargs.values())
        ):
            return None
        return str(first.target).removeprefix("module."), weight in first.all_input_nodes

    def _assign_levels(self, graph: fx.Graph, root: torch.nn.Module) -> None:
        of_edges: set[fx.Node] = set()  # computed from edge inputs alone
        for node in graph.nodes:
            levels = [self._level[source] for source in node.all_input_nodes if source in self._level]
            reads_edges = not of_edges.isdisjoint(node.all_input_nodes)
            if node.op == "placeholder":
                if node.target == "x":
                    self._level[node] = 0
                else:
                    self._edges[str(node.target)] = node
                    of_edges.add(node)
            elif node.op == "call_module" and is_convolution(root.get_submodule(str(node.target))):
                if not levels or not reads_edges:
                    raise NotSplitError(f"{node.name} is called without rows of nodes, or without edges")
                self._level[node] = max(levels) + 1
                self._convolutions.add(node)
            elif levels and reads_edges:
                raise NotSplitError(f"{node.name} reads nodes and edges outside of a convolution")
            elif levels:
                self._level[node] = max(levels)
            elif reads_edges:
                of_edges.add(node)

    def _layer(self, node: fx.Node) -> int:
        """The layer that computes a tensor; none for what is computed without node rows."""
        return max(self._level[node] - 1, 0) if node in self._level else len(self._level)

    def _measure(self, root: torch.nn.Module, sample: Mapping[str, Tensor]) -> dict[fx.Node, torch.Size]:
        """Shapes of rows, of the tensors that go from layer to layer. The pass may change the state of ``root``."""
        passes: list[Any] = []
        passed_on = [node for nodes in self._rows + self._carried for node in nodes]
        checked = {self._result, *self._convolutions, *passed_on}
        env = {self._x: sample["x"], **{node: sample.get(name) for name, node in self._edges.items()}}
        convolutions: list[Any] = [module for module in root.modules() if is_convolution(module)]
        for module in convolutions:
            module.register_propagate_forward_pre_hook(lambda conv, _: passes.append(conv))
        with torch.no_grad():
            for node in (node for nodes in self._layers for node in nodes if node is not self._x):
                passes.clear()
                env[node] = value = self._compute(node, root, env, None)
                if len(passes) > 1:
                    raise NotSplitError(f"{type(passes[0]).__name__} passes messages more than once in a call")
                is_rows = isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 1
                if node in checked and not (is_rows and len(value) == len(sample["x"])):
                    raise NotSplitError(f"{node.name} is no tensor with a row for each node")
        return {node: cast(Tensor, env[node]).shape[1:] for node in passed_on}

    def run(
        self, index: int, root: torch.nn.Module, inputs: Mapping[str, Any], carry: Tensor | None, num: int
    ) -> tuple[Tensor, Tensor | None]:
        env: dict[fx.Node, Any] = {node: inputs.get(name) for name, node in self._edges.items()}
        if index == 0:
            env[self._x] = inputs["x"]
        else:
            env |= self._unpack(self._rows[index - 1], inputs["x"]) | self._unpack(self._carried[index - 1], carry)
        for node in self._layers[index]:
            if node not in env:
                env[node] = self._compute(node, root, env, num)
        if index == self.num_layers - 1:
            return env[self._result], None
        x, carry = (_pack([first_rows(env[n], num) for n in nodes[index]]) for nodes in (self._rows, self._carried))
        assert x is not None
        return x, carry

    def _compute(self, node: fx.Node, root: torch.nn.Module, env: dict[fx.Node, Any], num_dst: int | None) -> Any:
        """The value of a node; a convolution reads rows of all sources, other operations those of destinations."""
        cuts = num_dst is not None and node not in self._convolutions

        def read(source: fx.Node) -> Any:
            if source not in env:
                env[source] = self._compute(source, root, env, num_dst)
            is_lower = source in self._level and self._level[source] < self._level[node]
            return env[source][:num_dst] if cuts and is_lower else env[source]

        args, kwargs = fx.node.map_arg((node.args, node.kwargs), read)
        if node.op == "call_function":
            return node.target(*args, **kwargs)  # type: ignore[operator]
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        target: Any = reduce(getattr, str(node.target).split("."), root)
        if node.op == "get_attr":
            return target
        relu = self._relus.get(node) if num_dst is not None and fuses_relu(target) else None
        out = target(*args, **kwargs) if relu is None else target(*args, **kwargs, relu=True)
        out = out if cuts or num_dst is None else first_rows(out, num_dst)
        if relu is not None:
            env[relu] = out
        return out

    def _unpack(self, nodes: Sequence[fx.Node], table: Tensor | None) -> dict[fx.Node, Tensor]:
        if table is None:
            return {}
        columns = torch.split(table, [self._shapes[node].numel() for node in nodes], 1)
        return {n: part.reshape(len(part), *self._shapes[n]) for n, part in zip(nodes, columns, strict=True)}


def _relu_behind(node: fx.Node, root: torch.nn.Module) -> fx.Node | None:
    """The ReLU that alone reads a tensor, perhaps behind norms that are Identity modules."""
    while len(node.users) == 1:
        (node,) = node.users
        module = root.get_submodule(str(node.target)) if node.op == "call_module" else None
        if type(module) is torch.nn.ReLU or node.target in (torch.relu, torch.relu_, functional.relu, "relu", "relu_"):
            return node
        if type(module) is not torch.nn.Identity:
            return None
    return None


def _pack(tensors: Sequence[Tensor]) -> Tensor | None:
    flat = [tensor.flatten(1) for tensor in tensors]
    return None if not flat else flat[0] if len(flat) == 1 else torch.cat(flat, 1)

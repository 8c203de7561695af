"""Any torch_geometric module as a model, called with x and edge_index as there, exact on parts of a graph."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gnnfleet.errors import ConfigError
from gnnfleet.graph.views.view import GraphView
from gnnfleet.nn.base import Model, RowsByType
from gnnfleet.nn.pyg.rules import pass_over
from gnnfleet.nn.pyg.source_index import SourceIndex

_INPUTS = ("x", "edge_index", "edge_weight", "edge_attr")


class PygModule(Model):
    """A module that is run as a whole: to the strategies it is a model of one layer that reads all rows."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module
        arguments, name = _arguments(module), type(module).__name__
        if not {"x", "edge_index"} <= arguments.keys():
            raise ConfigError(f"{name}.forward takes {', '.join(arguments)}: expected arguments x and edge_index")
        others = [argument for argument, is_required in arguments.items() if is_required and argument not in _INPUTS]
        if others:
            raise ConfigError(
                f"{name}.forward needs {', '.join(others)}: expected x, edge_index, edge_weight, edge_attr, and "
                "defaults for other arguments"
            )
        self._edge_inputs = {
            argument: arguments[argument]
            for argument in ("edge_weight", "edge_attr")
            if argument in arguments and getattr(module, f"supports_{argument}", True)
        }

    @property
    def num_layers(self) -> int:
        return 1

    @property
    def batch_norm(self) -> bool:
        """True: nothing is known of the rows that a module reads, so none may be left out."""
        return True

    @property
    def reads_whole_graph(self) -> bool:
        return True

    def compute(self, layer_index: int, view: GraphView, x: Any, carry: Tensor | None) -> tuple[RowsByType, None]:
        if isinstance(x, Mapping):
            (x,) = x.values()
        if x is None:
            raise ConfigError("the module needs node features, and this graph has none")
        edges = view.edge_list()
        inputs = {}
        for name, is_required in self._edge_inputs.items():
            values = edges.weight if name == "edge_weight" else edges.attr
            if values is not None:
                inputs[name] = values.to(x.dtype)
            elif is_required:
                raise ConfigError(f"{type(self.module).__name__}.forward needs {name}, which this graph does not have")
        with pass_over(view, self.module):
            return self.module(x=x, edge_index=SourceIndex.of(edges), **inputs), None


def _arguments(module: torch.nn.Module) -> dict[str, bool]:
    """{argument of forward: is it required?}"""
    sequential = getattr(module, "signature", None)  # torch_geometric.nn.Sequential takes its inputs by name
    if sequential is not None and hasattr(sequential, "param_dict"):
        return dict.fromkeys(sequential.param_dict, True)
    parameters = inspect.signature(module.forward).parameters.values()
    named = (p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD))
    return {parameter.name: parameter.default is parameter.empty for parameter in named}

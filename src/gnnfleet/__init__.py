"""Train graph neural networks on graphs too big for one machine.

>>> import gnnfleet as gf
>>> graph = gf.Graph(edge_index=edge_index, x=x, y=y, split=split)
>>> gf.save(graph, "shop/")
>>> graph = gf.open("shop/")

Names are looked up on first use, so that the command line can answer ``--help`` without loading torch.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gnnfleet import nn as nn
    from gnnfleet.api import load_run, train
    from gnnfleet.errors import ConfigError as ConfigError
    from gnnfleet.errors import ExchangeError as ExchangeError
    from gnnfleet.errors import GnnfleetError as GnnfleetError
    from gnnfleet.errors import InputError as InputError
    from gnnfleet.errors import NativeError as NativeError
    from gnnfleet.errors import PartitionError as PartitionError
    from gnnfleet.errors import RunError as RunError
    from gnnfleet.errors import StoreError as StoreError
    from gnnfleet.fleet.fleet import Fleet
    from gnnfleet.fleet.ranks import launch
    from gnnfleet.graph.graph import EdgeType, Graph
    from gnnfleet.graph.ingest.networkx import from_networkx
    from gnnfleet.graph.ingest.npz import read_npz
    from gnnfleet.graph.ingest.ogb import read_ogb
    from gnnfleet.graph.ingest.pyg import from_pyg, to_pyg
    from gnnfleet.graph.sampling.loader import NeighborLoader
    from gnnfleet.graph.store import save_store as save
    from gnnfleet.graph.validate import open_validated_store as open
    from gnnfleet.graph.views.view import GraphView

# Public name → where it lives, for all that is not an error.
_HOMES = {
    "EdgeType": "gnnfleet.graph.graph.EdgeType",
    "Fleet": "gnnfleet.fleet.fleet.Fleet",
    "Graph": "gnnfleet.graph.graph.Graph",
    "GraphView": "gnnfleet.graph.views.view.GraphView",
    "NeighborLoader": "gnnfleet.graph.sampling.loader.NeighborLoader",
    "launch": "gnnfleet.fleet.ranks.launch",
    "from_networkx": "gnnfleet.graph.ingest.networkx.from_networkx",
    "from_pyg": "gnnfleet.graph.ingest.pyg.from_pyg",
    "load_run": "gnnfleet.api.load_run",
    "open": "gnnfleet.graph.validate.open_validated_store",
    "read_npz": "gnnfleet.graph.ingest.npz.read_npz",
    "read_ogb": "gnnfleet.graph.ingest.ogb.read_ogb",
    "save": "gnnfleet.graph.store.save_store",
    "to_pyg": "gnnfleet.graph.ingest.pyg.to_pyg",
    "train": "gnnfleet.api.train",
}

__all__ = [
    "ConfigError", "EdgeType", "ExchangeError", "Fleet", "GnnfleetError", "Graph", "GraphView", "InputError",
    "NativeError", "NeighborLoader", "PartitionError", "RunError", "StoreError", "from_networkx", "from_pyg", "launch",
    "load_run", "open", "read_npz", "read_ogb", "save", "to_pyg", "train",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name == "nn":
        return import_module("gnnfleet.nn")
    if name not in __all__:
        raise AttributeError(f"module 'gnnfleet' has no attribute {name!r}")
    module, _, own_name = _HOMES.get(name, f"gnnfleet.errors.{name}").rpartition(".")
    return getattr(import_module(module), own_name)


class _Package(ModuleType):
    """Keeps ``launch`` the function: the import of the package gnnfleet.launch would replace it."""

    launch = property(lambda self: __getattr__("launch"), lambda self, package: None)


sys.modules[__name__].__class__ = _Package


def __dir__() -> list[str]:
    return [*__all__, "nn"]

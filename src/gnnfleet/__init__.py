"""Train graph neural networks on graphs too big for one machine.

>>> import gnnfleet as gf
>>> graph = gf.Graph(edge_index=edge_index, x=x, y=y, split=split)
>>> gf.save(graph, "shop/")
>>> graph = gf.open("shop/")

Names are looked up on first use, so that the command line can answer ``--help`` without loading torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gnnfleet.errors import ConfigError as ConfigError
    from gnnfleet.errors import GnnfleetError as GnnfleetError
    from gnnfleet.errors import InputError as InputError
    from gnnfleet.errors import NativeError as NativeError
    from gnnfleet.errors import PartitionError as PartitionError
    from gnnfleet.errors import StoreError as StoreError
    from gnnfleet.graph.graph import EdgeType as EdgeType
    from gnnfleet.graph.graph import Graph as Graph
    from gnnfleet.graph.store import open_store as open
    from gnnfleet.graph.store import save_store as save

# Public name → module it lives in, and its name there where it differs.
_HOMES: dict[str, tuple[str, str | None]] = {
    "ConfigError": ("gnnfleet.errors", None),
    "EdgeType": ("gnnfleet.graph.graph", None),
    "GnnfleetError": ("gnnfleet.errors", None),
    "Graph": ("gnnfleet.graph.graph", None),
    "InputError": ("gnnfleet.errors", None),
    "NativeError": ("gnnfleet.errors", None),
    "PartitionError": ("gnnfleet.errors", None),
    "StoreError": ("gnnfleet.errors", None),
    "open": ("gnnfleet.graph.store", "open_store"),
    "save": ("gnnfleet.graph.store", "save_store"),
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'gnnfleet' has no attribute {name!r}")
    module, own_name = _HOMES[name]
    return getattr(import_module(module), own_name or name)


def __dir__() -> list[str]:
    return __all__

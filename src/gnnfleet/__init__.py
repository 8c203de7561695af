"""Train graph neural networks on graphs too big for one machine.

>>> import gnnfleet as gf
>>> graph = gf.Graph(edge_index=edge_index, x=x, y=y, split=split)
>>> gf.save(graph, "shop/")
>>> graph = gf.open("shop/")
"""

from gnnfleet.errors import (
    ConfigError,
    GnnfleetError,
    InputError,
    NativeError,
    PartitionError,
    StoreError,
)
from gnnfleet.graph.graph import EdgeType, Graph
from gnnfleet.graph.store import open_store as open
from gnnfleet.graph.store import save_store as save

__all__ = [
    "ConfigError",
    "EdgeType",
    "GnnfleetError",
    "Graph",
    "InputError",
    "NativeError",
    "PartitionError",
    "StoreError",
    "open",
    "save",
]

"""One training epoch of gnnfleet and of torch_geometric on the same graph."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

Epoch = Callable[[int], float]
"""Runs one epoch and returns its loss."""

HIDDEN = {"sage": 256, "gat": 128, "custom": 64}


def load(data: Path) -> Any:
    """Load the graph of the .npy files in ``data``, or generate one of the same size."""
    import numpy as np
    import torch

    from gnnfleet.graph.datasets import make_dataset
    from gnnfleet.graph.graph import Graph

    if not (data / "edge_index.npy").exists():
        return make_dataset("communities", nodes=200_000, edges=5_000_000, features=100, classes=47)
    x, y = (torch.from_numpy(np.load(data / f"{name}.npy")) for name in ("x", "y"))
    train = torch.zeros(len(x), dtype=torch.bool)
    train[torch.from_numpy(np.load(data / "train_idx.npy"))] = True
    return Graph(torch.from_numpy(np.load(data / "edge_index.npy")), x=x, y=y, split={"train": train, "test": ~train})


def make_local(graph: Any, model: str, precision: str, **settings: Any) -> Any:
    """Build the local strategy on a graph; three layers, no dropout."""
    from gnnfleet.config.resolve import resolve
    from gnnfleet.training.build import build

    config = {
        "model": {"name": model, "hidden": HIDDEN[model], "layers": 3, "heads": 4, "dropout": 0.0, **settings},
        "train": {"weight_decay": 0.0},
        "strategy": {"name": "local", "order": "cluster"},
        "precision": precision,
    }
    return build(graph, resolve(config)).strategy


def gnnfleet_epoch(graph: Any, model: str, precision: str) -> Epoch:
    strategy = make_local(graph, model, precision)
    return lambda epoch: float(next(iter(list(strategy.train_epoch(epoch)))).loss)


def module_epoch(graph: Any, factory: str) -> Epoch:
    """An epoch of the module that ``file.py:factory`` makes, through the local strategy in full batch."""
    from gnnfleet.config.resolve import resolve
    from gnnfleet.training.build import build

    strategy = {"name": "local", "order": "cluster"}
    config = {"model": {"name": factory}, "train": {"weight_decay": 0.0}, "strategy": strategy}
    local = build(graph, resolve(config)).strategy
    return lambda epoch: float(next(iter(list(local.train_epoch(epoch)))).loss)


def pyg_network(model: str, in_channels: int, out_channels: int) -> Any:
    """Three layers of torch_geometric: ``sage``, ``gat``, or ``custom``, a SAGE with a message of its own."""
    import torch
    import torch_geometric.nn as pyg

    class Custom(pyg.SAGEConv):
        def message(self, x_j: Any) -> Any:
            return torch.nn.functional.leaky_relu(x_j)

    class CustomSAGE(pyg.GraphSAGE):
        def init_conv(self, in_channels: Any, out_channels: int, **settings: Any) -> Any:
            return Custom(in_channels, out_channels, **settings)

    torch.manual_seed(0)
    if model == "gat":
        return pyg.GAT(in_channels, HIDDEN[model], 3, out_channels, heads=4)
    kind = pyg.GraphSAGE if model == "sage" else CustomSAGE
    return kind(in_channels, HIDDEN[model], 3, out_channels)


def pyg_epoch(graph: Any, model: str, *, csr: bool) -> Epoch:
    """An epoch of torch_geometric on edge_index or on a sparse CSR matrix."""
    import torch

    nodes, edges = graph.single_nodes, graph.single_edges
    x, y, rows = nodes.x, nodes.y, nodes.mask("train")
    network = pyg_network(model, x.shape[1], nodes.num_classes)
    index = edges.edge_index()
    if csr:
        ones = torch.ones(edges.count)
        index = torch.sparse_csr_tensor(edges.indptr, edges.src.long(), ones, size=(nodes.count, nodes.count))
    optimizer = torch.optim.Adam(network.parameters(), lr=0.01)

    def epoch(_: int) -> float:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(network(x, index)[rows], y[rows])
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return epoch

"""Full-batch training in a plain PyTorch loop over a view and a model, without runs, strategies or configs.

python examples/full_batch.py [epochs]
"""

from __future__ import annotations

import sys

import torch
from torch.nn import functional

import gnnfleet as gf
from gnnfleet.graph.datasets import make_dataset
from gnnfleet.graph.views.local import LocalView
from gnnfleet.nn.model import build_model
from gnnfleet.ops.draws import DrawKey


def main(epochs: int = 30) -> float:
    graph = make_dataset("communities", nodes=2000, mean_degree=10, seed=1)
    nodes = graph.single_nodes
    assert nodes.x is not None and nodes.y is not None
    train, test = nodes.mask("train"), nodes.mask("test")

    torch.manual_seed(0)
    model = build_model(gf.nn.SAGE(hidden=64, layers=2), graph)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    view = LocalView.of_graph(graph)

    for epoch in range(epochs):
        model.train()
        # The key determines the dropout masks: the same key gives the same masks on any machine.
        logits = model(view.with_step(key=DrawKey(seed=0, epoch=epoch)), nodes.x)
        loss = functional.cross_entropy(logits[train], nodes.y[train])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    model.eval()
    with torch.no_grad():
        predicted = model(view.with_step(training=False), nodes.x).argmax(1)
    accuracy = float((predicted == nodes.y)[test].double().mean())
    print(f"{epochs} epochs, test accuracy {accuracy:.3f}")
    return accuracy


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))

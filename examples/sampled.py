"""Training on sampled mini-batches in a plain PyTorch loop, without runs, strategies or configs.

python examples/sampled.py [epochs]
"""

from __future__ import annotations

import sys

import torch
from torch.nn import functional

import gnnfleet as gf
from gnnfleet.graph.datasets import make_dataset
from gnnfleet.graph.views.local import LocalView
from gnnfleet.nn.model import build_model


def main(epochs: int = 5) -> float:
    graph = make_dataset("communities", nodes=4000, mean_degree=15, seed=1)
    nodes = graph.single_nodes
    assert nodes.x is not None and nodes.y is not None

    torch.manual_seed(0)
    model = build_model(gf.nn.SAGE(hidden=64, layers=2), graph)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    # Ten neighbours of each seed and five of each of those; the next batches are prefetched.
    loader = gf.NeighborLoader(graph, num_neighbors=[10, 5], batch_size=256, input_nodes="train", shuffle=True, seed=0)

    for epoch in range(epochs):
        model.train()
        total = 0.0
        for batch in loader:
            logits = model(batch.views, batch.x)
            loss = functional.cross_entropy(logits, batch.y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += float(loss.detach()) / len(loader)
        print(f"epoch {epoch + 1}: loss {total:.3f}")

    model.eval()
    with torch.no_grad():
        predicted = model(LocalView.of_graph(graph).with_step(training=False), nodes.x).argmax(1)
    accuracy = float((predicted == nodes.y)[nodes.mask("test")].double().mean())
    print(f"test accuracy {accuracy:.3f}, with all neighbours")
    return accuracy


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))

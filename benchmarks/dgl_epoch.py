"""Full-batch epoch of DGL, for an interpreter that has DGL and not gnnfleet; prints one JSON object.

usage: PYTHON benchmarks/dgl_epoch.py DATA sage|gat EPOCHS
"""

from __future__ import annotations

import json
import os
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ.setdefault("DGLBACKEND", "pytorch")


def make_network(model: str, width: int, classes: int) -> Any:
    import torch
    from dgl.nn.pytorch import GATConv, SAGEConv

    if model == "sage":
        sizes = [width, 256, 256, classes]
        layers = [SAGEConv(a, b, "mean") for a, b in pairwise(sizes)]
    else:
        layers = [GATConv(width, 32, 4), GATConv(128, 32, 4), GATConv(128, classes, 4)]
    return torch.nn.ModuleList(layers)


def main() -> None:
    import dgl
    import numpy as np
    import torch

    data, model, epochs = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    x, y, index, train = (
        torch.from_numpy(np.load(data / f"{name}.npy")) for name in ("x", "y", "edge_index", "train_idx")
    )
    graph = dgl.graph((index[0], index[1]), num_nodes=len(x))
    if model == "gat":
        graph = dgl.add_self_loop(graph)
    torch.manual_seed(0)
    layers = make_network(model, x.shape[1], int(y.max()) + 1)
    optimizer = torch.optim.Adam(layers.parameters(), lr=0.01)
    losses, seconds = [], []
    for _ in range(3 + epochs):
        start = time.perf_counter()
        h = x
        for number, layer in enumerate(layers):
            h = layer(graph, h)
            last = number == 2
            if model == "gat":
                h = h.mean(1) if last else h.flatten(1)
            h = h if last else torch.relu(h)
        loss = torch.nn.functional.cross_entropy(h[train], y[train].long())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        seconds.append(time.perf_counter() - start)
    peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    print(json.dumps({"seconds": min(seconds[3:]), "peak_gib": int(peak.split()[1]) / 2**20, "losses": losses[:3]}))


if __name__ == "__main__":
    main()

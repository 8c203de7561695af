"""Sampled training of DGL, for an interpreter that has DGL and not gnnfleet; prints one JSON object.

SAGE of three layers, 256 wide, neighbours [15, 10, 5] counted from the seeds: seeds per second, with and without
training. usage: PYTHON benchmarks/dgl_sampled.py DATA BATCH STEPS
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
WARM = 3


def rate(loader: Any, step: Any, steps: int) -> float:
    """Seeds per second of the loader after the first batches."""
    start, seeds = 0.0, 0
    for number, (_, out, blocks) in enumerate(loader):
        if number == WARM:
            start = time.perf_counter()
        step(blocks)
        if number >= WARM:
            seeds += len(out)
        if number == WARM + steps - 1:
            break
    return seeds / (time.perf_counter() - start)


def main() -> None:
    import dgl
    import numpy as np
    import torch
    from dgl.nn.pytorch import SAGEConv

    data, size, steps = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    x, y, index, train = (
        torch.from_numpy(np.load(data / f"{name}.npy")) for name in ("x", "y", "edge_index", "train_idx")
    )
    graph = dgl.graph((index[0], index[1]), num_nodes=len(x)).formats("csc")
    graph.create_formats_()
    sampler = dgl.dataloading.NeighborSampler([5, 10, 15])  # DGL names the layer that reads features first
    torch.manual_seed(0)
    widths = [x.shape[1], 256, 256, int(y.max()) + 1]
    layers = torch.nn.ModuleList(SAGEConv(a, b, "mean") for a, b in pairwise(widths))
    optimizer = torch.optim.Adam(layers.parameters(), lr=0.01)

    def train_step(blocks: Any) -> None:
        h = x[blocks[0].srcdata[dgl.NID]]
        for number, (layer, block) in enumerate(zip(layers, blocks, strict=True)):
            h = layer(block, h)
            h = h if number == 2 else torch.relu(h)
        loss = torch.nn.functional.cross_entropy(h, y[blocks[-1].dstdata[dgl.NID]].long())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    rates = {}
    for name, step in (("sampler", lambda _: None), ("training", train_step)):
        loader = dgl.dataloading.DataLoader(
            graph, train, sampler, batch_size=size, shuffle=True, drop_last=True, num_workers=0
        )
        rates[name] = rate(loader, step, steps)
    print(json.dumps(rates))


if __name__ == "__main__":
    main()

"""The loop of own_loop_single.py on several workers, with the same losses.

python examples/own_loop.py                      # two workers on this machine
torchrun --nproc-per-node 2 examples/own_loop.py
"""

import os

import torch
import torch.nn.functional as F
from torch_geometric.nn import GraphSAGE

import gnnfleet as gf
from gnnfleet.graph.datasets import make_dataset


def main() -> float:
    fleet = gf.Fleet()
    data = fleet.open(make_dataset("communities", nodes=2000, seed=0), partition="random")
    torch.manual_seed(0)
    model = GraphSAGE(data.num_features, 64, 2, data.num_classes)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model, optimizer = fleet.prepare(model, optimizer)
    for epoch in range(10):
        model.train()
        optimizer.zero_grad()
        out = model(data.x, data.edge_index)
        loss = fleet.mean(F.cross_entropy(out[data.train_mask], data.y[data.train_mask], reduction="none"))
        fleet.backward(loss)
        optimizer.step()
        model.eval()
        with torch.no_grad():
            correct = model(data.x, data.edge_index).argmax(1) == data.y
        test = fleet.mean(correct[data.test_mask])
        if fleet.rank == 0:
            print(f"epoch {epoch}: loss {loss:.4f}, test {test:.4f}")
    fleet.save("model", model, optimizer, epoch=10)
    fleet.predict(model, data, "predictions.parquet")
    return loss.item()


if __name__ == "__main__":
    print(f"final loss {main() if 'RANK' in os.environ else gf.launch(main, workers=2):.4f}")

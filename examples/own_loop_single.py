"""A training loop in plain torch_geometric; own_loop.py is the same loop on several workers.

python examples/own_loop_single.py
"""

import torch
import torch.nn.functional as F
from torch_geometric.nn import GraphSAGE

import gnnfleet as gf
from gnnfleet.graph.datasets import make_dataset


def main() -> None:
    data = gf.to_pyg(make_dataset("communities", nodes=2000, seed=0))
    torch.manual_seed(0)
    model = GraphSAGE(data.num_features, 64, 2, int(data.y.max()) + 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(10):
        model.train()
        optimizer.zero_grad()
        out = model(data.x, data.edge_index)
        loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask])
        loss.backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            correct = model(data.x, data.edge_index).argmax(1) == data.y
        print(f"epoch {epoch}: loss {loss:.4f}, test {correct[data.test_mask].float().mean():.4f}")
    torch.save(model.state_dict(), "model.pt")


if __name__ == "__main__":
    main()

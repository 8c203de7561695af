"""A custom model: a new layer, written as the message of an edge, stacked and trained like any other.

python examples/custom_model.py
gnnfleet train STORE --model examples/custom_model.py:distance_model --set model.settings.sharp=2
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

import gnnfleet as gf
from gnnfleet.graph.datasets import make_dataset


class DistanceConv(torch.nn.Module):
    """x'_i = W_r x_i + mean_j exp(−sharp · |z_j − z_i|²) z_j with z = W x: close neighbours count more."""

    def __init__(self, in_channels: int, out_channels: int, *, sharp: float) -> None:
        super().__init__()
        self.lin = torch.nn.Linear(in_channels, out_channels, bias=False)
        self.root = torch.nn.Linear(in_channels, out_channels)
        self.sharp = torch.nn.Parameter(torch.tensor([sharp]))

    def forward(self, view: gf.GraphView, x: Tensor) -> Tensor:
        z = self.lin(x)
        # Messages are computed block by block and rebuilt in backward: parameters are passed in, not captured.
        mean = view.propagate(_message, src={"z": z}, dst={"z": z}, params=[self.sharp], reduce="mean")
        return mean + self.root(x[: view.num_dst])  # the first rows of x are the destinations


def _message(src: dict[str, Tensor], dst: dict[str, Tensor], edge: dict[str, Tensor], sharp: Tensor) -> Tensor:
    distance = (src["z"] - dst["z"]).square().mean(1, keepdim=True)
    return torch.exp(-sharp * distance) * src["z"]


def distance_model(config: gf.nn.ModelConfig, graph: gf.Graph, out_channels: int) -> gf.nn.Model:
    """Factory for ``--model file.py:distance_model``."""
    x = graph.single_nodes.x
    assert x is not None, "the layer needs features"
    widths = [x.shape[1], *[config.hidden] * (config.layers - 1), out_channels]
    sharp = float(config.settings.get("sharp", 1.0))
    layers = [DistanceConv(in_channels, out_channels, sharp=sharp) for in_channels, out_channels in pairwise(widths)]
    return gf.nn.Model(layers, dropout=config.dropout)


def main() -> float:
    graph = make_dataset("communities", nodes=800, mean_degree=6, seed=1)
    model = {"name": f"{__file__}:distance_model", "hidden": 32, "layers": 2, "settings": {"sharp": 0.5}}
    record = gf.train(graph, model=model, epochs=15, lr=0.03, seed=0)
    print(record, "learnt sharpness:", [round(layer.sharp.item(), 2) for layer in record.model.layers])
    return float(record.metrics["test"])


if __name__ == "__main__":
    main()

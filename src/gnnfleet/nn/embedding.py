"""A learnable row per node, for graphs without features; looked up by store id, so any view finds its own."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from gnnfleet.graph.view import GraphView


class NodeEmbedding(torch.nn.Module):
    """``weight`` [nodes, width] of one node type; starts normal with rows of length about 1."""

    def __init__(self, num_nodes: int, width: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(num_nodes, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        torch.nn.init.normal_(self.weight, std=self.weight.shape[1] ** -0.5)

    def forward(self, view: GraphView) -> Tensor:
        """[N_src, width] the rows of a view of this node type."""
        return functional.embedding(view.node_ids, self.weight)

"""What reads embeddings in pairs: is there an event, or of which class is it."""

from __future__ import annotations

import torch
from torch import Tensor

from gnnfleet.nn.linear import apply_linear, widen


class EventDecoder(torch.nn.Module):
    """w ReLU(W_s z_u + W_d z_v): the logit of an event between two nodes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.src = torch.nn.Linear(width, width)
        self.dst = torch.nn.Linear(width, width)
        self.out = torch.nn.Linear(width, 1)

    def sources(self, z: Tensor) -> Tensor:
        """[n, D]: the part of a score that a source decides."""
        return widen(apply_linear(self.src, z))

    def destinations(self, z: Tensor) -> Tensor:
        """[n, D]: the part that a destination decides."""
        return widen(apply_linear(self.dst, z))

    def scores(self, sources: Tensor, destinations: Tensor) -> Tensor:
        """[…] logits of both parts [… , D], which may be broadcast."""
        both = torch.relu(sources + destinations)
        return both @ self.out.weight[0] + self.out.bias


class ClassDecoder(torch.nn.Module):
    """Linear on [z_u, z_v]: logits of an event's classes."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.out = torch.nn.Linear(2 * width, classes)

    def forward(self, src: Tensor, dst: Tensor) -> Tensor:
        """[n, C]."""
        return widen(apply_linear(self.out, torch.cat([src, dst], 1)))

"""What reads embeddings in pairs: is there an event, or of which class is it."""

from __future__ import annotations

import torch
from torch import Tensor

from gnnfleet.ops.product import linear_wide


class EventDecoder(torch.nn.Module):
    """w ReLU(W_s z_u + W_d z_v + W_p f_uv): the logit of an event between two nodes, f what is known of the pair."""

    def __init__(self, width: int, pair_width: int = 0) -> None:
        super().__init__()
        self.src = torch.nn.Linear(width, width)
        self.dst = torch.nn.Linear(width, width)
        self.pair = torch.nn.Linear(pair_width, width, bias=False) if pair_width else None
        self.out = torch.nn.Linear(width, 1)

    def sources(self, z: Tensor) -> Tensor:
        """[n, D]: the part of a score that a source decides."""
        return linear_wide(self.src, z)

    def destinations(self, z: Tensor) -> Tensor:
        """[n, D]: the part that a destination decides."""
        return linear_wide(self.dst, z)

    def scores(self, sources: Tensor, destinations: Tensor, pairs: Tensor | None = None) -> Tensor:
        """[…] logits of both parts [… , D], which may be broadcast, and features of pairs [… , P]."""
        both = sources + destinations
        if self.pair is not None:
            assert pairs is not None, "this decoder reads features of pairs"
            flat = pairs.to(both.dtype).reshape(-1, pairs.shape[-1])
            both = both + linear_wide(self.pair, flat).view(*pairs.shape[:-1], both.shape[-1])
        both = torch.relu(both)
        return both @ self.out.weight[0] + self.out.bias


class ClassDecoder(torch.nn.Module):
    """Linear on [z_u, z_v]: logits of an event's classes."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.out = torch.nn.Linear(2 * width, classes)

    def forward(self, src: Tensor, dst: Tensor) -> Tensor:
        """[n, C]."""
        return linear_wide(self.out, torch.cat([src, dst], 1))

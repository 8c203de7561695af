"""Decoders of pairs of embeddings: the logit of an event, or logits of its classes."""

from __future__ import annotations

import torch
from torch import Tensor

from gnnfleet.ops.rounded_matmul import linear_float32


class EventDecoder(torch.nn.Module):
    """w ReLU(W_s z_u + W_d z_v) + w_p ReLU(W_p f_uv), the logit of an event; f_uv are features of the pair of nodes.

    The terms have separate hidden units: early embeddings have large norms and would dominate a joint sum.
    """

    def __init__(self, width: int, pair_width: int = 0) -> None:
        super().__init__()
        self.src = torch.nn.Linear(width, width)
        self.dst = torch.nn.Linear(width, width)
        self.pair = torch.nn.Linear(pair_width, width) if pair_width else None
        self.out = torch.nn.Linear(width, 1)
        self.pair_out = torch.nn.Linear(width, 1, bias=False) if pair_width else None

    def sources(self, z: Tensor) -> Tensor:
        """[n, D] source part of the hidden units."""
        return linear_float32(self.src, z)

    def destinations(self, z: Tensor) -> Tensor:
        """[n, D] destination part of the hidden units."""
        return linear_float32(self.dst, z)

    def scores(self, sources: Tensor, destinations: Tensor, pairs: Tensor | None = None) -> Tensor:
        """[…] logits of both parts [… , D], which broadcast, and features of pairs [… , P]."""
        logits = _dot(torch.relu(sources + destinations), self.out.weight[0]) + self.out.bias
        if self.pair is None or self.pair_out is None:
            return logits
        assert pairs is not None, "this decoder reads features of pairs"
        flat = pairs.to(logits.dtype).reshape(-1, pairs.shape[-1])
        return logits + _dot(torch.relu(linear_float32(self.pair, flat)), self.pair_out.weight[0]).view(logits.shape)


class ClassDecoder(torch.nn.Module):
    """W [z_u, z_v] + b, the logits of an event's classes."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.out = torch.nn.Linear(2 * width, classes)

    def forward(self, src: Tensor, dst: Tensor) -> Tensor:
        """src, dst [n, D] → [n, C]."""
        return linear_float32(self.out, torch.cat([src, dst], 1))


def _dot(rows: Tensor, weight: Tensor) -> Tensor:
    """[…] of rows […, D], without a matrix product.

    Autocast would round its results: distinct scores would become equal, and rounding depends on the position of a row,
    so equal scores would become distinct.
    """
    return (rows * weight).sum(-1)

"""What reads embeddings in pairs: is there an event, or of which class is it."""

from __future__ import annotations

import torch
from torch import Tensor

from gnnfleet.ops.rounded_matmul import linear_float32


class EventDecoder(torch.nn.Module):
    """w ReLU(W_s z_u + W_d z_v) + w_p ReLU(W_p f_uv): the logit of an event; f is what is known of the pair of nodes.

    Both have units of their own: embeddings are long at first, and would drown a few numbers in a common sum.
    """

    def __init__(self, width: int, pair_width: int = 0) -> None:
        super().__init__()
        self.src = torch.nn.Linear(width, width)
        self.dst = torch.nn.Linear(width, width)
        self.pair = torch.nn.Linear(pair_width, width) if pair_width else None
        self.out = torch.nn.Linear(width, 1)
        self.pair_out = torch.nn.Linear(width, 1, bias=False) if pair_width else None

    def sources(self, z: Tensor) -> Tensor:
        """[n, D]: the part of a score that a source decides."""
        return linear_float32(self.src, z)

    def destinations(self, z: Tensor) -> Tensor:
        """[n, D]: the part that a destination decides."""
        return linear_float32(self.dst, z)

    def scores(self, sources: Tensor, destinations: Tensor, pairs: Tensor | None = None) -> Tensor:
        """[…] logits of both parts [… , D], which may be broadcast, and features of pairs [… , P]."""
        logits = _dot(torch.relu(sources + destinations), self.out.weight[0]) + self.out.bias
        if self.pair is None or self.pair_out is None:
            return logits
        assert pairs is not None, "this decoder reads features of pairs"
        flat = pairs.to(logits.dtype).reshape(-1, pairs.shape[-1])
        return logits + _dot(torch.relu(linear_float32(self.pair, flat)), self.pair_out.weight[0]).view(logits.shape)


class ClassDecoder(torch.nn.Module):
    """Linear on [z_u, z_v]: logits of an event's classes."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.out = torch.nn.Linear(2 * width, classes)

    def forward(self, src: Tensor, dst: Tensor) -> Tensor:
        """[n, C]."""
        return linear_float32(self.out, torch.cat([src, dst], 1))


def _dot(rows: Tensor, weight: Tensor) -> Tensor:
    """[…] of rows […, D]. No product of matrices: autocast would round its results, so that many would be equal, and
    how it rounds depends on where a row stands, so that equals would not be."""
    return (rows * weight).sum(-1)

"""Link prediction after the GNN: decoders that score pairs of rows, the losses.

All decoders read the elementwise product of the two rows, so a pair scores the same in both directions.
n pairs, D columns, R relations, Q queries, N candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional

from gnnfleet.nn.linear import glorot_
from gnnfleet.nn.link_config import LinkConfig
from gnnfleet.ops.linear import sum_linear

DropoutFn = Callable[[Tensor, int], Tensor]
"""(rows, index of the dropout in the decoder) → rows with dropout."""


class Decoder(torch.nn.Module):
    """Base class of decoders. Scores a pair by ⟨src, dst⟩."""

    def forward(self, src: Tensor, dst: Tensor, relation: Tensor, *, drop: DropoutFn | None = None) -> Tensor:
        """[n] logits of pairs of rows [n, D] in relations [n]."""
        return (src * dst).sum(1)

    def score_all(self, rows: Tensor, relation: Tensor, table: Tensor) -> Tensor:
        """[Q, N] logits of rows [Q, D] in relations [Q] with all rows of a table [N, D]."""
        return rows @ table.t()

    def penalty(self, rows: Tensor) -> Tensor:
        """Mean square that the L2 term penalises."""
        return rows.square().mean()


class DistMult(Decoder):
    """⟨src, diag(weight_r), dst⟩ (Yang et al., https://arxiv.org/abs/1412.6575). ``weight`` [R, D]."""

    def __init__(self, num_relations: int, width: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(glorot_(torch.empty(num_relations, width)))

    def forward(self, src: Tensor, dst: Tensor, relation: Tensor, *, drop: DropoutFn | None = None) -> Tensor:
        return (src * functional.embedding(relation, self.weight) * dst).sum(1)

    def score_all(self, rows: Tensor, relation: Tensor, table: Tensor) -> Tensor:
        return (rows * functional.embedding(relation, self.weight)) @ table.t()

    def penalty(self, rows: Tensor) -> Tensor:
        return rows.square().mean() + self.weight.square().mean()


class ProductMLP(Decoder):
    """MLP(src ⊙ dst), as in OGB's examples (Hu et al., https://arxiv.org/abs/2005.00687). Parameters ``lins.i``."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        widths = [width] * layers + [1]
        self.lins = torch.nn.ModuleList(torch.nn.Linear(*pair) for pair in pairwise(widths))

    def forward(self, src: Tensor, dst: Tensor, relation: Tensor, *, drop: DropoutFn | None = None) -> Tensor:
        x, hidden = src * dst, cast("Iterable[torch.nn.Linear]", self.lins[:-1])
        for index, lin in enumerate(hidden):
            x = sum_linear([(x, lin.weight)], lin.bias, relu=True)
            x = x if drop is None else drop(x, index)
        out: Tensor = self.lins[-1](x)
        return out[:, 0].to(src.dtype)

    def score_all(self, rows: Tensor, relation: Tensor, table: Tensor) -> Tensor:
        # One query at a time: the caller's chunk allows for [Q, N] scores, not for [Q, N, D] rows.
        scores = [self(row.expand_as(table), table, relation) for row in rows]
        return torch.stack(scores) if scores else rows @ table.t()


def make_decoder(config: LinkConfig, *, width: int, relations: int, several: bool) -> Decoder:
    """Build the configured decoder; ``several``: targets are of more than one edge type."""
    name = config.decoder
    if name == "auto":
        name = "distmult" if several else "dot"
    if name == "distmult":
        return DistMult(relations, width)
    return ProductMLP(width, config.layers) if name == "mlp" else Decoder()


def link_loss(positive: Tensor, negative: Tensor) -> Tensor:
    """Sum of binary cross entropies with logits; a negative weighs as much as a positive."""
    return functional.softplus(-positive).sum() + functional.softplus(negative).sum()


def softmax_loss(positive: Tensor, negative: Tensor) -> Tensor:
    """Sum over positives [n] of −log softmax among the positive and its negatives [n, K]."""
    candidates = torch.cat([positive[:, None], negative], 1)
    return (candidates.logsumexp(1) - positive).sum()


LINK_LOSSES = {"bce": link_loss, "softmax": softmax_loss}

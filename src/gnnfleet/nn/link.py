"""What a link predictor is made of after the GNN: a decoder that scores pairs of rows, its settings, the loss.

All decoders work on the elementwise product of the two rows, so a pair scores the same in both directions.
n pairs, D columns, R relations, Q queries, N candidates.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Literal, cast

import torch
from pydantic import BaseModel, Field, field_validator
from torch import Tensor
from torch.nn import functional

from gnnfleet.nn.linear import glorot_
from gnnfleet.ops.linear import sum_linear

DropoutFn = Callable[[Tensor, int], Tensor]
"""(rows, place) → rows with dropout."""


class LinkConfig(BaseModel, frozen=True, extra="forbid", allow_inf_nan=False):
    """How links are scored, trained and measured."""

    decoder: Literal["auto", "dot", "mlp", "distmult"] = "auto"  # auto: distmult for several edge types, else dot
    layers: int = Field(default=2, ge=1)  # mlp: linear maps
    dropout: float = Field(default=0.0, ge=0, lt=1)  # mlp: after each hidden map
    loss: Literal["bce", "softmax"] = "bce"  # softmax: each positive against its own negatives, or the shared list
    l2: float = Field(default=0.0, ge=0)  # on the mean square of the rows scored and of distmult's relations
    negatives: int = Field(default=1, ge=1)  # per positive; with mode shared: in the list of a step
    # What is drawn anew: an end, either end by a coin, both (pair), or one list of nodes for all positives of a step,
    # set against both their ends (shared). auto: dst; either for several edge types.
    negative_mode: Literal["auto", "dst", "src", "either", "pair", "shared"] = "auto"
    avoid_edges: bool = True  # draw again where a negative is an edge of the training graph (8 bytes an edge)
    # What training targets are hidden from message passing: none; batch: those of the step and their reverses;
    # disjoint:P: in every epoch a share P is held out, and only that is trained on. auto: batch on sampled blocks,
    # none on the whole graph.
    exclude: str = "auto"
    reverse: Literal["auto", "none", "inverse"] = "auto"  # auto: rgcn on several edge types gets inverse edge types
    relation: str = ""  # predict this edge type only, as user:buys:product
    # What a held-out link is ranked among: the negatives of the data set, drawn ones, or all nodes but known answers.
    ranking: Literal["auto", "given", "sampled", "filtered"] = "auto"
    eval_negatives: int = Field(default=100, ge=1)  # ranking sampled: for each held-out link

    @field_validator("exclude")
    @classmethod
    def _readable(cls, text: str) -> str:
        if text not in ("auto", "none", "batch") and not 0 < disjoint_share(text) < 1:
            raise ValueError(f"expected auto, none, batch or disjoint:P with a share P between 0 and 1, found {text!r}")
        return text


def disjoint_share(exclude: str) -> float:
    """P of ``disjoint:P``; 0 for the other words."""
    found = re.fullmatch(r"disjoint:(\d*\.?\d+)", exclude)
    return float(found[1]) if found else 0.0


class Decoder(torch.nn.Module):
    """Scores pairs; this one by the dot product."""

    def forward(self, src: Tensor, dst: Tensor, relation: Tensor, *, drop: DropoutFn | None = None) -> Tensor:
        """[n] logits of pairs of rows [n, D] in relations [n]."""
        return (src * dst).sum(1)

    def score_all(self, rows: Tensor, relation: Tensor, table: Tensor) -> Tensor:
        """[Q, N] logits of rows [Q, D] in relations [Q] with every row of a table [N, D]."""
        return rows @ table.t()

    def penalty(self, rows: Tensor) -> Tensor:
        """What L2 looks at."""
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
    """A perceptron on the product of the rows, ``lins.i``, as OGB's examples have it."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        widths = [width] * layers + [1]
        self.lins = torch.nn.ModuleList(torch.nn.Linear(*pair) for pair in pairwise(widths))

    def forward(self, src: Tensor, dst: Tensor, relation: Tensor, *, drop: DropoutFn | None = None) -> Tensor:
        x, hidden = src * dst, cast("Iterable[torch.nn.Linear]", self.lins[:-1])
        for place, lin in enumerate(hidden):
            x = sum_linear([(x, lin.weight)], lin.bias, relu=True)
            x = x if drop is None else drop(x, place)
        out: Tensor = self.lins[-1](x)
        return out[:, 0].to(src.dtype)

    def score_all(self, rows: Tensor, relation: Tensor, table: Tensor) -> Tensor:
        # One query at a time: [N, D] is what the caller's chunk of [Q, N] scores has room for.
        scores = [self(row.expand_as(table), table, relation) for row in rows]
        return torch.stack(scores) if scores else rows @ table.t()


def make_decoder(config: LinkConfig, *, width: int, relations: int, several: bool) -> Decoder:
    """The decoder a config asks for; ``several``: whether targets are of more than one edge type."""
    name = config.decoder
    if name == "auto":
        name = "distmult" if several else "dot"
    if name == "distmult":
        return DistMult(relations, width)
    return ProductMLP(width, config.layers) if name == "mlp" else Decoder()


def link_loss(positive: Tensor, negative: Tensor) -> Tensor:
    """The sum of binary cross entropies with logits; a negative weighs as much as a positive."""
    return functional.softplus(-positive).sum() + functional.softplus(negative).sum()


def softmax_loss(positive: Tensor, negative: Tensor) -> Tensor:
    """The sum over positives [n] of the cross entropy of choosing it among its negatives [n, K] and itself."""
    every = torch.cat([positive[:, None], negative], 1)
    return (every.logsumexp(1) - positive).sum()

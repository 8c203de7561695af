"""Settings of link prediction."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import BaseModel, Field, field_validator


class LinkConfig(BaseModel, frozen=True, extra="forbid", allow_inf_nan=False):
    """Settings of link prediction: decoder, loss, negatives, hidden edges and ranking."""

    decoder: Literal["auto", "dot", "mlp", "distmult"] = "auto"  # auto: distmult for several edge types, else dot
    layers: int = Field(default=2, ge=1)  # mlp: linear maps
    dropout: float = Field(default=0.0, ge=0, lt=1)  # mlp: after each hidden map
    loss: Literal["bce", "softmax"] = "bce"  # softmax: each positive against its own negatives, or the shared list
    l2: float = Field(default=0.0, ge=0)  # on the mean square of the rows scored and of distmult's relations
    negatives: int = Field(default=1, ge=1)  # per positive; with mode shared: in the list of a step
    # Corrupted end of a negative: dst, src, either at random, both (pair), or one list of nodes for all positives of a
    # step, scored against both ends (shared). auto: dst; either for several edge types.
    negative_mode: Literal["auto", "dst", "src", "either", "pair", "shared"] = "auto"
    avoid_edges: bool = True  # draw again where a negative is an edge of the training graph (8 bytes an edge)
    # Training targets hidden from message passing: none; batch: those of the step and their reverses; disjoint:P: a
    # share P is held out in every epoch, and only that is trained on. auto: batch on sampled blocks, none on the whole
    # graph.
    exclude: str = "auto"
    reverse: Literal["auto", "none", "inverse"] = "auto"  # auto: rgcn on several edge types gets inverse edge types
    relation: str = ""  # predict this edge type only, as user:buys:product
    # Candidates of a held-out link: negatives of the data set, sampled ones, or all nodes except known answers.
    ranking: Literal["auto", "given", "sampled", "filtered"] = "auto"
    eval_negatives: int = Field(default=100, ge=1)  # ranking sampled: for each held-out link

    @field_validator("exclude")
    @classmethod
    def _check_exclude(cls, text: str) -> str:
        if text not in ("auto", "none", "batch") and not 0 < disjoint_share(text) < 1:
            raise ValueError(f"expected auto, none, batch or disjoint:P with a share P between 0 and 1, found {text!r}")
        return text


def disjoint_share(exclude: str) -> float:
    """P of ``disjoint:P``; 0 for other settings."""
    match = re.fullmatch(r"disjoint:(\d*\.?\d+)", exclude)
    return float(match[1]) if match else 0.0

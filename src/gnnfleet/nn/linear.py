"""Dense pieces layers share: initialisation as PyG's, linear maps, the order of product and aggregation."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gnnfleet.graph.views.view import GraphView
from gnnfleet.ops.linear import sum_linear


def glorot_(tensor: Tensor) -> Tensor:
    """Uniform in ±√(6 / (rows + columns)), by the last two dimensions."""
    bound = math.sqrt(6.0 / (tensor.shape[-2] + tensor.shape[-1]))
    return torch.nn.init.uniform_(tensor, -bound, bound)


class GlorotLinear(torch.nn.Linear):
    """A linear map that starts as PyG's convolutions do: Glorot weights; the bias as in torch.nn.Linear."""

    def reset_parameters(self) -> None:
        super().reset_parameters()
        glorot_(self.weight)


def apply_linear(lin: torch.nn.Module, x: Tensor, *, rows: int | None = None, relu: bool = False) -> Tensor:
    """A ``torch.nn.Linear`` on the first ``rows`` rows of x, and a ReLU after it."""
    assert isinstance(lin, torch.nn.Linear)
    return sum_linear([(x, lin.weight)], lin.bias, rows=rows, relu=relu)


def to_float32(t: Tensor) -> Tensor:
    """float32 for the bfloat16 rows that products give under autocast; what scores and sums are made of."""
    return t.float() if t.dtype == torch.bfloat16 else t


def should_transform_first(view: GraphView, wide: int, narrow: int) -> bool:
    """Whether to map ``wide`` columns to ``narrow`` before aggregating them, in a layer where the order is free.

    Rows of the narrower side are gathered, and travel where sources live elsewhere. With far more sources than
    destinations the product over all sources would cost more than it saves.
    """
    return narrow < wide and not view.has_many_sources

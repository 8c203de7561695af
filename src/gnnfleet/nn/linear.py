"""Dense parts shared by layers: PyG's initialisation, linear maps, the order of product and aggregation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from gnnfleet.errors import ConfigError
from gnnfleet.graph.views.view import GraphView
from gnnfleet.nn.norm import make_norm
from gnnfleet.ops.linear import sum_linear


def glorot_(tensor: Tensor) -> Tensor:
    """Uniform in ±√(6 / (rows + columns)), by the last two dimensions."""
    bound = math.sqrt(6.0 / (tensor.shape[-2] + tensor.shape[-1]))
    return torch.nn.init.uniform_(tensor, -bound, bound)


class GlorotLinear(torch.nn.Linear):
    """Linear map initialised as in PyG's convolutions: Glorot weights, bias as in torch.nn.Linear."""

    def reset_parameters(self) -> None:
        super().reset_parameters()
        glorot_(self.weight)


class Conv(torch.nn.Module):
    """Base class of convolutions, which draws the parameters of their linear maps again and sets their bias to 0."""

    def reset_parameters(self) -> None:
        for child in self.children():
            child.reset_parameters()  # type: ignore[operator]
        if getattr(self, "bias", None) is not None:
            torch.nn.init.zeros_(self.bias)  # type: ignore[arg-type]


def apply_linear(lin: Any, x: Tensor, *, rows: int | None = None, relu: bool = False) -> Tensor:
    """Apply a linear map of torch or torch_geometric to the first ``rows`` rows of x, then a ReLU if ``relu``."""
    return sum_linear([(x, lin.weight)], lin.bias, rows=rows, relu=relu)


def to_float32(t: Tensor) -> Tensor:
    """Convert the bfloat16 rows of products under autocast to float32, for scores and sums."""
    return t.float() if t.dtype == torch.bfloat16 else t


def edge_rows(attr: Tensor | None, lin: Any, dtype: torch.dtype) -> Tensor | None:
    """[E, F] edge features as ``lin`` reads them; None without them or without ``lin``. Raises ConfigError."""
    if attr is None or lin is None:
        return None
    attr, width = attr[:, None] if attr.dim() == 1 else attr, lin.weight.shape[1]
    if attr.shape[1] != width:
        raise ConfigError(f"edge features must have {width} columns, found {attr.shape[1]}")
    return attr.to(dtype)


def should_transform_first(view: GraphView, in_width: int, out_width: int) -> bool:
    """True if a layer with a free order of product and aggregation should multiply before it aggregates.

    Rows of the narrower side are gathered and sent between ranks. With far more sources than destinations the product
    over all sources would cost more than it saves.
    """
    return out_width < in_width and not view.has_many_sources


Activation = Callable[[Tensor], Tensor]


def activation(name: str) -> Activation:
    """Return an activation that works in place."""
    return torch.relu_ if name == "relu" else partial(functional.elu, inplace=True)


class MLP(torch.nn.Module):
    """lin_n(act(norm_{n−1}(lin_{n−1}(… x)))), [N, C_0] → [N, C_n]. Parameters ``lins.i``, ``norms.i``, as PyG's MLP."""

    def __init__(self, channels: Sequence[int], *, act: Activation = torch.relu_, norm: str = "none") -> None:
        super().__init__()
        self.act = act
        self.lins = torch.nn.ModuleList(torch.nn.Linear(*pair) for pair in pairwise(channels))
        self.norms = torch.nn.ModuleList(make_norm(norm, width) for width in channels[1:-1])

    def reset_parameters(self) -> None:
        for module in (*self.lins, *self.norms):
            if not isinstance(module, torch.nn.Identity):
                module.reset_parameters()

    def forward(self, view: GraphView, x: Tensor) -> Tensor:
        for lin, norm in zip(self.lins, self.norms, strict=False):
            plain = isinstance(norm, torch.nn.Identity)
            relu = plain and self.act is torch.relu_
            x = apply_linear(lin, x, relu=relu)
            x = x if plain else norm(view, x)
            x = x if relu else self.act(x)
        return apply_linear(self.lins[-1], x)

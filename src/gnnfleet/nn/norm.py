"""Norms over node rows. They take the view: batch statistics are those of all nodes, wherever they live."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from gnnfleet.errors import InputError
from gnnfleet.graph.views.view import GraphView


class LayerNorm(torch.nn.LayerNorm):
    """Each row by itself (PyG's LayerNorm with ``mode="node"``). Parameters ``weight``, ``bias``."""

    def forward(self, view: GraphView, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x)


class BatchNorm(torch.nn.Module):
    """Each column over all nodes; equals torch.nn.BatchNorm1d on the rows of all ranks together.

    Parameters and running statistics are ``module.*``, as in PyG's BatchNorm. Running statistics serve when the model
    or the view does not train.
    """

    def __init__(self, in_channels: int, eps: float = 1e-5, momentum: float = 0.1) -> None:
        super().__init__()
        self.module = torch.nn.BatchNorm1d(in_channels, eps=eps, momentum=momentum)

    def reset_parameters(self) -> None:
        self.module.reset_parameters()

    def forward(self, view: GraphView, x: Tensor) -> Tensor:
        return batch_norm(view, x, self.module)


def batch_norm(view: GraphView, x: Tensor, module: torch.nn.BatchNorm1d) -> Tensor:
    """``module(x)`` with statistics over everything that holds part of the nodes; x [n, F]."""
    if not (module.training and view.training):
        mean, var = module.running_mean, module.running_var
        return functional.batch_norm(x, mean, var, module.weight, module.bias, eps=module.eps)
    mean, var, count = _moments(view, x)
    with torch.no_grad():
        assert module.running_mean is not None and module.running_var is not None and module.momentum is not None
        assert module.num_batches_tracked is not None
        module.running_mean.lerp_(mean.to(module.running_mean.dtype), module.momentum)
        unbiased = (var * (count / (count - 1))).to(module.running_var.dtype)
        module.running_var.lerp_(unbiased, module.momentum)
        module.num_batches_tracked.add_(1)
    scale = (var + module.eps).rsqrt() * module.weight
    return torch.addcmul(torch.addcmul(module.bias, mean, scale, value=-1), x, scale)


def _moments(view: GraphView, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(mean [F], biased variance [F], count) over all nodes. Means are merged before squares are: sums of squares of
    far-off values would cancel."""
    here = x.shape[0]
    if here:
        own_var, own_mean = torch.var_mean(x, 0, correction=0)
    else:
        own_var = own_mean = x.sum(0)  # zeros that still take part in the exchange of gradients
    total = view.sum_over_nodes(torch.cat([own_mean * here, own_mean.new_full((1,), here)]))
    count = total[-1].detach()
    if count < 2:
        raise InputError(f"batch norm needs at least 2 nodes to train on, found {int(count)}: use norm = 'layer'")
    mean = total[:-1] / count
    var = view.sum_over_nodes((own_var + (own_mean - mean) ** 2) * here) / count
    return mean, var, count


def make_norm(name: str, width: int) -> torch.nn.Module | None:
    """``none``, ``layer`` or ``batch``."""
    if name == "none":
        return None
    return LayerNorm(width) if name == "layer" else BatchNorm(width)

"""Norms over node rows. They read the view: batch statistics are over the nodes of all ranks."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from gnnfleet.errors import InputError
from gnnfleet.graph.views.view import GraphView


class LayerNorm(torch.nn.LayerNorm):
    """(x − mean) / √(var + eps) · weight + bias by row, [n, F] → [n, F]; PyG's LayerNorm with ``mode="node"``.

    Ba, Kiros and Hinton, https://arxiv.org/abs/1607.06450.
    """

    def forward(self, view: GraphView, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x)


class BatchNorm(torch.nn.Module):
    """(x − mean) / √(var + eps) · weight + bias by column, [n, F] → [n, F], with statistics of the nodes of all ranks.

    Ioffe and Szegedy, https://arxiv.org/abs/1502.03167. Parameters and running statistics are ``module.*``, as in PyG's
    BatchNorm. Running statistics are used unless both the model and the view are in training mode.
    """

    def __init__(self, in_channels: int, eps: float = 1e-5, momentum: float = 0.1) -> None:
        super().__init__()
        self.module = torch.nn.BatchNorm1d(in_channels, eps=eps, momentum=momentum)

    def reset_parameters(self) -> None:
        self.module.reset_parameters()

    def forward(self, view: GraphView, x: Tensor) -> Tensor:
        return batch_norm(view, x, self.module)


def batch_norm(view: GraphView, x: Tensor, module: torch.nn.BatchNorm1d) -> Tensor:
    """Collective in training. ``module(x)`` with statistics of the nodes of all ranks; x [n, F]."""
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
    """Collective. (mean [F], biased variance [F], count) over all nodes.

    Means are merged before variances: sums of squares of values far from zero would cancel.
    """
    rows = x.shape[0]
    if rows:
        local_var, local_mean = torch.var_mean(x, 0, correction=0)
    else:
        local_var = local_mean = x.sum(0)  # zeros that still take part in the exchange of gradients
    total = view.sum_over_nodes(torch.cat([local_mean * rows, local_mean.new_full((1,), rows)]))
    count = total[-1].detach()
    if count < 2:
        raise InputError(f"batch norm needs at least 2 nodes to train on, found {int(count)}: use norm = 'layer'")
    mean = total[:-1] / count
    var = view.sum_over_nodes((local_var + (local_mean - mean) ** 2) * rows) / count
    return mean, var, count


def mean_over_nodes(view: GraphView, x: Tensor) -> Tensor:
    """Collective. [F] mean over the nodes of all ranks."""
    total = view.sum_over_nodes(torch.cat([x.sum(0), x.new_full((1,), len(x))]))
    return total[:-1] / total[-1].detach()


def make_norm(name: str, width: int) -> torch.nn.Module | None:
    """Build the norm ``layer`` or ``batch``; None for ``none``."""
    if name == "none":
        return None
    return LayerNorm(width) if name == "layer" else BatchNorm(width)

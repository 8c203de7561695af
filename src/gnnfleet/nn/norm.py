"""Norms over node rows. They read the view: batch statistics are over the nodes of all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

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


_SAMPLED_ROWS = 10_000


def sample_rows(x: Tensor) -> Tensor:
    """[≤ 10,000, F] float64 rows at equal distances, the same on all ranks: statistics of features need no more."""
    return x[:: max(1, len(x) // _SAMPLED_ROWS)].double()


class Standardize(torch.nn.Module):
    """(x − mean) · scale by column; ``fit`` sets the mean, and 1 / deviation, or 0 for a constant column."""

    mean: Tensor
    scale: Tensor

    def __init__(self, in_channels: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(in_channels))
        self.register_buffer("scale", torch.ones(in_channels))

    def fit(self, x: Tensor) -> None:
        rows = sample_rows(x)
        deviation = rows.std(0, correction=0)
        is_constant = deviation <= 1e-6 * rows.abs().mean(0)
        self.mean.copy_(rows.mean(0))
        self.scale.copy_(torch.where(is_constant, 0.0, 1 / deviation))

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.mean) * self.scale


class InputNorm(torch.nn.Module):
    """Normalised features by node type: rows that sum to 1 in magnitude, standardized columns, or neither.

    ``widths`` are those of the features; a single type may have any name.
    """

    def __init__(self, mode: str, widths: Mapping[str, int]) -> None:
        super().__init__()
        self.mode, self._is_single = mode, len(widths) == 1
        widths = {kind: width for kind, width in widths.items() if width and mode == "standardize"}
        self.scalers = torch.nn.ModuleDict({module_name(kind): Standardize(width) for kind, width in widths.items()})

    def fit(self, tables: Iterable[Tensor | None]) -> None:
        """Take the statistics of features, one table for every node type."""
        features = (x for x in tables if x is not None and x.shape[1])
        for scaler, x in zip(self.scalers.values(), features, strict=False):
            scaler.fit(x)  # type: ignore[operator]

    def forward(self, x: Tensor, kind: str) -> Tensor:
        if self.mode == "sum":
            return functional.normalize(x, p=1, dim=1)
        name = next(iter(self.scalers), "") if self._is_single else module_name(kind)
        rows: Tensor = self.scalers[name](x) if name in self.scalers and x.shape[1] else x
        return rows


def module_name(kind: str) -> str:
    """Module name of a node type; the only type of a graph may have an empty name."""
    return kind.replace(".", "_") or "node"


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


def make_norm(name: str, width: int) -> torch.nn.Module:
    """Build the norm ``layer`` or ``batch``; an Identity, which takes no view, for ``none``."""
    if name == "none":
        return torch.nn.Identity()
    return LayerNorm(width) if name == "layer" else BatchNorm(width)

"""Batch norm over all nodes, wherever they live; layer norm is torch's own."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gnnfleet.graph.view import GraphView


class BatchNorm(nn.Module):
    """torch's BatchNorm1d (and PyG's keys, ``module.*``) with sums that go through the view.

    Two passes, mean first: the sum of squares alone loses digits in float32.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.module = nn.BatchNorm1d(channels)

    def forward(self, view: GraphView, x: Tensor) -> Tensor:
        norm = self.module
        if not self.training:
            return torch.nn.functional.batch_norm(
                x, norm.running_mean, norm.running_var, norm.weight, norm.bias, False, 0.0, norm.eps
            )
        count = view.sum_over_nodes(x.new_tensor(float(len(x))))
        mean = view.sum_over_nodes(x.sum(0)) / count
        var = view.sum_over_nodes((x - mean).square().sum(0)) / count
        self._remember(mean.detach(), var.detach() * count / (count - 1).clamp(min=1))
        scale = (var + norm.eps).rsqrt() * norm.weight
        return x * scale + (norm.bias - mean * scale)

    @torch.no_grad()
    def _remember(self, mean: Tensor, var: Tensor) -> None:
        norm = self.module
        assert norm.running_mean is not None and norm.running_var is not None and norm.num_batches_tracked is not None
        share = norm.momentum if norm.momentum is not None else 0.1
        norm.num_batches_tracked += 1
        norm.running_mean.lerp_(mean.to(norm.running_mean.dtype), share)
        norm.running_var.lerp_(var.to(norm.running_var.dtype), share)


class LayerNorm(nn.Module):
    """torch's LayerNorm under PyG's keys ``weight``, ``bias`` (its mode="node")."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, view: GraphView, x: Tensor) -> Tensor:
        return torch.nn.functional.layer_norm(x, x.shape[-1:], self.weight, self.bias)

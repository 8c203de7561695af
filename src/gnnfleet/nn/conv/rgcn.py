"""Relational graph convolution: a weight per relation, or a few shared ones mixed per relation."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from gnnfleet.errors import ConfigError
from gnnfleet.graph.view import GraphView
from gnnfleet.nn.linear import glorot_


class RGCNConv(nn.Module):
    """x'_i = Σ_r W_r mean_{j ∈ N_r(i)} x_j + W_root x_i + b (Schlichtkrull et al., 2018).

    Relations are the edge types of the view, in its order. Parameters as PyG's: ``weight`` [R or B, in, out], ``comp``
    [R, B] with ``num_bases`` B, ``root``, ``bias``.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        num_relations: int,
        num_bases: int | None = None,
        *,
        root_weight: bool = True,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.out_channels, self.num_relations = out_channels, num_relations
        self.weight = nn.Parameter(glorot_(torch.empty(num_bases or num_relations, in_channels, out_channels)))
        self.comp = None if num_bases is None else nn.Parameter(glorot_(torch.empty(num_relations, num_bases)))
        self.root = nn.Parameter(glorot_(torch.empty(in_channels, out_channels))) if root_weight else None
        self.bias = nn.Parameter(torch.zeros(out_channels)) if bias else None

    def forward(self, view: GraphView, x: Mapping[str, Tensor]) -> dict[str, Tensor]:
        weight: Tensor = self.weight
        if self.comp is not None:
            weight = torch.einsum("rb,bio->rio", self.comp, weight)
        means = view.aggregate_relations(x, reduce="mean")
        if len(means) != self.num_relations:
            raise ConfigError(f"this layer has {self.num_relations} relations, the graph has {len(means)}")
        out: dict[str, Tensor] = {}
        for kind, rows in x.items():
            own = rows[: view.num_dst_of(kind)]
            base = own.new_zeros(len(own), self.out_channels) if self.root is None else own @ self.root
            out[kind] = base if self.bias is None else base + self.bias
        for number, (edge_type, mean) in enumerate(means.items()):
            out[edge_type.dst] = torch.addmm(out[edge_type.dst], mean, weight[number])
        return out

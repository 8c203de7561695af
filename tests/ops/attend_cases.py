"""Inputs of attention for its tests, and the comparison of results."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gnnfleet.ops.csr import CSR
from gnnfleet.ops.draws import Draws, Purpose

DRAWS = Draws(5, Purpose.ATTENTION, layer=1)
# (score, edge term)
SCORES = [("add", False), ("add", True), ("v2", False), ("v2", True), ("dot", False)]
# (heads, channels, depth): full and partial vectors, rows longer than a tile, more heads than lanes
WIDTHS = [(1, 1, 1), (4, 32, 8), (3, 5, 7), (8, 8, 16), (1, 47, 19), (6, 40, 3), (2, 144, 33), (20, 3, 2)]


@dataclass(frozen=True, eq=False)
class Case:
    """A structure with a long row, isolated ends, self-loops and parallel edges, and inputs for it."""

    structure: CSR
    value: torch.Tensor
    options: dict

    @property
    def inputs(self):
        named = {"value": self.value, **{k: self.options[k] for k in ("src", "dst", "edge", "vector")}}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def results(self, function):
        """Output and the gradients of every input."""
        out = function(self.structure, self.value, **self.options)
        weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(out.dtype)
        gradients = torch.autograd.grad(out, list(self.inputs.values()), weight)
        return dict(zip(("out", *self.inputs), (out.detach(), *gradients), strict=True))


def compress(src: torch.Tensor, dst: torch.Tensor, num_src: int, num_dst: int) -> CSR:
    """CSR of edges that are sorted by destination."""
    indptr = torch.zeros(num_dst + 1, dtype=torch.int64)
    indptr[1:] = torch.bincount(dst.long(), minlength=num_dst).cumsum(0)
    return CSR(indptr, src, num_src)


def make_case(score, with_edge, widths=(4, 32, 8), *, dtype=torch.float64, dropout=0.0, edges=500, index=torch.int32):
    heads, channels, depth = widths
    depth = 1 if score == "add" else depth
    generator = torch.Generator().manual_seed(heads * 1000 + channels + depth)
    num_src, num_dst = 40, 30
    dst = torch.randint(0, num_dst - 2, (edges,), generator=generator)
    dst[: edges // 3] = 7  # longer than a block of the kernels
    src = torch.randint(0, num_src - 3, (edges,), generator=generator).to(index)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    structure = compress(src, dst.sort().values, num_src, num_dst)
    options = {"src": draw(num_src, heads * depth), "dst": draw(num_dst, heads * depth), "score": score, "heads": heads}
    options["edge"] = draw(edges, heads * depth) if with_edge else None
    options["vector"] = draw(heads * depth) if score == "v2" else None
    ids = torch.randperm(edges, generator=generator) + 2**33
    options |= {"dropout": dropout, "draws": DRAWS, "edge_ids": ids, "slope": 0.2}
    return Case(structure, draw(num_src, heads * channels), options)


def assert_close(actual, expected, tolerance):
    for name, tensor in expected.items():
        scale = max(1.0, float(tensor.abs().max())) if tensor.numel() else 1.0
        error = float((actual[name].double() - tensor.double()).abs().max()) if tensor.numel() else 0.0
        assert error <= tolerance * scale, f"{name}: off by {error}, size {scale}"

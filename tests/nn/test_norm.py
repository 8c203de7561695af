"""Batch norm equals torch's on all rows, wherever they are; layer norm is torch's."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from gnnfleet import nn
from gnnfleet.errors import InputError
from gnnfleet.graph.views.local import LocalView
from tests.nn.peers import random_graph, randomise


def test_batch_norm_equals_torch_over_steps() -> None:
    graph = random_graph()
    view = LocalView.of_graph(graph)
    for dtype, limit in ((torch.float32, 2e-5), (torch.float64, 1e-12)):
        ours, theirs = nn.BatchNorm(5).to(dtype), torch.nn.BatchNorm1d(5).to(dtype)
        randomise(ours)
        theirs.load_state_dict(ours.module.state_dict())
        for step in range(3):
            x = 3 * torch.randn(30, 5, dtype=dtype) + 50  # far from 0: squares would cancel
            a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
            out, expected = ours(view, a), theirs(b)
            torch.testing.assert_close(out, expected, rtol=limit, atol=limit)
            pull = torch.randn_like(x)
            out.backward(pull), expected.backward(pull)
            torch.testing.assert_close(a.grad, b.grad, rtol=limit, atol=limit)
            for key, tensor in theirs.state_dict().items():
                torch.testing.assert_close(ours.module.state_dict()[key], tensor, rtol=limit, atol=limit)
            assert int(ours.module.num_batches_tracked) == step + 1
        still = ours(view.with_step(training=False), x)
        ours.eval(), theirs.eval()
        torch.testing.assert_close(ours(view, x), theirs(x))
        assert torch.equal(still, ours(view, x))


class Meeting:
    """Sum over threads, each with a part of the nodes; its gradient is the sum of the parts' gradients."""

    def __init__(self, parts: int) -> None:
        self.barrier, self.board = threading.Barrier(parts, timeout=10), [torch.empty(0)] * parts

    def add(self, t: Tensor, me: int) -> Tensor:
        self.board[me] = t.detach()
        self.barrier.wait()
        total = torch.stack(self.board).sum(0)
        self.barrier.wait()  # nobody overwrites the board before all have read it
        return total

    def member(self, me: int) -> Callable[[Tensor], Tensor]:
        class Sum(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, t: Tensor) -> Tensor:
                return self.add(t, me)

            @staticmethod
            def backward(ctx: Any, grad: Tensor) -> Tensor:
                return self.add(grad, me)

        return Sum.apply


@dataclass(frozen=True, eq=False, kw_only=True)
class PartView(LocalView):
    sum_over_parts: Callable[[Tensor], Tensor]

    def sum_over_nodes(self, t: Tensor) -> Tensor:
        return self.sum_over_parts(t)


@pytest.mark.parametrize("sizes", [[30], [11, 19], [1, 29], [0, 30], [7, 0, 23]])
def test_statistics_are_those_of_the_nodes_of_all_parts(sizes: list[int]) -> None:
    nodes = LocalView.of_graph(random_graph()).nodes
    x, pull = torch.randn(2, 30, 5, dtype=torch.float64)
    meeting, norms = Meeting(len(sizes)), [nn.BatchNorm(5).double() for _ in sizes]
    rows = [piece.clone().requires_grad_() for piece in (x + 10).split(sizes)]

    def run(me: int) -> Tensor:
        out: Tensor = norms[me](PartView(nodes, {}, sum_over_parts=meeting.member(me)), rows[me])
        out.backward(pull.split(sizes)[me])
        return out.detach()

    with ThreadPoolExecutor(len(sizes)) as pool:
        outs = list(pool.map(run, range(len(sizes))))
    peer, whole = torch.nn.BatchNorm1d(5).double(), (x + 10).requires_grad_()
    expected = peer(whole)
    expected.backward(pull)
    torch.testing.assert_close(torch.cat(outs), expected)
    torch.testing.assert_close(torch.cat([piece.grad for piece in rows]), whole.grad)
    for norm in norms:
        torch.testing.assert_close(norm.module.state_dict(), peer.state_dict())
    torch.testing.assert_close(sum(norm.module.weight.grad for norm in norms), peer.weight.grad)


def test_batch_norm_of_one_row_is_refused() -> None:
    view = LocalView.of_graph(random_graph())
    with pytest.raises(InputError, match="at least 2 nodes to train on, found 1"):
        nn.BatchNorm(5)(view, torch.randn(1, 5))


def test_layer_norm_equals_torchs() -> None:
    ours, theirs = nn.LayerNorm(5), torch.nn.LayerNorm(5)
    randomise(ours)
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(30, 5)
    assert torch.equal(ours(LocalView.of_graph(random_graph()), x), theirs(x))

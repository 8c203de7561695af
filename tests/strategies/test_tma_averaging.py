"""Averages of weights: means, medoids, momentum, and the flat layout of what is averaged."""

from __future__ import annotations

import pytest
import torch

from gnnfleet.strategies.tma.averaging import FlatLayout, OuterOptimizer, medoid_weights, weighted_mean


def test_a_weighted_mean_of_one_row_is_that_row_to_the_bit() -> None:
    rows = [torch.randn(7, dtype=torch.float64) for _ in range(3)]
    assert torch.equal(weighted_mean(rows[:1], [0.3]), rows[0])
    torch.testing.assert_close(weighted_mean(rows, [2.0, 2.0, 2.0]), torch.stack(rows).mean(0))


def test_the_medoid_weighs_rows_less_that_are_far_from_the_others() -> None:
    row = torch.randn(7, dtype=torch.float64)
    weights = medoid_weights([row, row + 0.01, row + 100], [1.0, 1.0, 1.0], 0.1)
    assert weights[2] < 1e-2 * weights[0] and weights[0] == pytest.approx(weights[1], rel=0.01)
    assert medoid_weights([row, row], [1.0, 2.0], 1.0) == [1.0, 2.0]


def test_parameters_have_momentum_and_statistics_have_none() -> None:
    before, mean = torch.randn(7, dtype=torch.float64), torch.randn(7, dtype=torch.float64)
    outer = OuterOptimizer(0.5)
    first = outer.step(before, mean, 5)
    torch.testing.assert_close(first, mean)
    second = outer.step(first, first, 5)
    torch.testing.assert_close(second[:5], first[:5] + 0.5 * (mean - before)[:5])
    assert torch.equal(second[5:], first[5:])


def test_a_layout_packs_what_it_unpacks() -> None:
    tensors = {"b": torch.randn(2, 3), "a": torch.ones(4), "n": torch.tensor(3)}
    layout = FlatLayout.of(tensors, torch.float32, without=["a"])
    assert list(layout.shapes) == ["b"] and torch.equal(layout.unpack(layout.pack(tensors))["b"], tensors["b"])
    assert layout.nbytes == 24


def test_a_layout_leaves_out_a_parameter_and_its_moments_but_no_longer_name() -> None:
    names = ("emb.weight", "emb.weight/exp_avg", "emb.weight_scale", "emb.weight_scale/exp_avg", "emb.weights.0")
    layout = FlatLayout.of({name: torch.ones(1) for name in names}, torch.float32, without=["emb.weight"])
    assert list(layout.shapes) == ["emb.weight_scale", "emb.weight_scale/exp_avg", "emb.weights.0"]

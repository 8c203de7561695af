"""Averages of weights, and the flat layout of what is averaged."""

from __future__ import annotations

import torch

from gnnfleet.strategies.tma.averaging import FlatLayout, weighted_mean


def test_a_weighted_mean_of_one_row_is_that_row_to_the_bit() -> None:
    rows = [torch.randn(7, dtype=torch.float64) for _ in range(3)]
    assert torch.equal(weighted_mean(rows[:1], [0.3]), rows[0])
    torch.testing.assert_close(weighted_mean(rows, [2.0, 2.0, 2.0]), torch.stack(rows).mean(0))


def test_a_layout_packs_what_it_unpacks() -> None:
    tensors = {"b": torch.randn(2, 3), "a": torch.ones(4), "n": torch.tensor(3)}
    layout = FlatLayout.of(tensors, torch.float32, without=["a"])
    assert list(layout.shapes) == ["b"] and torch.equal(layout.unpack(layout.pack(tensors))["b"], tensors["b"])
    assert layout.nbytes == 24


def test_a_layout_leaves_out_a_parameter_and_its_moments_but_no_longer_name() -> None:
    names = ("emb.weight", "emb.weight/exp_avg", "emb.weight_scale", "emb.weight_scale/exp_avg", "emb.weights.0")
    layout = FlatLayout.of({name: torch.ones(1) for name in names}, torch.float32, without=["emb.weight"])
    assert list(layout.shapes) == ["emb.weight_scale", "emb.weight_scale/exp_avg", "emb.weights.0"]

"""Attention in pieces: any split of the edges, and either end's share of backward computed where that end is known."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gnnfleet.ops import attend_blocks as pieces
from gnnfleet.ops import reference
from gnnfleet.ops.csr import CSR
from tests.ops.attend_cases import DRAWS, SCORES, WIDTHS, assert_close, compress, make_case


def form_of(case, widths):
    words = case.words
    rule = {"score": words["score"], "slope": words["slope"], "dropout": words["dropout"], "words": DRAWS.words}
    depth = words["src"].shape[1] // words["heads"]
    return pieces.AttentionSpec(heads=widths[0], channels=widths[1], depth=depth, scale=depth**-0.5, **rule)


def inputs_of(case):
    return pieces.AttentionInputs(**case.inputs, edge_ids=case.words["edge_ids"])


def cut(structure: CSR, chosen: torch.Tensor, *, compact: bool) -> pieces.AttentionBlock:
    """The chosen edges of a structure, with all its rows or only those that have edges."""
    at = chosen.nonzero().flatten()
    row, col = structure.row[at].long(), structure.col[at]
    if not compact:
        return pieces.AttentionBlock(compress(col, row, structure.num_cols, structure.num_rows), positions=at)
    rows, row = row.unique(return_inverse=True)
    return pieces.AttentionBlock(compress(col, row, structure.num_cols, rows.shape[0]), rows.int(), at)


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(SCORES), st.sampled_from(WIDTHS), st.integers(1, 5), st.booleans(), st.integers(0, 10**6))
def test_any_split_of_the_edges_merges(score, widths, parts, compact, seed):
    case = make_case(*score, widths, dropout=0.3)
    form, inputs = form_of(case, widths), inputs_of(case)
    positive = score == ("add", False)
    whole = pieces.attention_pass(form, inputs, pieces.AttentionBlock(case.structure), positive=positive)
    part = torch.randint(0, parts, (case.structure.num_edges,), generator=torch.Generator().manual_seed(seed))
    state = pieces.init_attention(form, case.structure.num_rows, dtype=torch.float64, positive=positive)
    for number in range(parts):
        pieces.update_attention(state, form, inputs, cut(case.structure, part == number, compact=compact))
    pieces.finish_attention(state, form)
    for name in ("num", "max", "pos", "mass"):
        expected, found = getattr(whole, name), getattr(state, name)
        if expected is not None:
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize(("score", "with_edge"), SCORES)
def test_owners_of_the_ends_compute_gradients_apart(score, with_edge, compact):
    """Sources see destinations only as packed message rows; both sides work through the edges in pieces."""
    widths = (4, 32, 8)
    case = make_case(score, with_edge, widths, dropout=0.3)
    form, inputs, structure = form_of(case, widths), inputs_of(case), case.structure
    local = score == "add" and not with_edge
    state = pieces.attention_pass(form, inputs, pieces.AttentionBlock(structure), positive=local)
    grad = torch.randn(state.num.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    side, d_dst = pieces.destination_gradient(form, state, grad, inputs.dst)
    message = torch.cat([grad, inputs.dst.detach(), side.lse_dee], 1)
    width, inner = grad.shape[1], inputs.dst.shape[1]
    there = replace(inputs, dst=message[:, width : width + inner])
    transposed, positions = structure.transposed
    into = torch.zeros_like(inputs.value), torch.zeros_like(inputs.src)
    target = pieces.TargetGradient(
        *(None if x is None else torch.zeros_like(x) for x in (inputs.dst, inputs.edge, inputs.vector))
    )
    for number in range(3):
        piece = cut(transposed, positions % 3 == number, compact=compact)
        piece = replace(piece, positions=positions[piece.positions])
        pieces.source_gradient(form, there, piece, grad=message[:, :width], side=message[:, width + inner :], into=into)
        chosen = torch.arange(structure.num_edges) % 3 == number
        piece = cut(structure, chosen, compact=compact)
        pieces.target_gradient(form, inputs, piece, grad=grad, side=side.lse_dee, into=target)
    expected = case.results(reference.attend)
    found = {"value": into[0], "src": into[1], "dst": target.dst, "edge": target.edge, "vector": target.vector}
    assert_close({k: v for k, v in found.items() if v is not None}, {k: expected[k] for k in case.inputs}, 1e-12)
    assert (d_dst is not None) == local
    if d_dst is not None:
        assert_close({"dst": d_dst}, {"dst": expected["dst"]}, 1e-12)

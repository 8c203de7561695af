"""Blockwise attention: any split of the edges, and gradients of either end computed by its owner."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gnnfleet.ops import attend_blocks
from gnnfleet.ops.csr import CSR
from tests.ops import reference
from tests.ops.attend_cases import DRAWS, SCORES, WIDTHS, assert_close, compress, make_case


def spec_of(case, widths):
    options = case.options
    rule = {
        "score": options["score"],
        "slope": options["slope"],
        "dropout": options["dropout"],
        "dropout_key": DRAWS.kernel_args,
    }
    depth = options["src"].shape[1] // options["heads"]
    return attend_blocks.AttentionSpec(heads=widths[0], channels=widths[1], depth=depth, scale=depth**-0.5, **rule)


def inputs_of(case):
    return attend_blocks.AttentionInputs(**case.inputs, edge_ids=case.options["edge_ids"])


def block_of(structure: CSR, chosen: torch.Tensor, *, compact: bool) -> attend_blocks.AttentionBlock:
    """The chosen edges of a structure, with all its rows or only those that have edges."""
    edges = chosen.nonzero().flatten()
    row, col = structure.row[edges].long(), structure.col[edges]
    if not compact:
        return attend_blocks.AttentionBlock(compress(col, row, structure.num_cols, structure.num_rows), positions=edges)
    rows, row = row.unique(return_inverse=True)
    return attend_blocks.AttentionBlock(compress(col, row, structure.num_cols, rows.shape[0]), rows.int(), edges)


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(SCORES), st.sampled_from(WIDTHS), st.integers(1, 5), st.booleans(), st.integers(0, 10**6))
def test_any_split_of_the_edges_merges(score, widths, parts, compact, seed):
    case = make_case(*score, widths, dropout=0.3)
    spec, inputs = spec_of(case, widths), inputs_of(case)
    positive = score == ("add", False)
    expected_state = attend_blocks.attention_pass(
        spec, inputs, attend_blocks.AttentionBlock(case.structure), positive=positive
    )
    part = torch.randint(0, parts, (case.structure.num_edges,), generator=torch.Generator().manual_seed(seed))
    no_edges = block_of(case.structure, part < 0, compact=False)
    no_data = replace(inputs, edge=None if inputs.edge is None else inputs.edge[:0], edge_ids=inputs.edge_ids[:0])
    state = attend_blocks.attention_pass(spec, no_data, no_edges, positive=positive, finish=False)
    for number in range(parts):
        attend_blocks.update_attention(state, spec, inputs, block_of(case.structure, part == number, compact=compact))
    attend_blocks.finish_attention(state, spec)
    for name in ("num", "max", "pos", "mass"):
        expected, actual = getattr(expected_state, name), getattr(state, name)
        if expected is not None:
            torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize(("score", "with_edge"), SCORES)
def test_owners_of_either_end_compute_their_gradients(score, with_edge, compact):
    """Sources receive destinations as packed message rows; both sides process the edges in blocks."""
    widths = (4, 32, 8)
    case = make_case(score, with_edge, widths, dropout=0.3)
    spec, inputs, structure = spec_of(case, widths), inputs_of(case), case.structure
    local = score == "add" and not with_edge
    state = attend_blocks.attention_pass(spec, inputs, attend_blocks.AttentionBlock(structure), positive=local)
    grad = torch.randn(state.num.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    side, d_dst = attend_blocks.destination_gradient(spec, state, grad, inputs.dst)
    message = torch.cat([grad, inputs.dst.detach(), side.lse_dee], 1)
    width, inner = grad.shape[1], inputs.dst.shape[1]
    remote_inputs = replace(inputs, dst=message[:, width : width + inner])
    transposed, positions = structure.transposed
    into = torch.zeros_like(inputs.value), torch.zeros_like(inputs.src)
    target = attend_blocks.TargetGradient(
        *(None if x is None else torch.zeros_like(x) for x in (inputs.dst, inputs.edge, inputs.vector))
    )
    for number in range(3):
        block = block_of(transposed, positions % 3 == number, compact=compact)
        block = replace(block, positions=positions[block.positions])
        attend_blocks.source_gradient(
            spec, remote_inputs, block, grad=message[:, :width], side=message[:, width + inner :], into=into
        )
        chosen = torch.arange(structure.num_edges) % 3 == number
        block = block_of(structure, chosen, compact=compact)
        attend_blocks.target_gradient(spec, inputs, block, grad=grad, side=side.lse_dee, into=target)
    expected = case.results(reference.attend)
    actual = {"value": into[0], "src": into[1], "dst": target.dst, "edge": target.edge, "vector": target.vector}
    assert_close({k: v for k, v in actual.items() if v is not None}, {k: expected[k] for k in case.inputs}, 1e-12)
    assert (d_dst is not None) == local
    if d_dst is not None:
        assert_close({"dst": d_dst}, {"dst": expected["dst"]}, 1e-12)

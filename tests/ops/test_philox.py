"""The generator gives the known answers of Random123; every draw depends only on its family and index."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gnnfleet.ops import generate
from gnnfleet.ops.draws import Draws, Purpose, philox

# Random123, kat_vectors, philox4x32 10: counter, key, answer.
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]
DRAWS = Draws(7, Purpose.GENERATE)


def parse_hex(text: str) -> list[int]:
    return [int(number, 16) for number in text.split()]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_philox_gives_the_known_answers(counter, key, answer):
    low, high = parse_hex(key)
    output = philox(torch.tensor([parse_hex(counter)], dtype=torch.uint32), high << 32 | low)
    assert output.tolist() == [parse_hex(answer)]


def philox_in_python(counter: list[int], key: int) -> list[int]:
    k = [key & 0xFFFFFFFF, key >> 32]
    for _ in range(10):
        a, b = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57
        counter = [b >> 32 ^ counter[1] ^ k[0], b & 0xFFFFFFFF, a >> 32 ^ counter[3] ^ k[1], a & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return counter


def test_draws_of_a_family_are_the_documented_counters():
    """uniforms(i) is made of the first two 32-bit outputs of counter (i, 0, purpose/layer/relation), as 53 bits."""
    draws = Draws(2**64 - 5, Purpose.GENERATE, layer=3, relation=500, epoch=2, step=9)
    answer = philox_in_python([9, 0, 2, 0xFFFFFFFF], 2**64 - 5)
    key = answer[1] << 32 | answer[0]
    family = 1 << 24 | 3 << 16 | 500
    for i, uniform in enumerate(draws.uniforms(5, first=2**33).tolist()):
        low, high, *_ = philox_in_python([i, 2, 0, family], key)
        assert uniform == ((high << 32 | low) >> 11) * 2.0**-53


def test_families_differ():
    families = [DRAWS, DRAWS.at(1), DRAWS.at(0, 1), Draws(8, Purpose.GENERATE), Draws(7, Purpose.GENERATE, epoch=1)]
    firsts = [tuple(family.uniforms(4).tolist()) for family in families]
    assert len(set(firsts)) == len(families)


def test_threads_change_no_draw(threads):
    """All draws at once equal the draws taken one by one."""
    expected = torch.cat([DRAWS.uniforms(1, first=i) for i in range(101)])
    assert torch.equal(DRAWS.uniforms(101), expected)
    slots = generate.WeightedChoice.of(torch.tensor([1, 3, 2, 5]), torch.tensor([1, 0, 1, 0], dtype=torch.int32), 2)
    groups = (torch.arange(333) % 2).int()
    expected = torch.cat([slots.draw(DRAWS, groups[i : i + 1], first=i) for i in range(333)])
    assert torch.equal(slots.draw(DRAWS, groups), expected)
    assert torch.equal(
        generate.normal_rows(DRAWS, 70000, 3, dtype=torch.float64).float(), generate.normal_rows(DRAWS, 70000, 3)
    )


@pytest.mark.parametrize("count", [0, 1, 2, 3, 5, 64, 1000, 4097])
def test_a_permutation_has_every_number_once(count):
    order = DRAWS.permutation(count)
    assert torch.equal(order.sort().values, torch.arange(count, dtype=torch.int32))


def test_a_permutation_is_not_correlated_with_the_order():
    order = DRAWS.permutation(20000).double()
    assert abs(float(torch.corrcoef(torch.stack([order, torch.arange(20000.0).double()]))[0, 1])) < 0.03
    neighbours = (order.diff().abs() < 100).double().mean()
    assert neighbours < 0.02


def test_distributions_have_the_expected_moments():
    uniform, exponential = DRAWS.uniforms(200_000), DRAWS.at(1).exponentials(200_000)
    assert abs(float(uniform.mean()) - 0.5) < 0.003 and float(uniform.min()) >= 0 and float(uniform.max()) < 1
    assert abs(float(exponential.mean()) - 1) < 0.01 and abs(float(exponential.std()) - 1) < 0.02
    normal = generate.normal_rows(DRAWS.at(2), 50_000, 5).double()
    assert abs(float(normal.mean())) < 0.01 and abs(float(normal.std()) - 1) < 0.01
    for bound, share in ((1, 0.3173), (2, 0.0455), (3, 0.0027)):
        assert abs(float((normal.abs() > bound).double().mean()) - share) < 0.1 * share + 0.0005
    assert abs(float((normal**4).mean()) - 3) < 0.1
    correlation = torch.corrcoef(normal.T) - torch.eye(5)
    assert float(correlation.abs().max()) < 0.02


def test_logarithm_and_exponential_agree_with_libm():
    uniform = DRAWS.uniforms(50_000).numpy()
    np.testing.assert_allclose(DRAWS.exponentials(50_000).numpy(), -np.log1p(-uniform), rtol=1e-13, atol=1e-15)
    cut = 1 - 100.0**-1.3
    tail = generate.pareto(DRAWS, 50_000, shape=1.3, limit=100.0).numpy()
    np.testing.assert_allclose(tail, (1 - uniform * cut) ** (-1 / 1.3), rtol=1e-12)


def test_weighted_choices_follow_the_weights():
    weights = torch.tensor([1, 3, 0, 6])
    drawn = generate.WeightedChoice.of(weights).draw_any(DRAWS, 100_000).long()
    shares = torch.bincount(drawn, minlength=4) / 100_000
    assert torch.allclose(shares, weights / 10, atol=0.01)
    empty = generate.WeightedChoice.of(torch.tensor([2, 0]), torch.tensor([0, 1], dtype=torch.int32), 3)
    assert empty.draw(DRAWS, torch.tensor([0, 1, 2], dtype=torch.int32)).tolist() == [0, -1, -1]
    with pytest.raises(IndexError, match="position 1"):
        empty.draw(DRAWS, torch.tensor([0, 3], dtype=torch.int32))


def test_rmat_follows_its_quadrants_and_stays_in_range():
    src, dst = generate.rmat(DRAWS, 100_000, nodes=1024, quadrants=(0.5, 0.3, 0.15, 0.05))
    top = torch.stack([src, dst]) >= 512
    shares = [float((~top[0] & ~top[1]).double().mean()), float((~top[0] & top[1]).double().mean())]
    assert shares == pytest.approx([0.5, 0.3], abs=0.01)
    for nodes in (2, 3, 700):
        src, dst = generate.rmat(DRAWS, 2000, nodes=nodes, quadrants=(0.57, 0.19, 0.19, 0.05))
        assert int(torch.stack([src, dst]).max()) < nodes and int(torch.stack([src, dst]).min()) == 0
    # All weight is on a node that does not exist: the result is a valid node.
    assert int(generate.rmat(DRAWS, 5, nodes=3, quadrants=(0.0, 0.0, 0.0, 1.0))[0].max()) < 3


def test_pair_hashes_are_symmetric_and_distinct():
    a, b = torch.meshgrid(torch.arange(60).int(), torch.arange(60).int(), indexing="ij")
    numbers = generate.pair_hash(DRAWS, a.reshape(-1), b.reshape(-1)).reshape(60, 60)
    assert torch.equal(numbers, numbers.T)
    assert len(set(numbers[torch.triu(torch.ones(60, 60)) > 0].tolist())) == 60 * 61 // 2

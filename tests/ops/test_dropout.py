from __future__ import annotations

import pytest
import torch

from gnnfleet.errors import ConfigError
from gnnfleet.ops.draws import DrawKey, Purpose, dropout, dropout_mask

DRAWS = DrawKey(seed=3, epoch=1, step=2).draws(Purpose.DROPOUT, layer=1)


@pytest.mark.parametrize("shape", [(5, 1), (40, 7), (9, 64), (3, 65), (4, 130), (6, 2, 5), (0, 4), (7,)])
@pytest.mark.usefixtures("isa")
def test_dropout_multiplies_by_the_mask(shape: tuple[int, ...]) -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        x = torch.randn(shape, dtype=dtype)
        if x.dim() == 1:
            x = x[:, None]
        wide = torch.promote_types(dtype, torch.float32)
        ids = torch.randperm(10**6)[: shape[0]] * 2**20
        mask = dropout_mask(x.shape, 0.3, ids=ids, draws=DRAWS).to(wide)
        torch.testing.assert_close(dropout(x, 0.3, ids=ids, draws=DRAWS), (x.to(wide) * mask).to(dtype))


def test_the_mask_depends_on_ids_and_not_on_rows() -> None:
    x, ids = torch.ones(50, 20), torch.arange(50) + 1000
    order = torch.randperm(50)
    out = dropout(x, 0.5, ids=ids, draws=DRAWS)
    assert torch.equal(dropout(x, 0.5, ids=ids[order], draws=DRAWS), out[order])
    assert not torch.equal(out, dropout(x, 0.5, ids=ids, draws=DRAWS.at(layer=2)))


def test_dropout_rate_and_mean() -> None:
    x = torch.ones(20_000, 16)
    out = dropout(x, 0.25, ids=torch.arange(20_000), draws=DRAWS)
    assert abs(float((out == 0).float().mean()) - 0.25) < 0.005
    assert abs(float(out.mean()) - 1) < 0.01


def test_gradients_equal_finite_differences() -> None:
    x = torch.randn(30, 9, dtype=torch.float64, requires_grad=True)
    ids = torch.arange(30)
    assert torch.autograd.gradcheck(lambda x: dropout(x, 0.4, ids=ids, draws=DRAWS), (x,))


def test_a_rate_of_zero_copies_nothing_and_a_rate_of_one_is_refused() -> None:
    x = torch.ones(2, 2)
    assert dropout(x, 0.0, ids=torch.arange(2), draws=DRAWS) is x
    with pytest.raises(ConfigError, match="below 1"):
        dropout(x, 1.0, ids=torch.arange(2), draws=DRAWS)

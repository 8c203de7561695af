"""Ids of the user's: rows by id, by mask, one message for what is neither."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from gnnfleet.errors import InputError
from gnnfleet.graph.ids import Ids

ROWS, NUMBERS, TEXTS = Ids(3), Ids.from_values([7, 8, -5]), Ids.from_values(["a", "b", "c"])


@pytest.mark.parametrize("ids", [ROWS, NUMBERS, TEXTS])
@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_a_mask_selects_rows(ids: Ids, kind: Any) -> None:
    found = ids.rows(kind([True, False, True]))
    assert found.tolist() == [0, 2] and found.dtype == np.int64
    assert ids.rows(kind([False] * 3)).tolist() == []
    with pytest.raises(InputError, match=r"a mask must have one value for each of 3 nodes, found \[2\]"):
        ids.rows(kind([True, False]))


@pytest.mark.parametrize(
    ("ids", "asked", "rows"),
    [
        (ROWS, [2, 0], [2, 0]),
        (ROWS, torch.tensor([1]), [1]),
        (NUMBERS, torch.tensor([-5, 7]), [2, 0]),
        (NUMBERS, np.array([8, 8]), [1, 1]),
        (NUMBERS, ["8"], [1]),
        (TEXTS, np.array(["c", "a"]), [2, 0]),
        (TEXTS, ("b",), [1]),
        (ROWS, [], []),
        (TEXTS, [], []),
    ],
)
def test_ids_are_looked_up(ids: Ids, asked: Any, rows: list[int]) -> None:
    found = ids.rows(asked)
    assert found.tolist() == rows and found.dtype == np.int64


@pytest.mark.parametrize(
    ("ids", "asked", "message"),
    [
        (ROWS, [1, 3], "no node with id 3: the ids are the row numbers from 0 to 2"),
        (ROWS, ["0"], "no node with id '0': the ids are the row numbers"),
        (ROWS, [0.5], "no node with id 0.5"),
        (NUMBERS, [7, 9], "no node with id 9"),
        (NUMBERS, ["alice"], "ids of this node type are integers, found others"),
        (NUMBERS, [1.5], "ids of this node type are integers, found others"),
        (NUMBERS, [2**70], "ids of this node type are integers, found others"),
        (TEXTS, ["a", "d"], "no node with id 'd'"),
        (TEXTS, [object()], "ids of this node type are strings, found others"),
        (TEXTS, [1, "a"], "ids of this node type are strings, found others"),
    ],
)
def test_invalid_ids_are_refused(ids: Ids, asked: Any, message: str) -> None:
    with pytest.raises(InputError) as caught:
        ids.rows(asked)
    assert message in str(caught.value) and "\n" not in str(caught.value)

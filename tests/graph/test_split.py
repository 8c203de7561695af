"""Splits from rules: exact sizes, seeded, independent of the order of rows."""

from __future__ import annotations

import pyarrow as pa
import pytest
import torch

from gnnfleet.errors import ConfigError
from gnnfleet.graph.graph import NO_SPLIT, TEST, TRAIN, VAL, validated_nodes
from gnnfleet.graph.ids import Ids
from gnnfleet.graph.split import PerClassSplit, SplitShares, id_keys, make_split, parse_rule, split_nodes, value_keys


def counts(codes: torch.Tensor) -> list[int]:
    return [int((codes == code).sum()) for code in (TRAIN, VAL, TEST, NO_SPLIT)]


def test_rules_are_parsed() -> None:
    assert parse_rule("0.6/0.2/0.2") == SplitShares(0.6, 0.2, 0.2)
    assert parse_rule("20-per-class") == PerClassSplit(20)
    for wrong in ("", "0.6", "0.6/0.2", "0.9/0.9/0", "-0.1/0.5/0.5", "0-per-class", "x-per-class", "nan/0/0", "0/0/0"):
        with pytest.raises(ConfigError, match=r"0\.6/0\.2/0\.2, or 20-per-class"):
            parse_rule(wrong)


@pytest.mark.parametrize("count", [0, 1, 2, 7, 1000])
@pytest.mark.parametrize("rule", ["0.6/0.2/0.2", "0.1/0.1/0.1", "1/0/0", "0.34/0.33/0.33"])
def test_shares_are_exact(count: int, rule: str) -> None:
    nodes = validated_nodes(count)
    codes = split_nodes(nodes, parse_rule(rule), seed=1)
    assert codes.shape == (1, count) and codes.dtype == torch.int8
    sizes = counts(codes)
    for share, size in zip(rule.split("/"), sizes, strict=False):
        assert abs(size - float(share) * count) <= 1
    if sum(map(float, rule.split("/"))) == pytest.approx(1):
        assert sizes[3] == 0


def test_only_labelled_nodes_are_split() -> None:
    y = torch.arange(100) % 5 - 1
    codes = split_nodes(validated_nodes(100, y=y), SplitShares(0.5, 0.25, 0.25))[0]
    assert torch.equal(codes == NO_SPLIT, y < 0)
    assert counts(codes) == [40, 20, 20, 20]
    several = torch.full((10, 3), -1, dtype=torch.int8)
    several[:4] = 0
    assert counts(split_nodes(validated_nodes(10, y=several), SplitShares(0.5, 0.25, 0.25))) == [2, 1, 1, 6]


def test_per_class_splits_follow_planetoid() -> None:
    y = torch.arange(3000) % 3
    codes = split_nodes(validated_nodes(3000, y=y), PerClassSplit(20))[0]
    assert counts(codes) == [60, 500, 1000, 1440]
    assert torch.bincount(y[codes == TRAIN]).tolist() == [20, 20, 20]
    small = torch.tensor([0] * 5 + [1] * 40 + [-1] * 5)
    codes = split_nodes(validated_nodes(50, y=small), PerClassSplit(10))[0]
    assert torch.bincount(small[codes == TRAIN]).tolist() == [5, 10]
    assert counts(codes) == [15, 10, 20, 5]
    for nodes in (validated_nodes(5), validated_nodes(5, y=torch.zeros(5, 2, dtype=torch.int8))):
        with pytest.raises(ConfigError, match="one label per node"):
            split_nodes(nodes, PerClassSplit(2))


@pytest.mark.parametrize("names", [[f"né {i}" for i in range(200)], [i * i - 50 for i in range(200)]])
@pytest.mark.parametrize("rule", ["0.5/0.2/0.3", "10-per-class"])
def test_a_split_depends_on_ids_not_on_rows(names: list[str] | list[int], rule: str) -> None:
    y = torch.arange(200) % 4
    moved = torch.randperm(200, generator=torch.Generator().manual_seed(0))
    first = split_nodes(validated_nodes(200, y=y, ids=names), parse_rule(rule), seed=3)
    second = split_nodes(validated_nodes(200, y=y[moved], ids=[names[i] for i in moved]), parse_rule(rule), seed=3)
    assert torch.equal(first[0, moved], second[0])
    assert not torch.equal(first, split_nodes(validated_nodes(200, y=y, ids=names), parse_rule(rule), seed=4))


def test_keys_of_rows_are_those_of_equal_integers() -> None:
    assert id_keys(Ids(9)).tolist() == value_keys(pa.array(range(9))).tolist()
    far = make_split(SplitShares(0.5, 0, 0.5), value_keys(pa.array([-1, 2**63 - 1, -(2**63)])), None, seed=-7)
    assert counts(far) == [2, 0, 1, 0]

"""The page of torch_geometric modules lists every module, and says what the code does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch_geometric.nn as pyg
from torch_geometric.nn import aggr, conv, norm

from tests.nn.pyg.catalogue import AGGREGATIONS, ALL, CONVOLUTIONS, NEEDS_LIBRARY, NORMS
from tests.nn.pyg.table import is_exact_under_sar, make_entries, page, read_page, status
from tests.ranks import RankPool

PAGE = Path(__file__).parents[3] / "docs" / "pyg-modules.md"


def kinds(names: object) -> set[str]:
    return {str(name).partition(",")[0] for name in names}  # type: ignore[attr-defined]


def test_every_exported_module_is_listed() -> None:
    """If this fails, add the module to tests/nn/pyg/catalogue.py."""
    assert {*conv.__all__} - {"MessagePassing"} == CONVOLUTIONS.keys() | NEEDS_LIBRARY.keys()
    assert {*aggr.__all__} - {"Aggregation"} == kinds(AGGREGATIONS)
    assert {*norm.__all__} == kinds(NORMS)


UNAVAILABLE: dict[str, Callable[[], object]] = {
    "CuGraphSAGEConv": lambda: pyg.CuGraphSAGEConv(5, 3),
    "CuGraphGATConv": lambda: pyg.CuGraphGATConv(5, 3),
    "CuGraphRGCNConv": lambda: pyg.CuGraphRGCNConv(5, 3, 2),
    "FusedGATConv": lambda: pyg.FusedGATConv(5, 3, add_self_loops=False),
    "GravNetConv": lambda: pyg.GravNetConv(5, 3, 2, 2, k=2),
    "DynamicEdgeConv": lambda: pyg.DynamicEdgeConv(pyg.MLP([10, 3]), k=2),
    "XConv": lambda: pyg.XConv(5, 3, dim=3, kernel_size=2),
    "SplineConv": lambda: pyg.SplineConv(5, 3, dim=3, kernel_size=2),
    "PANConv": lambda: pyg.PANConv(5, 3, filter_size=2),
}


@pytest.mark.parametrize("name", NEEDS_LIBRARY)
def test_convolutions_without_a_case_need_another_library(name: str) -> None:
    x, edge_index = torch.rand(4, 5), torch.tensor([[0, 1, 2], [1, 2, 3]])
    inputs = {"GravNetConv": (x,), "DynamicEdgeConv": (x,), "XConv": (x, x[:, :3])}.get(name, (x, edge_index))
    with pytest.raises((ImportError, ModuleNotFoundError)):
        conv = UNAVAILABLE[name]()
        conv(*inputs, torch.rand(3, 3)) if name == "SplineConv" else conv(*inputs)


def test_the_page_is_up_to_date(pool: RankPool, tmp_path: Path) -> None:
    """If this fails, look at the difference and run ``python -m tests.nn.pyg.table -o docs/pyg-modules.md``."""
    entries = make_entries(pool, tmp_path)
    statuses, stored = (
        {name: {column: status(entry) for column, entry in row.items()} for name, row in table.items()}
        for table in (entries, read_page(PAGE.read_text()))
    )
    assert not [(name, row) for name, row in entries.items() if "wrong" in statuses[name].values()]
    assert statuses == stored and entries.keys() == ALL.keys()
    assert page(entries).partition("## ")[0] == PAGE.read_text().partition("## ")[0]
    exact = sum(is_exact_under_sar(entries[name]) for name in CONVOLUTIONS)
    assert exact >= 0.92 * len(CONVOLUTIONS)

"""Blocks of docs/migration.md run in order, on one small graph."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch_geometric.data import Data

from gnnfleet.graph.datasets import make_dataset

PAGE = Path(__file__).parents[1] / "docs" / "migration.md"


def test_blocks_run_in_order() -> None:
    graph = make_dataset("communities", nodes=300, mean_degree=8, features=8, seed=1)
    nodes = graph.single_nodes
    masks = {f"{name}_mask": nodes.mask(name) for name in ("train", "val", "test")}
    data = Data(x=nodes.x, y=nodes.y, edge_index=graph.single_edges.edge_index(), **masks)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 5
    names: dict[str, object] = {"data": data}
    torch.manual_seed(0)
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    assert names["record"].metrics["test"] is not None  # type: ignore[attr-defined]

"""Data sets of TGB through a stand-in of its package, and what is said where there is none."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from gnnfleet.errors import ConfigError, InputError
from gnnfleet.graph.events.event_stream import EventStream
from gnnfleet.graph.ingest.in_memory import import_in_memory
from gnnfleet.graph.ingest.spec import ImportRules
from gnnfleet.graph.store import open_store

EVENTS = {
    "sources": np.array([0, 1, 0, 2]),
    "destinations": np.array([3, 4, 4, 3]),
    "timestamps": np.array([1.0, 2.0, 2.0, 7.0]),
    "edge_feat": np.arange(8.0).reshape(4, 2),
    "edge_label": np.ones(4),
}


def stand_in(monkeypatch: pytest.MonkeyPatch, make: Any) -> None:
    module = ModuleType("tgb.linkproppred.dataset")
    module.LinkPropPredDataset = make  # type: ignore[attr-defined]
    for name in ("tgb", "tgb.linkproppred"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "tgb.linkproppred.dataset", module)


@pytest.mark.parametrize("last", [7.0, 7.5])
def test_events_equal_those_of_tgb(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], last: float
) -> None:
    passed = {}
    data = {**EVENTS, "timestamps": np.array([1.0, 2.0, 2.0, last])}

    def make(**arguments: Any) -> Any:
        passed.update(arguments)
        print("loading")
        return SimpleNamespace(full_data=data, node_feat=None, name="tgbl-wiki")

    stand_in(monkeypatch, make)
    import_in_memory("tgb:tgbl-wiki", tmp_path / "store", ImportRules())
    assert passed["name"] == "tgbl-wiki" and capsys.readouterr().out == "", "standard output is for results only"
    stream = EventStream.of(open_store(tmp_path / "store"))
    assert stream.src.tolist() == [0, 1, 0, 2] and stream.dst.tolist() == [3, 4, 4, 3]
    assert stream.t.tolist() == [1, 2, 2, last]
    assert stream.t.dtype == (torch.int64 if last == 7 else torch.float64)
    assert stream.msg is not None and stream.msg.tolist() == EVENTS["edge_feat"].tolist()


def test_a_missing_package_or_dataset_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "tgb", None)
    with pytest.raises(ConfigError, match=r"gnnfleet\[tgb\]"):
        import_in_memory("tgb:tgbl-wiki", tmp_path / "store", ImportRules())

    def make(**arguments: Any) -> Any:
        raise EOFError

    stand_in(monkeypatch, make)
    with pytest.raises(InputError, match="TGB cannot load tgbl-wiki: EOFError"):
        import_in_memory("tgb:tgbl-wiki", tmp_path / "store", ImportRules())
    assert not (tmp_path / "store").exists()

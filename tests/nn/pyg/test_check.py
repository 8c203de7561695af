"""The self-check of modules: it decides how a module runs, keeps what passed, and repeats every refusal."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg

from gnnfleet.errors import ConfigError
from gnnfleet.sharded import module_check
from gnnfleet.training import module_execution
from tests.equivalence.spread import plain_graph

FILE = """
import torch, torch_geometric.nn as pyg

class TwoHops(pyg.MessagePassing):
    def forward(self, x, edge_index):
        mean = torch.zeros_like(x).index_add(0, edge_index[1], x[edge_index[0]])
        return self.propagate(edge_index, x=mean)

class Net(torch.nn.Module):
    def __init__(self, width, out):
        super().__init__()
        self.first, self.second, self.bias = pyg.SAGEConv(width, 8), CONV, BIAS
        self.out = torch.nn.Linear(8, out)

    def forward(self, x, edge_index):
        h = self.second(torch.relu(self.first(x, edge_index)), edge_index)
        return self.out(h + self.bias * torch.arange(h.size(0))[:, None])

def make(config, graph, out):
    return Net(graph.single_nodes.x.shape[1], out)
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield tmp_path / "cache" / "gnnfleet" / "module-checks"


def settle(tmp_path: Path, conv: str = "pyg.GCNConv(8, 8)", bias: str = "0", **settings: Any) -> tuple[str, str]:
    file = tmp_path / "net.py"
    file.write_text(FILE.replace("CONV", conv).replace("BIAS", bias))
    from gnnfleet.config.resolve import resolve

    config = resolve({"model": {"name": f"{file}:make", **settings.pop("model", {})}, **settings})
    config, remark = module_execution.settle_execution(plain_graph(), config)
    return config.model.execution, remark


def test_a_module_that_passes_runs_in_layers_and_is_checked_once(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sar = {"strategy": {"name": "sar"}, "workers": 2}
    assert settle(tmp_path, **sar) == ("layers", "")
    assert sorted(json.loads(file.read_text())["passed"] for file in cache.iterdir()) == ["layers", "parts"]
    monkeypatch.setattr(module_execution, "check_layers", None)
    monkeypatch.setattr(module_execution, "check_parts", None)
    assert settle(tmp_path, **sar) == ("layers", "")
    with pytest.raises(TypeError):  # another class in the same file: not the code that passed
        settle(tmp_path, conv="pyg.GATConv(8, 8)", **sar)


def test_a_refusal_is_repeated(cache: Path, tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"Net on 2 parts .* differs .* operation of it depends on the partition"):
            settle(tmp_path, bias="0.1", strategy={"name": "sar"}, workers=2, model={"execution": "whole"})


def test_a_module_that_reads_further_runs_as_a_whole(cache: Path, tmp_path: Path) -> None:
    for _ in range(2):
        execution, remark = settle(tmp_path, conv="TwoHops()")
        assert execution == "whole"
        assert remark.startswith("net.py:make runs as a whole: its layers on a part of the rows differ from Net in ")
    with pytest.raises(ConfigError, match=r"cannot run layer by layer: its layers .* Leave out model.execution=layers"):
        settle(tmp_path, conv="TwoHops()", model={"execution": "layers"})
    with pytest.raises(ConfigError, match=r"runs as a whole \(its layers .*: use sar, local without strategy.fanouts"):
        settle(tmp_path, conv="TwoHops()", strategy={"name": "pipe"}, workers=2)
    assert settle(tmp_path, conv="TwoHops()", check=False) == ("layers", "")


def test_the_user_may_choose(cache: Path, tmp_path: Path) -> None:
    assert settle(tmp_path, model={"execution": "whole"}) == ("whole", "")


def test_without_a_writable_cache_the_check_runs_every_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert settle(tmp_path) == ("layers", "")


def test_the_fingerprint_covers_state_code_and_constants(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gnnfleet.nn.pyg.module import PygModule

    def path_of(module: torch.nn.Module) -> Path:
        return module_check._cache_path("layers", PygModule(module), plain_graph())

    torch.manual_seed(0)
    first = path_of(pyg.GCN(5, 8, 2, 3))
    assert path_of(pyg.GCN(5, 8, 2, 3)) == first  # other weights
    others = [pyg.GCN(5, 8, 2, 3, improved=True), pyg.GCN(5, 8, 2, 3, dropout=0.1), pyg.GCN(5, 8, 3, 3)]
    assert len({first, *map(path_of, others)}) == 4
    module = pyg.GCN(5, 8, 2, 3)
    module.register_buffer("mask", torch.ones(2))
    before = path_of(module)
    module.mask[0] = 2
    assert path_of(module) != before

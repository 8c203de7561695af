"""Modules passed to gf.train: copied, sent to workers by inherited memory, read again after a restart."""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch_geometric.nn import GraphSAGE

import gnnfleet as gf
from gnnfleet.config.resolve import resolve
from gnnfleet.config.schema import RunConfig
from gnnfleet.errors import ConfigError, RunError
from gnnfleet.launch.live_module import receive_module, share_module
from gnnfleet.launch.spec import RunSpec
from gnnfleet.launch.tma_supervisor import LocalProcess, launch_supervised
from gnnfleet.nn.config import LIVE
from gnnfleet.nn.custom_model import live_modules
from tests.graphs import communities
from tests.shell import fails

NETS = """
import os, torch
from pathlib import Path
from torch_geometric.nn import SAGEConv


class Net(torch.nn.Module):
    def __init__(self, wide, classes, marker=None):
        super().__init__()
        self.first, self.last, self.marker = SAGEConv(wide, 8), SAGEConv(8, classes), marker

    def forward(self, x, edge_index):
        if self.marker and os.environ.get("RANK") == "1" and not Path(self.marker).exists():
            Path(self.marker).touch()
            os._exit(3)
        return self.last(self.first(x, edge_index).relu(), edge_index)
"""
SETTINGS: dict[str, Any] = {"epochs": 3, "precision": "float64", "optimizer": "sgd", "lr": 0.1}


@pytest.fixture(scope="module")
def graph() -> gf.Graph:
    return communities()


@pytest.fixture
def nets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A module of the user's own folder, which only the import path of this process has."""
    (tmp_path / "live_nets.py").write_text(NETS)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    yield import_module("live_nets")
    del sys.modules["live_nets"]


def live_config(module: torch.nn.Module, **settings: Any) -> RunConfig:
    name = f"{LIVE}{type(module).__name__}:1"
    live_modules[name] = module
    return resolve({"model": name, **settings})


def test_a_module_trains_on_workers_and_after_a_restart_as_in_one_process(
    graph: gf.Graph, nets: ModuleType, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    net = nets.Net(64, 10)
    before = copy.deepcopy(net.state_dict())
    local = gf.train(graph, model=net, **SETTINGS)
    net.marker, run = str(tmp_path / "killed"), tmp_path / "run"
    spread = gf.train(graph, model=net, strategy="sar", workers=2, max_restarts=1, run_dir=run, **SETTINGS)
    assert (tmp_path / "killed").exists()
    assert not [path for path in Path("/proc/self/fd").iterdir() if "gnnfleet-module" in os.path.realpath(path)]
    assert spread.metrics["train_loss"] == pytest.approx(local.metrics["train_loss"], rel=1e-9)
    assert spread.summary.model == "Net" and spread.predict() == local.predict()
    for name, weight in local.model.state_dict().items():
        torch.testing.assert_close(spread.model.state_dict()[name], weight, rtol=1e-9, atol=1e-9)
    for name, weight in net.state_dict().items():
        assert torch.equal(weight, before[name]) and not torch.equal(
            weight, gf.nn.to_pyg(local.model).state_dict()[name]
        )
    again = gf.train(graph, model=local.model, **{**SETTINGS, "epochs": 1})  # continues from the trained weights
    assert again.metrics["train_loss"] < local.metrics["train_loss"]
    for call in (lambda: gf.load_run(run), lambda: gf.train(graph, run_dir=run, resume=True, model="sage")):
        with pytest.raises(RunError, match="runs do not save modules"):
            call()
    assert "runs do not save modules" in fails("evaluate", run, code=7)
    with pytest.raises(ConfigError, match="this one cannot be resumed"):
        gf.train(graph, model=net, run_dir=run, resume=True)
    assert not list(run.rglob("*.pickle")) and "live:Net" in (run / "config.json").read_text()


def test_modules_that_workers_cannot_load_are_refused_before_anything_is_written(
    graph: gf.Graph, nets: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local_name, main_name = nets.Net(64, 10), nets.Net(64, 10)
    local_name.act = lambda x: x
    main_name.__class__ = type("Net", (nets.Net,), {"__module__": "__main__"})
    monkeypatch.setattr(sys.modules["__main__"], "Net", type(main_name), raising=False)
    options: dict[str, Any] = {"strategy": "sar", "workers": 2, "run_dir": tmp_path / "run"}
    for net, reason in ((local_name, "lambda"), (main_name, "main script or notebook")):
        with pytest.raises(ConfigError, match=rf"cannot be sent to worker processes \(.*{reason}.*file\.py:factory"):
            gf.train(graph, model=net, **options)
        assert gf.train(graph, model=net, epochs=1).summary.epochs == 1
    assert not (tmp_path / "run").exists()
    with pytest.raises(ConfigError, match="model=3: expected a name"):
        gf.train(graph, model=3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="an instance"):
        gf.train(graph, model=GraphSAGE)  # type: ignore[arg-type]


def test_a_worker_reads_sealed_memory_only_and_again_after_a_restart(nets: ModuleType, tmp_path: Path) -> None:
    net = nets.Net(4, 2)
    config = live_config(net, strategy="tma", workers=2)
    spec = RunSpec(store="", digest="", partition="", run_dir="", config=config.model_dump(mode="json"))
    with share_module(config) as fd:
        assert fd is not None
        with pytest.raises(OSError), open(fd, "wb", closefd=False) as file:
            file.write(b"other")
        for _ in range(2):
            receive_module(replace(spec, module_fd=fd))
            received = live_modules[config.model.name]
            assert received is not net and torch.equal(received.first.lin_l.weight, net.first.lin_l.weight)
        command = [sys.executable, "-c", f"import os; assert len(os.pread({fd}, 9, 0)) == 9"]
        process = LocalProcess("0", command, tmp_path, 1, (fd,))
        assert process.process.wait(30) == 0 and process.restart() and process.process.wait(30) == 0
        remote = replace(
            spec, module_fd=fd, config={**spec.config, "strategy": {**spec.config["strategy"], "local_trainers": 1}}
        )
        with pytest.raises(ConfigError, match="trainers of this machine only"):
            launch_supervised(remote, folder=tmp_path / "l", workers=2, restarts=0, log_user=print)
    (tmp_path / "other").write_bytes(b"cos\nsystem\n(S'touch hacked'\ntR.")
    with (tmp_path / "other").open("rb") as file, pytest.raises((OSError, ConfigError)):
        receive_module(replace(spec, module_fd=file.fileno()))


def test_a_model_of_gf_nn_may_be_an_instance(graph: gf.Graph) -> None:
    torch.manual_seed(0)  # as the run draws its weights
    instance = gf.nn.build_model(gf.nn.SAGE(hidden=8, layers=2), graph)
    expected = gf.train(graph, model=gf.nn.SAGE(hidden=8, layers=2), seed=0, epochs=2, quiet=True)
    assert gf.train(graph, model=instance, seed=0, epochs=2).logits().equal(expected.logits())


def test_lazy_parameters_are_drawn_from_the_seed(graph: gf.Graph) -> None:
    lazy = GraphSAGE(-1, 8, 2, 10)
    losses = [gf.train(graph, model=lazy, seed=seed, epochs=1).metrics["train_loss"] for seed in (0, 0, 1)]
    assert losses[0] == losses[1] != losses[2]

"""A custom model through a whole run: train, resume, evaluate, predict; errors in its file are shown with the line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from gnnfleet.api import train
from gnnfleet.errors import ConfigError, RunError
from gnnfleet.graph.graph import Graph
from gnnfleet.graph.store import open_store, save_store
from gnnfleet.inference.query import open_trained_run
from tests.graphs import assert_same_checkpoint, communities
from tests.shell import call, run_json

CUSTOM_MODEL = """
import torch
import gnnfleet as gf

class Weighted(torch.nn.Module):
    def __init__(self, wide, narrow, scale):
        super().__init__()
        self.lin, self.lin_self = torch.nn.Linear(wide, narrow), torch.nn.Linear(wide, narrow)
        self.gate = torch.nn.Parameter(torch.tensor([float(scale)]))

    def forward(self, view, x):
        z = self.lin(x)
        def message(src, dst, edge, gate):
            return torch.sigmoid(gate * (src["z"] * dst["z"]).mean(1, keepdim=True)) * src["z"]
        aggregated = view.propagate(message, src={"z": z}, dst={"z": z}, params=[self.gate], reduce="mean")
        return aggregated + self.lin_self(x[:view.num_dst])

def make(config, graph, out_channels):
    widths = [graph.single_nodes.x.shape[1], config.hidden, out_channels]
    layers = [Weighted(*pair, config.settings["scale"]) for pair in zip(widths, widths[1:])]
    return gf.nn.Model(layers, dropout=config.dropout)
"""
SHARED_LAYER_MODEL = """
import torch
import gnnfleet as gf

class Step(torch.nn.Module):
    def __init__(self, wide, narrow, norm):
        super().__init__()
        self.lin, self.norm = torch.nn.Linear(wide, narrow), getattr(gf.nn, norm)(narrow)

    def forward(self, view, x):
        return self.norm(view, self.lin(x[:view.num_dst] + view.aggregate(x, reduce="mean")))

def make(config, graph, out_channels):
    wide, hidden, norm = graph.single_nodes.x.shape[1], config.hidden, config.settings["norm"]
    again = Step(hidden, hidden, norm)
    return gf.nn.Model([Step(wide, hidden, norm), again, again, Step(hidden, out_channels, norm)])
"""
OPTIONS: dict[str, Any] = {"hidden": 16, "dropout": 0.3, "settings": {"scale": 2}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "custom.py").write_text(CUSTOM_MODEL)
    save_store(communities(), tmp_path / "store")
    return tmp_path


def model(folder: Path) -> dict[str, Any]:
    return {"name": f"{folder / 'custom.py'}:make", **OPTIONS}


def test_python_and_command_line_train_the_same_weights(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    record = train(folder / "store", model=model(folder), epochs=6, lr=0.02, seed=3, run_dir=folder / "one")
    (folder / "run.toml").write_text(
        f'seed = 3\n[model]\nname = "{folder / "custom.py"}:make"\nhidden = 16\ndropout = 0.3\n'
        "[model.settings]\nscale = 2\n[train]\nepochs = 6\nlr = 0.02\n"
    )
    shown = run_json("train", folder / "store", "--config", folder / "run.toml", "--run-dir", folder / "two")
    assert shown["model"] == record.summary.model == "custom.py:make" and shown["metrics"] == record.metrics
    assert_same_checkpoint(folder / "one/checkpoints/last", folder / "two/checkpoints/last")
    other_folder = tmp_path_factory.mktemp("other")
    built, _, _ = open_trained_run(folder / "two", open_store(folder / "store"), split="test")
    assert built.strategy.evaluate("test")["accuracy"] == record.metrics["test"]
    assert run_json("predict", folder / "two", "-o", other_folder / "out.parquet", "--memory", "150KB")["rows"] == 300
    assert pq.read_table(other_folder / "out.parquet")["prediction"].to_pylist() == record.predict()
    saved = json.loads((folder / "two/config.json").read_text())["model_file"]
    assert saved["path"] == str(folder / "custom.py") and len(saved["sha256"]) == 64
    assert (folder / "two/model.py").read_text() == CUSTOM_MODEL


def test_a_resumed_run_equals_an_uninterrupted_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    settings: dict[str, Any] = {"model": {**model(folder), "name": "custom.py:make"}, "seed": 1}  # a relative path
    train("store", **settings, epochs=3, run_dir="whole")
    train("store", **settings, epochs=1, run_dir="cut")
    train("store", epochs=3, run_dir="cut", resume=True)
    assert_same_checkpoint(folder / "cut/checkpoints/last", folder / "whole/checkpoints/last")
    with pytest.raises(ConfigError, match=r"started with model\.settings\.scale=2, found 3"):
        train("store", **{"model.settings.scale": 3}, epochs=4, run_dir="cut", resume=True)


@pytest.mark.parametrize("options", [{}, {"strategy": "sar", "workers": 2, "partition": "random"}])
def test_a_layer_may_occur_twice(folder: Path, options: dict[str, Any]) -> None:
    (folder / "shared.py").write_text(SHARED_LAYER_MODEL)
    model = {"name": f"{folder / 'shared.py'}:make", "hidden": 8, "settings": {"norm": "BatchNorm"}}
    settings = {"model": model, "seed": 1, "checkpoint_seconds": 0, "lr": 0.02, **options}
    record = train(folder / "store", **settings, epochs=4, run_dir=folder / "whole")
    train(folder / "store", **settings, epochs=2, run_dir=folder / "cut")
    train(folder / "store", epochs=4, run_dir=folder / "cut", resume=True)
    for name in ("best", "last"):
        assert_same_checkpoint(folder / f"cut/checkpoints/{name}", folder / f"whole/checkpoints/{name}")
    built, _, _ = open_trained_run(folder / "cut", open_store(folder / "store"), split="test")
    assert built.strategy.evaluate("test")["accuracy"] == pytest.approx(record.metrics["test"])
    torch.testing.assert_close(built.strategy.predict().logits, record.logits())


def test_node_order_and_memory_limit_change_only_rounding(folder: Path) -> None:
    settings: dict[str, Any] = {"model": model(folder), "epochs": 2, "precision": "float64"}
    plain = train(folder / "store", **settings)
    other = train(folder / "store", **settings, order="cluster", evaluation_memory="150KB", eval_every=2)
    torch.testing.assert_close(other.logits(), plain.logits(), rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(other.embeddings(), plain.embeddings(), rtol=1e-8, atol=1e-10)


def test_a_changed_or_missing_model_file_is_refused(folder: Path) -> None:
    train(folder / "store", model=model(folder), epochs=2, run_dir=folder / "run")
    file, copy, graph = folder / "custom.py", folder / "run" / "model.py", open_store(folder / "store")
    file.write_text(CUSTOM_MODEL + "# another line\n")
    message = rf"model file {file} changed since the run started: restore it from the copy {copy}, or start a new run"
    with pytest.raises(RunError, match=message):
        open_trained_run(folder / "run", graph)
    with pytest.raises(RunError, match="changed since the run started"):
        train(folder / "store", epochs=4, run_dir=folder / "run", resume=True)
    file.unlink()
    with pytest.raises(RunError, match=rf"model file {file} of this run is missing: restore it from the copy {copy}"):
        open_trained_run(folder / "run", graph)
    file.write_bytes(copy.read_bytes())  # as the message advises
    train(folder / "store", epochs=4, run_dir=folder / "run", resume=True)


FAULTS = [
    ("z = self.lin(x)", "z = self.lin(x[:, :3])", "line 12: RuntimeError: mat1 and mat2 shapes cannot be multiplied"),
    ("return torch.sigmoid", "assert not torch.is_grad_enabled(), 'only\\nbackward'\n            return torch.sigmoid",
     "line 14: AssertionError: only"),
    ("torch.sigmoid(gate", "torch.sigmoid(self.gate", "the message uses a parameter of shape [1]"),
    ('config.settings["scale"]', 'config.settings["scales"]', "line 20: KeyError: 'scales'"),
    ("config.hidden, out_channels]", "config.hidden, out_channels - 1]", "must return 10 columns"),
]  # fmt: skip


@pytest.mark.parametrize(("code", "faulty", "message"), FAULTS)
def test_errors_in_the_model_file_name_the_line(folder: Path, code: str, faulty: str, message: str) -> None:
    (folder / "custom.py").write_text(CUSTOM_MODEL.replace(code, faulty))
    with pytest.raises(ConfigError) as caught:
        train(folder / "store", model=model(folder), epochs=2)
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert "line" not in message or (str(folder / "custom.py") in str(caught.value) and caught.value.__cause__)


def test_the_command_line_shows_one_message_or_the_traceback(folder: Path) -> None:
    (folder / "custom.py").write_text(CUSTOM_MODEL.replace("z = self.lin(x)", "z = self.lin(y)"))
    command = ["train", folder / "store", "--model", f"{folder}/custom.py:make", "--set", "model.settings.scale=1"]
    done = call(*command, "--run-dir", folder / "run", "-q")
    assert done.returncode == 2
    assert done.stderr == f"error: {folder}/custom.py, line 12: NameError: name 'y' is not defined\n"
    shown = call("--debug", *command, "--run-dir", folder / "other", "-q").stderr
    assert "Traceback" in shown and "z = self.lin(y)" in shown and "direct cause" in shown
    assert not (folder / "run" / "checkpoints").exists()


def test_a_model_file_may_be_corrected_before_the_first_checkpoint(folder: Path) -> None:
    (folder / "custom.py").write_text(CUSTOM_MODEL.replace("z = self.lin(x)", "z = self.lin(y)"))
    with pytest.raises(ConfigError, match="line 12"):
        train(folder / "store", model=model(folder), epochs=1, run_dir=folder / "run")
    (folder / "custom.py").write_text(CUSTOM_MODEL)
    train(folder / "store", model=model(folder), epochs=1, run_dir=folder / "run", resume=True)
    assert (folder / "run/model.py").read_text() == CUSTOM_MODEL


def test_a_custom_model_on_several_node_types(folder: Path) -> None:
    from gnnfleet.graph.datasets import make_dataset

    shop = make_dataset("shop", seed=1, users=60, products=40, brands=5, buys=300, views=400)
    (folder / "custom.py").write_text(
        """
import torch, gnnfleet as gf
class Enter(torch.nn.Module):
    def __init__(self, widths, graph, hidden):
        super().__init__()
        self.maps = torch.nn.ModuleDict({k: torch.nn.Linear(w, hidden) for k, w in widths.items() if w})
        self.rows = torch.nn.ModuleDict(
            {k: gf.nn.NodeEmbedding(graph.nodes[k].count, hidden) for k, w in widths.items() if not w})
        self.conv = gf.nn.RGCNConv(hidden, hidden, len(graph.edges), relations=tuple(graph.edges))
    def forward(self, view, x):
        learnt = {k: rows(view.for_type(k)) for k, rows in self.rows.items()}
        return self.conv(view, {**learnt, **{k: m(x[k]) for k, m in self.maps.items()}})
def make(config, graph, out_channels):
    widths = {k: 0 if n.x is None else n.x.shape[1] for k, n in graph.nodes.items()}
    last = gf.nn.RGCNConv(8, out_channels, len(graph.edges), relations=tuple(graph.edges))
    return gf.nn.Model([Enter(widths, graph, 8), last], dropout=0.2)
""".replace('"user"', repr(shop.labelled_type))
    )
    settings: dict[str, Any] = {"model": f"{folder / 'custom.py'}:make", "split": "0.6/0.2/0.2", "epochs": 3}
    plain = train(shop, **settings)
    limited = train(shop, **settings, evaluation_memory=20_000)
    torch.testing.assert_close(plain.logits(), limited.logits(), rtol=1e-4, atol=1e-5)


def test_a_custom_model_may_train_without_features(folder: Path) -> None:
    (folder / "custom.py").write_text("""
import gnnfleet as gf
class Rows(gf.nn.Model):
    def __init__(self, count, out):
        super().__init__([gf.nn.SAGEConv(8, out)])
        self.rows = gf.nn.NodeEmbedding(count, 8)
    def compute(self, index, view, x, carry):
        return super().compute(index, view, self.rows(view), carry)
def make(config, graph, out_channels):
    return Rows(graph.num_nodes, out_channels)
""")
    graph = Graph([[0, 1, 2, 3], [1, 2, 3, 0]], y=[0, 1, 0, 1], split=[0, 0, 1, 2], num_nodes=4)
    assert train(graph, model=f"{folder / 'custom.py'}:make", epochs=2).logits().shape == (4, 2)

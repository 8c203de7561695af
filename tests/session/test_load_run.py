"""gf.load_run: a finished run in Python, on its store or another graph; its model in a file."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

import gnnfleet as gf
from gnnfleet.errors import InputError, RunError
from gnnfleet.graph.store import save_store
from gnnfleet.io.bundle import manifest_digest
from tests.graphs import CLASSES, communities


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, gf.api.Record]:
    folder = tmp_path_factory.mktemp("runs")
    save_store(communities(), folder / "store")
    model = gf.nn.GCN(hidden=16, layers=2)
    return folder, gf.train(folder / "store", model=model, epochs=5, lr=0.05, run_dir=folder / "run")


def test_a_loaded_run_predicts_as_the_record_of_its_training(
    trained: tuple[Path, gf.api.Record], tmp_path: Path
) -> None:
    folder, record = trained
    run = gf.load_run(folder / "run")
    assert run.metrics == record.metrics and run.config == record.config and run.summary == record.summary
    assert run.graph.num_nodes == record.graph.num_nodes
    assert run.predict(["n5", "n0"]) == record.predict(["n5", "n0"])
    assert torch.equal(run.embeddings(), record.embeddings())
    data = gf.to_pyg(run.graph)
    expected = run.predict()
    for others in (folder / "store", run.graph, data):
        assert run.predict(others) == record.predict(others) == expected
    half = data.subgraph(torch.arange(0, data.num_nodes, 2))
    del half.y, half.train_mask, half.val_mask, half.test_mask, half.class_names
    assert set(run.predict(half)) <= set(CLASSES) and run.logits(half).shape == (half.num_nodes, 10)
    assert torch.allclose(run.logits(half), run.model(half.x, half.edge_index), atol=1e-5)
    half.x = half.x[:, :3]
    with pytest.raises(RunError, match="trained on 64 features per node"):
        run.predict(half)
    run.save_model(tmp_path / "model.safetensors")
    model = gf.nn.load_model(tmp_path / "model.safetensors")
    assert torch.equal(model(data.x, data.edge_index), run.model(data.x, data.edge_index)) and not model.training


def test_runs_that_cannot_be_loaded_say_why(trained: tuple[Path, gf.api.Record], tmp_path: Path) -> None:
    folder, record = trained

    def altered(name: str, **changes: object) -> Path:
        shutil.copytree(folder / "run", tmp_path / name)
        content = json.loads((tmp_path / name / "config.json").read_text())
        content = {key: value for key, value in {**content, **changes}.items() if key != "digest"}
        (tmp_path / name / "config.json").write_text(json.dumps({**content, "digest": manifest_digest(content)}))
        return tmp_path / name

    with pytest.raises(RunError, match=r"is a run of gnnfleet 0\.1\.0, which had other options"):
        gf.load_run(altered("old", versions={"gnnfleet": "0.1.0"}))
    for name, store, reason in (
        ("memory", None, "a graph in memory"),
        ("gone", {"path": "/gone", "digest": ""}, "/gone"),
    ):
        path = altered(name, store=store)
        with pytest.raises(RunError, match=f"was trained on {reason}, which is gone: pass it with store$"):
            gf.load_run(path)
        assert gf.load_run(path, folder / "store").predict(["n3"]) == record.predict(["n3"])
    with pytest.raises(RunError, match="changed since the run started"):
        gf.load_run(altered("changed", store={"path": str(folder / "store"), "digest": "other"}))
    unfinished = altered("unfinished")
    (unfinished / "record.json").unlink()
    with pytest.raises(RunError, match="has no record: wait until it has finished, or continue with resume=True"):
        gf.load_run(unfinished)
    with pytest.raises(RunError, match="is not a run"):
        gf.load_run(tmp_path)
    with pytest.raises(InputError, match=r"is not a model that gf\.nn\.save_model wrote"):
        gf.nn.load_model(folder / "run" / "config.json")

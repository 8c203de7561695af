"""Files of version 0.1.0 can be read, and names and numbers on disk do not change.

The fixtures are never written again; ``make_fixtures.py`` wrote them. A name in a list here changes together
with a version number of what it is part of, never alone.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gnnfleet import errors
from gnnfleet.api import train
from gnnfleet.config.resolve import resolve, unflatten
from gnnfleet.errors import RunError
from gnnfleet.graph import store
from gnnfleet.graph.datasets import make_dataset
from gnnfleet.graph.graph import Graph
from gnnfleet.graph.partition import chunk_layout, node_assignment, partitioned_graph, shard
from gnnfleet.graph.partition.partitioned_graph import Partition
from gnnfleet.graph.validate import open_validated_part, open_validated_store
from gnnfleet.inference.query import open_trained_run
from gnnfleet.io import bundle as manifest
from gnnfleet.io.bundle import Bundle
from gnnfleet.nn.link import make_decoder
from gnnfleet.nn.link_config import LinkConfig
from gnnfleet.nn.model import build_model
from gnnfleet.ops.draws import Draws, Purpose
from gnnfleet.ops.native import _native
from gnnfleet.strategies import protocol
from gnnfleet.strategies.tma import strategy as tma
from gnnfleet.training import checkpoint
from gnnfleet.training.build import build, build_events
from gnnfleet.training.checkpoint import TrainState
from gnnfleet.training.partition_cache import ensure_placement
from gnnfleet.training.run_dir import RunDirectory
from tests.golden.compare import renamed
from tests.golden.make_fixtures import DECODERS, MODELS, OTHERS, SETTINGS

HERE = Path(__file__).parent
STORE, RUN = HERE / "store", HERE / "run"


@pytest.fixture
def copy(tmp_path: Path) -> Graph:
    shutil.copytree(STORE, tmp_path / "store")
    return open_validated_store(tmp_path / "store")


def with_new_option_names(settings: dict[str, Any], group: str = "", scope: str = "") -> dict[str, Any]:
    """Settings of 0.1.0 under the present option names."""
    return dict(renamed(f"{group}{key}", value, scope) for key, value in settings.items())


def test_store_opens_with_all_its_data() -> None:
    graph = open_validated_store(STORE)  # compares every file with its checksum
    nodes, edges = graph.single_nodes, graph.single_edges
    assert nodes.ids.select([0, 59]).to_pylist() == ["n00", "n59"] and nodes.classes == ("a", "b", "c")
    assert nodes.x is not None and nodes.x.shape == (60, 8) and nodes.split is not None
    source, target = edges.edge_index()
    assert edges.weight is not None and torch.equal(edges.weight, (1 + (3 * source + 5 * target) % 7) / 4)


def test_partition_opens() -> None:
    path = STORE / "parts" / "mincut-2-nodes-seed0"
    opened = Partition.open(path, open_validated_store(STORE))
    parts = [open_validated_part(path, number) for number in range(2)]
    ids = torch.cat([part.nodes("node").store_ids for part in parts])
    assert opened.parts == 2 and torch.equal(ids.sort().values, torch.arange(60))


@pytest.mark.parametrize("strategy", [{"name": "sar"}, *OTHERS], ids=lambda settings: settings["name"])
def test_runs_use_the_partitions_saved_in_the_store(copy: Graph, strategy: dict[str, Any]) -> None:
    assert copy.store is not None
    inodes = {path.name: path.stat().st_ino for path in (copy.store.path / "parts").iterdir()}
    settings = with_new_option_names(strategy, "strategy.", strategy["name"])
    path = ensure_placement(copy, copy, resolve({**unflatten(settings), "workers": 2}))
    assert path is not None and inodes[path.name] == path.stat().st_ino


@pytest.fixture(params=_native.isas().split())
def isa(request: pytest.FixtureRequest) -> Any:
    """Every instruction set of this machine in turn."""
    before = _native.isa()
    assert _native.select_isa(request.param)
    yield request.param
    _native.select_isa(before)


@pytest.mark.usefixtures("isa")
def test_saved_weights_give_the_saved_logits() -> None:
    loaded = RunDirectory(RUN, seed=SETTINGS["seed"]).load_weights("best")
    assert loaded is not None and loaded[1].best_epoch == 4
    model = with_new_option_names({key: value for key, value in SETTINGS.items() if key.startswith("model.")})
    settings = unflatten({**model, "model.residual": True, "seed": SETTINGS["seed"]})
    built = build(open_validated_store(STORE), resolve(settings))  # strategy local
    built.strategy.load_state_dict(loaded[0])
    logits = built.strategy.predict().logits
    # Of other instruction sets the last bits differ.
    torch.testing.assert_close(logits, torch.from_numpy(np.load(HERE / "logits.npy")), rtol=1e-6, atol=1e-6)


def test_a_run_of_version_0_1_0_is_not_resumed(copy: Graph, tmp_path: Path) -> None:
    shutil.copytree(HERE / "run", tmp_path / "run")
    with pytest.raises(RunError, match=r"is a run of gnnfleet 0\.1\.0, which had other options: resume, evaluate"):
        train(copy, run_dir=tmp_path / "run", resume=True)
    with pytest.raises(RunError, match=r"is a run of gnnfleet 0\.1\.0"):
        open_trained_run(tmp_path / "run", copy)


def test_tensors_of_models_keep_their_names() -> None:
    homogeneous = make_dataset("communities", nodes=20, features=4, classes=3, mean_degree=4)
    heterogeneous = make_dataset("shop", users=10, products=10, brands=3, buys=20, views=20, features=4)
    stream = make_dataset("events", users=10, items=8, events=60, features=4)
    modules: dict[str, Any] = {}
    for label, settings in MODELS.items():
        model = unflatten(with_new_option_names(settings, "model."))
        if settings["name"].startswith("tg"):
            modules[label] = build_events(stream, resolve({**model, "strategy": {"name": "temporal"}}))[1]
        else:
            graph = heterogeneous if settings["name"] == "rgcn" else homogeneous
            modules[label] = build_model(resolve(model).model, graph, out_channels=3)
    for name, settings in DECODERS.items():
        config = LinkConfig(**unflatten(with_new_option_names({"decoder": name, **settings}, "link."))["link"])
        modules[f"decoder-{name}"] = make_decoder(config, width=8, relations=2, several=True)
    for label, expected in json.loads((HERE / "state_keys.json").read_text()).items():
        assert {key: list(tensor.shape) for key, tensor in modules[label].state_dict().items()} == expected, label


def test_names_on_disk_do_not_change() -> None:
    assert manifest.VERSION == 1
    assert (store.KIND, partitioned_graph.KIND, shard.KIND, checkpoint.KIND) == (
        "graph",
        "partition",
        "part",
        "checkpoint",
    )
    assert (node_assignment.KIND, chunk_layout.KIND) == ("gnnfleet clusters", "gnnfleet chunks")
    assert (protocol.SHARDED, protocol.IDS_SUFFIX, protocol.RANK_LOCAL, protocol.RAW_WEIGHTS) == (
        "own",
        "/ids",
        "private",
        "trained",
    )
    assert tma.CORRECTION == "correction/"
    assert [field.name for field in fields(TrainState)] == [
        "epoch", "step", "within", "loss", "count", "seconds", "evaluated", "best_epoch", "best_metric", "best_loss",
        "lr_scale", "lr_epoch",  # added in 0.2.0, with defaults
    ]  # fmt: skip


def test_run_writes_the_same_names(copy: Graph, tmp_path: Path) -> None:
    """A run has the same names as that of 0.1.0, and no others."""
    settings = with_new_option_names({"model.name": "gcn", "model.hidden": 4, "train.epochs": 1})
    train(copy, run_dir=tmp_path / "run", config=unflatten(settings))
    for name in ("last", "best"):
        saved, written = (Bundle.open(run / "checkpoints" / name, checkpoint.KIND) for run in (RUN, tmp_path / "run"))
        assert set(written.meta) == set(saved.meta) and written.meta["parts"] == saved.meta["parts"]
        assert set(written.files) == {file for file in saved.files if not file.startswith("rank-")}
        assert set(written.meta["position"]) == {*saved.meta["position"], "lr_scale", "lr_epoch"}
    # Keys may be added to these, none may go.
    for name in ("metrics.jsonl", "record.json", "config.json"):
        kept_keys, written_keys = (_keys(run / name) for run in (RUN, tmp_path / "run"))
        assert kept_keys <= written_keys, (name, kept_keys - written_keys)
    assert checkpoint.rank_file(1) in Bundle.open(RUN / "checkpoints" / "last", checkpoint.KIND).files


def _keys(path: Path) -> set[str]:
    """Keys of a JSON file, or of the first line of JSON lines."""
    text = path.read_text()
    return set(json.loads(text.splitlines()[0] if path.suffix == ".jsonl" else text))


def test_exit_codes_do_not_change() -> None:
    assert {kind.__name__: kind.exit_code for kind in errors.GnnfleetError.__subclasses__()} == {
        "ConfigError": 2,
        "InputError": 3,
        "StoreError": 4,
        "PartitionError": 5,
        "NativeError": 6,
        "RunError": 7,
        "ExchangeError": 8,
    }


def test_random_draws_do_not_change() -> None:
    assert [int(purpose) for purpose in Purpose] == list(range(1, 11))  # names may change, numbers may not
    drawn = [Draws(7, purpose, layer=1, relation=2, epoch=3, step=4).uniforms(3, first=5) for purpose in Purpose]
    digest = hashlib.sha256(torch.cat(drawn).numpy().tobytes()).hexdigest()
    assert digest == "3026d15e86c7845746df95d2f59db3d4417563b14aa083baa041d4d529a90dec"

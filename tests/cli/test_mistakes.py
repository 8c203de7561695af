"""Mistakes on the command line print one line, exit with the right code and write nothing."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from gnnfleet.api import train
from gnnfleet.graph.datasets import make_dataset
from gnnfleet.graph.graph import Graph, validated_nodes
from gnnfleet.graph.partition.assign import PARTITIONERS
from gnnfleet.graph.store import save_store
from gnnfleet.nn.config import MODELS
from gnnfleet.session import training
from tests.graphs import assert_same_checkpoint, communities
from tests.report.runs import write_run
from tests.shell import call


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stores")
    good = communities(120)
    edges, nodes = good.edges, good.single_nodes
    save_store(good, folder / "good")
    labels: dict[str, Any] = {"y": nodes.y, "split": nodes.split}
    save_store(Graph.of({"node": validated_nodes(120, **labels)}, edges), folder / "bare")
    assert nodes.y is not None and nodes.split is not None
    wrong = good.with_nodes("node", y=nodes.y + 3)
    save_store(wrong, folder / "wrong")
    save_store(good.with_nodes("node", split=torch.ones_like(nodes.split)), folder / "untrained")
    save_store(good.with_nodes("node", split=torch.zeros_like(nodes.split)), folder / "unvalidated")
    save_store(good.with_nodes("node", split=None), folder / "unsplit")
    save_store(good.with_nodes("node", y=None, classes=()), folder / "unlabelled")
    save_store(make_dataset("shop", seed=1, users=20, products=20, brands=3, buys=40, views=40), folder / "shop")
    save_store(make_dataset("events", users=20, items=10, events=60, seed=1), folder / "events")
    (folder / "wrong.toml").write_text("seed = = 3")
    (folder / "unknown.toml").write_text("[train]\nepohcs = 3\n")
    return folder


# Arguments of "train"; exit code; part of the message. {} is the folder of stores.
CASES = [
    ("{}/good --set train.epoch=3", 2, "no setting 'train.epoch': did you mean train.epochs?"),
    ("{}/good --set epochs=5", 2, "no setting 'epochs': did you mean train.epochs?"),
    ("{}/good --set epoch=5", 2, "no setting 'epoch': did you mean train.epochs?"),
    ("{}/good --set train.hidden=5", 2, "no setting 'train.hidden': did you mean model.hidden?"),
    ("{}/good --set fanouts=[5]", 2, "no setting 'fanouts': did you mean strategy.fanouts?"),
    (
        "{}/good -s sar --set strategy.fanouts=[5]",
        2,
        "strategy sar has no such setting, strategy.fanouts is a setting of local, macrobatch, tma",
    ),
    ("{}/good --epochs 5", 2, "no option --epochs: use --set train.epochs=5 (gnnfleet train --help)"),
    ("{}/good --fanouts=[5]", 2, "no option --fanouts: use --set strategy.fanouts=[5] (gnnfleet train --help)"),
    ("{}/good --epochs", 2, "no option --epochs: use --set train.epochs=VALUE (gnnfleet train --help)"),
    ("{}/good --magic", 2, "No such option: --magic (gnnfleet train --help)"),
    ("{}/good --set train.epochs=many", 2, "train.epochs='many'"),
    ("{}/good --set train.lr=-1", 2, "train.lr=-1: input should be greater than 0"),
    ("{}/good --set train.label_smoothing=1.5", 2, "train.label_smoothing=1.5"),
    ("{}/good --set train.lr", 2, "--set takes KEY=VALUE"),
    ("{}/good --set model=3 --set model.hidden=4", 2, "model has a value already"),
    ("{}/good --set model=3", 2, "model=3: expected a name or a table"),
    ("{}/good --set model=3 --model gcn", 2, "model=3: expected a name or a table"),
    ("{}/good --set strategy=3 --strategy local", 2, "strategy=3: expected a name or a table"),
    ("{}/good --set train=3", 2, "train=3"),
    ("{}/good --set seed.x=3", 2, "seed={'x': 3}"),
    ("{}/good --set strategy=3", 2, "strategy=3: expected a name or a table"),
    ("{}/good --config {}/wrong.toml", 2, "wrong.toml is not valid TOML"),
    ("{}/good --config {}/unknown.toml", 2, "did you mean train.epochs?"),
    ("{}/good --config {}/none.toml", 2, "cannot read config"),
    ("{}/good --model sagee", 2, "did you mean 'sage'?"),
    ("{}/good --model none.py:make", 2, "cannot read the model file"),
    ("{}/good --model none.py", 2, "a custom model is named file.py:factory"),
    ("{}/good --memory lots", 2, "memory 'lots' is not a size"),
    ("{}/good --partition mincut", 2, "strategy local uses no partition"),
    ("{}/good --partition mincat", 2, "did you mean 'mincut'?"),
    ("{}/good --strategy temporal", 2, "no edges have times"),
    ("{}/good --strategy temporal --model sage", 2, "strategy temporal trains tgn, tgn-id, tgat"),
    ("{}/good --model tgn", 2, "use --strategy temporal"),
    ("{}/good --strategy temporal --partition mincut", 2, "uses no partition"),
    ("{}/good --workers 2", 2, "use --workers 1, or --strategy sar|macrobatch|tma|pipe"),
    ("{}/good --precision half", 2, "half"),
    ("{}/good --split 3", 2, "split 3 does not exist: this graph has splits 0 to 0"),
    ("{}/good --split half", 2, "a split has the form TRAIN/VAL/TEST"),
    ("{}/good --resume", 2, "there is no runs/last to resume"),
    ("{}/good --run-dir {}", 2, "is not empty"),
    ("{}/good --run-dir {}/wrong.toml", 2, "is a file"),
    ("{}/good --run-dir {} --resume", 2, "is not a run"),
    ("{}/good --run-dir /dev/null/run", 7, "cannot write to /dev/null/run"),
    ("{}/good --seed x", 2, "Invalid value for '--seed'"),
    ("{}/good --precision flat32", 2, "'flat32' is not one of 'float32', 'bf16', 'float64': did you mean 'float32'?"),
    ("{}/good --memory 1GiB", 2, "of plans; for strategy local use --set evaluation_memory=SIZE"),
    ("{}/bare --set auto_defaults=false", 2, "no features: set model.embedding=64"),
    ("{}/events", 2, "edges have times: train on events with --strategy temporal"),
    ("{}/wrong.toml", 4, "wrong.toml is a file, not a store: import it first"),
    ("{}/wrong", 3, "label 12 is out of range: expected 0 to 9"),
    ("{}/untrained", 2, "training split has no labelled nodes"),
    ("{}/unvalidated --set train.patience=3", 2, "train.patience needs val nodes"),
    ("{}/unsplit", 2, "the graph has no split"),
    ("{}/unlabelled", 3, "the graph has no labels"),
    ("{}/shop --split 0.6/0.2/0.2 --model gcn", 2, "use one of rgcn, hetero-sage"),
    ("{}/none", 4, "no graph at"),
]


@pytest.mark.parametrize(("arguments", "code", "message"), CASES)
def test_mistakes_of_train_print_one_line(
    arguments: str, code: int, message: str, stores: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = sorted(stores.rglob("*"))
    done = call("train", *arguments.replace("{}", str(stores)).split())
    assert done.returncode == code, done.stderr
    lines = done.stderr.strip().splitlines()
    assert message in lines[-1] and lines[-1].startswith("error: ") and not done.stdout
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir()) and sorted(stores.rglob("*")) == before


# The same for other commands. {out} is an empty directory that stays empty.
OTHERS = [
    (
        "train {}/good -s macrobatch -w 2 --set strategy.batches_per_fetch=0",
        2,
        "strategy.batches_per_fetch=0: input should be 'auto' or",
    ),
    ("train {}/events -s temporal --set strategy.relation=a:b:c", 2, "edges a:b:c have no times"),
    ("plan {}/good --strategies temporal", 2, "no edges have times"),
    ("plan {}/good --bandwidth fast", 2, "'fast' is not a bandwidth: write 1Gbit"),
    ("compare {}/good --strategies sar --set sar.grup=1 -o {out}/c", 2, "did you mean strategy.group?"),
    ("compare {}/good --strategies local -o /proc/none", 2, "cannot write to /proc/none"),
    ("demo --set nodes=0 -o {out}/d", 2, "nodes: input should be greater than"),
    ("report {}/good", 7, "is not a run"),
    ("report", 2, "Missing argument 'RUN…' (gnnfleet report --help)"),
    ("train", 2, "Missing argument 'STORE' (gnnfleet train --help)"),
    ("plan {}/wrong.toml", 4, "is a file, not a store"),
    ("compare {}/wrong.toml -o {out}/c", 4, "is a file, not a store"),
    ("diagnose {}/wrong.toml", 4, "is a file, not a store"),
    ("partition {}/wrong.toml --parts 2", 4, "is a file, not a store"),
    ("info {}/wrong.toml", 4, "is a file, not a store"),
    ("watch {}/none", 7, "is not a run"),
    ("predict {}/none -o {out}/a.csv", 7, "is not a run"),
    ("evaluate {}/good", 7, "is not a run"),
    ("join nowhere {}/good --trainers 1", 2, "expected HOST:PORT"),
    ("join localhost:0 {}/good --trainers 1", 2, "localhost:0 has port 0: use the port"),
    ("join localhost:65536 {}/good --trainers 1", 2, "a port up to 65535"),
    ("join localhost:1 {}/none --trainers 1", 4, "no graph at"),
]


@pytest.mark.parametrize(("arguments", "code", "message"), OTHERS)
def test_mistakes_of_other_commands_print_one_line(
    arguments: str, code: int, message: str, stores: Path, tmp_path: Path
) -> None:
    before = sorted(stores.rglob("*"))
    done = call(*arguments.replace("{out}", str(tmp_path)).replace("{}", str(stores)).split())
    assert done.returncode == code, done.stderr
    lines = done.stderr.strip().splitlines()
    assert (
        message in lines[-1] and lines[-1].startswith("error: ") and not done.stdout and "Traceback" not in done.stderr
    )
    assert not list(tmp_path.iterdir()) and sorted(stores.rglob("*")) == before


def test_a_page_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    (tmp_path / "folder").mkdir()
    done = call("report", run, "-o", tmp_path / "folder")
    assert done.returncode == 2 and "Is a directory: choose another --output" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "run"]


def test_an_infinite_loss_ends_the_run(stores: Path, tmp_path: Path) -> None:
    options = ["--set", "train.lr=1e30", "--set", "train.optimizer=sgd", "--set", "model.hidden=8", "-q"]
    done = call("train", stores / "good", *options, "--run-dir", tmp_path / "run")
    assert done.returncode == 7 and "try a smaller train.lr" in done.stderr
    assert not (tmp_path / "run/record.json").exists()


@pytest.mark.parametrize(("stopped", "options"), [("run_session", ""), ("launch", "-s sar -w 2")])
def test_an_interrupted_run_says_how_to_resume_it(
    stopped: str, options: str, stores: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(training, stopped, stop)
    done = call("train", stores / "good", *options.split(), "--run-dir", tmp_path / "run")
    *_, advice, last = done.stderr.splitlines()
    assert done.returncode == 130 and last.startswith("error: interrupted") and not done.stdout
    assert advice.endswith(f"--run-dir {tmp_path / 'run'} --resume"), done.stderr


def test_resume_without_a_run_starts_a_new_one(stores: Path, tmp_path: Path) -> None:
    arguments = [
        stores / "good",
        "--set",
        "train.epochs=1",
        "--set",
        "model.hidden=8",
        "--resume",
        "--run-dir",
        tmp_path / "run",
    ]
    done = call("train", *arguments)
    assert done.returncode == 0 and f"no run in {tmp_path / 'run'} to resume: starting a new one" in done.stderr
    assert "no run in" not in call("train", *arguments).stderr


def test_help_names_models_partitioners_and_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    done = call("train", "--help")
    terms = (*MODELS, "file.py:factory", *PARTITIONERS, "--memory", "4GiB", "--partition")
    assert done.returncode == 0 and all(term in done.stdout for term in terms)


KILLED = """
import os, signal, sys
from pathlib import Path
from gnnfleet.training import checkpoint
from gnnfleet.api import train

write, remaining = checkpoint.save_file, 5

def killed(tensors, path):
    global remaining
    remaining -= 1
    write(tensors, path)
    if not remaining:
        os.truncate(path, os.path.getsize(path) // 2)  # as if the kill had interrupted the write
        os.kill(os.getpid(), signal.SIGKILL)

checkpoint.save_file = killed
store, run_dir = sys.argv[1:]
train(store, model={"hidden": 8, "layers": 2}, epochs=8, lr=0.03, checkpoint_seconds=0, run_dir=run_dir)
"""


def test_a_run_killed_while_writing_a_checkpoint_is_resumed_bit_for_bit(stores: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"model": {"hidden": 8, "layers": 2}, "epochs": 8, "lr": 0.03, "checkpoint_seconds": 0}
    train(stores / "good", **settings, run_dir=tmp_path / "uninterrupted")
    done = subprocess.run(
        [sys.executable, "-c", KILLED, stores / "good", tmp_path / "run"], env={"PYTHONPATH": ":".join(sys.path)}
    )
    assert done.returncode == -signal.SIGKILL
    train(stores / "good", **settings, run_dir=tmp_path / "run", resume=True)
    for name in ("last", "best"):
        assert_same_checkpoint(tmp_path / "run/checkpoints" / name, tmp_path / "uninterrupted/checkpoints" / name)
    assert sorted(p.name for p in (tmp_path / "run/checkpoints").iterdir()) == ["best", "last"]

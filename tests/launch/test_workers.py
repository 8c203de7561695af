"""Training on several workers: results of one process, a record with one entry per rank, and one error for all."""

from __future__ import annotations

import io
import os
import re
import signal
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch
from torch.distributed.elastic.multiprocessing import SignalException

from gnnfleet.api import train
from gnnfleet.comm.failure import Failure, FailureKind
from gnnfleet.config.resolve import resolve
from gnnfleet.config.schema import RunConfig
from gnnfleet.errors import ConfigError, ExchangeError, GnnfleetError, PartitionError, RunError, StoreError
from gnnfleet.graph.graph import Graph
from gnnfleet.graph.store import open_store, save_store
from gnnfleet.inference.query import open_trained_run
from gnnfleet.launch.local_launcher import combine_failures, launch, threads_per_worker
from gnnfleet.launch.spec import RunSpec
from gnnfleet.report.metrics import read_metrics
from gnnfleet.session.prepare import RunLocation, prepare_run
from gnnfleet.training import partition_cache
from tests.graphs import communities
from tests.shell import fails, run_json

MODEL: dict[str, Any] = {"model": {"name": "sage", "hidden": 16, "layers": 2}}


def test_more_workers_than_nodes_are_remarked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    nodes, codes = torch.arange(12), torch.arange(12) % 3
    ring = Graph(torch.stack([nodes, nodes.roll(1)]), x=torch.ones(12, 2), y=codes, split=codes)
    graph = save_store(ring, tmp_path / "store")
    caplog.set_level("INFO", "gnnfleet")
    for workers, has_remark in ((16, True), (12, False)):
        config = resolve({**MODEL, "strategy": {"name": "sar"}, "workers": workers, "partition": "random"})
        with prepare_run(graph, config, None, location=RunLocation(tmp_path / f"run{workers}"), quiet=False):
            assert ("16 parts of 12 nodes: at least 4 are empty" in caplog.text) is has_remark
        caplog.clear()


def assert_close(model: torch.nn.Module, expected: torch.nn.Module) -> None:
    torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=1e-8, atol=1e-10)


def test_two_workers_on_a_graph_in_memory_equal_one_and_leave_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "scratch"))
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr("tempfile.tempdir", None)
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    before = dict(os.environ)
    graph, options = communities(), {**MODEL, "epochs": 12, "precision": "float64", "seed": 2}
    local, record = train(graph, **options), train(graph, strategy="sar", workers=2, **options)
    for key in ("val", "test", "best_epoch", "name"):
        assert record.metrics[key] == local.metrics[key]
    assert_close(record.model, local.model)
    assert record.predict(["n7", "n0"]) == local.predict(["n7", "n0"])
    torch.testing.assert_close(record.embeddings(), local.embeddings())
    assert record.summary.workers == 2 and record.run_dir is None
    assert all(len(numbers) == 2 for numbers in (*record.summary.traffic.values(), *record.summary.memory.values()))
    assert min(record.summary.traffic["bytes_sent"]) > 0
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == handlers
    names = ("PYTHONPATH", "OMP_NUM_THREADS", "RES_OPTIONS", "TORCHELASTIC_SIGNALS_TO_HANDLE")
    assert [os.environ.get(name) for name in names] == [before.get(name) for name in names]
    scratch = [path.name for path in (tmp_path / "scratch").iterdir() if not path.name.startswith("torchinductor_")]
    assert not scratch and sorted(path.name for path in tmp_path.iterdir()) == ["scratch"]


def test_a_run_is_resumed_with_another_number_of_workers(tmp_path: Path) -> None:
    store = tmp_path / "shop"
    save_store(communities(), store)
    model = {"name": "sage", "hidden": 16, "layers": 2, "embedding": 4}  # embedding rows change their owners
    options: dict[str, Any] = {"model": model, "precision": "float64", "seed": 1, "checkpoint_seconds": 0}
    uninterrupted = train(store, **options, epochs=9, run_dir=tmp_path / "uninterrupted")
    settings = [f"--set=model.{option}={model[option]}" for option in ("hidden", "layers", "embedding")]
    line = ["train", store, "-s", "sar", "--model", "sage", *settings, "--precision", "float64", "--seed", "1"]
    line += ["--run-dir", tmp_path / "resumed"]
    run_json(*line, "-w", "2", "--set", "train.epochs=4")
    record = run_json(*line, "-w", "3", "--set", "train.epochs=9", "--resume")
    assert (
        record["workers"] == 3 and record["epochs"] == 9 and record["metrics"]["test"] == uninterrupted.metrics["test"]
    )
    assert [row["epoch"] for row in read_metrics(tmp_path / "resumed/metrics.jsonl")] == list(range(1, 10))
    built, _, name = open_trained_run(tmp_path / "resumed", open_store(store))
    assert name == "best"
    assert_close(built.strategy.model, uninterrupted.model)
    assert sorted(p.name for p in (store / "parts").iterdir() if p.name[0] != ".") == [
        "mincut-2-nodes-seed0",
        "mincut-3-nodes-seed0",
    ]


def test_wrong_options_start_no_worker(tmp_path: Path) -> None:
    store = tmp_path / "shop"
    save_store(communities(), store)
    assert "strategy local runs in one process" in fails("train", store, "--workers", "2", code=2)
    with pytest.raises(ConfigError, match="patience needs val nodes"):
        train(store, strategy="sar", workers=2, patience=3, split="0.8/0/0.2", run_dir=tmp_path / "run")
    with pytest.raises(ConfigError, match="max_restarts=1 is for several workers, found workers=1: use resume=True"):
        train(store, max_restarts=1)
    assert not (store / "parts").exists() and not (tmp_path / "run").exists()


def config(**options: Any) -> RunConfig:
    return resolve({"strategy": "sar", "workers": 2, **options})


def ensure(graph: Graph, config: RunConfig) -> Path:
    return partition_cache.ensure_partition(graph, partition_cache.trained_graph(graph, config), config)


def test_a_partition_is_computed_once_per_method_and_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = save_store(communities(), tmp_path / "shop")
    methods: list[str] = []
    assign_nodes = partition_cache.assign_nodes

    def recorded(*args: Any, **options: Any) -> Any:
        methods.append(args[2])
        return assign_nodes(*args, **options)

    monkeypatch.setattr(partition_cache, "assign_nodes", recorded)
    threads = [threading.Thread(target=ensure, args=(graph, config())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    path = ensure(graph, config(seed=5))
    assert methods == ["mincut"] and path.name == "mincut-2-nodes-seed0"
    assert ensure(graph, config(partition="random")).name == "random-2-nodes-seed0" and methods == ["mincut", "random"]
    (path / "assignment.npy").write_bytes(b"damaged")
    assert ensure(graph, config()) == path and methods == ["mincut", "random", "mincut"]
    other = save_store(communities(200), tmp_path / "shop", overwrite=True)
    ensure(other, config())
    assert len(methods) == 4


def test_every_split_of_links_has_its_own_partition(tmp_path: Path) -> None:
    graph = save_store(communities(), tmp_path / "shop")
    paths = [ensure(graph, config(task="link", split="0.8/0.1/0.1", seed=seed)) for seed in (0, 1, 0)]
    assert paths[0] == paths[2] != paths[1] and paths[0].parent.name.startswith("links-")


def test_a_store_that_is_not_writable_is_an_error(tmp_path: Path) -> None:
    graph = save_store(communities(), tmp_path / "shop")
    (tmp_path / "shop" / "parts").write_text("a file")
    with pytest.raises(StoreError, match="cannot save a partition"):
        ensure(graph, config())


def test_a_partition_is_computed_in_another_process(tmp_path: Path) -> None:
    graph = save_store(communities(), tmp_path / "shop")
    path = partition_cache.ensure_placement_in_subprocess(graph, config(), quiet=True)
    assert path == tmp_path / "shop/parts/mincut-2-nodes-seed0"
    (tmp_path / "shop/parts/random-2-nodes-seed0").write_text("a file")
    with pytest.raises(StoreError, match="exists and is not a partition"):
        partition_cache.ensure_placement_in_subprocess(graph, config(partition="random"), quiet=True)


def test_nodes_assigned_one_by_one_need_no_clusters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The other process is simulated in this one."""
    graph = save_store(communities(120), tmp_path / "shop")
    monkeypatch.setattr(partition_cache, "die_with_parent", lambda: None)

    def run(line: list[str], *, input: str, **_: Any) -> Any:
        monkeypatch.setattr("sys.stdin", io.StringIO(input))
        partition_cache._main()
        return SimpleNamespace(stdout=capsys.readouterr().out, returncode=0)

    monkeypatch.setattr(partition_cache.subprocess, "run", run)
    random = config(strategy={"name": "tma", "scheme": "random"})
    assert partition_cache.ensure_placement_in_subprocess(graph, random, quiet=True) is None
    path = partition_cache.ensure_placement_in_subprocess(graph, config(), quiet=True)
    assert path == tmp_path / "shop/parts/mincut-2-nodes-seed0"


def failed(code: int, failure: Failure | None = None) -> Any:
    """A failure as torchrun reports it."""
    data = {} if failure is None else {"gnnfleet": {**vars(failure)}}
    name = signal.Signals(-code).name if code < 0 else ""
    return SimpleNamespace(exitcode=code, pid=77, error_file_data=data, signal_name=lambda: name)


def report(kind: FailureKind, rank: int, by: int, text: str, code: int = 8) -> Failure:
    return Failure(kind=kind, ranks=(rank,), found_by=by, text=text, exit_code=code, trace="T" if code == 1 else "")


FAILURES: list[tuple[dict[int, Any], type[GnnfleetError], str]] = [
    # The killed rank, not those that lost it.
    ({0: failed(8, report(FailureKind.lost, 0, 0, "lost rank 1")), 1: failed(-9)}, ExchangeError, "rank 1 .* SIGKILL"),
    # The paused rank, which its peers have killed.
    (
        {1: failed(-9), 0: failed(8, report(FailureKind.silent, 1, 0, "rank 1 is silent"))},
        ExchangeError,
        "rank 1 is silent",
    ),
    # The rank that raised, not those that heard of it, nor those that torchrun stopped.
    (
        {
            2: failed(7, report(FailureKind.raised, 1, 2, "rank 2 exits: nan", 7)),
            1: failed(7, report(FailureKind.raised, 1, 1, "nan", 7)),
            0: failed(143),
        },
        RunError,
        "^nan$",
    ),
    ({0: failed(143), 1: failed(5, report(FailureKind.raised, 1, 1, "cut", 5))}, PartitionError, "^cut$"),
    ({1: failed(8, report(FailureKind.lost, 1, 1, "rows")), 0: failed(143)}, ExchangeError, "rows; continue"),
    ({1: failed(143), 0: failed(143)}, ExchangeError, "rank 1 .* code 143"),
    ({0: failed(1, report(FailureKind.raised, 0, 0, "oops", 1))}, GnnfleetError, "^oops$"),
]


@pytest.mark.parametrize(("failures", "kind", "text"), FAILURES)
def test_failures_of_several_workers_become_one_error(
    failures: dict[int, Any], kind: type[GnnfleetError], text: str
) -> None:
    error = combine_failures(failures, "continue with --resume")
    assert type(error) is kind
    assert re.search(text, str(error))
    assert getattr(error, "__notes__", []) == (["T"] if kind is GnnfleetError else [])


def test_workers_share_the_cores() -> None:
    cores = len(os.sched_getaffinity(0))
    assert threads_per_worker(1) == cores and threads_per_worker(10 * cores) == 1


def test_an_interrupted_launch_leaves_the_hooks_of_python_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> NoReturn:
        raise SignalException("interrupted", signal.SIGINT)

    monkeypatch.setattr("torch.distributed.launcher.api.elastic_launch", lambda *_: interrupted)
    before = sys.unraisablehook, sys.excepthook, threading.excepthook
    spec = RunSpec(store="s", digest="d", partition="", run_dir="r", config={})
    with pytest.raises(KeyboardInterrupt):
        launch(spec, folder=tmp_path / "launch", workers=2)
    assert (sys.unraisablehook, sys.excepthook, threading.excepthook) == before
    assert not (tmp_path / "launch").exists()

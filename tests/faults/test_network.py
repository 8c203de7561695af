"""Network exposure of a run: listening sockets of all its processes, and the effect of foreign messages.

Every attack is on loopback, against a run that the test itself started.
"""

from __future__ import annotations

import contextlib
import hashlib
import ipaddress
import json
import pickle
import shlex
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.distributed import TCPStore

from gnnfleet.comm.message_store import MessageStore
from gnnfleet.config.resolve import resolve
from gnnfleet.errors import ConfigError, ExchangeError
from gnnfleet.graph.datasets import make_dataset
from gnnfleet.graph.store import save_store
from gnnfleet.launch.confirmed_model import check_model_path, confirm_model_file
from gnnfleet.launch.spec import RunSpec
from gnnfleet.launch.tma_supervisor import join_supervised
from gnnfleet.report.metrics import read_metrics
from tests.faults.driving import MODEL, Driver
from tests.faults.trials import TIMEOUT, wait_until
from tests.shell import set_options, start

SHORT = ("--set", "train.epochs=3", "--set", "train.checkpoint_seconds=0")
EXTRA: dict[str, tuple[str, ...]] = {
    "local": (),
    "sar": (),
    "pipe": ("--set", "strategy.graph_parallel=1", "--set", "strategy.chunks=2"),
    "macrobatch": ("--set", "strategy.fanouts=[3,2]"),
    "tma": ("--set", "strategy.steps=3", "--set", "strategy.fanouts=[3,2]"),
    "temporal": ("--set", "model.hidden=8", "--set", "strategy.epoch_parallel=2"),
}


@pytest.fixture(scope="module")
def events(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "events"
    save_store(make_dataset("events", users=40, items=20, events=600, features=4, seed=3), path)
    return path


def listening(root: psutil.Process) -> set[tuple[str, int]]:
    """(address, port) of every socket of a process tree that accepts connections or datagrams."""
    sockets: set[tuple[str, int]] = set()
    for process in (root, *root.children(recursive=True)):
        with contextlib.suppress(psutil.Error):
            for connection in process.net_connections(kind="inet"):
                # A datagram socket with a peer, as name look-ups open it, receives from that peer only.
                accepts = connection.status in (psutil.CONN_LISTEN, psutil.CONN_NONE) and not connection.raddr
                if accepts and connection.laddr:
                    sockets.add((connection.laddr.ip, connection.laddr.port))
    return sockets


def assert_loopback_only(sockets: set[tuple[str, int]]) -> None:
    assert all(ipaddress.ip_address(address).is_loopback for address, _ in sockets), sockets


@pytest.mark.parametrize("strategy", EXTRA)
def test_a_run_on_one_machine_listens_on_loopback_only(
    strategy: str, store: Path, events: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From its first socket to its last, even if the environment names another interface for gloo."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    graph, model = (events, ()) if strategy == "temporal" else (store, MODEL)
    workers = "1" if strategy == "local" else "2"
    options = ("-s", strategy, "-w", workers, "--run-dir", tmp_path / "run", *model, *SHORT, *EXTRA[strategy])
    process = start("train", graph, *options)
    root, sockets = psutil.Process(process.pid), set()
    while process.poll() is None:
        with contextlib.suppress(psutil.Error):
            sockets |= listening(root)
        time.sleep(0.02)
    _, stderr = process.communicate()
    assert process.returncode == 0, stderr
    assert bool(sockets) == (strategy != "local"), sockets
    assert_loopback_only(sockets)


def test_the_report_server_listens_on_loopback_only(uninterrupted_run: Path) -> None:
    process = start("report", uninterrupted_run, "--serve", "--port", "0")
    try:
        wait_until(lambda: bool(listening(psutil.Process(process.pid))), TIMEOUT, "report server")
        assert_loopback_only(listening(psutil.Process(process.pid)))
    finally:
        process.kill()
        process.communicate()


class Payload:
    """Unpickling it creates a file."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._marker,)


def intrude(driver: Driver) -> TCPStore:
    """Connect to the store in which the workers of a run meet, as a foreign process."""
    port = int(driver.workers[0].environ()["MASTER_PORT"])
    return TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=10))


def test_planted_pickles_run_no_code(drive: Callable[..., Driver], tmp_path: Path) -> None:
    """First under the key of torchrun's pickled rendezvous state, across a restart; then under every key."""
    marker = tmp_path / "executed"
    payload = pickle.dumps(Payload(marker))
    pickle.loads(payload)
    assert marker.exists(), "unpickling the payload has its effect"
    marker.unlink()
    driver = drive(
        "run", *MODEL, "--set", "train.epochs=1000000", "--set", "train.checkpoint_seconds=0.2", "--max-restarts", "1"
    )
    driver.wait_for_epochs(5)
    run_id = driver.workers[0].environ()["TORCHELASTIC_RUN_ID"]
    intrude(driver).set(f"torch.rendezvous.{run_id}", payload)
    victim = driver.workers[1]
    victim.kill()
    wait_until(lambda: not driver.workers[0].is_running(), TIMEOUT, "end of the other worker")
    driver.wait_for_epochs(len(read_metrics(driver.run_dir / "metrics.jsonl")) + 3)
    assert not marker.exists() and victim.pid != driver.workers[1].pid
    client = intrude(driver)
    keys = client.list_keys()
    failure_keys = [f"{key.removesuffix('beat/0')}told" for key in keys if key.endswith("beat/0")]
    assert failure_keys, "the key under which a failing rank reports its error"
    for key in (*keys, *failure_keys):
        client.set(key, payload)
    code, stderr = driver.wait_for_exit(30)
    assert code == 8 and stderr.count("error: ") == 1 and "Traceback" not in stderr and not marker.exists(), stderr
    assert "holds a message that gnnfleet did not write" in stderr, stderr


MODEL_FILE = """
from pathlib import Path

import gnnfleet as gf

Path({marker!r}).touch()


def make(config, graph, out_channels):
    return gf.nn.build_model(gf.nn.SAGE(hidden=8, layers=2), graph, out_channels=out_channels)
"""


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    """A model file that creates ``executed`` beside it when it runs."""
    path = tmp_path / "mine.py"
    path.write_text(MODEL_FILE.format(marker=str(tmp_path / "executed")))
    return path


def test_join_executes_no_model_file_named_over_the_network(store: Path, model_file: Path, tmp_path: Path) -> None:
    """A foreign server describes a run whose model is a file of the joining machine."""
    config = resolve({"strategy": "tma", "workers": 2, "model": {"name": f"{model_file}:make"}}).model_dump(mode="json")
    spec = RunSpec(store="", digest="", partition="", run_dir="", config=config)
    server = MessageStore.serve()
    source = model_file.read_bytes()
    digest = hashlib.sha256(source).hexdigest()
    server.write("spec", {"spec": spec.as_json()}, torch.frombuffer(bytearray(source), dtype=torch.uint8))
    other = tmp_path / "other.py"
    other.write_bytes(source + b"# edited")
    options_by_message: dict[str, dict[str, str]] = {
        "which is not executed without your consent": {},
        f"SHA-256 {digest}, not the one you confirmed": {"model_sha256": "0" * 64},
        "takes the 64 hexadecimal digits": {"model_sha256": digest[:12]},
        "differs from the coordinator's model file": {"model": f"{other}:make"},
        "the factory 'make'": {"model": f"{model_file}:build"},
        "exclude each other": {"model": f"{model_file}:make", "model_sha256": digest},
    }
    for message, options in options_by_message.items():
        with pytest.raises(ConfigError, match=message):
            join_supervised(str(server.address), store, [1], restarts=0, log_user=str, **options)
    server.write("spec", {"spec": json.dumps({**asdict(spec), "partition": "../elsewhere"})})
    with pytest.raises(ExchangeError, match="a partition outside of"):
        join_supervised(str(server.address), store, [1], restarts=0, log_user=str)
    server.write("spec", {"spec": "[]"})
    with pytest.raises(ExchangeError, match="not of this version of gnnfleet"):
        join_supervised(str(server.address), store, [1], restarts=0, log_user=str)
    assert not (tmp_path / "executed").exists()


def test_join_runs_a_confirmed_model_file(store: Path, model_file: Path, tmp_path: Path) -> None:
    """``join`` takes the digest that ``gnnfleet train`` prints; it runs the copy, not the path."""
    settings = {"strategy.local_trainers": 1, "strategy.steps": 2, "strategy.fanouts": "[3,2]", "train.epochs": 6}
    options = ["--model", f"{model_file}:make", "--run-dir", tmp_path / "run", *set_options(settings)]
    first = start("train", store, "-s", "tma", "-w", "2", *options)
    try:
        assert first.stderr is not None
        line = next(line for line in first.stderr if "gnnfleet join" in line)
        command = shlex.split(line[line.index("gnnfleet join") :])[1:]
        assert command[-2:] == ["--model-sha256", hashlib.sha256(model_file.read_bytes()).hexdigest()]
        second = start(*(str(store) if argument == "STORE" else argument for argument in command))
        stderr = second.communicate(timeout=TIMEOUT)[1], first.communicate(timeout=TIMEOUT)[1]
        assert (first.returncode, second.returncode) == (0, 0), stderr
    finally:
        first.kill()
    assert read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]["trainers"] == 2


def test_ranks_of_torchrun_execute_only_model_files_of_their_own_command(tmp_path: Path) -> None:
    sent = {"model": {"name": f"{tmp_path / 'mine.py'}:make"}}
    check_model_path(sent, frozenset({tmp_path / "mine.py"}))
    check_model_path({"model": {"name": "sage"}}, frozenset())
    with pytest.raises(ConfigError, match="this rank's own command line does not name"):
        check_model_path(sent, frozenset({tmp_path / "other.py"}))


def test_a_built_in_model_needs_no_file(tmp_path: Path) -> None:
    config = {"model": {"name": "sage", "hidden": 8}}
    assert confirm_model_file(config, b"", model=None, sha256=None, folder=tmp_path) == config
    with pytest.raises(ConfigError, match="leave out --model-sha256"):
        confirm_model_file(config, b"", model=None, sha256="0" * 64, folder=tmp_path)

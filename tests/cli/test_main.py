"""The commands and options that all commands share; ``info``, ``partition`` and ``doctor``."""

from __future__ import annotations

import csv
import re
import signal
import time
from importlib.metadata import version
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from gnnfleet.cli import doctor, main
from gnnfleet.comm import shm_transport
from gnnfleet.errors import GnnfleetError
from gnnfleet.graph.graph import Graph
from gnnfleet.graph.partition.partitioned_graph import Partition
from gnnfleet.graph.store import open_store, save_store
from gnnfleet.io.atomic import PARTIAL
from tests.report.runs import write_run
from tests.shell import call, fails, run, run_json, start

COMMANDS = ("demo", "import", "export", "info", "partition", "plan", "train", "join", "watch", "report", "evaluate")
COMMANDS += ("predict", "compare", "diagnose", "doctor", "datasets")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    random = torch.Generator().manual_seed(0)
    count = 300
    graph = Graph(
        torch.randint(0, count, (2, 2000), generator=random),
        x=torch.randn(count, 4, generator=random),
        y=torch.randint(0, 3, (count,), generator=random),
        split=torch.randint(0, 3, (count,), generator=random),
        ids=[f"user {i:04d}" for i in range(count)],
    )
    path = tmp_path_factory.mktemp("cli") / "store"
    save_store(graph, path)
    return path


def test_help_starts_in_a_process_of_its_own() -> None:
    done = run("--help")
    assert done.returncode == 0 and all(command in done.stdout for command in COMMANDS)


@pytest.mark.parametrize("command", [*COMMANDS, "datasets list", "datasets show", "datasets make"])
def test_help_names_a_default_once(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")  # one line per option
    done = call(*command.split(), "--help")
    assert done.returncode == 0 and "--help" in done.stdout
    repeated = [line for line in done.stdout.splitlines() if re.search(r"\b[Dd]efault.*\[default:", line)]
    assert not repeated


def test_version_is_that_of_the_package() -> None:
    shown = call("--version")
    assert shown.returncode == 0 and shown.stdout == f"gnnfleet {version('gnnfleet')}\n", shown


def test_info_describes_a_store(store: Path) -> None:
    result = run_json("info", store, "--verify", "--head", "2")
    assert (result["num_nodes"], result["num_edges"], result["verified"]) == (300, 2000, True)
    assert [row["id"] for row in result["nodes"]["node"]["head"]] == ["user 0000", "user 0001"]
    shown = run("info", store, "--head", "2")
    assert "2,000" in shown.stdout and "user 0001" in shown.stdout


def test_info_verify_finds_an_altered_byte(store: Path, tmp_path: Path) -> None:
    graph = open_store(store)
    save_store(graph, tmp_path / "copy")
    file = tmp_path / "copy" / "nodes" / "node" / "x.npy"
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
    assert run("info", tmp_path / "copy").returncode == 0, "the size is unchanged; only --verify reads the content"
    assert "nodes/node/x.npy" in fails("info", tmp_path / "copy", "--verify", "-q", code=4)


def test_partition_reports_its_quality_and_writes_parts_and_ids(store: Path, tmp_path: Path) -> None:
    result = run_json("partition", store, "--parts", "3", "--method", "super", "--ids", tmp_path / "ids.parquet")
    assert result["parts"] == 3 and result["kept_edges"] + result["cut_edges"] == 2000
    partition = Partition.open(result["path"], open_store(store))
    table = pq.read_table(tmp_path / "ids.parquet").to_pydict()
    assert table["id"] == [f"user {i:04d}" for i in range(300)] and set(table["type"]) == {"node"}
    assert table["part"] == partition.assignment().tolist()
    assert run_json("info", store)["partitions"][0]["volume"] == result["volume"]
    assert run_json("info", result["path"], "--verify")["volume"] == result["volume"]
    assert "--overwrite" in fails("partition", store, "--parts", "3", "--method", "super", code=4)
    again = run_json("partition", store, "--parts", "3", "--method", "super", "--overwrite")
    assert again["need"] == result["need"], "the same seed gives the same parts"


def test_more_parts_than_nodes_give_a_warning_and_a_shortened_table(store: Path) -> None:
    line = ["partition", store, "--parts", "400", "--method", "random", "--dry-run"]
    done = call(*line)
    assert done.returncode == 0 and "400 parts of 300 nodes: at least 100 are empty" in done.stderr
    parts = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("│")]
    assert parts == [*map(str, range(32)), "…", *map(str, range(368, 400))]
    assert len(run_json(*line)["per_part"]["nodes"]) == 400
    assert "empty" not in call(*line[:3], "300", *line[4:]).stderr


def test_a_dry_run_writes_nothing(store: Path) -> None:
    before = sorted(store.rglob("*"))
    line = ["partition", store, "--parts", "2", "--method", "random", "--balance", "edges", "--dry-run"]
    assert run_json(*line)["path"] is None and sorted(store.rglob("*")) == before
    assert "--dry-run writes nothing, found --ids" in fails(*line, "--ids", store / "ids.parquet", code=2)
    assert sorted(store.rglob("*")) == before


def test_a_table_of_ids_is_complete_or_absent(store: Path, tmp_path: Path) -> None:
    line = ["partition", store, "--parts", "2", "--method", "random", "-o", tmp_path / "cut"]
    (tmp_path / "file").touch()
    for ids in (tmp_path / "file" / "ids.parquet", tmp_path):
        assert f"--ids {ids} cannot be written" in fails(*line, "--ids", ids, code=2)
    assert [path.name for path in tmp_path.iterdir()] == ["file"], "refused before the graph is partitioned"
    run_json(*line, "--ids", tmp_path / "new" / "ids.csv")
    with (tmp_path / "new" / "ids.csv").open() as file:
        head, *rows = csv.reader(file)
    assert head == ["id", "type", "part"] and len(rows) == 300 and rows[7][:2] == ["user 0007", "node"]
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["ids.csv"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("info", "nowhere"), 4, "does not exist"),
        (("partition", "nowhere", "--parts", "2"), 4, "does not exist"),
        (("partition", "STORE", "--parts", "0"), 2, "expected at least 1"),
        (("partition", "STORE", "--parts", "two"), 2, "--parts"),
        (("partition", "STORE", "--parts", "2", "--method", "magic"), 2, "magic"),
        (("partition", "STORE"), 2, "--parts"),
        (("magic",), 2, "magic"),
        (("info", "STORE", "--magic"), 2, "--magic"),
    ],
)
def test_mistakes_get_one_short_message(store: Path, arguments: tuple[str, ...], code: int, message: str) -> None:
    assert message in fails(*(store if argument == "STORE" else argument for argument in arguments), code=code)


@pytest.mark.parametrize("arguments", [("info", "nowhere", "--debug"), ("--debug", "info", "nowhere")])
def test_debug_shows_the_traceback(arguments: tuple[str, ...]) -> None:
    done = call(*arguments)
    assert done.returncode == 4 and "Traceback" in done.stderr
    assert "Traceback" not in call("info", "nowhere").stderr


def test_debug_may_be_the_value_of_an_option(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run")
    done = call("report", run_dir, "--title", "--debug", "-o", tmp_path / "page.html")
    assert done.returncode == 0, done.stderr
    assert "<title>--debug" in (tmp_path / "page.html").read_text()


def test_usage_errors_are_known_by_their_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """Releases of typer derive usage errors from different classes."""

    class OtherUsageError(Exception):
        def format_message(self) -> str:
            return "No such command 'x'."

    def refuse(**_: object) -> None:
        raise OtherUsageError

    monkeypatch.setattr(main, "app", refuse)
    done = call("x")
    assert done.returncode == 2 and done.stderr == "error: No such command 'x' (gnnfleet --help)\n"


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGKILL])
def test_a_killed_partition_leaves_nothing_that_opens(tmp_path: Path, signal_number: signal.Signals) -> None:
    random = torch.Generator().manual_seed(1)
    graph = Graph(torch.randint(0, 20_000, (2, 400_000), generator=random), num_nodes=20_000)
    save_store(graph, tmp_path / "s")
    target = tmp_path / "out" / "cut"
    for delay in (0.0, 0.1):
        stale = set(target.parent.glob(f".cut{PARTIAL}*"))
        process = start("partition", tmp_path / "s", "--parts", "16", "--method", "random", "-o", target)
        deadline = time.monotonic() + 60
        while set(target.parent.glob(f".cut{PARTIAL}*")) <= stale and time.monotonic() < deadline:
            if process.poll() is not None:
                break
            time.sleep(0.002)
        time.sleep(delay)
        process.send_signal(signal_number)
        process.communicate(timeout=60)
        if target.exists():
            assert Partition.open(target).parts == 16, "it ended before the signal, so it must be complete"
            continue
        remaining = list(target.parent.iterdir()) if target.parent.exists() else []
        if signal_number is not signal.SIGKILL:
            assert remaining == [] and process.returncode == 130
        for path in remaining:
            assert PARTIAL in path.name
            with pytest.raises(GnnfleetError):
                Partition.open(path)
    done = call("partition", tmp_path / "s", "--parts", "16", "--method", "random", "-o", target, "--overwrite")
    assert done.returncode == 0, done.stderr
    assert [path.name for path in target.parent.iterdir()] == ["cut"]


def test_doctor_finds_no_problem_on_this_machine() -> None:
    result = run_json("doctor")
    assert result["fit"]
    checks = {check["check"]: check for check in result["checks"]}
    assert checks["openmp"]["level"] == "ok", checks["openmp"]
    assert {"torch", "kernels", "shared memory", "ports", "interface", "open files"} <= set(checks)


def test_doctor_does_not_resolve_the_host_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks listen on the interface that reaches the store, so a host name without an address is no problem."""

    def unknown(*_: object) -> str:
        raise OSError("Name or service not known")

    monkeypatch.setattr(doctor.socket, "gethostbyname", unknown)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    checks = {result.check: result for result in doctor._network()}
    assert checks["interface"].level == "ok" and not checks["interface"].advice
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,eth99")
    checks = {result.check: result for result in doctor._network()}
    assert checks["interface"].level == "warn" and "there is no eth99" in checks["interface"].advice


def test_doctor_warns_if_shared_memory_is_forbidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(shm_transport, "create_memory", forbidden)
    (finding,) = doctor._shared_memory()
    assert finding.level == "warn" and "Operation not permitted" in finding.found and "sockets" in finding.advice

from __future__ import annotations

import csv
import signal
import time
from importlib.metadata import version
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from gnnfleet.analysis import doctor
from gnnfleet.comm import shm_transport
from gnnfleet.errors import GnnfleetError
from gnnfleet.graph.graph import Graph
from gnnfleet.graph.partition.partitioned_graph import Partition
from gnnfleet.graph.store import open_store, save_store
from gnnfleet.io.atomic import PARTIAL
from tests.shell import call, fails, run, run_json, start


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


def test_help_names_every_command() -> None:
    shown = run("--help")
    assert shown.returncode == 0
    for command in ("info", "import", "export", "datasets", "partition", "doctor", "demo"):
        assert command in shown.stdout
        assert run(command, "--help").returncode == 0


def test_version_is_that_of_the_package() -> None:
    shown = call("--version")
    assert shown.returncode == 0 and shown.stdout == f"gnnfleet {version('gnnfleet')}\n", shown


def test_info_says_what_is_there(store: Path) -> None:
    found = run_json("info", store, "--verify", "--head", "2")
    assert (found["num_nodes"], found["num_edges"], found["verified"]) == (300, 2000, True)
    assert [row["id"] for row in found["nodes"]["node"]["head"]] == ["user 0000", "user 0001"]
    shown = run("info", store, "--head", "2")
    assert "2,000" in shown.stdout and "user 0001" in shown.stdout


def test_info_verify_finds_an_altered_byte(store: Path, tmp_path: Path) -> None:
    graph = open_store(store)
    save_store(graph, tmp_path / "copy")
    file = tmp_path / "copy" / "nodes" / "node" / "x.npy"
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
    assert run("info", tmp_path / "copy").returncode == 0, "the size is right; only --verify reads"
    assert "nodes/node/x.npy" in fails("info", tmp_path / "copy", "--verify", "-q", code=4)


def test_partition_reports_and_writes(store: Path, tmp_path: Path) -> None:
    found = run_json("partition", store, "--parts", "3", "--method", "super", "--ids", tmp_path / "ids.parquet")
    assert found["parts"] == 3 and found["kept_edges"] + found["cut_edges"] == 2000
    partition = Partition.open(found["path"], open_store(store))
    table = pq.read_table(tmp_path / "ids.parquet").to_pydict()
    assert table["id"] == [f"user {i:04d}" for i in range(300)] and set(table["type"]) == {"node"}
    assert table["part"] == partition.assignment().tolist()
    assert run_json("info", store)["partitions"][0]["volume"] == found["volume"]
    assert run_json("info", found["path"], "--verify")["volume"] == found["volume"]
    assert "--overwrite" in fails("partition", store, "--parts", "3", "--method", "super", code=4)
    again = run_json("partition", store, "--parts", "3", "--method", "super", "--overwrite")
    assert again["need"] == found["need"], "the same seed gives the same parts"


def test_more_parts_than_nodes_are_remarked_and_shown_in_part(store: Path) -> None:
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


def test_a_table_of_ids_is_whole_or_not_there(store: Path, tmp_path: Path) -> None:
    line = ["partition", store, "--parts", "2", "--method", "random", "-o", tmp_path / "cut"]
    (tmp_path / "file").touch()
    for place in (tmp_path / "file" / "ids.parquet", tmp_path):
        assert f"--ids {place} cannot be written" in fails(*line, "--ids", place, code=2)
    assert [path.name for path in tmp_path.iterdir()] == ["file"], "refused before the graph is cut"
    run_json(*line, "--ids", tmp_path / "new" / "ids.csv")
    with (tmp_path / "new" / "ids.csv").open() as file:
        head, *rows = csv.reader(file)
    assert head == ["id", "type", "part"] and len(rows) == 300 and rows[7][:2] == ["user 0007", "node"]
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["ids.csv"]


@pytest.mark.parametrize(
    ("words", "code", "message"),
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
def test_mistakes_get_one_short_message(store: Path, words: tuple[str, ...], code: int, message: str) -> None:
    assert message in fails(*(store if word == "STORE" else word for word in words), code=code)


def test_debug_shows_the_traceback() -> None:
    assert "Traceback" in run("info", "nowhere", "--debug").stderr


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_killed_partition_leaves_nothing_that_opens(tmp_path: Path, how: signal.Signals) -> None:
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
        process.send_signal(how)
        process.communicate(timeout=60)
        if target.exists():
            assert Partition.open(target).parts == 16, "it was faster than the signal, so it must be whole"
            continue
        left = list(target.parent.iterdir()) if target.parent.exists() else []
        if how is not signal.SIGKILL:
            assert left == [] and process.returncode == 130
        for path in left:
            assert PARTIAL in path.name
            with pytest.raises(GnnfleetError):
                Partition.open(path)
    done = call("partition", tmp_path / "s", "--parts", "16", "--method", "random", "-o", target, "--overwrite")
    assert done.returncode == 0, done.stderr
    assert [path.name for path in target.parent.iterdir()] == ["cut"]


def test_doctor_finds_this_machine_fit() -> None:
    found = run_json("doctor")
    assert found["fit"]
    checks = {check["check"]: check for check in found["checks"]}
    assert checks["openmp"]["level"] == "ok", checks["openmp"]
    assert {"torch", "kernels", "shared memory", "ports", "interface", "open files"} <= set(checks)


def test_doctor_where_shared_memory_is_forbidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(shm_transport, "create_memory", none)
    (found,) = doctor._shared_memory()
    assert found.level == "warn" and "Operation not permitted" in found.found and "sockets" in found.advice

"""Every strategy on hosts with limited links: an epoch measured, then the cable of one host taken out.

Each worker is a host, a network namespace (netns.py); all share the cores of this machine: seconds say what links and
rounds cost, not what more machines would bring. After some epochs the link of the last host goes down: of strategies
whose ranks wait for each other the seconds until all workers have ended, of tma whether rounds went on. Needs root.
Finished cells are not run again.

usage: python benchmarks/hosts.py [--hosts 3] [--rate 200mbit] [--delay 1ms] [--strategies sar tma …] [--nodes 60000]

``--nodes`` are nodes of the graph, and for temporal events of a stream.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gnnfleet.graph.datasets import make_dataset
from gnnfleet.graph.store import save_store
from gnnfleet.report.metrics import read_metrics
from index import put
from netns import Host, hosts
from record import RESULTS, write_results

EPOCHS = 6
PATIENCE = 600
RECIPE = Path(__file__).parents[1] / "examples" / "clusters" / "torchrun.sh"
WORDS = {
    "sar": [],
    "macrobatch": ["--set", "strategy.fanouts=[10,5,5]", "--set", "strategy.batch=2048"],
    "pipe": ["--set", "strategy.graph_parallel=1"],  # in stages; a plan would take one host for so little
    "tma": ["--set", "strategy.fanouts=[10,5,5]", "--set", "strategy.interval=2", "--set", "strategy.silence=3"],
    "temporal": ["--set", "strategy.batch=200"],
}
MODEL = ["--model", "sage", "--set", "model.hidden=64", "--set", "model.layers=3"]
EVENT_MODEL = ["--model", "tgn", "--set", "model.hidden=64"]


def environment() -> dict[str, str]:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    threads = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "FATAL", "GNNFLEET_SHARED_MEMORY": "0"}
    return {**os.environ, **threads, "PATH": path}


def start(found: list[Host], strategy: str, store: Path, run: Path, epochs: int) -> list[subprocess.Popen[str]]:
    """The run on all hosts: by the recipe for torchrun, or for tma a coordinator and those who join it."""
    model = EVENT_MODEL if strategy == "temporal" else MODEL
    words = ["--strategy", strategy, *model, *WORDS[strategy], "--set", f"train.epochs={epochs}", "--quiet"]
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": (run.parent / f"{run.name}.err").open("a")}
    if strategy != "tma":
        seat = {"FIRST": found[0].address, "NODES": str(len(found)), "RESTARTS": "0", "RUN": str(run)}
        started = []
        for host in found:
            own = {"ADDRESS": host.address, "HOST": str(int(host is found[0])), "STORE": str(store)}
            started.append(host.popen([str(RECIPE), *words], env={**environment(), **seat, **own}, **quiet))
        return started
    gnnfleet, address = [sys.executable, "-m", "gnnfleet"], f"{found[0].address}:29411"
    where = ["--set", f"strategy.listen={address}", "--set", "strategy.local_trainers=1", "--workers", str(len(found))]
    line = [*gnnfleet, "train", str(store), *words, *where, "--run-dir", str(run)]
    started = [found[0].popen(line, env=environment(), **quiet)]
    until(lambda: (run / "config.json").exists(), "the coordinator")
    time.sleep(5)
    for host in found[1:]:
        line = [*gnnfleet, "join", address, str(store), "--trainers", str(host.number), "--quiet"]
        started.append(host.popen(line, env=environment(), **quiet))
    return started


def measure(found: list[Host], strategy: str, store: Path, folder: Path) -> dict[str, Any]:
    """A whole run, then one that is cut."""
    run = folder / f"{strategy}-whole"
    running = start(found, strategy, store, run, EPOCHS)
    try:
        if running[0].wait(PATIENCE):
            raise RuntimeError(f"{strategy} failed: {(folder / f'{run.name}.err').read_text()[-2000:]}")
    finally:
        end(running)
    record = json.loads((run / "record.json").read_text())
    seconds = sorted(record["seconds_per_epoch"][1:])
    sent = sum(record["traffic"]["bytes_sent"]) / record["epochs"]
    return {"seconds": seconds[len(seconds) // 2], "bytes": sent, **cut(found, strategy, store, folder)}


def cut(found: list[Host], strategy: str, store: Path, folder: Path) -> dict[str, Any]:
    run = folder / f"{strategy}-cut"
    running = start(found, strategy, store, run, 100_000)
    rows: Callable[[], list[dict[str, Any]]] = lambda: read_metrics(run / "metrics.jsonl")  # noqa: E731
    try:
        until(lambda: len(rows()) >= 3, "epochs")
        if strategy == "tma":
            until(lambda: rows()[-1]["trainers"] == len(found), "all trainers")
        begun = time.monotonic()
        found[-1].cut()
        if strategy == "tma":
            until(lambda: rows()[-1]["trainers"] == len(found) - 1, "rounds without it")
            without = time.monotonic() - begun
            found[-1].mend()
            seen = len(rows())
            until(lambda: any(row["trainers"] == len(found) for row in rows()[seen:]), "its return")
            return {"cut": "rounds go on without it, and with it again once the cable is back", "ended": without}
        workers = [worker for process in running for worker in below(process.pid)]
        until(lambda: not any(map(is_alive, workers)), "end of workers")
        said = (folder / f"{run.name}.err").read_text()
        named = f"rank {len(found) - 1} (pid" in said
        return {"cut": "all end, the lost one is named" if named else "all end", "ended": time.monotonic() - begun}
    finally:
        found[-1].mend()
        end(running)


def below(pid: int) -> list[int]:
    """The worker that torchrun has started."""
    children = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in children.read_text().split()] if children.exists() else []


def is_alive(pid: int) -> bool:
    """Neither gone nor a zombie, whose command line is empty."""
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    except OSError:
        return False


def end(running: list[subprocess.Popen[str]]) -> None:
    for process in running:
        for pid in below(process.pid):
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)
        process.kill()
        process.wait()


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError(f"no {what} within {PATIENCE} s")
        time.sleep(0.05)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=3)
    parser.add_argument("--rate", default="200mbit")
    parser.add_argument("--delay", help="as 1ms; needs a kernel with netem")
    parser.add_argument("--strategies", nargs="+", default=list(WORDS))
    parser.add_argument("--nodes", type=int, default=60_000)
    asked = parser.parse_args()
    path = RESULTS / "hosts.json"
    cells = {cell["cell"]: cell for cell in json.loads(path.read_text())["cells"]} if path.exists() else {}
    with tempfile.TemporaryDirectory(prefix="hosts-") as scratch:
        folder = Path(scratch)
        graph = make_dataset("communities", nodes=asked.nodes, mean_degree=20, features=64, seed=1)
        save_store(graph, folder / "graph")
        save_store(make_dataset("events", events=asked.nodes, features=16, seed=1), folder / "events")
        for strategy in asked.strategies:
            name = f"{strategy}/{asked.hosts}/{asked.rate}/{asked.delay or 'none'}/{asked.nodes}"
            if name in cells:
                continue
            with hosts(asked.hosts, rate=asked.rate, delay=asked.delay) as found:
                store = folder / ("events" if strategy == "temporal" else "graph")
                cells[name] = {"cell": name, **measure(found, strategy, store, folder)}
            cells[name]["load"] = round(os.getloadavg()[0], 1)
            write_results("hosts", list(cells.values()))
            print(cells[name], flush=True)
    lines = ["| strategy / hosts / rate / delay / size | s per epoch | MB sent per epoch | a cable cut | after s |"]
    lines += ["|---|---|---|---|---|"]
    for name, cell in cells.items():
        figures = f"{cell['seconds']:.2f} | {cell['bytes'] / 1e6:.1f} | {cell['cut']} | {cell['ended']:.1f}"
        lines.append(f"| {name} | {figures} |")
    put("hosts", "\n".join(lines))
    print("\n".join(lines))


if __name__ == "__main__":
    main()

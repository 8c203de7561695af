"""Every strategy on hosts with limited links: the seconds of an epoch, then the effect of a cut link.

Each worker is a host, a network namespace (netns.py). All hosts share the cores of this machine, so seconds show the
cost of links and rounds, not the gain of more machines. After some epochs the link of the last host is cut. For
strategies with synchronous ranks the result is the seconds until all workers have ended; for tma, whether rounds
continue. Needs root. Finished cells are not run again.

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
from index import replace_between_marks
from netns import Host, hosts
from record import RESULTS, write_results

EPOCHS = 6
TIMEOUT = 600
RECIPE = Path(__file__).parents[1] / "examples" / "clusters" / "torchrun.sh"
OPTIONS = {
    "sar": [],
    "macrobatch": ["--set", "strategy.fanouts=[10,5,5]", "--set", "strategy.batch=2048"],
    "pipe": [
        "--set",
        "strategy.graph_parallel=1",
    ],  # in stages; the planner would choose one host for a graph of this size
    "tma": ["--set", "strategy.fanouts=[10,5,5]", "--set", "strategy.interval=2", "--set", "strategy.silence=3"],
    "temporal": ["--set", "strategy.batch=200"],
}
MODEL = ["--model", "sage", "--set", "model.hidden=64", "--set", "model.layers=3"]
EVENT_MODEL = ["--model", "tgn", "--set", "model.hidden=64"]


def environment() -> dict[str, str]:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    threads = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "FATAL", "GNNFLEET_SHARED_MEMORY": "0"}
    return {**os.environ, **threads, "PATH": path}


def start(namespaces: list[Host], strategy: str, store: Path, run: Path, epochs: int) -> list[subprocess.Popen[str]]:
    """Start a run on all hosts: with the recipe for torchrun, or for tma a coordinator and joining trainers."""
    model = EVENT_MODEL if strategy == "temporal" else MODEL
    options = ["--strategy", strategy, *model, *OPTIONS[strategy], "--set", f"train.epochs={epochs}", "--quiet"]
    outputs: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": (run.parent / f"{run.name}.err").open("a")}
    if strategy != "tma":
        variables = {"FIRST": namespaces[0].address, "NODES": str(len(namespaces)), "RESTARTS": "0", "RUN": str(run)}
        processes = []
        for host in namespaces:
            host_variables = {"ADDRESS": host.address, "HOST": str(int(host is namespaces[0])), "STORE": str(store)}
            processes.append(
                host.popen([str(RECIPE), *options], env={**environment(), **variables, **host_variables}, **outputs)
            )
        return processes
    gnnfleet, address = [sys.executable, "-m", "gnnfleet"], f"{namespaces[0].address}:29411"
    listen = [
        "--set",
        f"strategy.listen={address}",
        "--set",
        "strategy.local_trainers=1",
        "--workers",
        str(len(namespaces)),
    ]
    command = [*gnnfleet, "train", str(store), *options, *listen, "--run-dir", str(run)]
    processes = [namespaces[0].popen(command, env=environment(), **outputs)]
    wait_until(lambda: (run / "config.json").exists(), "the coordinator")
    time.sleep(5)
    for host in namespaces[1:]:
        command = [*gnnfleet, "join", address, str(store), "--trainers", str(host.number), "--quiet"]
        processes.append(host.popen(command, env=environment(), **outputs))
    return processes


def measure(namespaces: list[Host], strategy: str, store: Path, folder: Path) -> dict[str, Any]:
    """Measure an undisturbed run, then one with a cut link."""
    run = folder / f"{strategy}-undisturbed"
    processes = start(namespaces, strategy, store, run, EPOCHS)
    try:
        if processes[0].wait(TIMEOUT):
            raise RuntimeError(f"{strategy} failed: {(folder / f'{run.name}.err').read_text()[-2000:]}")
    finally:
        end(processes)
    record = json.loads((run / "record.json").read_text())
    seconds = sorted(record["seconds_per_epoch"][1:])
    sent = sum(record["traffic"]["bytes_sent"]) / record["epochs"]
    return {"seconds": seconds[len(seconds) // 2], "bytes": sent, **cut(namespaces, strategy, store, folder)}


def cut(namespaces: list[Host], strategy: str, store: Path, folder: Path) -> dict[str, Any]:
    run = folder / f"{strategy}-cut"
    processes = start(namespaces, strategy, store, run, 100_000)
    rows: Callable[[], list[dict[str, Any]]] = lambda: read_metrics(run / "metrics.jsonl")  # noqa: E731
    try:
        wait_until(lambda: len(rows()) >= 3, "epochs")
        if strategy == "tma":
            wait_until(lambda: rows()[-1]["trainers"] == len(namespaces), "all trainers")
        cut_time = time.monotonic()
        namespaces[-1].cut()
        if strategy == "tma":
            wait_until(lambda: rows()[-1]["trainers"] == len(namespaces) - 1, "rounds without it")
            seconds = time.monotonic() - cut_time
            namespaces[-1].mend()
            before = len(rows())
            wait_until(lambda: any(row["trainers"] == len(namespaces) for row in rows()[before:]), "its return")
            return {"cut": "rounds go on without it, and with it again once the cable is back", "ended": seconds}
        workers = [worker for process in processes for worker in children_of(process.pid)]
        wait_until(lambda: not any(map(is_alive, workers)), "end of workers")
        stderr = (folder / f"{run.name}.err").read_text()
        is_named = f"rank {len(namespaces) - 1} (pid" in stderr
        return {
            "cut": "all end, the lost one is named" if is_named else "all end",
            "ended": time.monotonic() - cut_time,
        }
    finally:
        namespaces[-1].mend()
        end(processes)


def children_of(pid: int) -> list[int]:
    """Pids of the child processes; for torchrun, its worker."""
    children = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in children.read_text().split()] if children.exists() else []


def is_alive(pid: int) -> bool:
    """True if the process exists and is not a zombie, whose command line is empty."""
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    except OSError:
        return False


def end(processes: list[subprocess.Popen[str]]) -> None:
    for process in processes:
        for pid in children_of(process.pid):
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)
        process.kill()
        process.wait()


def wait_until(condition: Callable[[], bool], name: str) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError(f"no {name} within {TIMEOUT} s")
        time.sleep(0.05)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=3)
    parser.add_argument("--rate", default="200mbit")
    parser.add_argument("--delay", help="as 1ms; needs a kernel with netem")
    parser.add_argument("--strategies", nargs="+", default=list(OPTIONS))
    parser.add_argument("--nodes", type=int, default=60_000)
    args = parser.parse_args()
    path = RESULTS / "hosts.json"
    cells = {cell["cell"]: cell for cell in json.loads(path.read_text())["cells"]} if path.exists() else {}
    with tempfile.TemporaryDirectory(prefix="hosts-") as scratch:
        folder = Path(scratch)
        graph = make_dataset("communities", nodes=args.nodes, mean_degree=20, features=64, seed=1)
        save_store(graph, folder / "graph")
        save_store(make_dataset("events", events=args.nodes, features=16, seed=1), folder / "events")
        for strategy in args.strategies:
            name = f"{strategy}/{args.hosts}/{args.rate}/{args.delay or 'none'}/{args.nodes}"
            if name in cells:
                continue
            with hosts(args.hosts, rate=args.rate, delay=args.delay) as namespaces:
                store = folder / ("events" if strategy == "temporal" else "graph")
                cells[name] = {"cell": name, **measure(namespaces, strategy, store, folder)}
            cells[name]["load"] = round(os.getloadavg()[0], 1)
            write_results("hosts", list(cells.values()))
            print(cells[name], flush=True)
    lines = ["| strategy / hosts / rate / delay / size | s per epoch | MB sent per epoch | a link cut | after s |"]
    lines += ["|---|---|---|---|---|"]
    for name, cell in cells.items():
        figures = f"{cell['seconds']:.2f} | {cell['bytes'] / 1e6:.1f} | {cell['cut']} | {cell['ended']:.1f}"
        lines.append(f"| {name} | {figures} |")
    replace_between_marks("hosts", "\n".join(lines))
    print("\n".join(lines))


if __name__ == "__main__":
    main()

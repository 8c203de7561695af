"""tma: what independent trainers reach, and how soon, against PSGD-PA, LLCG and synchronous training (GGS).

Link prediction, three trainers on the cores of one machine, runs of a given time. Nobody's evaluation is counted:
weights are kept every few seconds (tma) or evaluated while the clock stands still (GGS), so all cores train. Time and
steps (of each trainer) are those to 99 % of the best val metric that any scheme reaches; also to 99 % of what the best
baseline reaches.
Cells that are done with the same settings are not run again. Beside them `gnnfleet diagnose` of every set.

  ddi                  ogbl_ddi, SAGE on learnt rows of 64 (hits@20)  \\  from --data
  debian               debian_temporal_lp, 256 features, R-GCN (mrr)   /
  communities          50,000 nodes, 1 M edges, SAGE (mrr)
  shop                 the generated shop, 10 M edges, R-GCN (mrr); only when it is named

usage: python benchmarks/tma.py [OUT] [--data DIR] [--only ddi …] [--schemes random …] [--seeds 1] [--seconds 90]
       [--work DIR]    stores and cuts are kept there and found again
ggs-1gbit holds the links between workers to that rate, which needs root. Without OUT the table goes to
benchmarks/results/tma.json and docs/tma.md, and the charts to docs/img.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import crew
from tma_sets import MAIN, RATES, SCHEMES, SETS, TRAINERS, look_of, make_store, seconds_of, words_of
from tma_table import best_of, markdown, plot, table_of

HERE = Path(__file__).parent
DATA = HERE.parent.parent / "shared" / "data" / "static"
OUT = HERE / "results" / "cells" / "tma"
CELL = ("set", "scheme", "seed")
BATCHES = 30
"""Of a trainer's epoch, for the gradients that are compared."""


def run_tma(store: Path, words: dict[str, Any], seconds: float, look: float, scratch: Path) -> dict[str, Any]:
    """A coordinator here and trainers as processes; weights are kept now and then, and evaluated when all is over."""
    import torch

    kept: list[tuple[float, int, dict[str, Any]]] = []
    number, at, steps = 0, 0.0, 0
    torch.set_num_threads(1)
    with _fleet(store, words, scratch) as built:
        strategy: Any = built.strategy
        while at < seconds:
            (record,) = strategy.train_epoch(number)
            number, steps = number + 1, steps + record.steps
            if not steps:  # nothing is trained in the first round: it waits for processes to start
                continue
            at += strategy.epoch_metrics()["round_seconds"]
            if not kept or (at <= seconds and at - kept[-1][0] >= look - 1e-3):
                state = {name: tensor.clone() for name, tensor in strategy.state_dict()["model"].items()}
                kept.append((round(at, 2), round(steps / TRAINERS), state))
    counts, began, line = strategy.epoch_metrics(), time.monotonic(), []
    torch.set_num_threads(os.cpu_count() or 1)
    for when, made, state in kept:
        strategy.load_state_dict({"model": state})
        line.append((when, strategy.evaluate("val")[built.task.metric], made))
    best = max(range(len(line)), key=lambda place: line[place][1])
    strategy.load_state_dict({"model": kept[best][2]})
    test = strategy.evaluate("test")[built.task.metric]
    return {
        "line": line,
        "test": test,
        "kept": counts["kept_edges"],
        "megabytes_per_round": counts["megabytes_up"] + counts["megabytes_down"],
        "megabytes_beside": counts["megabytes_beside"],
        "evaluation_seconds": round(time.monotonic() - began, 1),
    }


@contextmanager
def _fleet(store: Path, words: dict[str, Any], scratch: Path) -> Iterator[Any]:
    """A coordinator, with trainers until the end; raises RuntimeError where one had ended before."""
    from gnnfleet.comm.message_store import MessageStore
    from gnnfleet.config.resolve import resolve
    from gnnfleet.graph.partition.node_assignment import ClusterMap, NodeAssignment
    from gnnfleet.graph.store import open_store
    from gnnfleet.launch.local_launcher import threads_per_worker, worker_environment
    from gnnfleet.launch.tma_supervisor import end_processes, start_processes
    from gnnfleet.session.prepare import RunLocation, prepare_run
    from gnnfleet.training.build import RankContext, build

    graph, config = open_store(store), resolve(words)
    with (
        worker_environment(),
        prepare_run(graph, config, None, location=RunLocation(scratch / "run"), quiet=True) as (spec, _),
    ):
        post = MessageStore.serve()
        spec = replace(spec, parent=os.getpid(), threads=threads_per_worker(TRAINERS))
        (scratch / "SPEC.json").write_text(spec.as_json())
        clusters = ClusterMap.open(store / spec.partition) if spec.partition else None
        deal = NodeAssignment({kind: table.count for kind, table in graph.nodes.items()}, clusters, config.seed)
        built = build(graph, config, context=RankContext(message_store=post, assignment=deal))
        members = start_processes(scratch, str(post.address), [str(i) for i in range(TRAINERS)], 0)
        try:
            yield built
            lost = [how for member in members if (how := member.exit_status()) is not None]
            if lost:
                raise RuntimeError(lost[0])
        finally:
            try:
                built.strategy.close()  # trainers hear that all is over
            finally:
                end_processes(members)


def run_ggs(world: Any, name: str, scheme: str, seed: int, seconds: float, store: Path) -> dict[str, Any]:
    """As many steps as the time allows; evaluated now and then, off the clock."""
    from gnnfleet.comm.collectives import broadcast_bytes
    from gnnfleet.config.resolve import resolve
    from gnnfleet.graph.partition.partitioned_graph import open_part
    from gnnfleet.graph.store import open_store
    from gnnfleet.strategies.protocol import SHARDED
    from gnnfleet.training.build import RankContext, build

    graph, config = open_store(store), resolve(words_of(name, scheme, seed))
    part = open_part(_cut(graph, config), world.rank)
    built = build(graph, config, context=RankContext(world, part))
    strategy, metric = built.strategy, built.task.metric
    line: list[tuple[float, float, int]] = []
    at, steps, last, epoch, spent, over = 0.0, 0, 0.0, 0, 0.0, False
    found: dict[str, dict[str, Any]] = {}
    while not over:
        begun = time.perf_counter()
        for _ in strategy.train_epoch(epoch):
            at, steps = at + time.perf_counter() - begun, steps + 1
            word = {"look": at - last >= look_of(name), "over": at >= seconds}
            word = json.loads(broadcast_bytes(world, json.dumps(word).encode() if world.is_first else None))
            if word["look"] or word["over"]:
                begun = time.perf_counter()
                value = strategy.evaluate("val")[metric]
                if value > max((before for _, before, _ in line), default=-1.0):
                    state = strategy.state_dict()
                    found = {
                        part: {k: t.clone() for k, t in state[part].items()}
                        for part in state
                        if part in ("model", SHARDED)
                    }
                line.append((round(at, 2), value, steps))
                last, spent = at, spent + time.perf_counter() - begun
            if word["over"]:
                over = True
                break
            begun = time.perf_counter()
        epoch += 1
    strategy.load_state_dict(found)
    test = strategy.evaluate("test")[metric]
    sent = world.traffic.bytes_sent / 1e6
    return {"line": line, "test": test, "kept": 1.0, "megabytes": sent, "evaluation_seconds": round(spent, 1)}


def _cut(graph: Any, config: Any) -> Path:
    """Parts of the edges that are trained on; kept in the store, as those of any run."""
    from gnnfleet.training.partition_cache import ensure_partition, trained_graph

    return ensure_partition(graph, trained_graph(graph, config), config)


def run_diagnosis(store: Path, name: str) -> list[dict[str, Any]]:
    """How alike trainers would be, by scheme."""
    from gnnfleet.analysis.partition_diagnosis import diagnose
    from gnnfleet.config.resolve import resolve
    from gnnfleet.graph.store import open_store

    rows = diagnose(open_store(store), resolve(words_of(name, "super", 0)), batches=BATCHES)
    return [{"set": name, **asdict(row)} for row in rows]


def run_cell(name: str, scheme: str, seed: int, seconds: float, store: Path, scratch: Path) -> dict[str, Any]:
    seconds = seconds_of(scheme, seconds)
    if not scheme.startswith("ggs"):
        return run_tma(store, words_of(name, scheme, seed, rounds=100_000), seconds, look_of(name), scratch)
    line = [__file__, "--seconds", str(seconds), "--cell", name, scheme, str(seed), str(store)]
    from gnnfleet.config.resolve import resolve
    from gnnfleet.graph.store import open_store

    _cut(open_store(store), resolve(words_of(name, scheme, seed)))  # before ranks want it together
    found: dict[str, Any] = crew.run(line, TRAINERS, rate=RATES.get(scheme), seconds=600 + 20 * seconds)
    return found


def run_cells(args: argparse.Namespace, folder: Path) -> None:
    place = args.work or folder
    place.mkdir(parents=True, exist_ok=True)
    for seed in range(args.seeds):
        for name in args.only:
            for scheme in args.schemes:
                path = args.out / f"{name}.{scheme}.{seed}.json"
                settings = _settings(name, scheme, seed, args.seconds)
                if path.exists() and json.loads(path.read_text())["settings"] == settings:
                    continue
                began = time.monotonic()
                try:
                    store = make_store(name, args.data, place)
                    scratch = Path(tempfile.mkdtemp(dir=folder))
                    found = run_cell(name, scheme, seed, args.seconds, store, scratch)
                except Exception as error:  # the others are worth having
                    print(path.stem, f"failed: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
                    continue
                cell = {"set": name, "scheme": scheme, "seed": seed, "settings": settings, **found}
                _write(path, cell)
                took = f"{time.monotonic() - began:.0f} s, of evaluation {cell['evaluation_seconds']:.0f}"
                print(path.stem, f"val {best_of(cell):.4f} test {cell['test']:.4f} {cell['line'][-1][2]} steps", took)
                sys.stdout.flush()
    for name in args.only if args.diagnose else ():
        path, settings = args.out / f"diagnosis.{name}.json", _settings(name, "super", 0, args.seconds)
        if not path.exists() or any(row["settings"] != settings for row in json.loads(path.read_text())):
            try:
                rows = run_diagnosis(make_store(name, args.data, place), name)
                _write(path, [{"settings": settings, **row} for row in rows])
            except Exception as error:
                print(path.stem, f"failed: {type(error).__name__}: {error}", file=sys.stderr, flush=True)


def _settings(name: str, scheme: str, seed: int, seconds: float) -> str:
    """What makes a cell another one."""
    words = json.dumps([words_of(name, scheme, seed), seconds_of(scheme, seconds), RATES.get(scheme)], sort_keys=True)
    return hashlib.sha256(words.encode()).hexdigest()[:12]


def _write(path: Path, value: Any) -> None:
    path.with_suffix(".part").write_text(json.dumps(value))
    path.with_suffix(".part").replace(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?", default=OUT)
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--only", nargs="+", default=[name for name in SETS if name != "shop"], choices=list(SETS))
    parser.add_argument("--schemes", nargs="+", default=list(MAIN), choices=list(SCHEMES))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=90.0)
    parser.add_argument("--work", type=Path, help="where stores are kept; by default nowhere")
    parser.add_argument("--no-diagnose", dest="diagnose", action="store_false")
    parser.add_argument("--cell", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.cell:
        name, scheme, seed, store = args.cell
        crew.as_rank(lambda world: run_ggs(world, name, scheme, int(seed), args.seconds, Path(store)))
        return
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        run_cells(args, Path(folder))
    show(args.out, args.seconds)


def show(out: Path, seconds: float) -> None:
    """Print the table of all cells of these settings; of those in the usual place keep it, with charts."""
    from index import put
    from record import write_results

    cells = [json.loads(path.read_text()) for path in sorted(out.glob("*.*.*.json"))]
    alike = [row for path in sorted(out.glob("diagnosis.*.json")) for row in json.loads(path.read_text())]
    if out == OUT:  # with what is kept of other calls
        named = [{"cell": f"{cell['set']}/{cell['scheme']}/{cell['seed']}", **cell} for cell in cells]
        named += [{"cell": f"{row['set']}/diagnosis/{row['scheme']}", **row} for row in alike]
        path = write_results("tma", named, keep=True)
        kept = json.loads(path.read_text())["cells"]
        cells, alike = [cell for cell in kept if "line" in cell], [cell for cell in kept if "trained" in cell]
        print(path)
    known = [cell for cell in cells if cell["set"] in SETS and cell["scheme"] in SCHEMES]
    cells = [cell for cell in known if cell["settings"] == _settings(*(cell[k] for k in CELL), seconds)]
    table = table_of(cells)
    for line in table:
        print("  ".join(f"{key} {value}" for key, value in line.items()))
    for row in alike:
        print("  ".join(f"{key} {value}" for key, value in row.items()))
    plot(cells, HERE.parent / "docs" / "img" if out == OUT else out)
    if out == OUT:
        put("tma", markdown(table, alike), HERE.parent / "docs" / "tma.md")


if __name__ == "__main__":
    main()

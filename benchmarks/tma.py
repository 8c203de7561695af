"""tma: metric and time of independent trainers, against PSGD-PA, LLCG and synchronous training (GGS).

Link prediction, three trainers on the cores of one machine, runs of a given time. Evaluations are not counted: weights
are saved every few seconds (tma) or evaluated while the clock is stopped (GGS). Time and steps (of each trainer) are
those to 99 % of the best val metric of any scheme, and of the best baseline. Finished cells with the same settings are
not run again. `gnnfleet diagnose` of every set is shown too.

  ddi                  ogbl_ddi, SAGE on learnt rows of 64 (hits@20)  \\  from --data
  debian               debian_temporal_lp, 256 features, R-GCN (mrr)   /
  communities          50,000 nodes, 1 M edges, SAGE (mrr)
  shop                 the generated shop, 10 M edges, R-GCN (mrr); only if it is named

usage: python benchmarks/tma.py [OUT] [--data DIR] [--only ddi …] [--schemes random …] [--seeds 1] [--seconds 90]
       [--work DIR]    stores and partitions are saved there and reused
ggs-1gbit limits the links between workers, which needs root. Without OUT the table goes to benchmarks/results/tma.json
and docs/tma.md, and the charts to docs/img.
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

from index import replace_between_marks
from ranks import run_as_rank, run_ranks
from record import write_results
from tma_sets import MAIN, RATES, SCHEMES, SETS, TRAINERS, config_of, eval_seconds_of, make_store, seconds_of
from tma_table import best_of, markdown, plot, table_of

HERE = Path(__file__).parent
DATA = HERE.parent.parent / "shared" / "data" / "static"
OUT = HERE / "results" / "cells" / "tma"
CELL = ("set", "scheme", "seed")
BATCHES = 30
"""Batches of a trainer's epoch whose gradients are compared."""


def run_tma(store: Path, config: dict[str, Any], seconds: float, eval_seconds: float, scratch: Path) -> dict[str, Any]:
    """Train with a coordinator in this process; save weights at intervals and evaluate them after the run."""
    import torch

    checkpoints: list[tuple[float, int, dict[str, Any]]] = []
    epoch, trained_seconds, steps = 0, 0.0, 0
    torch.set_num_threads(1)
    with _coordinator(store, config, scratch) as built:
        strategy: Any = built.strategy
        while trained_seconds < seconds:
            (record,) = strategy.train_epoch(epoch)
            epoch, steps = epoch + 1, steps + record.steps
            if not steps:  # the first round waits for processes to start
                continue
            trained_seconds += strategy.epoch_metrics()["round_seconds"]
            if not checkpoints or (
                trained_seconds <= seconds and trained_seconds - checkpoints[-1][0] >= eval_seconds - 1e-3
            ):
                state = {name: tensor.clone() for name, tensor in strategy.state_dict()["model"].items()}
                checkpoints.append((round(trained_seconds, 2), round(steps / TRAINERS), state))
    counts, eval_start, line = strategy.epoch_metrics(), time.monotonic(), []
    torch.set_num_threads(os.cpu_count() or 1)
    for time_of_checkpoint, steps_of_checkpoint, state in checkpoints:
        strategy.load_state_dict({"model": state})
        line.append((time_of_checkpoint, strategy.evaluate("val")[built.task.metric], steps_of_checkpoint))
    best = max(range(len(line)), key=lambda index: line[index][1])
    strategy.load_state_dict({"model": checkpoints[best][2]})
    test = strategy.evaluate("test")[built.task.metric]
    return {
        "line": line,
        "test": test,
        "kept": counts["kept_edges"],
        "megabytes_per_round": counts["megabytes_up"] + counts["megabytes_down"],
        "megabytes_beside": counts["megabytes_beside"],
        "evaluation_seconds": round(time.monotonic() - eval_start, 1),
    }


@contextmanager
def _coordinator(store: Path, settings: dict[str, Any], scratch: Path) -> Iterator[Any]:
    """A coordinator with running trainers; raises RuntimeError if one has ended too early."""
    from gnnfleet.comm.message_store import MessageStore
    from gnnfleet.config.resolve import resolve
    from gnnfleet.graph.partition.node_assignment import ClusterMap, NodeAssignment
    from gnnfleet.graph.store import open_store
    from gnnfleet.launch.local_launcher import threads_per_worker, worker_environment
    from gnnfleet.launch.tma_supervisor import end_processes, start_processes
    from gnnfleet.session.prepare import RunLocation, prepare_run
    from gnnfleet.training.build import RankContext, build

    graph, config = open_store(store), resolve(settings)
    with (
        worker_environment(),
        prepare_run(graph, config, None, location=RunLocation(scratch / "run"), quiet=True) as (spec, _),
    ):
        server = MessageStore.serve()
        spec = replace(spec, parent=os.getpid(), threads=threads_per_worker(TRAINERS))
        (scratch / "SPEC.json").write_text(spec.as_json())
        clusters = ClusterMap.open(store / spec.partition) if spec.partition else None
        assignment = NodeAssignment({kind: table.count for kind, table in graph.nodes.items()}, clusters, config.seed)
        built = build(graph, config, context=RankContext(message_store=server, assignment=assignment))
        trainers = start_processes(scratch, str(server.address), [str(i) for i in range(TRAINERS)], 0)
        try:
            yield built
            exits = [status for trainer in trainers if (status := trainer.exit_status()) is not None]
            if exits:
                raise RuntimeError(exits[0])
        finally:
            try:
                built.strategy.close()  # tells the trainers to end
            finally:
                end_processes(trainers)


def run_ggs(world: Any, name: str, scheme: str, seed: int, seconds: float, store: Path) -> dict[str, Any]:
    """Train synchronously for a time; evaluations are not counted."""
    from gnnfleet.comm.collectives import broadcast_bytes
    from gnnfleet.config.resolve import resolve
    from gnnfleet.graph.partition.partitioned_graph import open_part
    from gnnfleet.graph.store import open_store
    from gnnfleet.strategies.protocol import SHARDED
    from gnnfleet.training.build import RankContext, build

    graph, config = open_store(store), resolve(config_of(name, scheme, seed))
    part = open_part(_partition(graph, config), world.rank)
    built = build(graph, config, context=RankContext(world, part))
    strategy, metric = built.strategy, built.task.metric
    line: list[tuple[float, float, int]] = []
    trained_seconds, steps, last_eval, epoch, eval_spent, is_over = 0.0, 0, 0.0, 0, 0.0, False
    best_state: dict[str, dict[str, Any]] = {}
    while not is_over:
        started = time.perf_counter()
        for _ in strategy.train_epoch(epoch):
            trained_seconds, steps = trained_seconds + time.perf_counter() - started, steps + 1
            flags = {
                "evaluate": trained_seconds - last_eval >= eval_seconds_of(name),
                "over": trained_seconds >= seconds,
            }
            flags = json.loads(broadcast_bytes(world, json.dumps(flags).encode() if world.is_first else None))
            if flags["evaluate"] or flags["over"]:
                started = time.perf_counter()
                value = strategy.evaluate("val")[metric]
                if value > max((former for _, former, _ in line), default=-1.0):
                    state = strategy.state_dict()
                    best_state = {
                        part: {k: t.clone() for k, t in state[part].items()}
                        for part in state
                        if part in ("model", SHARDED)
                    }
                line.append((round(trained_seconds, 2), value, steps))
                last_eval, eval_spent = trained_seconds, eval_spent + time.perf_counter() - started
            if flags["over"]:
                is_over = True
                break
            started = time.perf_counter()
        epoch += 1
    strategy.load_state_dict(best_state)
    test = strategy.evaluate("test")[metric]
    sent = world.traffic.bytes_sent / 1e6
    return {"line": line, "test": test, "kept": 1.0, "megabytes": sent, "evaluation_seconds": round(eval_spent, 1)}


def _partition(graph: Any, config: Any) -> Path:
    """Partition of the training edges, cached in the store as in any run."""
    from gnnfleet.training.partition_cache import ensure_partition, trained_graph

    return ensure_partition(graph, trained_graph(graph, config), config)


def run_diagnosis(store: Path, name: str) -> list[dict[str, Any]]:
    """Similarity of the trainers, by scheme."""
    from gnnfleet.analysis.partition_diagnosis import diagnose
    from gnnfleet.config.resolve import resolve
    from gnnfleet.graph.store import open_store

    rows = diagnose(open_store(store), resolve(config_of(name, "super", 0)), batches=BATCHES)
    return [{"set": name, **asdict(row)} for row in rows]


def run_cell(name: str, scheme: str, seed: int, seconds: float, store: Path, scratch: Path) -> dict[str, Any]:
    seconds = seconds_of(scheme, seconds)
    if not scheme.startswith("ggs"):
        return run_tma(store, config_of(name, scheme, seed, rounds=100_000), seconds, eval_seconds_of(name), scratch)
    arguments = [__file__, "--seconds", str(seconds), "--cell", name, scheme, str(seed), str(store)]
    from gnnfleet.config.resolve import resolve
    from gnnfleet.graph.store import open_store

    _partition(open_store(store), resolve(config_of(name, scheme, seed)))  # before all ranks need it
    figures: dict[str, Any] = run_ranks(arguments, TRAINERS, rate=RATES.get(scheme), seconds=600 + 20 * seconds)
    return figures


def run_cells(args: argparse.Namespace, folder: Path) -> None:
    work = args.work or folder
    work.mkdir(parents=True, exist_ok=True)
    for seed in range(args.seeds):
        for name in args.only:
            for scheme in args.schemes:
                path = args.out / f"{name}.{scheme}.{seed}.json"
                settings = _settings(name, scheme, seed, args.seconds)
                if path.exists() and json.loads(path.read_text())["settings"] == settings:
                    continue
                started = time.monotonic()
                try:
                    store = make_store(name, args.data, work)
                    scratch = Path(tempfile.mkdtemp(dir=folder))
                    figures = run_cell(name, scheme, seed, args.seconds, store, scratch)
                except Exception as error:  # run the others
                    print(path.stem, f"failed: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
                    continue
                cell = {"set": name, "scheme": scheme, "seed": seed, "settings": settings, **figures}
                _write(path, cell)
                duration = f"{time.monotonic() - started:.0f} s, of evaluation {cell['evaluation_seconds']:.0f}"
                print(
                    path.stem, f"val {best_of(cell):.4f} test {cell['test']:.4f} {cell['line'][-1][2]} steps", duration
                )
                sys.stdout.flush()
    for name in args.only if args.diagnose else ():
        path, settings = args.out / f"diagnosis.{name}.json", _settings(name, "super", 0, args.seconds)
        if not path.exists() or any(row["settings"] != settings for row in json.loads(path.read_text())):
            try:
                rows = run_diagnosis(make_store(name, args.data, work), name)
                _write(path, [{"settings": settings, **row} for row in rows])
            except Exception as error:
                print(path.stem, f"failed: {type(error).__name__}: {error}", file=sys.stderr, flush=True)


def _settings(name: str, scheme: str, seed: int, seconds: float) -> str:
    """Digest of everything that distinguishes a cell from one with other settings."""
    content = json.dumps(
        [config_of(name, scheme, seed), seconds_of(scheme, seconds), RATES.get(scheme)], sort_keys=True
    )
    return hashlib.sha256(content.encode()).hexdigest()[:12]


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
    parser.add_argument("--work", type=Path, help="directory for stores; by default a temporary one")
    parser.add_argument("--no-diagnose", dest="diagnose", action="store_false")
    parser.add_argument("--cell", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.cell:
        name, scheme, seed, store = args.cell
        run_as_rank(lambda world: run_ggs(world, name, scheme, int(seed), args.seconds, Path(store)))
        return
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        run_cells(args, Path(folder))
    show(args.out, args.seconds)


def show(out: Path, seconds: float) -> None:
    """Print the table of all cells with these settings; for the default OUT write results, page and charts."""
    cells = [json.loads(path.read_text()) for path in sorted(out.glob("*.*.*.json"))]
    diagnoses = [row for path in sorted(out.glob("diagnosis.*.json")) for row in json.loads(path.read_text())]
    if out == OUT:  # with the results of other calls
        named_cells = [{"cell": f"{cell['set']}/{cell['scheme']}/{cell['seed']}", **cell} for cell in cells]
        named_cells += [{"cell": f"{row['set']}/diagnosis/{row['scheme']}", **row} for row in diagnoses]
        path = write_results("tma", named_cells, keep=True)
        saved = json.loads(path.read_text())["cells"]
        cells, diagnoses = [cell for cell in saved if "line" in cell], [cell for cell in saved if "trained" in cell]
        print(path)
    valid = [cell for cell in cells if cell["set"] in SETS and cell["scheme"] in SCHEMES]
    cells = [cell for cell in valid if cell["settings"] == _settings(*(cell[k] for k in CELL), seconds)]
    table = table_of(cells)
    for line in table:
        print("  ".join(f"{key} {value}" for key, value in line.items()))
    for row in diagnoses:
        print("  ".join(f"{key} {value}" for key, value in row.items()))
    plot(cells, HERE.parent / "docs" / "img" if out == OUT else out)
    if out == OUT:
        replace_between_marks("tma", markdown(table, diagnoses), HERE.parent / "docs" / "tma.md")


if __name__ == "__main__":
    main()

"""Time and memory to import a pair of Parquet tables with text ids into a store.

    python benchmarks/ingest.py                    10 M edges, 1 M nodes, 16 features
    python benchmarks/ingest.py --edges 100000000 --nodes 10000000 --memory 2GiB

Each case runs in its own process; memory is the process's VmHWM, with torch and DuckDB loaded.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from record import run_json, write_results

CASES: dict[str, dict[str, Any]] = {
    "parquet, directed": {},
    "parquet, undirected": {"undirected": True},
    "csv, directed": {"csv": True},
}


def make_tables(folder: Path, nodes: int, edges: int, features: int, csv: bool) -> tuple[Path, Path]:
    import duckdb

    columns = ", ".join(f"(hash(i * 31 + {k}) % 1000)::FLOAT / 1000 AS f{k}" for k in range(features))
    ending = "csv" if csv else "parquet"
    paths = folder / f"nodes.{ending}", folder / f"edges.{ending}"
    options = "(FORMAT csv, HEADER)" if csv else "(FORMAT parquet)"
    name = "'user-' || lpad(({} % {})::VARCHAR, 8, '0')"
    # 7919 is prime, so every node appears once, in random order.
    node = f"SELECT {name.format('(i * 7919)', nodes)} AS id, {columns}, hash(i) % 10 AS label FROM range({nodes}) t(i)"
    src, dst = name.format("hash(2 * i + 1)", nodes), name.format("hash(2 * i)", nodes)
    edge = f"SELECT {src} AS src, {dst} AS dst, (hash(3 * i) % 100)::FLOAT AS weight FROM range({edges}) t(i)"
    for query, path in zip((node, edge), paths, strict=True):
        if not path.exists():
            duckdb.sql(f"COPY ({query}) TO '{path}' {options}")
    return paths


def measure_in_process(sources: list[str], output: str, rules: dict[str, Any]) -> dict[str, Any]:
    """Import once in this process."""
    from dataclasses import replace

    from gnnfleet.graph.ingest.tables import classify_tables, import_tables
    from gnnfleet.report.memory import peak_rss

    before = time.monotonic()
    report = import_tables(replace(classify_tables(sources), **rules), output)
    seconds = time.monotonic() - before
    counts = next(iter(report.edges.values()))
    rates = {"seconds": seconds, "edges_per_second": counts.rows / seconds}
    return {**rates, "stored": counts.count, "peak_rss": peak_rss()}


def measure(case: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    rules = dict(CASES[case])
    sources = make_tables(folder, options.nodes, options.edges, options.features, rules.pop("csv", False))
    with tempfile.TemporaryDirectory(dir=folder) as output:
        task = json.dumps([[*map(str, sources)], f"{output}/store", {**rules, "memory": options.memory}])
        return {"case": case, **run_json([sys.executable, __file__, "--measure", task])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=1_000_000)
    parser.add_argument("--edges", type=int, default=10_000_000)
    parser.add_argument("--features", type=int, default=16)
    parser.add_argument("--memory", default="1GiB")
    parser.add_argument("--case", action="append", choices=CASES)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure_in_process(*json.loads(options.measure))))
        return
    cells = []
    print(f"{options.edges:,} edges, {options.nodes:,} nodes, {options.features} features, {os.cpu_count()} cores")
    print(f"{'case':24}{'seconds':>10}{'M edges/s':>12}{'peak GiB':>10}{'stored':>14}")
    with tempfile.TemporaryDirectory() as folder:
        for case in options.case or CASES:
            cell = measure(case, options, Path(folder))
            cells.append(cell)
            rate, peak = cell["edges_per_second"] / 1e6, cell["peak_rss"] / 2**30
            print(f"{case:24}{cell['seconds']:10.2f}{rate:12.2f}{peak:10.2f}{cell['stored']:14,}", flush=True)
    sizes = {key: getattr(options, key) for key in ("nodes", "edges", "features", "memory")}
    print(write_results("ingest", [{**sizes, **cell} for cell in cells]))


if __name__ == "__main__":
    main()

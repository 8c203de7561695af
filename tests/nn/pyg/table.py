"""Table of torch_geometric modules and strategies: ``python -m tests.nn.pyg.table [-o docs/pyg-modules.md]``.

Every module of the catalogue runs forward and backward in float64. An entry is the largest difference from plain
torch_geometric over outputs, all gradients and buffers, or the reason of a refusal.
"""

from __future__ import annotations

import argparse
import re
import tempfile
import textwrap
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from gnnfleet.comm.world import World
from gnnfleet.errors import ConfigError
from gnnfleet.graph.views.local import LocalView
from tests.equivalence.spread import KEY, cut_graph, open_view, plain_graph
from tests.nn.pyg.catalogue import ALL, CONVOLUTIONS, NEEDS_LIBRARY, TABLE
from tests.nn.pyg.outcomes import TOLERANCE, Outcome, joined, largest_error, run_on_blocks, run_on_view, run_plain
from tests.ranks import RankPool

SEEDS = torch.tensor([3, 17, 25, 40, 55, 8])
Entries = dict[str, dict[str, str]]
"""{module: {column: entry}}."""

HEAD = """# torch_geometric modules

Every convolution that torch_geometric exports, its aggregations, norms and models, as [unchanged
modules](models.md#a-torch_geometric-module). An entry is the largest difference from plain torch_geometric over
outputs, all gradients and buffers, in float64, on a graph with parallel edges, self-loops and isolated nodes. *Refused*
names the operation whose result depends on the partition: such a run ends before its first epoch.

* `local`: one process. `sar`: 2 ranks with a random partition, 3 ranks of which one has no edges.
* `blocks`: layer by layer on sampled blocks with all neighbours, in evaluation. *Whole*: convolutions cannot be run one
  by one, so strategies that need layers refuse the module.
* {summary}
* `python -m tests.nn.pyg.table -o docs/pyg-modules.md` writes this page; `tests/nn/pyg/test_table.py` keeps it.
"""


def reason(message: str) -> str:
    """The operation that a refusal names."""
    operation = re.search(r"torch\.[\w.]*\w", message)
    return f"refused: `{operation[0]}`" if operation else f"refused: {message.split(':')[0]}"


def run_modules(run: Callable[[Any], Outcome], names: Iterable[str]) -> dict[str, Outcome]:
    """Outcomes, or refusals, of modules that ``run`` builds and runs."""
    outcomes = {}
    for name in names:
        try:
            outcomes[name] = run(ALL[name])
        except ConfigError as error:
            outcomes[name] = {"refused": str(error)}
    return outcomes


def on_rank(world: World, path: str, names: list[str]) -> dict[str, Outcome]:
    return run_modules(lambda make: run_on_view(open_view(world, path, 1, 1), make), names)


def blocks_entry(name: str) -> str:
    actual = run_on_blocks(ALL[name], SEEDS)
    return "whole" if "whole" in actual else f"{largest_error(actual, run_plain(ALL[name], SEEDS)):.0e}"


def run_columns(pool: RankPool, folder: Path, names: list[str]) -> dict[str, dict[str, list[Outcome]]]:
    """{column: {module: outcome by rank}}."""
    whole = LocalView.of_graph(plain_graph()).with_step(key=KEY, layer=1)
    local = run_modules(lambda make: run_on_view(whole, make), names)
    columns = {"local": {name: [outcome] for name, outcome in local.items()}}
    for size, cut in ((2, "random"), (3, "edgeless")):
        path = cut_graph(plain_graph(), size, cut, folder / f"{size}-parts")
        ranks = pool.run(size, on_rank, str(path), names)
        columns[f"sar, {size} ranks"] = {name: [rank[name] for rank in ranks] for name in names}
    return columns


def make_entries(pool: RankPool, folder: Path, names: Iterable[str] = ALL) -> Entries:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch_geometric, of slower code paths
        columns = run_columns(pool, folder, [*names])
        expected = {name: run_plain(ALL[name]) for name in names}
        blocks = {name: {"blocks": blocks_entry(name)} for name in names}
    return {
        name: {column: _entry(ranks[name], expected[name]) for column, ranks in columns.items()} | blocks[name]
        for name in names
    }


def _entry(ranks: list[Outcome], expected: Outcome) -> str:
    refusals = [rank["refused"] for rank in ranks if "refused" in rank]
    if refusals:
        assert len(refusals) == len(ranks), f"refused on some ranks only: {refusals[0]}"
        return reason(refusals[0])
    return f"{largest_error(joined(ranks), expected):.0e}"


def status(entry: str) -> str:
    """``exact`` or ``wrong`` for a number; other entries as they are."""
    try:
        return "exact" if float(entry) <= TOLERANCE else "wrong"
    except ValueError:
        return entry


def is_exact_under_sar(row: dict[str, str]) -> bool:
    return all(status(entry) == "exact" for column, entry in row.items() if column.startswith("sar"))


def page(entries: Entries) -> str:
    exact, ran = sum(is_exact_under_sar(entries[name]) for name in CONVOLUTIONS), len(CONVOLUTIONS)
    others = ", ".join(f"{name} ({library})" for name, library in NEEDS_LIBRARY.items())
    summary = (
        f"Of {ran + len(NEEDS_LIBRARY)} convolutions, {ran} run in plain torch_geometric on a CPU. {exact} of those "
        f"({100 * exact / ran:.0f} %) are exact to 1e-10 under `sar`. The others need libraries: {others}."
    )
    lines = [HEAD.format(summary=textwrap.fill(summary, 118, break_on_hyphens=False, subsequent_indent="  "))]
    for title, modules in TABLE.items():
        columns = [*entries[next(iter(modules))]]
        lines += [f"## {title}", "", f"| module | {' | '.join(columns)} |", f"|---|{'---|' * len(columns)}"]
        lines += [f"| {name} | {' | '.join(entries[name].values())} |" for name in modules]
        counts = [sum(status(entries[name][column]) == "exact" for name in modules) for column in columns]
        lines += [f"| **exact, of {len(modules)}** | {' | '.join(map(str, counts))} |", ""]
    return "\n".join(lines)


def read_page(text: str) -> Entries:
    entries: Entries = {}
    columns: list[str] = []
    for line in text.splitlines():
        name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        if name == "module":
            columns = cells
        elif cells and name in ALL:
            entries[name] = dict(zip(columns, cells, strict=True))
    return entries


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the table of torch_geometric modules.")
    parser.add_argument("-o", "--output", type=Path)
    output = parser.parse_args().output
    pool = RankPool()
    try:
        with tempfile.TemporaryDirectory() as folder:
            text = page(make_entries(pool, Path(folder)))
    finally:
        pool.close()
    output.write_text(text) if output else print(text)


if __name__ == "__main__":
    from tests.nn.pyg import table  # ranks import the case by the name of its module

    table.main()

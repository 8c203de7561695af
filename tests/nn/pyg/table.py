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
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch

from gnnfleet.comm.collectives import all_gather_json
from gnnfleet.comm.world import World
from gnnfleet.errors import ConfigError
from gnnfleet.graph.views.local import LocalView
from tests.equivalence.spread import KEY, cut_graph, open_view, plain_graph
from tests.nn.pyg.catalogue import ALL, CONVOLUTIONS, NEEDS_LIBRARY, TABLE
from tests.nn.pyg.outcomes import TOLERANCE, Outcome, joined, largest_error, run_on_blocks, run_on_view, run_plain
from tests.nn.pyg.stages import joined_stages, run_on_stages
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
* `pipe, one chunk`: layer by layer in training, in two stages on 2 ranks, all rows in one chunk.
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


COLUMNS: dict[str, Callable[[list[Outcome]], Outcome]] = {
    "local": joined,
    "sar, 2 ranks": joined,
    "sar, 3 ranks": joined,
    "blocks": itemgetter(0),
    "pipe, one chunk": joined_stages,
}
"""{column: function that joins the outcomes of its ranks}."""

PLAIN, PLAIN_SEEDS = "plain torch_geometric", "plain torch_geometric, rows of SEEDS in evaluation"


def on_rank(world: World, folder: str, names: list[str]) -> dict[str, dict[str, Outcome]]:
    """{column: {module: outcome}} of this rank. While two ranks run sar, the third one runs what takes one process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch_geometric, of slower code paths
        columns = {"sar, 3 ranks": _run_sar(world, folder, names)}
        if world.rank == 2:
            columns |= _run_alone(names)
            gather_whole(world, columns["blocks"])
            return columns
        pair = replace(world.subgroup("pair", [0, 1]), new_group=world.new_group)
        columns["sar, 2 ranks"] = _run_sar(pair, folder, names)
        whole = gather_whole(world, {})
        stages = run_modules(lambda make: run_on_stages(pair, make), [name for name in names if name not in whole])
        return columns | {"pipe, one chunk": stages | {name: {"whole": True} for name in whole}}


def gather_whole(world: World, blocks: dict[str, Outcome]) -> list[str]:
    """Collective. The modules without layers, of the third rank's outcomes on blocks."""
    whole = [name for name, outcome in blocks.items() if "whole" in outcome]
    return list(all_gather_json(world, whole)[2])


def _run_sar(world: World, folder: str, names: list[str]) -> dict[str, Outcome]:
    view = open_view(world, f"{folder}/{world.size}-parts", 1, 1)
    return run_modules(lambda make: run_on_view(view, make), names)


def _run_alone(names: list[str]) -> dict[str, dict[str, Outcome]]:
    view = LocalView.of_graph(plain_graph()).with_step(key=KEY, layer=1)
    columns = {"local": run_modules(lambda make: run_on_view(view, make), names)}
    columns[PLAIN] = run_modules(run_plain, names)
    columns[PLAIN_SEEDS] = run_modules(lambda make: run_plain(make, SEEDS), names)
    return columns | {"blocks": run_modules(lambda make: run_on_blocks(make, SEEDS), names)}


def make_entries(pool: RankPool, folder: Path, names: Iterable[str] = ALL) -> Entries:
    for size, cut in ((2, "random"), (3, "edgeless")):
        cut_graph(plain_graph(), size, cut, folder / f"{size}-parts")
    ranks = pool.run(3, on_rank, str(folder), [*names], seconds=900)

    def entry(column: str, name: str) -> str:
        expected = ranks[2][PLAIN_SEEDS if column == "blocks" else PLAIN][name]
        return _entry([rank[column][name] for rank in ranks if column in rank], expected, COLUMNS[column])

    return {name: {column: entry(column, name) for column in COLUMNS} for name in names}


def _entry(ranks: list[Outcome], expected: Outcome, join: Callable[[list[Outcome]], Outcome]) -> str:
    if "whole" in ranks[0]:
        return "whole"
    refusals = [rank["refused"] for rank in ranks if "refused" in rank]
    if refusals:
        assert len(refusals) == len(ranks), f"refused on some ranks only: {refusals[0]}"
        return reason(refusals[0])
    return f"{largest_error(join(ranks), expected):.0e}"


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

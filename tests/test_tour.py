"""docs/tour.md as its reader follows it: own tables of CSV, the commands in order, under ten of them."""

from __future__ import annotations

import csv
import random
import re
import shlex
from pathlib import Path

import pytest

from tests.shell import call

PAGE = Path(__file__).parents[1] / "docs" / "tour.md"


def write_tables(folder: Path) -> list[str]:
    """Two circles of friends, with the columns of the page; some without a label."""
    draw = random.Random(1)
    names = ["ann", "bob", "eve", *(f"n{i}" for i in range(117))]
    kinds = [i % 2 for i in range(len(names))]
    with (folder / "nodes.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["id", "age", "spent", "label"])
        for place, (name, kind) in enumerate(zip(names, kinds, strict=True)):
            label = "" if place % 10 == 9 else ("keeps", "leaves")[kind]
            writer.writerow([name, round(draw.gauss(kind, 0.5), 3), round(draw.gauss(-kind, 0.5), 3), label])
    with (folder / "edges.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["src", "dst"])
        for place, name in enumerate(names):
            same = [i for i, kind in enumerate(kinds) if kind == kinds[place]]
            writer.writerows([name, names[draw.choice(same)]] for _ in range(3))
    return names


def test_from_tables_to_predictions_in_nine_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = write_tables(tmp_path)
    text = PAGE.read_text()
    commands = [line.strip() for line in text.splitlines() if re.match(r"    (make|\.|gnnfleet) ", line)]
    assert len(commands) < 10 and commands[:2] == ["make build", ". .venv/bin/activate"]
    for line in commands[2:]:
        done = call(*shlex.split(line)[1:])
        assert done.returncode == 0, (line, done.stderr)
    tables = ((tmp_path / f"{name}.csv").read_text().splitlines() for name in ("predictions", "two"))
    one, two = (list(csv.DictReader(lines)) for lines in tables)
    assert [row["id"] for row in one] == names and {row["prediction"] for row in one} == {"keeps", "leaves"}
    assert [row["prediction"] for row in one] == [row["prediction"] for row in two]
    for before, after in zip(one, two, strict=True):
        assert abs(float(before["probability"]) - float(after["probability"])) < 1e-4
    (block,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(compile(block, str(PAGE), "exec"), {})

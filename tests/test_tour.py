"""docs/tour.md followed by a reader: CSV tables of their own, the commands in order, fewer than ten."""

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
    """Write two groups of friends with the columns of the page; some nodes have no label."""
    draw = random.Random(1)
    names = ["ann", "bob", "eve", *(f"n{i}" for i in range(117))]
    kinds = [i % 2 for i in range(len(names))]
    with (folder / "nodes.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["id", "age", "spent", "label"])
        for index, (name, kind) in enumerate(zip(names, kinds, strict=True)):
            label = "" if index % 10 == 9 else ("keeps", "leaves")[kind]
            writer.writerow([name, round(draw.gauss(kind, 0.5), 3), round(draw.gauss(-kind, 0.5), 3), label])
    with (folder / "edges.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["src", "dst"])
        for index, name in enumerate(names):
            same = [i for i, kind in enumerate(kinds) if kind == kinds[index]]
            writer.writerows([name, names[draw.choice(same)]] for _ in range(3))
    return names


def test_from_tables_to_predictions_in_nine_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = write_tables(tmp_path)
    text = PAGE.read_text()
    commands = [command.strip() for command in text.splitlines() if re.match(r"    (make|\.|gnnfleet) ", command)]
    assert len(commands) < 10 and commands[:2] == ["make build", ". .venv/bin/activate"]
    for command in commands[2:]:
        done = call(*shlex.split(command)[1:])
        assert done.returncode == 0, (command, done.stderr)
    tables = ((tmp_path / f"{name}.csv").read_text().splitlines() for name in ("predictions", "two"))
    first, second = (list(csv.DictReader(rows)) for rows in tables)
    assert [row["id"] for row in first] == names and {row["prediction"] for row in first} == {"keeps", "leaves"}
    assert [row["prediction"] for row in first] == [row["prediction"] for row in second]
    for before, after in zip(first, second, strict=True):
        assert abs(float(before["probability"]) - float(after["probability"])) < 1e-4
    (block,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(compile(block, str(PAGE), "exec"), {})

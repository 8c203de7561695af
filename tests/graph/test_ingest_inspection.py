"""Import says what columns look like, and prepares features: standardised numbers, one-hot and hashed categories."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import pytest
import torch
from typer.testing import CliRunner

from gnnfleet.errors import ConfigError, InputError
from gnnfleet.graph.graph import EDGE, NODE
from gnnfleet.graph.ingest.tables import EdgeTable, NodeTable, TableSpec, import_tables
from gnnfleet.graph.store import open_store
from tests.cli.test_import import app

ROWS = 60
RANDOM = np.random.default_rng(0)
PEOPLE: dict[str, Any] = {
    "id": [f"u{i}" for i in range(ROWS)],
    "age": RANDOM.integers(18, 80, ROWS),
    "logins": RANDOM.integers(1, 30, ROWS),
    "income": RANDOM.normal(60_000, 9_000, ROWS),
    "signup_ts": RANDOM.integers(1_500_000_000, 1_700_000_000, ROWS),
    "user_no": RANDOM.permutation(ROWS) + 1000,
    "plan": RANDOM.integers(1, 5, ROWS),
    "country": [("FR", "DE", "IT")[i % 3] for i in range(ROWS)],
    "bio": [f"likes {i} things and {i % 7} more" for i in range(ROWS)],
    "token": [f"x{i:04}" for i in range(ROWS)],
    "born": [f"19{50 + i % 40}-03-01" for i in range(ROWS)],
    "constant": [7] * ROWS,
    "label": np.arange(ROWS) % 3,
}
FOLLOWS = {
    "src": PEOPLE["id"],
    "dst": PEOPLE["id"][1:] + PEOPLE["id"][:1],
    "created_at": RANDOM.integers(1_500_000_000_000, 1_700_000_000_000, ROWS),
}


def tables(folder: Path, ending: str, **columns: Any) -> tuple[Path, Path]:
    folder.mkdir(exist_ok=True)
    paths = folder / f"people.{ending}", folder / f"follows.{ending}"
    for path, table in zip(paths, ({**PEOPLE, **columns}, FOLLOWS), strict=True):
        (pacsv.write_csv if ending == "csv" else pq.write_table)(pa.table(table), path)
    return paths


def spec_of(paths: tuple[Path, Path], *, category: str | None = None, **rules: Any) -> TableSpec:
    nodes = NodeTable(files=(str(paths[0]),), category=category)
    return TableSpec(nodes={NODE: nodes}, edges={EDGE: EdgeTable(files=(str(paths[1]),))}, **rules)


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_columns_are_named_with_what_to_do(tmp_path: Path, ending: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "gnnfleet"):
        report = import_tables(spec_of(tables(tmp_path, ending)), tmp_path / "store")
    scale = np.sqrt(np.mean(PEOPLE["income"] ** 2))
    assert report.remarks == (
        f"node: columns that have another magnitude than others: income (about {scale:,.0f}). Use --standardize",
        "node: columns that look like times: signup_ts (unix seconds). Use --standardize, or leave them out of "
        "--features",
        "node: columns that look like ids: user_no. Leave them out of --features",
        "node: columns that may be categories: plan (4 values). Use --category if their numbers have no order",
        "node: columns that look like categories and are left out: country (3 values). Use --category",
        "node: columns that are text and are left out: bio",
        "node: columns that look like ids and are left out: token",
        "node: columns that look like times and are left out: born (timestamps)",
        "node:to:node: columns that look like times: created_at (unix milliseconds). Name the time of an edge with "
        "--time, use --standardize, or leave them out of --edge-features",
    )
    assert [record.getMessage() for record in caplog.records if record.name.endswith("tables")] == list(report.remarks)


def test_labels_that_look_continuous_ask_for_regression(tmp_path: Path) -> None:
    for name, label in (
        ("fractions", RANDOM.normal(0, 1, ROWS).round(2).astype(str)),
        ("whole", RANDOM.permutation(ROWS)),
    ):
        report = import_tables(spec_of(tables(tmp_path / name, "csv", label=label)), tmp_path / name / "store")
        assert "looks continuous" in report.remarks[0] and report.remarks[0].endswith("with --value label instead")
    with pytest.raises(InputError, match=r"predict them by regression \(--value label\)"):
        import_tables(spec_of(tables(tmp_path, "parquet", label=RANDOM.normal(0, 1, ROWS))), tmp_path / "store")


def test_prepared_features_equal_numpy_and_another_store_gets_the_same_numbers(tmp_path: Path) -> None:
    paths = tables(tmp_path, "csv")
    spec = spec_of(paths, category="country,plan", standardize=True)
    assert not any(
        "--standardize" in remark or "country" in remark for remark in import_tables(spec, tmp_path / "a").remarks
    )
    nodes = open_store(tmp_path / "a").single_nodes
    names = ["age", "logins", "income", "signup_ts", "user_no", "constant"]
    mean = {name: np.mean(np.float64(PEOPLE[name])) for name in names}
    deviation = {name: np.std(np.float64(PEOPLE[name])) or np.inf for name in names}

    def expected(people: dict[str, Any]) -> torch.Tensor:
        scaled = [(np.float64(people[name]) - mean[name]) / deviation[name] for name in names]
        one_hot = [np.float64(np.array(people["country"]) == value) for value in ("DE", "FR", "IT")]
        one_hot += [np.float64(np.array(people["plan"]) == value) for value in range(1, 5)]
        return torch.from_numpy(np.stack([*scaled, *one_hot], 1)).float()

    torch.testing.assert_close(nodes.x, expected(PEOPLE), rtol=1e-5, atol=1e-6)
    assert [name for name, _ in nodes.columns][5:8] == ["constant (standardized)", "country=DE", "country=FR"]
    others = {"age": PEOPLE["age"] + 100, "country": ["FR", "ES", None] * 20}
    import_tables(spec_of(tables(tmp_path / "other", "parquet", **others), like=str(tmp_path / "a")), tmp_path / "b")
    other = open_store(tmp_path / "b").single_nodes
    torch.testing.assert_close(other.x, expected({**PEOPLE, **others}), rtol=1e-5, atol=1e-6)
    assert other.columns == nodes.columns


def test_many_values_are_hashed_alike_in_every_table(tmp_path: Path) -> None:
    extended = {name: np.tile(column, 2) for name, column in PEOPLE.items() if name != "id"}
    rows = [f"v{i}" for i in range(2 * ROWS)]
    people = {"id": rows, **extended, "city": [f"city {i}" for i in range(2 * ROWS)]}
    pq.write_table(pa.table(people), tmp_path / "people.parquet")
    edges = {"src": rows, "dst": rows}
    pq.write_table(pa.table(edges), tmp_path / "follows.parquet")
    paths = tmp_path / "people.parquet", tmp_path / "follows.parquet"
    import_tables(spec_of(paths, category="city"), tmp_path / "store")
    nodes = open_store(tmp_path / "store").single_nodes
    assert nodes.columns[-1] == ("city (hashed)", 64)
    buckets = nodes.x[:, -64:]
    assert torch.equal(buckets.sum(1), torch.ones(2 * ROWS)) and (buckets.sum(0) > 0).sum() > 40
    pq.write_table(pa.table(people).slice(30, 40), paths[0])
    import_tables(spec_of(paths, like=str(tmp_path / "store"), missing="add"), tmp_path / "part")
    assert torch.equal(open_store(tmp_path / "part").single_nodes.x[:40, -64:], buckets[30:70])


def test_options_of_the_command_and_refusals(tmp_path: Path) -> None:
    people, follows = tables(tmp_path, "csv")
    command = ["import", people, follows, "-o", tmp_path / "store", "--category", "country", "--standardize", "--json"]
    result = CliRunner().invoke(app, list(map(str, command)), catch_exceptions=False)
    remarks = json.loads(result.stdout)["remarks"]
    named = [remark.split(": ")[2].split()[0].rstrip(".") for remark in remarks]
    assert named == ["user_no", "plan", "bio", "token", "born"]
    for rules, message in (
        ({"standardize": True, "like": str(tmp_path / "store")}, "leave out --standardize"),
        ({"standardize": True, "duplicates": "sum"}, "choose keep or drop"),
    ):
        with pytest.raises(ConfigError, match=message):
            spec_of((people, follows), **rules)
    for category, message in (("label", "has another use"), ("town", "no column matches")):
        with pytest.raises(InputError, match=message):
            import_tables(spec_of((people, follows), category=category), tmp_path / "refused")

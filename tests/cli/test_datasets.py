"""``gnnfleet datasets``: list, show, make."""

from __future__ import annotations

import json
import re

import pytest
from typer.testing import CliRunner

from gnnfleet.cli.main import datasets
from gnnfleet.errors import ConfigError, StoreError
from gnnfleet.graph.datasets import DATASETS, make_dataset
from gnnfleet.graph.store import open_store


def run(*arguments: str) -> str:
    """Standard output; errors are raised."""
    result = CliRunner().invoke(datasets, list(arguments))
    if result.exception is not None:
        raise result.exception
    return result.stdout


def test_list_prints_one_line_per_generator_or_its_parameters():
    lines = run("list").strip().splitlines()
    assert [line.split()[0] for line in lines] == list(DATASETS)
    assert [entry["name"] for entry in json.loads(run("list", "--json"))["datasets"]] == list(DATASETS)
    for command in ("list", "show"):
        assert re.search(r"edge_factor .* float .* 16\.0 .* stored edges per node", run(command, "rmat"))
    shown = json.loads(run("show", "shop", "--json"))["parameters"]
    assert {entry["name"] for entry in shown} == set(DATASETS["shop"].config.model_fields)


def test_make_writes_the_store_and_reports_it(tmp_path):
    arguments = [
        "make",
        "communities",
        "-o",
        str(tmp_path / "g"),
        "--set",
        "nodes=300",
        "--set",
        "edges=3000",
        "--set",
        "seed=4",
    ]
    result = json.loads(run(*arguments, "--json", "--quiet"))
    assert result["nodes"] == {"node": {"count": 300, "features": 64, "classes": 10}}
    assert result["edges"] == {"node:to:node": 3000} and result["parameters"]["seed"] == 4
    assert result["bytes"] > 300 * 64 * 4 and set(result["seconds"]) == {"generate", "write"}
    written, expected = open_store(tmp_path / "g"), make_dataset("communities", nodes=300, edges=3000, seed=4)
    assert written.single_edges.src.equal(expected.single_edges.src) and written.single_nodes.x.equal(
        expected.single_nodes.x
    )
    with pytest.raises(StoreError, match="--overwrite"):
        run(*arguments)
    assert "3,000" in run(*arguments, "--overwrite", "--quiet")


def test_progress_names_the_stages(tmp_path):
    result = CliRunner().invoke(datasets, ["make", "events", "-o", str(tmp_path / "g"), "--set", "events=100"])
    assert result.exit_code == 0 and [line for line in result.stderr.splitlines() if ":" not in line] == [
        "generate",
        "writing the store",
    ]


def test_a_wrong_parameter_writes_nothing(tmp_path):
    target = str(tmp_path / "g")
    for settings in (["nodez=3"], ["nodes"], ["nodes=0"]):
        with pytest.raises(ConfigError):
            run("make", "communities", "-o", target, "--set", *settings)
    with pytest.raises(ConfigError, match="did you mean 'shop'"):
        run("make", "shp", "-o", target)
    assert list(tmp_path.iterdir()) == []

"""Tables of options in the documentation: complete, without invented options, with the defaults of the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pydantic import BaseModel

from gnnfleet.config.resolve import parse_value
from gnnfleet.config.schema import ReportConfig, RunConfig
from gnnfleet.nn.config import ModelConfig
from gnnfleet.nn.link_config import LinkConfig
from gnnfleet.strategies.registry import all_specs
from gnnfleet.tasks.train_options import TrainConfig

DOCS = Path(__file__).parents[1] / "docs"
GROUPS = {"strategy", "model", "train", "report", "link"}

# page, section, prefix of its options, their model
LISTS: list[tuple[str, str, str, type[BaseModel]]] = [
    ("defaults", "All strategies", "", RunConfig),
    ("defaults", "All strategies", "train.", TrainConfig),
    ("defaults", "All strategies", "report.", ReportConfig),
    *(("defaults", name, "strategy.", spec.config) for name, spec in all_specs().items()),
    ("link", "Options", "link.", LinkConfig),
    ("models", "Options", "model.", ModelConfig),
]


def listed_options(page: str, section: str, prefix: str) -> dict[str, str]:
    """{option: default on the page} of the tables of a section; "" for a row with several options."""
    defaults: dict[str, str] = {}
    for part in re.split(r"^## ", (DOCS / f"{page}.md").read_text(), flags=re.MULTILINE):
        title, _, body = part.partition("\n")
        if title != section and not title.startswith(f"{section} "):
            continue
        for line in body.splitlines():
            if line.startswith("| `"):
                cells = [cell.strip() for cell in line.split("|")]
                options = re.findall(r"`([\w.]+)`", cells[1])
                defaults |= dict.fromkeys(options, cells[2] if len(options) == 1 else "")
    return {option: text for option, text in defaults.items() if option.rpartition(".")[0] == prefix.rstrip(".")}


@pytest.mark.parametrize(("page", "section", "prefix", "config"), LISTS)
def test_pages_list_all_options(page: str, section: str, prefix: str, config: type[BaseModel]) -> None:
    options = set(config.model_fields) - ({"name"} if prefix == "strategy." else set() if prefix else GROUPS)
    assert set(listed_options(page, section, prefix)) == {prefix + option for option in options}


@pytest.mark.parametrize(("page", "section", "prefix", "config"), LISTS)
def test_defaults_on_pages_are_those_of_the_code(page: str, section: str, prefix: str, config: type[BaseModel]) -> None:
    for option, text in listed_options(page, section, prefix).items():
        default, listed = config.model_fields[option.removeprefix(prefix)].default, parse_value(text.split(";")[0])
        is_plain = isinstance(listed, int | float) or (isinstance(listed, str) and re.fullmatch(r"[a-z]\w*", listed))
        if is_plain and listed != "none" and isinstance(default, int | float | str):
            assert (listed, type(listed) is bool) == (default, type(default) is bool), option

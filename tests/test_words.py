"""The words of the config and the pages that list them: none is missing, none is made up, plain defaults are right."""

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

# page, section, what its words begin with, where they come from
LISTS: list[tuple[str, str, str, type[BaseModel]]] = [
    ("defaults", "All strategies", "", RunConfig),
    ("defaults", "All strategies", "train.", TrainConfig),
    ("defaults", "All strategies", "report.", ReportConfig),
    *(("defaults", name, "strategy.", spec.config) for name, spec in all_specs().items()),
    ("link", "Options", "link.", LinkConfig),
    ("models", "Options", "model.", ModelConfig),
]


def listed(page: str, section: str, prefix: str) -> dict[str, str]:
    """{word: default as the page has it} of the tables of a section; "" where a row is about several words."""
    found: dict[str, str] = {}
    for part in re.split(r"^## ", (DOCS / f"{page}.md").read_text(), flags=re.MULTILINE):
        title, _, body = part.partition("\n")
        if title != section and not title.startswith(f"{section} "):
            continue
        for line in body.splitlines():
            if line.startswith("| `"):
                cells = [cell.strip() for cell in line.split("|")]
                words = re.findall(r"`([\w.]+)`", cells[1])
                found |= dict.fromkeys(words, cells[2] if len(words) == 1 else "")
    return {word: default for word, default in found.items() if word.rpartition(".")[0] == prefix.rstrip(".")}


@pytest.mark.parametrize(("page", "section", "prefix", "config"), LISTS)
def test_pages_list_the_words_there_are(page: str, section: str, prefix: str, config: type[BaseModel]) -> None:
    known = set(config.model_fields) - ({"name"} if prefix == "strategy." else set() if prefix else GROUPS)
    assert set(listed(page, section, prefix)) == {prefix + word for word in known}


@pytest.mark.parametrize(("page", "section", "prefix", "config"), LISTS)
def test_plain_defaults_are_those_of_the_code(page: str, section: str, prefix: str, config: type[BaseModel]) -> None:
    for word, text in listed(page, section, prefix).items():
        default, said = config.model_fields[word.removeprefix(prefix)].default, parse_value(text.split(";")[0])
        plain = isinstance(said, int | float) or (isinstance(said, str) and re.fullmatch(r"[a-z]\w*", said))
        if plain and said != "none" and isinstance(default, int | float | str):
            assert (said, type(said) is bool) == (default, type(default) is bool), word

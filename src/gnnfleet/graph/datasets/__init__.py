"""Generated graphs by name: a registry of configurations and the functions that make a Graph of one.

>>> graph = make_dataset("communities", nodes=1000, homophily=0.9, seed=1)
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gnnfleet.errors import ConfigError
from gnnfleet.graph.datasets.base import DatasetConfig, configure
from gnnfleet.graph.datasets.communities import CommunitiesConfig, make_communities
from gnnfleet.graph.datasets.debian import DebianConfig, make_debian
from gnnfleet.graph.datasets.events import EventsConfig, make_events
from gnnfleet.graph.datasets.rmat import RmatConfig, make_rmat
from gnnfleet.graph.datasets.shop import ShopConfig, make_shop
from gnnfleet.graph.graph import Graph
from gnnfleet.report.progress import NoProgress, Progress


@dataclass(frozen=True)
class Parameter:
    """One thing that can be set."""

    name: str
    kind: str
    default: Any
    meaning: str


@dataclass(frozen=True)
class Dataset:
    """A generator: ``make(config, progress)`` gives a Graph."""

    name: str
    summary: str
    config: type[DatasetConfig]
    make: Callable[[Any, Progress], Graph]

    def configure(self, settings: dict[str, Any]) -> DatasetConfig:
        """Raises ConfigError naming the parameter that is wrong."""
        return configure(self.config, self.name, settings)

    @property
    def parameters(self) -> list[Parameter]:
        schema = self.config.model_json_schema()["properties"]
        return [
            Parameter(name, _kind(schema[name]), field.default, field.description or "")
            for name, field in self.config.model_fields.items()
        ]


DATASETS: dict[str, Dataset] = {
    entry.name: entry
    for entry in (
        Dataset("communities", "communities, power-law degrees, features, labels", CommunitiesConfig, make_communities),
        Dataset("rmat", "recursive matrix as in Graph500: very skewed, for scale", RmatConfig, make_rmat),
        Dataset("shop", "users, products and brands: six relations, string ids", ShopConfig, make_shop),
        Dataset("events", "users and items in time: repeats and drift", EventsConfig, make_events),
        Dataset("debian", "packages of this Debian machine's archive: a real graph", DebianConfig, make_debian),
    )
}


def find_dataset(name: str) -> Dataset:
    """Raises ConfigError for an unknown name, with the nearest one."""
    if name in DATASETS:
        return DATASETS[name]
    near = difflib.get_close_matches(name, DATASETS, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(DATASETS)}"
    raise ConfigError(f"no dataset {name!r}: {hint}")


def make_dataset(name: str, *, progress: Progress = NoProgress(), **settings: Any) -> Graph:
    """Generate a graph; raises ConfigError for an unknown name or parameter."""
    dataset = find_dataset(name)
    return dataset.make(dataset.configure(settings), progress)


def _kind(schema: dict[str, Any]) -> str:
    if "enum" in schema:
        return "|".join(schema["enum"])
    kinds = [option["type"] for option in schema.get("anyOf", [schema])]
    words = {"integer": "int", "number": "float", "boolean": "bool", "string": "text"}
    return "|".join(words.get(kind, kind) for kind in kinds if kind != "null")

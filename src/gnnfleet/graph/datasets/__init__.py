"""Generators of graphs by name.

>>> graph = make_dataset("communities", nodes=1000, homophily=0.9, seed=1)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from gnnfleet.errors import ConfigError, suggest
from gnnfleet.graph.datasets.base import DatasetConfig, explain
from gnnfleet.graph.datasets.communities import CommunitiesConfig, make_communities
from gnnfleet.graph.datasets.events import EventsConfig, make_events
from gnnfleet.graph.datasets.rmat import RmatConfig, make_rmat
from gnnfleet.graph.datasets.shop import ShopConfig, make_shop
from gnnfleet.graph.graph import Graph
from gnnfleet.report.progress import Progress


@dataclass(frozen=True)
class Dataset:
    """A generator: ``make(config, progress)`` returns a Graph."""

    name: str
    summary: str
    config: type[DatasetConfig]
    make: Callable[[Any, Progress], Graph]

    def configure(self, settings: dict[str, Any]) -> DatasetConfig:
        """Build a configuration from texts or values; raises ConfigError naming the wrong parameter."""
        try:
            return self.config(**settings)
        except ValidationError as error:
            raise ConfigError(explain(error, self.config, self.name)) from error

    @property
    def parameters(self) -> list[dict[str, Any]]:
        """Name, type, default and meaning of every parameter, as plain values."""
        return [
            {"name": name, "type": _kind(field), "default": field.get("default"), "meaning": field["description"]}
            for name, field in self.config.model_json_schema()["properties"].items()
        ]


DATASETS: dict[str, Dataset] = {
    entry.name: entry
    for entry in (
        Dataset(
            "communities", "communities, power-law degrees, features and labels", CommunitiesConfig, make_communities
        ),
        Dataset(
            "rmat", "recursive matrix as in Graph500: very skewed degrees, for tests at scale", RmatConfig, make_rmat
        ),
        Dataset("shop", "users, products and brands: six edge types, string ids", ShopConfig, make_shop),
        Dataset("events", "timed events between users and items: repeats and drift", EventsConfig, make_events),
    )
}


def find_dataset(name: str) -> Dataset:
    """Look up a generator; raises ConfigError for an unknown name."""
    if name not in DATASETS:
        raise ConfigError(f"no dataset {name!r}: {suggest(name, DATASETS)}")
    return DATASETS[name]


def make_dataset(name: str, *, progress: Progress = Progress(), **settings: Any) -> Graph:
    """Generate a graph; raises ConfigError for an unknown name or a wrong parameter."""
    dataset = find_dataset(name)
    return dataset.make(dataset.configure(settings), progress)


def _kind(schema: dict[str, Any]) -> str:
    if "enum" in schema:
        return "|".join(schema["enum"])
    kinds = [option["type"] for option in schema.get("anyOf", [schema])]
    names = {"integer": "int", "number": "float", "boolean": "bool", "string": "text"}
    return "|".join(names.get(kind, kind) for kind in kinds if kind != "null")

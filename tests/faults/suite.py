"""Trials of faults and their expected outcomes. A trial is a strategy, a role, an event and a number.

Its moment is drawn from its name, so it can be repeated. ``python -m tests.faults`` saves the outcomes and writes the
table.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gnnfleet.graph.datasets import make_dataset
from gnnfleet.graph.graph import Graph
from gnnfleet.graph.store import save_store
from tests.graphs import communities

EXIT_LIMIT = 15.0
"""Seconds from the event to the end of the last remaining process."""
PAUSE = 12.0
"""Seconds; longer than the silence limit."""
SYNCHRONOUS = ("sar", "macrobatch", "pipe")
SINGLE_PROCESS = ("local", "temporal")
"""Strategies whose trials include a single process."""


@dataclass(frozen=True)
class Case:
    """One trial. ``how`` names its runner: forked ranks, a command, tma processes, hosts."""

    strategy: str
    role: str
    event: str
    number: int
    how: str

    @property
    def name(self) -> str:
        return f"{self.strategy}, {self.role}, {self.event}, {self.number}"

    @property
    def draw(self) -> random.Random:
        return random.Random(self.name)


@dataclass
class Outcome:
    """Outcome of a trial; ``seconds`` is None if no process had to end."""

    result: str  # "finished", or "named, then exact"
    seconds: float | None
    moment: float
    said: str = ""
    load: float = 0.0


def plan(repeats: int) -> list[Case]:
    """All trials, the same ones for the same number of repeats."""
    cases: list[Case] = []

    def add(how: str, strategy: str, roles: tuple[str, ...], events: tuple[str, ...], times: int) -> None:
        for role in roles:
            for event in events:
                cases.extend(Case(strategy, role, event, number, how) for number in range(times))

    for strategy in SYNCHRONOUS:
        add("forks", strategy, ("first rank", "rank"), ("kill", "pause"), repeats)
        add("command", strategy, ("launcher",), ("kill", "pause"), max(1, repeats // 3))
        add("hosts", strategy, ("host",), ("cut",), max(1, repeats // 3))
    add("forks", "temporal", ("first rank", "rank"), ("kill", "pause"), max(1, repeats // 3))
    add("hosts", "temporal", ("host",), ("cut",), max(1, repeats // 3))
    for strategy in SINGLE_PROCESS:
        add("command", strategy, ("process",), ("kill", "pause"), max(1, repeats // 3))
    add("fleet", "tma", ("trainer", "coordinator", "launcher"), ("kill", "pause"), max(1, repeats // 3))
    add("joined", "tma", ("host",), ("cut",), max(1, repeats // 3))
    return cases


def settings_of(strategy: str, workers: int) -> dict[str, Any]:
    """Settings of a run of some seconds, with checkpoints at any point of it."""
    settings: dict[str, Any] = {
        "strategy": {"name": strategy},
        "workers": workers,
        "model": {"name": "sage", "hidden": 32, "layers": 2},
        "train": {"epochs": 40, "checkpoint_seconds": 0.2},
        "seed": 3,
    }
    if strategy == "macrobatch":
        settings["strategy"] |= {"fanouts": [5, 5], "batch": 128, "batches_per_fetch": 3, "prefetch": 1}
    if strategy == "pipe":
        settings["strategy"] |= {
            "graph_parallel": 1,
            "chunks": 2 * workers,
            "refresh": 3,
            "gradient": "stale",
        }
        settings["model"] |= {"layers": max(3, workers)}
    if strategy == "temporal":
        settings["strategy"] |= {"batch": 50, "prefetch": 1, "eval_negatives": 5}
        # Two trainers may be on different machines: each has a copy of the memory. More share one memory.
        settings["strategy"] |= {"memory_parallel": workers} if workers == 2 else {"epoch_parallel": workers}
        settings["model"] = {"name": "tgn", "hidden": 16, "layers": 1}
    if workers == 1:
        del settings["workers"]
    return settings


def options(settings: dict[str, Any]) -> list[str]:
    """The same settings as options of the command line."""
    arguments: list[str] = []
    for group, value in settings.items():
        if group == "workers":
            arguments += ["--workers", str(value)]
        elif isinstance(value, dict):
            for key, option in value.items():
                is_name = (group, key) == ("strategy", "name")
                arguments += ["-s", option] if is_name else ["--set", f"{group}.{key}={option}"]
        else:
            arguments += ["--set", f"{group}={value}"]
    return arguments


def make_store(folder: Path) -> Graph:
    """A small graph whose messages between parts are large enough for shared memory."""
    return save_store(communities(900), folder / "shop")


def make_easy(folder: Path) -> Graph:
    return save_store(make_dataset("communities", nodes=4000, mean_degree=12, features=16, seed=1), folder / "easy")


def make_events(folder: Path) -> Graph:
    return save_store(make_dataset("events", users=40, items=20, events=600, features=4, seed=3), folder / "events")


def load() -> float:
    return round(os.getloadavg()[0], 1)

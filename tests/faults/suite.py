"""What is tried, and what must come of it. A trial is a strategy, a role, what is done to it and a number.

Its moment is drawn from its name, so it can be tried again. ``Outcome`` says how it ended; ``python -m tests.faults``
keeps the outcomes and writes the table.
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

LIMIT = 15.0
"""Seconds from the event to the end of the last one that was left."""
PAUSE = 12.0
"""Longer than silence may last."""
SYNCHRONOUS = ("sar", "macrobatch", "pipe")
ALONE = ("local", "temporal")
"""Tried in one process too."""


@dataclass(frozen=True)
class Case:
    """One trial. ``how`` is what runs it: forked ranks, a command, a fleet, hosts."""

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
    """How a trial ended. ``seconds`` is None where nobody had to end."""

    result: str  # "finished", or "named, then exact"
    seconds: float | None
    moment: float
    said: str = ""
    load: float = 0.0

    @property
    def in_time(self) -> bool:
        return self.seconds is None or self.seconds < LIMIT


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
    for strategy in ALONE:
        add("command", strategy, ("process",), ("kill", "pause"), max(1, repeats // 3))
    add("fleet", "tma", ("trainer", "coordinator", "launcher"), ("kill", "pause"), max(1, repeats // 3))
    add("joined", "tma", ("host",), ("cut",), max(1, repeats // 3))
    return cases


def words_of(strategy: str, workers: int) -> dict[str, Any]:
    """A run of some seconds in which checkpoints fall anywhere."""
    words: dict[str, Any] = {
        "strategy": {"name": strategy},
        "workers": workers,
        "model": {"name": "sage", "hidden": 32, "layers": 2},
        "train": {"epochs": 40, "checkpoint_seconds": 0.2},
        "seed": 3,
    }
    if strategy == "macrobatch":
        words["strategy"] |= {"fanouts": [5, 5], "batch": 128, "batches_per_fetch": 3, "prefetch": 1}
    if strategy == "pipe":
        words["strategy"] |= {"graph_parallel": 1, "chunks": 2 * workers, "refresh": 3, "gradient": "control_variate"}
        words["model"] |= {"layers": max(3, workers)}
    if strategy == "temporal":
        words["strategy"] |= {"batch": 50, "prefetch": 1, "eval_negatives": 5}
        # Trainers of one machine on one memory; two of them may have a machine each, and a copy.
        words["strategy"] |= {"memory_parallel": workers} if workers == 2 else {"epoch_parallel": workers}
        words["model"] = {"name": "tgn", "hidden": 16, "layers": 1}
    if workers == 1:
        del words["workers"]
    return words


def options(words: dict[str, Any]) -> list[str]:
    """The same for a command line."""
    found: list[str] = []
    for group, value in words.items():
        if group == "workers":
            found += ["--workers", str(value)]
        elif isinstance(value, dict):
            for key, word in value.items():
                found += ["--set", f"{group}.{key}={word}"] if (group, key) != ("strategy", "name") else ["-s", word]
        else:
            found += ["--set", f"{group}={value}"]
    return found


def make_store(folder: Path) -> Graph:
    """Small, but messages between parts are large enough to go through shared memory."""
    return save_store(communities(900), folder / "shop")


def make_easy(folder: Path) -> Graph:
    return save_store(make_dataset("communities", nodes=4000, mean_degree=12, features=16, seed=1), folder / "easy")


def make_events(folder: Path) -> Graph:
    return save_store(make_dataset("events", users=40, items=20, events=600, features=4, seed=3), folder / "events")


def load() -> float:
    return round(os.getloadavg()[0], 1)

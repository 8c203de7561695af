"""What a run leaves behind in numbers and words: the object that ``train --json`` prints."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """One run. Lists in ``traffic`` and ``memory`` have one entry per rank."""

    strategy: str
    workers: int
    model: str
    seed: int
    epochs: int  # run, which may be fewer than asked for
    steps: int
    seconds_per_epoch: list[float]  # of training; evaluation is not in it
    metrics: Mapping[str, Any]  # train_loss, val, test, name; best_epoch
    traffic: Mapping[str, list[int]] = field(default_factory=lambda: {"bytes_sent": [0], "rounds": [0]})
    memory: Mapping[str, list[int]] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)  # workers without which the run went on to its end, and why
    run_dir: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """``lost`` only where there is something to tell."""
        found = asdict(self)
        return found if self.lost else {key: value for key, value in found.items() if key != "lost"}


def versions() -> dict[str, str]:
    """The versions that decide a result."""
    found = {"python": platform.python_version()}
    for package in ("gnnfleet", "torch", "numpy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found

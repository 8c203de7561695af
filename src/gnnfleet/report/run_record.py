"""The record of a finished run: the object that ``train --json`` prints."""

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
    epochs: int  # trained, perhaps fewer than requested
    steps: int
    seconds_per_epoch: list[float]  # of training without evaluation
    metrics: Mapping[str, Any]  # train_loss, val, test, name; best_epoch
    traffic: Mapping[str, list[int]] = field(default_factory=lambda: {"bytes_sent": [0], "rounds": [0]})
    memory: Mapping[str, list[int]] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)  # workers that were lost before the end, with the reason
    failure: str = ""  # why nothing was learnt
    run_dir: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Leave out ``lost`` and ``failure`` if they are empty."""
        return {key: value for key, value in asdict(self).items() if value or key not in ("lost", "failure")}


def versions() -> dict[str, str]:
    """Versions of the packages that affect a result."""
    installed = {"python": platform.python_version()}
    for package in ("gnnfleet", "torch", "numpy"):
        try:
            installed[package] = version(package)
        except PackageNotFoundError:
            installed[package] = "not installed"
    return installed

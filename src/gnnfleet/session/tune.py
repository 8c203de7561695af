"""Search for good settings by successive halving: many configurations for few epochs, the best ones for more.

Configurations are compared by the validation metric only. Each is a run in a directory of its own, which the next rung
resumes, so no epoch is trained twice and an interrupted search continues.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from gnnfleet.config.resolve import flatten, named_group, overlay, resolve, unflatten
from gnnfleet.config.schema import SettingsTree
from gnnfleet.errors import ConfigError, GnnfleetError
from gnnfleet.graph.graph import Graph
from gnnfleet.io.atomic import write_atomically
from gnnfleet.nn.metrics import LOWER_IS_BETTER
from gnnfleet.report.progress import Progress
from gnnfleet.report.remarks import print_note
from gnnfleet.session.prepare import RunLocation
from gnnfleet.session.training import run_training
from gnnfleet.training.auto_defaults import with_auto_defaults

MODELS, HETERO_MODELS = ("gcn", "sage", "gat"), ("hetero-sage", "rgcn", "hgt")
_KEYS = ("model.layers", "model.norm", "model.dropout", "train.lr")
_RECIPES = (
    (2, "none", 0.5, 0.01),
    (2, "none", 0.7, 0.003),
    (3, "layer", 0.3, 0.003),
    (3, "layer", 0.6, 0.001),
    (5, "layer", 0.2, 0.003),
    (3, "batch", 0.5, 0.003),
    (5, "batch", 0.2, 0.003),
    (8, "batch", 0.3, 0.003),
    (8, "layer", 0.2, 0.001),
)
_RUNGS = (9, 3, 1)  # divisors of the number of epochs; a third of the configurations passes each rung
_SHARES = (0.4, 0.7, 1.0)  # of the budget that is spent at the end of a rung
SEARCH, BEST = "search.json", "best.toml"


@dataclass(eq=False)
class Trial:
    """A configuration and how far it was trained."""

    number: int
    changes: Mapping[str, Any]  # settings by full name, other than the defaults for the graph
    epochs: int = 0
    val: float | None = None  # best value of the metric
    score: float = -math.inf  # the same, with the sign by which higher is better
    seconds: float = 0.0
    error: str = ""


@dataclass(frozen=True)
class Search:
    """A finished search: its trials, best first, and the file with the settings of the best."""

    trials: list[Trial]
    metric: str
    best: Path
    folder: Path
    settings: Mapping[str, Any] = field(default_factory=dict)


def tune(
    graph: Graph,
    settings: Mapping[str, Any],
    folder: Path,
    *,
    budget: float,
    progress: Progress = Progress(),
    quiet: bool = True,
) -> Search:
    """Search for ``budget`` seconds; raises ConfigError if no configuration can be trained."""
    base = with_auto_defaults(graph, settings, quiet=quiet)
    if resolve(base).model.is_custom:
        raise ConfigError("the search chooses among the built-in models: leave out --model file.py:factory")
    _claim(folder, base)
    trials = [Trial(number, changes) for number, changes in enumerate(configurations(graph, base, settings))]
    epochs, started = resolve(base).train.epochs, time.monotonic()
    metric, running = "", trials
    for rung, (divisor, share) in enumerate(zip(_RUNGS, _SHARES, strict=True)):
        target = max(1, epochs // divisor)
        advance = progress.stage(f"{len(running)} configurations, {target} epochs", total=len(running))
        for trial in running:
            left = budget * share - (time.monotonic() - started)
            expected = trial.seconds / max(trial.epochs, 1) * (target - trial.epochs)
            if left > expected or (trial is running[0] and not trial.epochs):
                metric = _train(graph, base, folder, trial, target) or metric
            advance(1)
        ranked = sorted((t for t in running if t.val is not None), key=lambda t: (-t.score, t.number))
        if not ranked:
            raise ConfigError(f"no configuration can be trained: {trials[0].error}")
        running = ranked[: max(1, len(ranked) // 3)] if rung < len(_RUNGS) - 1 else ranked
    best = running[0]
    rest = sorted((t for t in trials if t is not best), key=lambda t: (-t.epochs, -t.score, t.number))
    chosen = overlay(base, unflatten(best.changes))
    path = folder / BEST
    write_atomically(path, _as_toml(chosen).encode())
    return Search([best, *rest], metric, path, folder, flatten(chosen))


def configurations(graph: Graph, base: Mapping[str, Any], settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Changes of ``base``, at most 28; the first has none. ``settings`` are those that the user fixed."""
    fixed, defaults = flatten({**settings, "model": named_group("model", settings.get("model", {}))}), flatten(base)
    models = HETERO_MODELS if graph.is_hetero else MODELS
    changes: list[dict[str, Any]] = [{}]
    for recipe, model in product(_RECIPES, [fixed["model.name"]] if "model.name" in fixed else models):
        values = dict(zip(_KEYS, recipe, strict=True)) | {"model.name": model, "model.residual": recipe[1] != "none"}
        change = {key: value for key, value in values.items() if key not in fixed and defaults.get(key) != value}
        if change not in changes:
            changes.append(change)
    return changes


def _train(graph: Graph, base: Mapping[str, Any], folder: Path, trial: Trial, epochs: int) -> str:
    """Train a trial up to ``epochs``; returns the name of the metric, or nothing if it failed."""
    settings = overlay(overlay(base, unflatten(trial.changes)), {"train": {"epochs": epochs}})
    location = RunLocation(folder / f"trial-{trial.number}", resume=True)
    started = time.monotonic()
    try:
        record = run_training(graph, settings, location=location).record
    except GnnfleetError as error:
        trial.error = str(error)
        return ""
    trial.seconds += time.monotonic() - started
    trial.epochs, value, name = epochs, record.metrics["val"], str(record.metrics["name"])
    if value is None:
        raise ConfigError("the search needs val nodes, and the split has none: choose another --split")
    trial.val, trial.score = value, -value if name in LOWER_IS_BETTER else value
    return name


def _claim(folder: Path, base: SettingsTree) -> None:
    """Take a new folder, or that of an interrupted search with the same settings; raises ConfigError otherwise."""
    path, text = folder / SEARCH, json.dumps(base, sort_keys=True, default=str)
    if path.exists():
        if path.read_text() != text:
            raise ConfigError(f"{folder} has a search with other settings: choose another --output")
        print_note(f"continuing the search in {folder}")
        return
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty: choose another --output")
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(path, text.encode())


def _as_toml(settings: Mapping[str, Any]) -> str:
    """Settings as dotted keys; JSON values of these types are TOML, too."""
    return "".join(f"{key} = {json.dumps(value)}\n" for key, value in flatten(settings).items() if value is not None)

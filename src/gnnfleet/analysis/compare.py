"""Comparison of strategies: the same model, seed and epochs, one run after the other, each in its own processes.

Strategies that should equal ``local`` are checked: both train two epochs in float64, and the weights are compared.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from gnnfleet.config.resolve import flatten, overlay, resolve
from gnnfleet.config.schema import RunConfig, SettingsTree
from gnnfleet.errors import ConfigError, GnnfleetError
from gnnfleet.graph.graph import Graph
from gnnfleet.nn.custom_model import annotate_model_errors
from gnnfleet.report.metrics import read_metrics
from gnnfleet.report.progress import Progress
from gnnfleet.strategies.protocol import RANK_LOCAL
from gnnfleet.strategies.registry import STRATEGIES, find_spec, reference_config
from gnnfleet.training.build import validate
from gnnfleet.training.checkpoint import has_rank_local, load_rank_local
from gnnfleet.training.partition_cache import error_for_exit_code
from gnnfleet.training.run_dir import RunDirectory

CHECK_EPOCHS = 2
TOLERANCE = 1e-9
"""Largest difference of float64 weights that counts as equal, relative to the largest of a tensor."""

_POLL_INTERVAL = 0.1


@dataclass(frozen=True)
class Comparison:
    """Runs to compare: ``settings`` apply to all, ``strategy_settings`` to one strategy each."""

    store: Path
    folder: Path  # of the run directories, which are named like the strategies
    strategies: Sequence[str]
    workers: int
    settings: SettingsTree = field(default_factory=dict)
    strategy_settings: Mapping[str, SettingsTree] = field(default_factory=dict)

    def run_dir(self, name: str) -> Path:
        return self.folder / name

    def config(self, name: str) -> RunConfig:
        """The config of a strategy; raises ConfigError for settings it does not accept."""
        spec = find_spec(name)
        workers = 1 if spec.execution == "single" else self.workers
        strategy = {"name": name, **self.strategy_settings.get(name, {})}
        tree = overlay(self.settings, {"strategy": strategy, "workers": workers})
        return resolve(tree if spec.placement != "none" else {**tree, "partition": None})

    def require_strategies(self) -> None:
        """Raise the error of the first strategy if none of them accepts the settings."""
        errors = []
        for name in self.strategies:
            try:
                self.config(name)
                return
            except ConfigError as error:
                errors.append(error)
        raise errors[0]


@dataclass(frozen=True)
class EqualityCheck:
    """The largest difference of weights between a strategy and local.

    None if the strategy is not meant to equal local, or if the check failed for a ``reason``.
    """

    difference: float | None = None
    reason: str = ""

    @property
    def equals(self) -> bool:
        return self.difference is not None and self.difference <= TOLERANCE

    def __str__(self) -> str:
        if self.difference is None:
            return f"not checked: {self.reason}" if self.reason else "no, by design"
        return f"{'yes' if self.equals else 'no'} ({self.difference:.0e})"

    def as_json(self) -> dict[str, Any]:
        if self.reason:
            return {"equals_local": None, "difference": None, "not_checked": self.reason}
        return {"equals_local": self.equals, "difference": self.difference}


def parse_strategies(text: str) -> list[str]:
    """The names in a comma-separated list; raises ConfigError for unknown or repeated ones."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        find_spec(name)
    if not names or len(set(names)) < len(names):
        raise ConfigError(f"--strategies takes different names, as {','.join(STRATEGIES)}; found {text!r}")
    return names


def split_settings(settings: Mapping[str, object]) -> tuple[dict[str, object], dict[str, SettingsTree]]:
    """(settings of all runs, settings of one strategy each), from {"train.lr": …, "sar.group": …}."""
    common: dict[str, object] = {}
    by_strategy: dict[str, SettingsTree] = {}
    for key, value in settings.items():
        group, dot, option = key.partition(".")
        if group == "strategy":
            raise ConfigError(f"--set {key}: strategies have different options; name one, as in sar.{option}")
        if dot and group in STRATEGIES:
            by_strategy.setdefault(group, {})[option] = value
        else:
            common[key] = value
    return common, by_strategy


def one_epoch_steps(graph: Graph, config: RunConfig) -> SettingsTree:
    """Strategy settings that make an epoch one pass over the training items, unless the user set its length."""
    one_pass = config.spec.one_pass
    if one_pass is None:
        return {}
    no_rows = {kind: torch.empty(0, dtype=torch.int64) for kind in graph.nodes}
    with annotate_model_errors(config.model.file):
        count = len(validate(graph, config, no_rows).task.items("train"))
    return one_pass(config.strategy, count, config.workers)


def train_all(comparison: Comparison, *, progress: Progress = Progress(), say: Callable[[str], None]) -> list[str]:
    """Train every strategy and return those that could be trained; raises the first error if there are none."""
    trained, errors = [], []
    for name in comparison.strategies:
        try:
            _train(comparison.store, comparison.config(name), comparison.run_dir(name), progress=progress)
            trained.append(name)
        except GnnfleetError as error:
            errors.append(error)
            say(f"{name} is skipped: {error}")
    if not trained:
        raise errors[0]
    return trained


def check_all(
    comparison: Comparison, names: Sequence[str], *, progress: Progress = Progress()
) -> dict[str, EqualityCheck]:
    checks: dict[str, EqualityCheck] = {}
    references: dict[str, Path] = {}
    with tempfile.TemporaryDirectory(prefix="gnnfleet-") as scratch:
        for name in names:
            config = _check_config(comparison, name)
            reference = reference_config(config.strategy, config.model.layers)
            if reference is None:
                checks[name] = EqualityCheck()
                continue
            run_dir, key = Path(scratch) / name, reference.model_dump_json()
            local = config.model_copy(update={"strategy": reference, "workers": 1, "partition": None})
            try:
                _train(comparison.store, config, run_dir, progress=progress, stage=f"check of {name} against local")
                if key not in references:
                    local_dir = Path(scratch) / f"local-{len(references)}"
                    _train(comparison.store, local, local_dir, progress=progress, stage=f"local, to check {name}")
                    references[key] = local_dir
                checks[name] = EqualityCheck(_largest_difference(run_dir, references[key]))
            except GnnfleetError as error:  # the results of training are still worth showing
                checks[name] = EqualityCheck(reason=str(error))
    return checks


def _check_config(comparison: Comparison, name: str) -> RunConfig:
    """The config of a trained strategy with what its run chose, for two epochs in float64."""
    config, checkpoint = comparison.config(name), RunDirectory(comparison.run_dir(name)).checkpoint("last")
    tree = config.model_dump(mode="json")
    if config.spec.chosen is not None and checkpoint.exists() and has_rank_local(checkpoint, config.workers):
        tree["strategy"] |= config.spec.chosen(load_rank_local(checkpoint, 0)[RANK_LOCAL])
    tree["train"] |= {"epochs": CHECK_EPOCHS, "patience": 0}
    return resolve({**tree, "precision": "float64", "report": {}})


def _largest_difference(run: Path, reference: Path) -> float:
    """The largest relative difference of weights after the last epoch."""
    seed = RunDirectory(run).config().seed
    checkpoints = [RunDirectory(path, seed=seed).load_weights("last") for path in (run, reference)]
    weights, expected = (checkpoint[0]["model"] for checkpoint in checkpoints if checkpoint is not None)
    largest = 0.0
    for name, tensor in expected.items():
        if tensor.numel():
            difference = (weights[name].double() - tensor.double()).abs().max()
            largest = max(largest, float(difference / tensor.double().abs().max().clamp(min=1e-300)))
    return largest


def _train(store: Path, config: RunConfig, run_dir: Path, *, progress: Progress, stage: str | None = None) -> None:
    """Run ``gnnfleet train`` in another process, so that its memory is measured alone; raises its error."""
    workers = f" on {config.workers} workers" if config.workers > 1 else ""
    advance = progress.stage(stage or f"train {config.strategy.name}{workers}", config.train.epochs)
    settings = flatten(_non_default_settings(config)).items()
    options = [f"--set={key}={json.dumps(value)}" for key, value in settings if value is not None]
    command = gnnfleet_command("train", str(store), *options, "--run-dir", str(run_dir), "--json", "-q")
    epochs = 0
    with tempfile.TemporaryFile("w+") as stderr, _running(command, stderr) as process:
        while process.poll() is None:
            time.sleep(_POLL_INTERVAL)
            before, epochs = epochs, len(read_metrics(run_dir / "metrics.jsonl"))
            advance(epochs - before)
        if process.returncode:
            stderr.seek(0)
            errors = [line for line in stderr.read().splitlines() if line.startswith("error: ")]
            text = errors[-1].removeprefix("error: ") if errors else f"it ended with exit code {process.returncode}"
            raise error_for_exit_code(process.returncode)(text)


def _non_default_settings(config: RunConfig) -> SettingsTree:
    tree = config.model_dump(mode="json", exclude_defaults=True)
    tree["strategy"] = {"name": config.strategy.name, **config.strategy.model_dump(mode="json", exclude_defaults=True)}
    return tree


_CHILD = """
import sys
from gnnfleet.comm.process_lifetime import die_with_parent
die_with_parent(int(sys.argv.pop(1)))
from gnnfleet.cli.main import main
main()
"""


def gnnfleet_command(*arguments: str) -> list[str]:
    """The command line of a gnnfleet command that ends with this process.

    The child asks the kernel for that itself: code between fork and exec may deadlock while other threads run.
    """
    return [sys.executable, "-c", _CHILD, str(os.getpid()), *arguments]


@contextmanager
def _running(command: Sequence[str], stderr: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A process in its own session, so that Ctrl-C reaches only this process, which then terminates it."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=stderr, start_new_session=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

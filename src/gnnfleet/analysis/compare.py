"""The same model, seed and epochs under several strategies, one run after the other, each in processes of its own.

Whether a strategy equals ``local`` is measured: both train two epochs in float64, and whole weights are compared.
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
from gnnfleet.report.progress import NoProgress, Progress
from gnnfleet.strategies.protocol import RANK_LOCAL
from gnnfleet.strategies.registry import STRATEGIES, find_spec, reference_config
from gnnfleet.training.build import validate
from gnnfleet.training.partition_cache import error_for_exit_code
from gnnfleet.training.run_dir import RunDirectory

CHECK_EPOCHS = 2
TOLERANCE = 1e-9
"""Of float64 weights, relative to the largest of a tensor."""

_POLL = 0.1


@dataclass(frozen=True)
class Comparison:
    """What is compared: ``settings`` are of all runs, ``strategy_settings`` of one strategy each."""

    store: Path
    folder: Path  # runs go below it, by name of the strategy
    strategies: Sequence[str]
    workers: int
    settings: SettingsTree = field(default_factory=dict)
    strategy_settings: Mapping[str, SettingsTree] = field(default_factory=dict)

    def run_dir(self, name: str) -> Path:
        return self.folder / name

    def config(self, name: str) -> RunConfig:
        """Raises ConfigError where a strategy cannot be trained so."""
        spec = find_spec(name)
        workers = 1 if spec.execution == "single" else self.workers
        strategy = {"name": name, **self.strategy_settings.get(name, {})}
        words = overlay(self.settings, {"strategy": strategy, "workers": workers})
        return resolve(words if spec.placement != "none" else {**words, "partition": None})

    def require_strategies(self) -> None:
        """Raise what the first strategy says where none of them can be trained so."""
        said = []
        for name in self.strategies:
            try:
                self.config(name)
                return
            except ConfigError as error:
                said.append(error)
        raise said[0]


@dataclass(frozen=True)
class EqualityCheck:
    """Whether a strategy equals local: the largest difference of weights, None where that is not its aim, or where
    it could not be checked: ``reason``."""

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
        told: dict[str, Any] = {"equals_local": self.equals, "difference": self.difference}
        return {**told, "equals_local": None, "not_checked": self.reason} if self.reason else told


def parse_strategies(text: str) -> list[str]:
    """Names in the order given; raises ConfigError for one that is not there, or twice."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        find_spec(name)
    if not names or len(set(names)) < len(names):
        raise ConfigError(f"--strategies takes different names, as {','.join(STRATEGIES)}; found {text!r}")
    return names


def split_settings(given: Mapping[str, object]) -> tuple[dict[str, object], dict[str, SettingsTree]]:
    """(words of all runs, words of one strategy), from {"train.lr": …, "sar.group": …}."""
    common: dict[str, object] = {}
    own: dict[str, SettingsTree] = {}
    for key, value in given.items():
        group, dot, word = key.partition(".")
        if group == "strategy":
            raise ConfigError(f"--set {key}: strategies differ in their words; name one, as in sar.{word}")
        if dot and group in STRATEGIES:
            own.setdefault(group, {})[word] = value
        else:
            common[key] = value
    return common, own


def one_epoch_steps(graph: Graph, config: RunConfig) -> SettingsTree:
    """Strategy settings that make an epoch one pass over the training items, where the user set no length."""
    one_pass = config.spec.one_pass
    if one_pass is None:
        return {}
    nobody = {kind: torch.empty(0, dtype=torch.int64) for kind in graph.nodes}
    with annotate_model_errors(config.model.file):
        count = len(validate(graph, config, nobody).task.items("train"))
    return one_pass(config.strategy, count, config.workers)


def train_all(contest: Comparison, *, progress: Progress = NoProgress(), say: Callable[[str], None]) -> list[str]:
    """Train every strategy; the names of those that could be. One that cannot is said why; raises where none can."""
    done, failed = [], []
    for name in contest.strategies:
        try:
            config = contest.config(name)
            _train(contest.store, config, contest.run_dir(name), progress=progress)
            done.append(name)
        except GnnfleetError as error:
            failed.append(error)
            say(f"{name} is left out: {error}")
    if not done:
        raise failed[0]
    return done


def check_all(
    contest: Comparison, names: Sequence[str], *, progress: Progress = NoProgress()
) -> dict[str, EqualityCheck]:
    """Whether each of some trained strategies equals local."""
    found: dict[str, EqualityCheck] = {}
    known: dict[str, Path] = {}
    with tempfile.TemporaryDirectory(prefix="gnnfleet-") as scratch:
        for name in names:
            config = _check_config(contest, name)
            other = reference_config(config.strategy, config.model.layers)
            if other is None:
                found[name] = EqualityCheck()
                continue
            folder, key = Path(scratch) / name, other.model_dump_json()
            plain = config.model_copy(update={"strategy": other, "workers": 1, "partition": None})
            try:
                _train(contest.store, config, folder, progress=progress, what=f"does {name} equal local?")
                if key not in known:
                    alone = Path(scratch) / f"local-{len(known)}"
                    _train(contest.store, plain, alone, progress=progress, what=f"local, for {name}")
                    known[key] = alone
                found[name] = EqualityCheck(_difference(folder, known[key]))
            except GnnfleetError as error:  # all have been trained: what is known is worth having
                found[name] = EqualityCheck(reason=str(error))
    return found


def _check_config(contest: Comparison, name: str) -> RunConfig:
    """The strategy as it was trained, for two epochs in float64."""
    config = contest.config(name)
    words = config.model_dump(mode="json")
    words["strategy"] |= _chosen_settings(contest.run_dir(name), config)
    words["train"] |= {"epochs": CHECK_EPOCHS, "patience": 0}
    return resolve({**words, "precision": "float64", "report": {}})


def _chosen_settings(run: Path, config: RunConfig) -> SettingsTree:
    """Settings that the strategy chose in a run."""
    choice = config.spec.chosen
    if choice is None:
        return {}
    directory = open_own_run(run)
    if directory.load("last") is None or not directory.has_rank_local("last", config.workers):
        return {}
    return choice(directory.load_rank_local("last", 0)[RANK_LOCAL])


def open_own_run(run: Path) -> RunDirectory:
    """A run with its own seed, so that its checkpoints are taken for its own."""
    return RunDirectory(run, seed=RunDirectory(run).config().seed)


def _difference(one: Path, two: Path) -> float:
    """The largest relative difference of weights after the last epoch."""
    states = []
    for path in (one, two):
        found = open_own_run(path).load_weights("last")
        assert found is not None, "it has just been trained"
        states.append(found[0]["model"])
    worst = 0.0
    for name, weights in states[1].items():
        apart = (states[0][name].double() - weights.double()).abs().max() if weights.numel() else torch.zeros(())
        worst = max(worst, float(apart / weights.double().abs().max().clamp(min=1e-300)) if weights.numel() else 0.0)
    return worst


def _train(store: Path, config: RunConfig, run_dir: Path, *, progress: Progress, what: str | None = None) -> None:
    """``gnnfleet train`` in a process of its own, so that memory is that of the run; raises its error."""
    name, epochs = config.strategy.name, config.train.epochs
    on = f" on {config.workers} workers" if config.workers > 1 else ""
    advance = progress.stage(what or f"train {name}{on}", epochs)
    words = [
        f"--set={key}={json.dumps(value)}"
        for key, value in flatten(_non_default_settings(config)).items()
        if value is not None
    ]
    line = gnnfleet_command("train", str(store), *words, "--run-dir", str(run_dir), "--json", "-q")
    seen = 0
    with tempfile.TemporaryFile("w+") as told, _process(line, told) as process:
        while process.poll() is None:
            time.sleep(_POLL)
            now = len(read_metrics(run_dir / "metrics.jsonl"))
            advance(now - seen)
            seen = now
        if process.returncode:
            told.seek(0)
            errors = [text for text in told.read().splitlines() if text.startswith("error: ")]
            text = errors[-1].removeprefix("error: ") if errors else f"it ended with exit code {process.returncode}"
            raise error_for_exit_code(process.returncode)(text)


def _non_default_settings(config: RunConfig) -> SettingsTree:
    """The words of a config that differ from their defaults: those that are left out keep their meaning."""
    words = config.model_dump(mode="json", exclude_defaults=True)
    words["strategy"] = {"name": config.strategy.name, **config.strategy.model_dump(mode="json", exclude_defaults=True)}
    return words


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
def _process(line: Sequence[str], errors: object) -> Iterator[subprocess.Popen[bytes]]:
    """A process that does not outlive this one. Ctrl-C is for this one, which ends it in order."""
    process = subprocess.Popen(
        line,
        stdout=subprocess.DEVNULL,
        stderr=errors,  # type: ignore[call-overload]
        start_new_session=True,
    )
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

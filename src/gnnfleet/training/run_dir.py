"""Directory of a run: config.json, metrics.jsonl, ranks.jsonl, checkpoints/{last,best}, record.json.

One process at a time may use it, by a lock of the kernel that disappears with its process.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from gnnfleet.comm.world import World
from gnnfleet.config.resolve import resolve
from gnnfleet.config.schema import RunConfig, SettingsTree
from gnnfleet.errors import ConfigError, RunError
from gnnfleet.graph.graph import Graph
from gnnfleet.graph.validate import open_validated_store
from gnnfleet.io.atomic import write_atomically
from gnnfleet.io.bundle import manifest_digest
from gnnfleet.nn.custom_model import file_digest
from gnnfleet.report.remarks import print_note
from gnnfleet.report.run_record import RunRecord, versions
from gnnfleet.strategies.protocol import SHARDED, State
from gnnfleet.training.checkpoint import (
    TrainState,
    load_checkpoint,
    load_sharded,
    save_checkpoint,
    sharded_ids,
)
from gnnfleet.training.output_schema import OutputSchema

MODEL_COPY = "model.py"
"""Copy of a custom model file as it was when the run started. Runs execute the original, not the copy."""


class RunDirectory:
    """A run on disk. ``on_checkpoint`` is called with the epoch of each new ``last``."""

    def __init__(
        self,
        path: Path,
        *,
        seed: int = 0,
        world: World | None = None,
        on_checkpoint: Callable[[int], None] = lambda epoch: None,
    ) -> None:
        self.path = path
        self.seed = seed
        self._on_checkpoint = on_checkpoint
        self.world = world or World()  # the ranks that write checkpoints together
        self._lock: TextIO | None = None

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    def checkpoint(self, name: str) -> Path:
        return self.path / "checkpoints" / name

    @property
    def is_initialized(self) -> bool:
        """True if a config was saved: a run killed before that cannot be resumed."""
        return (self.path / "config.json").is_file()

    def lock(self) -> None:
        """Lock the directory; raises RunError if another process uses it."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = (self.path / ".lock").open("w")
        except OSError as error:
            raise RunError(f"cannot write to {self.path}: {error.strerror}: choose another --run-dir") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self.close()
            raise RunError(
                f"{self.path} is in use by another process: wait for it or choose another --run-dir"
            ) from error

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    @contextmanager
    def open_for_resume(self, *, quiet: bool) -> Iterator[None]:
        """On Ctrl-C inside, tell the user how to resume."""
        try:
            yield
        except KeyboardInterrupt:
            print_note(f"run saved: to resume, repeat the command with --run-dir {self.path} --resume", quiet=quiet)
            raise

    def initialize(self, config: RunConfig, graph: Graph, output: OutputSchema | None) -> None:
        store = None if graph.store is None else {"path": str(graph.store.path.resolve()), "digest": graph.store.digest}
        file = config.model.file
        content = {
            "config": config.model_dump(mode="json"),
            "output": None if output is None else output.as_json(),
            "model_file": None if file is None else {"path": str(file), "sha256": file_digest(file)},
            "store": store,
            "versions": versions(),
        }
        if file is not None:
            self._write(MODEL_COPY, file.read_bytes())
        self._write("config.json", json.dumps({**content, "digest": manifest_digest(content)}, indent=1).encode())

    def info(self) -> SettingsTree:
        """Content saved by ``initialize``; raises RunError if this is not a run or its config is damaged."""
        if not self.path.is_dir() or not self.is_initialized:
            raise RunError(f"{self.path} is not a run: config.json is missing")
        try:
            content: SettingsTree = json.loads((self.path / "config.json").read_bytes())
            if content["digest"] != manifest_digest(content) or not isinstance(content["config"], dict):
                raise ValueError("altered")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OSError) as error:
            raise RunError(f"{self.path / 'config.json'} is damaged: restore it or train again") from error
        return content

    def record(self) -> RunRecord:
        """The record of a finished run; raises RunError for another."""
        try:
            return RunRecord(**json.loads((self.path / "record.json").read_bytes()))
        except (OSError, TypeError, ValueError) as error:
            raise RunError(
                f"{self.path} has no record: wait until it has finished, or continue with --resume"
            ) from error

    def open_graph(self, store: Path | None = None) -> Graph:
        """Open ``store``, or else the one that the run was trained on; raises RunError if that is gone or changed."""
        if store is not None:
            return open_validated_store(store)
        self.check_model_file()
        path = (self.info()["store"] or {}).get("path", "a graph in memory")
        if not Path(path).is_dir():
            raise RunError(f"{self.path} was trained on {path}, which is gone: pass it with --store")
        graph = open_validated_store(path)
        self.check_graph(graph)
        return graph

    def settings(self) -> SettingsTree:
        """The saved settings; raises RunError for those of version 0.1.0, whose options had other names."""
        info = self.info()
        if str(info.get("versions", {}).get("gnnfleet", "")).startswith("0.1."):
            raise RunError(
                f"{self.path} is a run of gnnfleet {info['versions']['gnnfleet']}, which had other options: resume, "
                "evaluate and predict with that version, or train again; its store and partitions can be used"
            )
        settings: SettingsTree = info["config"]
        return settings

    def config(self) -> RunConfig:
        return resolve(self.settings())

    def output(self) -> OutputSchema:
        """Output schema of the run; raises RunError if it is damaged."""
        try:
            return OutputSchema.from_json(self.info()["output"])
        except (KeyError, TypeError) as error:
            raise RunError(f"{self.path / 'config.json'} is damaged: restore it or train again") from error

    def check_model_file(self) -> None:
        """Raise RunError if the custom model file is missing or differs from the start of the run."""
        if self.config().model.is_live:
            raise RunError(
                f"{self.path} trained a module that a Python program passed to gf.train, and runs do not save modules: "
                "to resume, evaluate or load a run, train with model='file.py:factory'"
            )
        saved = self.info().get("model_file")
        if saved is None or not (self.path / "checkpoints").exists():  # no weights depend on it yet
            return
        path, copy = Path(saved["path"]), self.path / MODEL_COPY
        if not path.is_file():
            raise RunError(f"the model file {path} of this run is missing: restore it from the copy {copy}")
        if file_digest(path) != saved["sha256"]:
            raise RunError(
                f"the model file {path} changed since the run started: restore it from the copy {copy}, "
                "or start a new run"
            )

    def check_graph(self, graph: Graph) -> None:
        """Raise RunError if the store is not the one the run started with."""
        store = self.info()["store"]
        if store is not None and graph.store is not None and store["digest"] != graph.store.digest:
            raise RunError(
                f"{graph.store.path} changed since the run started, or is another store: start a new run, "
                "or restore the store"
            )

    def save(self, name: str, state: State, position: TrainState) -> None:
        save_checkpoint(self.checkpoint(name), state, position, seed=self.seed, world=self.world)
        if name == "last":
            self._on_checkpoint(position.epoch)

    def load(self, name: str) -> tuple[State, TrainState] | None:
        """Load a checkpoint; None if there is none. Raises RunError if it is damaged."""
        path = self.checkpoint(name)
        if not path.exists():
            return None
        state, position, seed = load_checkpoint(path)
        if seed != self.seed:
            raise RunError(f"checkpoint {path} has seed {seed}, the run has {self.seed}: it belongs to another run")
        return state, position

    def load_weights(self, name: str) -> tuple[State, TrainState] | None:
        """Load only the weights, including rows owned by any rank."""
        checkpoint = self.load(name)
        if checkpoint is None:
            return None
        state, position = checkpoint
        ids = sharded_ids(self.checkpoint(name))
        rows = load_sharded(self.checkpoint(name), rank=0, ids=ids).get(SHARDED, {})
        return {"model": {**state["model"], **{key: rows[key] for key in ids}}}, position

    def finish(self, record: Mapping[str, Any], pages: Mapping[str, str] | None = None) -> None:
        """Write the record of a finished run, and its artifacts."""
        for name, text in (pages or {}).items():
            self._write(name, text.encode())
        self._write("record.json", json.dumps(record, indent=1).encode())

    def append_rank_rows(self, totals: Mapping[str, Any]) -> None:
        self._write("ranks.json", json.dumps(totals).encode())

    def write_partition_info(self, method: str, quality: Mapping[str, Any]) -> None:
        self._write("parts.json", json.dumps({"method": method, "quality": quality}).encode())

    def log(self, text: str, *, quiet: bool) -> None:
        """Print a message for the user and append it to remarks.jsonl."""
        print_note(text, quiet=quiet)
        with suppress(OSError), (self.path / "remarks.jsonl").open("a") as file:
            file.write(json.dumps({"time": time.time(), "text": text}) + "\n")

    def _write(self, name: str, content: bytes) -> None:
        try:
            write_atomically(self.path / name, content)
        except OSError as error:
            raise RunError(f"cannot write {self.path / name}: {error.strerror or error}") from error


def new_directory(parent: Path, store: str, model: str) -> Path:
    """Create ``parent/<store>-<model>-<n>`` with the first free n; ``parent/last`` then points to it."""
    parent.mkdir(parents=True, exist_ok=True)
    stem = re.sub(r"[^\w.+-]+", "_", f"{store}-{model}")
    for number in itertools.count(1):
        path = parent / f"{stem}-{number}"
        with suppress(FileExistsError):
            path.mkdir()
            break
    link_last(path)
    return path


def link_last(path: Path) -> None:
    """Let the link ``last`` in the parent directory point to a run, unless ``last`` is not a link."""
    link = path.parent / "last"
    if link.exists() and not link.is_symlink():
        return
    partial = path.parent / f".last-{os.getpid()}"
    partial.unlink(missing_ok=True)
    partial.symlink_to(path.name)
    partial.replace(link)


def choose_directory(run_dir: Path | None, *, resume: bool, store: str, model: str) -> RunDirectory:
    """Directory of a run: ``run_dir`` if given, runs/last to resume, otherwise a new one below runs/."""
    if run_dir is None:
        last = Path("runs") / "last"
        if resume and not last.is_dir():
            raise ConfigError("there is no runs/last to resume: name the run with --run-dir")
        return RunDirectory(last.resolve() if resume else new_directory(Path("runs"), store, model))
    if run_dir.exists() and not run_dir.is_dir():
        raise ConfigError(f"{run_dir} is a file: choose another --run-dir")
    directory, files = RunDirectory(run_dir), list(run_dir.iterdir()) if run_dir.is_dir() else []
    if files and not resume:
        raise ConfigError(f"{run_dir} is not empty: pass --resume to continue it, or choose another --run-dir")
    expected = {"checkpoints", "tensorboard", MODEL_COPY}
    expected |= {"metrics.jsonl", "ranks.jsonl", "ranks.json", "parts.json", "remarks.jsonl", "record.json"}
    foreign = [file.name for file in files if file.name not in expected and not file.name.startswith(".")]
    if foreign and not directory.is_initialized:
        raise ConfigError(f"{run_dir} is not a run (it has {foreign[0]}): choose another --run-dir")
    return directory

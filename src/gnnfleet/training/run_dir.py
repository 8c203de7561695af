"""The directory of a run: config.json, metrics.jsonl, ranks.jsonl, checkpoints/{last,best}, record.json, perhaps more.

A run belongs to one process at a time: the lock is the kernel's, so a killed process leaves none behind.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from torch import Tensor

from gnnfleet.comm.world import World
from gnnfleet.config.resolve import resolve
from gnnfleet.config.schema import RunConfig, SettingsTree
from gnnfleet.errors import ConfigError, RunError
from gnnfleet.graph.graph import Graph
from gnnfleet.io.atomic import write_atomically
from gnnfleet.io.manifest import manifest_digest
from gnnfleet.nn.custom_model import file_digest
from gnnfleet.report.remarks import print_note
from gnnfleet.report.run_record import versions
from gnnfleet.strategies.protocol import SHARDED, State
from gnnfleet.training.checkpoint import (
    TrainState,
    has_rank_local,
    load_checkpoint,
    load_rank_local,
    load_sharded,
    save_checkpoint,
    sharded_ids,
)
from gnnfleet.training.output_schema import OutputSchema

MODEL_COPY = "model.py"
"""The file of the user's own model as it was when the run began. It is the original that is run."""


class RunDirectory:
    """An opened run; also what the loop hands checkpoints to. ``kept`` hears the epoch of the newest."""

    def __init__(
        self,
        path: Path,
        *,
        seed: int = 0,
        world: World | None = None,
        kept: Callable[[int], None] = lambda epoch: None,
    ) -> None:
        self.path = path
        self.seed = seed
        self._kept = kept
        self.world = world or World()  # the ranks that write checkpoints together
        self._lock: TextIO | None = None

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def is_initialized(self) -> bool:
        """Whether a config was saved here: a process killed before that leaves nothing to go on with."""
        return (self.path / "config.json").is_file()

    def lock(self) -> None:
        """Refuse a second process; raises RunError."""
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
        """While a run goes on that is kept: whoever interrupts it is told how to go on."""
        try:
            yield
        except KeyboardInterrupt:
            print_note(f"the run is kept: go on with the same command and --run-dir {self.path} --resume", quiet=quiet)
            raise

    def initialize(self, config: RunConfig, graph: Graph, output: OutputSchema | None) -> None:
        """Save what the run is about."""
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
        """What ``initialize`` saved; raises RunError when this is no run or its config is damaged."""
        if not self.path.is_dir() or not self.is_initialized:
            raise RunError(f"{self.path} is not a run: config.json is missing")
        try:
            content: SettingsTree = json.loads((self.path / "config.json").read_bytes())
            if content["digest"] != manifest_digest(content) or not isinstance(content["config"], dict):
                raise ValueError("altered")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OSError) as error:
            raise RunError(f"{self.path / 'config.json'} is damaged: restore it or train again") from error
        return content

    def config(self) -> RunConfig:
        return resolve(self.info()["config"])

    def output(self) -> OutputSchema:
        """What the run predicts; raises RunError when that is damaged."""
        try:
            return OutputSchema.from_json(self.info()["output"])
        except (KeyError, TypeError) as error:
            raise RunError(f"{self.path / 'config.json'} is damaged: restore it or train again") from error

    def check_model_file(self) -> None:
        """Raise RunError when the file of the user's own model is gone or not the one the run began with."""
        known = self.info().get("model_file")
        if known is None or not (self.path / "checkpoints").exists():  # nothing was learnt with it yet
            return
        path, copy = Path(known["path"]), self.path / MODEL_COPY
        if not path.is_file():
            raise RunError(f"the model file {path} of this run is gone: put its copy {copy} back there")
        if file_digest(path) != known["sha256"]:
            raise RunError(
                f"the model file {path} changed since the run began: put its copy {copy} back there, "
                "or start another run"
            )

    def check_graph(self, graph: Graph) -> None:
        """Raise RunError when the store is not the one the run began with."""
        store = self.info()["store"]
        if store is not None and graph.store is not None and store["digest"] != graph.store.digest:
            raise RunError(
                f"{graph.store.path} changed since the run began (or is another store): start another run, "
                "or bring the store back"
            )

    def save(self, name: str, state: State, position: TrainState) -> None:
        save_checkpoint(self.path / "checkpoints" / name, state, position, seed=self.seed, world=self.world)
        if name == "last":
            self._kept(position.epoch)

    def load(self, name: str) -> tuple[State, TrainState] | None:
        """A checkpoint, None when there is none; raises RunError when it is damaged."""
        path = self.path / "checkpoints" / name
        if not path.exists():
            return None
        state, position, seed = load_checkpoint(path)
        if seed != self.seed:
            raise RunError(f"checkpoint {path} has seed {seed}, the run has {self.seed}: it belongs to another run")
        return state, position

    def load_sharded(self, name: str, rank: int, ids: Mapping[str, Tensor]) -> State:
        """The rows a rank owns in a checkpoint that the first rank has found; raises RunError."""
        path = self.path / "checkpoints" / name
        return load_sharded(path, rank=rank, ids=ids) if ids else {}

    def has_rank_local(self, name: str, size: int) -> bool:
        """Whether a checkpoint has something for each of so many ranks alone."""
        return has_rank_local(self.path / "checkpoints" / name, size)

    def load_rank_local(self, name: str, rank: int) -> State:
        """What a checkpoint has for one rank alone."""
        return load_rank_local(self.path / "checkpoints" / name, rank)

    def load_weights(self, name: str) -> tuple[State, TrainState] | None:
        """The weights alone of a checkpoint, whole in this process though ranks may own rows of them."""
        found = self.load(name)
        if found is None:
            return None
        path = self.path / "checkpoints" / name
        every = sharded_ids(path)
        own = load_sharded(path, rank=0, ids=every)[SHARDED] if every else {}
        return {"model": {**found[0]["model"], **{key: own[key] for key in every}}}, found[1]

    def finish(self, record: Mapping[str, Any], pages: Mapping[str, str] | None = None) -> None:
        """The end of a run: its record, and files that show how it went."""
        for name, text in (pages or {}).items():
            self._write(name, text.encode())
        self._write("record.json", json.dumps(record, indent=1).encode())

    def append_rank_rows(self, found: Mapping[str, Any]) -> None:
        """What workers have sent and held until now."""
        self._write("ranks.json", json.dumps(found).encode())

    def write_partition_info(self, method: str, quality: Mapping[str, Any]) -> None:
        """How the graph is cut."""
        self._write("parts.json", json.dumps({"method": method, "quality": quality}).encode())

    def log(self, text: str, *, quiet: bool) -> None:
        """A sentence for the user, which is kept as well: whoever looks at the run later reads it."""
        print_note(text, quiet=quiet)
        with suppress(OSError), (self.path / "remarks.jsonl").open("a") as file:
            file.write(json.dumps({"time": time.time(), "text": text}) + "\n")

    def _write(self, name: str, content: bytes) -> None:
        try:
            write_atomically(self.path / name, content)
        except OSError as error:
            raise RunError(f"cannot write {self.path / name}: {error.strerror or error}") from error


def new_directory(parent: Path, store: str, model: str) -> Path:
    """``parent/<store>-<model>-<n>`` with the first free n, created; ``parent/last`` then points to it."""
    parent.mkdir(parents=True, exist_ok=True)
    stem = re.sub(r"[^\w.+-]+", "_", f"{store}-{model}")
    number = 1
    while True:
        path = parent / f"{stem}-{number}"
        try:
            path.mkdir()
        except FileExistsError:
            number += 1
            continue
        link_last(path)
        return path


def link_last(path: Path) -> None:
    """Make ``last`` beside a run point to it; left alone where ``last`` is something else."""
    link = path.parent / "last"
    if link.exists() and not link.is_symlink():
        return
    partial = path.parent / f".last-{os.getpid()}"
    partial.unlink(missing_ok=True)
    partial.symlink_to(path.name)
    partial.replace(link)


def choose_directory(run_dir: Path | None, *, resume: bool, store: str, model: str) -> RunDirectory:
    """Where a run goes: the given directory, the last one when it is continued, otherwise a new one below runs/."""
    if run_dir is None:
        last = Path("runs") / "last"
        if resume and not last.is_dir():
            raise ConfigError("there is no runs/last to resume: name the run with --run-dir")
        return RunDirectory(last.resolve() if resume else new_directory(Path("runs"), store, model))
    if run_dir.exists() and not run_dir.is_dir():
        raise ConfigError(f"{run_dir} is a file: choose another --run-dir")
    if not resume and run_dir.is_dir() and any(run_dir.iterdir()):
        raise ConfigError(f"{run_dir} is not empty: pass --resume to go on with it, or choose another --run-dir")
    if resume and run_dir.is_dir() and any(run_dir.iterdir()):
        known = {"config.json", "checkpoints", "tensorboard", MODEL_COPY}
        known |= {"metrics.jsonl", "ranks.jsonl", "ranks.json", "parts.json", "remarks.jsonl", "record.json"}
        foreign = [p.name for p in run_dir.iterdir() if p.name not in known and not p.name.startswith(".")]
        if foreign and not (run_dir / "config.json").is_file():
            raise ConfigError(f"{run_dir} is not a run (it has {foreign[0]}): choose another --run-dir")
    return RunDirectory(run_dir)

"""Compares the bits that two versions of gnnfleet train, strategy by strategy.

    python -m tests.golden.compare [--old COMMIT] [--only sar,tma] [--again]

The old version is built once, in an environment of its own under build/golden. Both versions make their own stores and
train the cases of ``cases.py``; tensors of both checkpoints, losses and predictions must be equal bit for bit. Results
of the old version are saved, so that a second comparison runs the new version only. The exit code is 1 on any
difference, 2 if nothing could be compared. Both run on one thread and on the best instruction set of the machine.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq
import torch
from safetensors.torch import load_file

from gnnfleet.config.renamed import RENAMED, RENAMED_VALUES
from tests.golden.cases import CASES, STORES, Case, Options

ROOT = Path(__file__).parents[2]
CACHE = ROOT / "build" / "golden"
OLD = "a56b128"
"""Version 0.1.0."""

SECONDS = 180
"""Limit of one command."""

# --- Translation, old → new; empty means identity. Options are translated by gnnfleet.config.renamed. ---

ARGUMENTS: dict[str, str] = {}
"""Commands and flags of the command line, and settings of environment variables, as {"--run-dir": "--output"}."""

FILES: dict[str, str] = {}
"""Files of a checkpoint without suffix, as {"own": "rows"}."""

TENSORS: list[tuple[str, str]] = []
"""(pattern, replacement) for names of tensors, as "model/conv.weight": all that match are applied in order."""

METRICS: dict[str, str] = {}
"""Keys of metrics.jsonl."""

COLUMNS: dict[str, str] = {}
"""Columns of prediction files, and keys of traffic in record.json."""

# -----------------------------------------------------------------------------------------------------------------

MEASURED = ("step", "train_loss", "val", "val_loss", "cosine", "trainers", "steps", "kept_edges")
COUNTED = ("relays", "duplication", "hit_rate", "megabytes_fetched", "megabytes_up", "megabytes_down")
"""Keys of metrics.jsonl that are compared. What is counted tells whether an option still has an effect where results do
not depend on it: caches, groups, batches per relay. Bytes and rounds of record.json do as well."""

Values = dict[str, object]
"""The compared values of a run, under the names of the old version."""


@dataclass(frozen=True)
class Side:
    """Name one version: its interpreter, and the directory where its stores and runs are."""

    name: str
    python: Path
    folder: Path
    translates: bool

    def call(self, *arguments: str | Path, variables: Sequence[str] = ()) -> None:
        """Run a command of gnnfleet; raises RuntimeError with its output when it fails."""
        translated, settings = (
            [ARGUMENTS.get(argument, argument) if self.translates else argument for argument in map(str, group)]
            for group in (arguments, variables)
        )
        command = [str(self.python), "-m", "gnnfleet", *translated]
        env = environment() | dict(setting.split("=", 1) for setting in settings)
        done = subprocess.run(
            command, cwd=self.folder, env=env, capture_output=True, text=True, timeout=SECONDS, check=False
        )
        if done.returncode:
            raise RuntimeError(
                f"{done.stderr[-2000:].strip()}\n{self.name}: ended with {done.returncode}: {' '.join(command)}"
            )

    def set(self, settings: Options, scope: str) -> Iterator[str]:
        """Arguments for ``settings``, in the names of this version."""
        for key, value in settings.items():
            yield "--set"
            name, text = renamed(key, value, scope) if self.translates else (key, value)
            yield f"{name}={text}"


def environment() -> dict[str, str]:
    """Variables of both versions: one thread, and no way to import another gnnfleet."""
    inherited = {
        key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    }
    return {**inherited, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "COLUMNS": "200"}


def renamed(key: str, value: object, scope: str) -> tuple[str, object]:
    """An option of the old version as the new one has it; ``scope`` is the strategy, or the generator."""
    group, _, option = key.rpartition(".")
    if group != "strategy":
        return key, value
    option = RENAMED.get(scope, {}).get(option, option)
    return f"strategy.{option}", RENAMED_VALUES.get((scope, option), {}).get(str(value), value)


def old_side(commit: str) -> Side:
    """The old version, built when it is not there yet."""
    full = _git("rev-parse", "--verify", f"{commit}^{{commit}}").decode().strip()
    folder = CACHE / full[:12]
    if not (folder / "built").exists():
        shutil.rmtree(folder, ignore_errors=True)
        _build(full, folder)
        (folder / "built").touch()
    side = Side("old", folder / "env" / "bin" / "python", folder, translates=False)
    _check_origin(side, folder / "env", kernels=True)
    return side


def _build(commit: str, folder: Path) -> None:
    """Install a commit in a new environment, which borrows all other packages from the present one."""
    print(f"building {commit[:12]} in {folder}", flush=True)
    with tarfile.open(fileobj=io.BytesIO(_git("archive", commit))) as tar:
        tar.extractall(folder / "source", filter="data")
    subprocess.run([sys.executable, "-m", "venv", folder / "env"], check=True)
    python = folder / "env" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", folder / "source"], check=True)
    # Paths in a .pth file are appended to sys.path and their own .pth files are not read: the hook of an editable
    # gnnfleet stays without effect. Written after pip, which must not see that gnnfleet either.
    borrowed = [path for path in sys.path if Path(path).name == "site-packages"]
    (site,) = (folder / "env" / "lib").glob("python*/site-packages")
    (site / "borrowed.pth").write_text("".join(f"{path}\n" for path in borrowed))


def _git(*arguments: str) -> bytes:
    return subprocess.run(["git", *arguments], cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout


def _check_origin(side: Side, home: Path, *, kernels: bool) -> None:
    """Raise RuntimeError unless a side runs the code below ``home``, of the old one the ``kernels`` too."""
    probe = "import torch, gnnfleet, gnnfleet._native as n; print(gnnfleet.__file__, n.__file__, n.isa(), sep='\\n')"
    line = [str(side.python), "-c", probe]
    done = subprocess.run(line, cwd=side.folder, env=environment(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{side.name}: gnnfleet cannot be imported:\n{done.stderr[-2000:]}")
    package, native, isa = done.stdout.splitlines()
    for file in (package, native) if kernels else (package,):
        if not Path(file).is_relative_to(home):
            raise RuntimeError(f"{side.name}: expected gnnfleet below {home}, it is {file}: remove {side.folder}")
    print(f"{side.name}: {package}, kernels {native} ({isa})", flush=True)


def new_side() -> Side:
    """The working tree, with nothing of former comparisons."""
    folder = CACHE / "new"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    side = Side("new", Path(sys.executable), folder, translates=True)
    _check_origin(side, ROOT / "src", kernels=False)
    return side


def make_store(side: Side, name: str) -> None:
    generator, parameters = STORES[name]
    path = side.folder / "stores" / f"{name}-{_key(STORES[name])}"
    if not path.exists():
        side.call("datasets", "make", generator, "--output", path, "--quiet", *side.set(parameters, generator))


def run_case(side: Side, case: Case) -> Path:
    """Train a case, unless it is there; returns its directory."""
    path = side.folder / "cases" / f"{case.name}-{_key(case.content)}"
    if (path / "done").exists():
        return path
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    # A store for every case: each makes its own partitions, and no case waits for another.
    store = path / "store"
    shutil.copytree(side.folder / "stores" / f"{case.store}-{_key(STORES[case.store])}", store)
    run = path / "run"
    side.call(
        "train", store, "--run-dir", run, "--quiet", *side.set(case.settings, case.strategy), variables=case.environment
    )
    if case.predict is not None:
        more: list[str | Path] = list(case.predict)
        if case.pairs:
            (path / "pairs.csv").write_text("\n".join(["src,dst", *case.pairs]) + "\n")
            more += ["--pairs", path / "pairs.csv"]
        side.call("predict", run, "--output", path / "predictions.parquet", "--quiet", *more)
    shutil.rmtree(store)
    (path / "done").touch()
    return path


def _key(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:8]


def read_values(path: Path) -> Values:
    """Tensors of both checkpoints, losses of all epochs and columns of predictions."""
    values: Values = {}
    for name in ("last", "best"):
        for file in sorted((path / "run" / "checkpoints" / name).glob("*.safetensors")):
            values |= {f"{name}/{file.stem}/{key}": tensor for key, tensor in load_file(file).items()}
    for number, line in enumerate((path / "run" / "metrics.jsonl").read_text().splitlines(), 1):
        row = json.loads(line)
        keys = [*MEASURED, *COUNTED, *(METRICS[key] for key in (*MEASURED, *COUNTED) if key in METRICS)]
        values |= {f"metrics/{number}/{key}": row[key] for key in keys if key in row}
    traffic = json.loads((path / "run" / "record.json").read_text())["traffic"]
    values |= {f"traffic/{key}": traffic[key] for key in ("bytes_sent", "rounds")}
    if (path / "predictions.parquet").exists():
        table = pq.read_table(path / "predictions.parquet")
        values |= {f"predictions/{name}": table[name].to_pylist() for name in table.column_names}
    return values


def with_new_names(values: Mapping[str, object]) -> Values:
    """Values of the old version under the names of the new one."""
    renamed = {}
    for key, value in values.items():
        group, middle, name = key.split("/", 2) if key.count("/") > 1 else (*key.split("/", 1), "")
        if group == "metrics":
            name = METRICS.get(name, name)
        elif group in ("predictions", "traffic"):
            middle = COLUMNS.get(middle, middle)
        else:
            both = f"{middle}/{name}"
            for pattern, new in TENSORS:
                both = re.sub(pattern, new, both)
            middle, _, name = both.partition("/")
            middle = FILES.get(middle, middle)
        renamed["/".join(part for part in (group, middle, name) if part)] = value
    return renamed


def differences(old: Values, new: Values) -> list[str]:
    """Descriptions of the values that differ in any bit; NaN equals NaN of the same bits."""
    wrong = []
    for key in dict.fromkeys([*old, *new]):
        if key not in new or key not in old:
            wrong.append(f"{key} is only in the {'old' if key in old else 'new'} run")
        elif not _same(old[key], new[key]):
            wrong.append(f"{key}{_distance(old[key], new[key])}")
    return wrong


def _same(value: object, other: object) -> bool:
    if isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor):
        alike = value.dtype == other.dtype and value.shape == other.shape
        return alike and torch.equal(_bytes(value), _bytes(other))
    return repr(value) == repr(other)  # Python prints floats exactly


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _distance(old: object, new: object) -> str:
    if isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor):
        if old.shape != new.shape or old.dtype != new.dtype:
            return f" is {new.dtype} {list(new.shape)}, it was {old.dtype} {list(old.shape)}"
        return f" differs by up to {(old.double() - new.double()).abs().max().item():.3g}"
    return f" is {str(new)[:60]}, it was {str(old)[:60]}"


def compare(case: Case, old: Side, new: Side) -> tuple[int, list[str]]:
    """(number of values, differences)."""
    before, after = with_new_names(read_values(run_case(old, case))), read_values(run_case(new, case))
    wrong = differences(before, after)
    if not any(key.startswith("best/") for key in after) or not any(key.startswith("metrics/") for key in after):
        wrong.append("the new run has no best checkpoint or no metrics")
    return len(before), wrong


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.golden.compare", description=__doc__)
    parser.add_argument("--old", default=OLD, metavar="COMMIT", help=f"the version to compare with (default {OLD})")
    parser.add_argument("--only", default="", metavar="NAMES", help="cases whose names begin so, separated by commas")
    parser.add_argument("--again", action="store_true", help="run the old version again, too")
    parser.add_argument("--jobs", type=int, default=2, help="cases at a time (default 2)")
    args = parser.parse_args(arguments)
    selected = [case for case in CASES if case.name.startswith(tuple(args.only.split(",")))]
    if not selected:
        parser.error(f"no case begins with {args.only}: there are {', '.join(case.name for case in CASES)}")
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            parser.error(f"another comparison runs in {CACHE}: wait for it")
        try:
            old, new = old_side(args.old), new_side()
            if args.again:
                shutil.rmtree(old.folder / "cases", ignore_errors=True)
                shutil.rmtree(old.folder / "stores", ignore_errors=True)
            return _compare_all(selected, old, new, jobs=args.jobs)
        except (RuntimeError, subprocess.CalledProcessError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 2


def _compare_all(chosen: Sequence[Case], old: Side, new: Side, *, jobs: int) -> int:
    """Print a line for every case; returns the exit code."""
    started, failed = time.monotonic(), 0
    for side in (old, new):
        for name in dict.fromkeys(case.store for case in chosen):
            make_store(side, name)
    with ThreadPoolExecutor(jobs) as pool:
        waiting = [(case, pool.submit(compare, case, old, new)) for case in chosen]
        for case, future in waiting:
            try:
                count, wrong = future.result()
            except (RuntimeError, OSError, subprocess.TimeoutExpired) as error:
                count, wrong = 0, [f"nothing, it failed: {error}"]
            failed += bool(wrong)
            verdict = "equal" if not wrong else f"DIFFERENT: {len(wrong)}, first {wrong[0]}"
            print(f"{case.name:24} {count:5} values  {verdict}", flush=True)
    print(f"{len(chosen)} cases, {failed} different, {time.monotonic() - started:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

"""The ranks of a script: those that torchrun or ``gf.launch`` started, or this process alone."""

from __future__ import annotations

import atexit
import json
import runpy
import sys
import tempfile
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from gnnfleet.comm.heartbeat import FailureDetector
from gnnfleet.comm.launch_env import LaunchEnv
from gnnfleet.comm.process_lifetime import exit_process, interrupt_code
from gnnfleet.comm.world import World
from gnnfleet.config.schema import DEFAULT_SILENCE_LIMIT
from gnnfleet.errors import ConfigError, ExchangeError, GnnfleetError
from gnnfleet.launch import local_launcher
from gnnfleet.launch.rank_main import join_ranks
from gnnfleet.launch.spec import RunSpec
from gnnfleet.nn.custom_model import annotate_model_errors

_ADVICE = "start the script again, from its last fleet.save"

_worlds: list[World] = []  # one, once this process has joined


def script_world(silence_limit: float) -> World:
    """Collective. The World of this process. Under torchrun its ranks meet on the first call."""
    if not _worlds:
        env = LaunchEnv.from_environment()
        if env is None or env.size == 1:
            return World()
        ranks = ExitStack()
        joined = join_ranks(env, print_errors=True, silence_limit=silence_limit)
        world, _, detector = ranks.enter_context(joined)
        sys.excepthook = partial(_fail, detector)
        atexit.register(ranks.close)
        _worlds.append(world)
    return _worlds[0]


def _fail(
    detector: FailureDetector, kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> NoReturn:
    """End this process after an exception that the script did not catch; the other ranks name it."""
    script = getattr(sys.modules["__main__"], "__file__", None)
    try:
        if not isinstance(error, ExchangeError | KeyboardInterrupt):  # the line that lost a peer explains nothing
            sys.__excepthook__(kind, error, trace)
        try:
            with annotate_model_errors(None if script is None else Path(script)):
                raise error
        except Exception as annotated:
            detector.fail(annotated)
    except KeyboardInterrupt as stop:  # also while it looks for the reason
        exit_process(interrupt_code(stop))
    exit_process(1)


def launch(
    function: Callable[..., Any], *args: Any, workers: int = 2, silence_limit: float = DEFAULT_SILENCE_LIMIT
) -> Any:
    """Call ``function(*args)`` in worker processes on this machine; returns the result of rank 0.

    Arguments and result are JSON. The function is at the top level of a file. A script that calls ``gf.launch`` does so
    under ``if __name__ == "__main__":``. One worker runs in this process. The error of a worker is raised here.
    """
    env, name = LaunchEnv.from_environment(), getattr(function, "__qualname__", "")
    if env is not None and env.size > 1:
        raise ConfigError(
            "gf.launch starts workers, and this process is one of them: call it without torchrun, and under "
            'if __name__ == "__main__":'
        )
    file = Path(getattr(getattr(function, "__code__", None), "co_filename", "")).resolve()
    if workers < 1:
        raise ConfigError(f"workers is a number from 1, found {workers}")
    if workers > 1 and not (file.is_file() and name.isidentifier()):
        raise ConfigError(
            f"workers cannot find {name or function}: expected a function at the top level of a file, which a notebook "
            "would import"
        )
    if workers == 1:
        return function(*args)
    spec = getattr(sys.modules.get(function.__module__), "__spec__", None)
    module = spec.name if spec is not None and spec.origin == str(file) else None
    location = {"module": module, "file": str(file), "function": name}
    with tempfile.TemporaryDirectory(prefix="gnnfleet-") as scratch:
        question = {**location, "path": sys.path, "args": list(args)}
        config = {"silence_limit": silence_limit}
        spec = RunSpec(store="", digest="", partition="", run_dir=scratch, config=config, question=question)
        folder, entry = Path(scratch) / "launch", f"{__name__}:run_function"
        return local_launcher.launch(spec, folder=folder, workers=workers, advice=_ADVICE, function=entry)["result"]


def run_function(spec: RunSpec, world: World) -> dict[str, Any]:
    """Collective. Call the function of ``launch`` as one of its workers."""
    question = spec.question
    assert question is not None
    _worlds.append(world)
    tempfile.tempdir = spec.run_dir  # the launcher removes it
    sys.path[:] = question["path"]
    file, module = question["file"], question["module"]
    try:
        with annotate_model_errors(Path(file)):
            names = vars(import_module(module)) if module else runpy.run_path(file, run_name="gnnfleet_script")
            result = names[question["function"]](*question["args"])
    except GnnfleetError as error:
        if error.__cause__ is not None and not isinstance(error.__cause__, GnnfleetError):
            error.add_note("".join(traceback.format_exception(error.__cause__)))
        raise
    try:
        return {"result": json.loads(json.dumps(result if world.is_first else None))}
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the result of {question['function']} is not JSON, as gf.launch needs: {error}") from error

"""Custom models, named ``file.py:factory``: ``factory(config, graph, out_channels)`` returns a Model.

The file is executed with its folder first on the import path; ``sys.path`` is restored afterwards. An error in it
becomes one message with file and line; the cause is chained.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from weakref import WeakValueDictionary

import torch

from gnnfleet.errors import ConfigError, GnnfleetError, suggest
from gnnfleet.graph.graph import Graph
from gnnfleet.nn.base import Model
from gnnfleet.nn.config import ModelConfig
from gnnfleet.nn.norm import BatchNorm

# Dropouts whose draws depend on the order of work, and norms that see only the rows of one machine.
_DROPOUTS = (torch.nn.Dropout, torch.nn.AlphaDropout, torch.nn.FeatureAlphaDropout, torch.nn.Dropout1d)
_NORMS = (torch.nn.BatchNorm1d, torch.nn.SyncBatchNorm, torch.nn.LazyBatchNorm1d)

live_modules: WeakValueDictionary[str, torch.nn.Module] = WeakValueDictionary()
"""Modules that the program passed to gf.train, by ``model.name``."""


def file_digest(path: Path) -> str:
    """SHA-256 of a model file; raises ConfigError if it cannot be read."""
    return hashlib.sha256(_read(path)).hexdigest()


def build_custom_model(config: ModelConfig, graph: Graph, *, out_channels: int) -> Model:
    """Call the factory, or copy a live module with its weights, and check the model; raises ConfigError."""
    if config.is_live:
        if config.name not in live_modules:
            raise ConfigError(f"{config.label} is a module of another Python program: use file.py:factory")
        module = copy.deepcopy(live_modules[config.name])
        return _checked(module, config.label, out_channels, graph, config.execution)
    assert config.file is not None
    path, name = config.file, config.factory
    sys.path.insert(0, str(path.parent))
    try:
        with annotate_model_errors(path):
            source = _run(path)
            factory = getattr(source, name, None)
            if not callable(factory):
                raise ConfigError(f"{path} has no function {name!r}: {_nearest(name, source)}")
            _check_signature(factory, f"{path.name}:{name}")
            model = factory(config, graph, out_channels)
    finally:
        sys.path.remove(str(path.parent))
    return _checked(model, f"{path.name}:{name}", out_channels, graph, config.execution)


@contextmanager
def annotate_model_errors(path: Path | None) -> Iterator[None]:
    """Add file and line to errors raised through a line of ``path``; leave other errors unchanged."""
    try:
        yield
    except Exception as error:
        line = None if path is None else _line_in(path, error)
        if line is None:
            raise
        location = f"{path}, line {line}"
        if isinstance(error, GnnfleetError):
            raise type(error)(f"{location}: {error}") from error
        text = (str(error).strip().splitlines() or [""])[0]
        raise ConfigError(f"{location}: {type(error).__name__}: {text}") from error


def _line_in(path: Path, error: Exception) -> int | None:
    """Innermost line of the file in the traceback of an error."""
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return error.lineno
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return lines[-1] if lines else None


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read the model file {path}: {error.strerror}") from error


def _run(path: Path) -> ModuleType:
    source = _read(path)
    module = ModuleType(f"gnnfleet_custom_{path.stem}_{hashlib.sha256(source).hexdigest()[:8]}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # dataclasses look their module up there
    exec(compile(source, str(path), "exec"), module.__dict__)
    return module


def _nearest(name: str, module: ModuleType) -> str:
    factories = [
        attribute
        for attribute, function in vars(module).items()
        if callable(function) and getattr(function, "__module__", None) == module.__name__ and attribute[0] != "_"
    ]
    return suggest(name, factories) if factories else "it defines none"


def _check_signature(factory: Callable[..., Any], name: str) -> None:
    try:
        inspect.signature(factory).bind(None, None, None)
    except TypeError as error:
        raise ConfigError(f"{name} must take (config, graph, out_channels): {error}") from error
    except ValueError:  # a builtin without a signature
        return


def _as_model(module: torch.nn.Module, name: str, graph: Graph, execution: str) -> Model:
    """Wrap a module with torch_geometric's call; ``execution`` is ``model.execution``."""
    from gnnfleet.nn.pyg.module import PygModule

    model = PygModule(module)
    model.prepare(graph)
    if execution != "whole":
        model.split(graph)
    if execution == "layers" and model.reads_whole_graph:
        raise ConfigError(f"{name} cannot run layer by layer: {model.reason_whole}. Leave out model.execution=layers")
    return model


def _checked(model: Any, name: str, out_channels: int, graph: Graph, execution: str) -> Model:
    if isinstance(model, torch.nn.Module) and not isinstance(model, Model):
        module = _as_model(model, name, graph, execution)
        module.out_channels = out_channels
        return module
    if not isinstance(model, Model):
        kind = type(model).__name__
        raise ConfigError(f"{name} must return a gf.nn.Model or a torch_geometric module, found {kind}")
    if model.num_layers < 1:
        raise ConfigError(f"{name} returned a model without layers: pass them to gf.nn.Model(layers)")
    synchronised = {id(module.module) for module in model.modules() if isinstance(module, BatchNorm)}
    for path, module in model.named_modules():
        kind = type(module).__name__
        if isinstance(module, _DROPOUTS) and module.p:
            raise ConfigError(
                f"{name} uses torch.nn.{kind} ({path}), which no run can reproduce: use view.dropout(x, p)"
            )
        if isinstance(module, _NORMS) and id(module) not in synchronised:
            raise ConfigError(
                f"{name} uses torch.nn.{kind} ({path}), which sees only the nodes of one machine: use gf.nn.BatchNorm"
            )
    model.out_channels = out_channels
    return model

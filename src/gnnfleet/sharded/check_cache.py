"""Self-checks that passed, by a fingerprint of all that decides them. Nothing else is kept, so a refusal is repeated.

The fingerprint covers the state of a module without the values of its parameters, the files of its classes and of what
these import, except installed packages, versions, and the types and widths of the graph.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch

from gnnfleet.graph.graph import Graph
from gnnfleet.io.atomic import write_atomically
from gnnfleet.nn.pyg.module import PygModule
from gnnfleet.report.run_record import versions

_OWN_CODE = Path(__file__).parents[1]
_INSTALLED = ("site-packages", "dist-packages", str(Path(os.__file__).parent))


def cached_check(name: str, model: PygModule, graph: Graph, check: Callable[[], str]) -> str:
    """The reason that a check does not pass, or nothing; it runs unless it has passed before."""
    try:
        path = _cache_path(name, model, graph)
    except (pickle.PicklingError, AttributeError, TypeError, RuntimeError, OSError):  # as lambdas: no fingerprint
        return check()
    if path.is_file():
        return ""
    reason = check()
    if not reason:
        with suppress(OSError):  # the next run checks again
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, json.dumps({"passed": name}).encode())
    return reason


def _cache_path(name: str, model: PygModule, graph: Graph) -> Path:
    content = io.BytesIO()
    pickler = _StatePickler(content)
    pickler.dump(model.module)
    digest = hashlib.sha256(content.getvalue())
    for source in (*_sources(pickler.modules), *(path.read_bytes() for path in sorted(_OWN_CODE.glob("nn/pyg/*.py")))):
        digest.update(source)
    tables: list[Any] = [(kind, _width(nodes.x)) for kind, nodes in graph.nodes.items()]
    tables += [(kind, edges.weight is None, _width(edges.attr)) for kind, edges in graph.edges.items()]
    library = getattr(sys.modules.get("torch_geometric"), "__version__", "")
    digest.update(repr([name, model.reads_whole_graph, sorted(versions().items()), library, tables]).encode())
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return folder / "gnnfleet" / "module-checks" / f"{digest.hexdigest()}.json"


def _width(table: torch.Tensor | None) -> Any:
    return None if table is None else table.shape[1:]


class _StatePickler(pickle.Pickler):
    """Writes the state of a module to be hashed; nothing reads it."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.modules: set[str] = set()

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            is_parameter = isinstance(value, torch.nn.Parameter)
            flat = value.detach().reshape(-1)[: 0 if is_parameter else None]
            return str(value.dtype), tuple(value.shape), flat.contiguous().view(torch.uint8).numpy().tobytes()
        if type(value).__module__ == "torch_geometric.inspector":  # caches what it reads of a class
            return type(value).__name__
        if isinstance(value, set | frozenset):
            return sorted(map(repr, value))
        if isinstance(value, type | FunctionType | BuiltinFunctionType):
            self.modules.add(value.__module__)
        return None


def _sources(names: set[str]) -> Iterator[bytes]:
    """Contents and constants of Python modules that are not installed, and of those that they import."""
    pending, seen = sorted(names, key=str), set[str]()
    while pending:
        name = pending.pop()
        module = sys.modules.get(name)
        file = getattr(module, "__file__", None)
        if name == "__main__" and file is None:
            raise pickle.PicklingError("classes of a notebook have no file")
        if name in seen or file is None or any(folder in file for folder in _INSTALLED):
            continue
        seen.add(name)
        values = vars(module).values()
        yield Path(file).read_bytes() + repr([v for v in values if isinstance(v, int | float | str | tuple)]).encode()
        pending += [value.__name__ for value in values if isinstance(value, ModuleType)]
        pending += [value.__module__ for value in values if isinstance(value, type | FunctionType)]

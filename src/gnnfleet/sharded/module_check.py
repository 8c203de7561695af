"""Self-check of an unknown module: on a small random graph, parts and layers must give what the whole gives.

The graph has self-loops, parallel edges, isolated nodes, edge weights and edge features. Parts are threads of this
process that run the exchange of real ranks over loopback. Output, gradients of features and parameters, and buffers are
compared in float64. A random test finds nearly every dependence on the partition; it is no proof.
"""

from __future__ import annotations

import copy
import hashlib
import io
import json
import os
import pickle
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._C._distributed_c10d import HashStore, ProcessGroupGloo

from gnnfleet.comm.halo_exchange import RingExchange
from gnnfleet.comm.world import World
from gnnfleet.errors import ConfigError, ExchangeError, first_line
from gnnfleet.graph.graph import Graph
from gnnfleet.graph.partition.assign import Assignment
from gnnfleet.graph.partition.partitioned_graph import Partition, write_partition
from gnnfleet.graph.sampling.sampler import Fanouts, NeighborSampler
from gnnfleet.graph.views.local import LocalView
from gnnfleet.graph.views.view import GraphView
from gnnfleet.io.atomic import write_atomically
from gnnfleet.nn.pyg.module import ISOLATED, NODES, PygModule, random_graph_like
from gnnfleet.ops.draws import DrawKey
from gnnfleet.report.run_record import versions
from gnnfleet.sharded.full_batch.ring_view import RingView

_TOLERANCE = 1e-9
_SECONDS = 30.0
_KEY = DrawKey(seed=1, epoch=2, step=3)
_FAILURES = (ConfigError, RuntimeError, TypeError, ValueError, IndexError, AssertionError)

Outcome = dict[str, Tensor]


def check_layers(model: PygModule, graph: Graph) -> str:
    """Compare layers on blocks with all neighbours with the whole module: the reason that they differ, or nothing.

    Batch norm uses its running statistics and nothing is dropped: both depend on the rows and layers of a pass.
    """
    name, sample = type(model.module).__name__, random_graph_like(graph)
    seeds = torch.arange(1, NODES, 4)
    blocks = NeighborSampler(sample, [-1] * model.num_layers).blocks(dict.fromkeys(sample.nodes, seeds), _KEY)
    for training in (True, False):
        expected = _run_sample(model, sample, seeds, training=training)
        try:
            actual = _run(model, [view.with_step(training=False) for view in blocks], sample, training=training)
        except _FAILURES as error:
            return f"its layers fail on a part of the rows ({first_line(error)})"
        if difference := _difference(actual, expected):
            return f"its layers on a part of the rows differ from {name} in {difference[0]}, by {difference[1]:.1e}"
    return ""


def check_sampled(model: PygModule, graph: Graph, fanouts: Fanouts) -> str:
    """Raise ConfigError if the layers do not run on sampled blocks."""
    sample = random_graph_like(graph)
    blocks = NeighborSampler(sample, fanouts).blocks(dict.fromkeys(sample.nodes, torch.arange(1, NODES, 4)), _KEY)
    if len(blocks) == model.num_layers:  # the strategy reports another number
        _run(model, blocks, sample)
    return ""


def check_parts(model: PygModule, graph: Graph) -> str:
    """Raise ConfigError, with the tensor that differs or the operation that failed, unless parts equal the whole."""
    name, sample = type(model.module).__name__, random_graph_like(graph)
    expected = _run_sample(model, sample)
    for parts in (2, 3):  # the last of three has isolated nodes only
        if difference := _difference(_run_on_parts(model, sample, parts), expected):
            raise ConfigError(
                f"{name} on {parts} parts of a graph differs from {name} on the whole graph by {difference[1]:.1e} in "
                f"{difference[0]}: an operation of it depends on the partition. Use strategy local, or a gf.nn.Model"
            )
    return ""


def _run_sample(model: PygModule, sample: Graph, rows: Tensor | None = None, *, training: bool = True) -> Outcome:
    """Run on the whole sample graph; with ``rows`` as one layer, and only their outputs count."""
    view = LocalView.of_graph(sample)
    try:
        if rows is None:
            return _run(model, [view] * model.num_layers, sample)
        whole = copy.copy(model)
        whole.separate_layers = None
        return _run(whole, [view.with_step(training=False)], sample, rows, training=training)
    except _FAILURES as error:
        name, widths = type(model.module).__name__, ", ".join(str(x.shape[1]) for x in _features(sample).values())
        raise ConfigError(
            f"{name} fails on a small random graph with {widths} features: {first_line(error)}"
        ) from error


def _difference(actual: Outcome, expected: Outcome) -> tuple[str, float] | None:
    """(name, largest difference) of the first tensor that differs."""
    for name, value in expected.items():
        scale = max(1.0, float(value.abs().max())) if value.numel() else 1.0
        difference = float((actual[name] - value).abs().max()) if value.numel() else 0.0
        if not difference <= _TOLERANCE * scale:
            return name, difference
    return None


def _run_on_parts(model: PygModule, graph: Graph, parts: int) -> Outcome:
    """Run one thread per part; rows in store order, gradients of parameters summed."""
    part = np.tile(np.arange(NODES, dtype=np.int32) * 7 % min(parts, 2), (len(graph.nodes), 1))
    if parts > 2:
        part[:, NODES - ISOLATED :] = parts - 1
    if len(part) > 1:
        part[-1] = 0  # other parts have no nodes of the last type
    with tempfile.TemporaryDirectory(prefix="gnnfleet-check-") as folder, ThreadPoolExecutor(parts) as pool:
        path = Path(folder) / "parts"
        write_partition(graph, Assignment(part=part.ravel(), parts=parts, method="random"), path)
        store = HashStore()
        futures = [pool.submit(_run_part, model, graph, path, store, rank, parts) for rank in range(parts)]
        failures = [error for future in futures if (error := future.exception()) is not None]
        if failures:
            # A rank that fails leaves the others waiting: theirs are errors of the exchange.
            cause = next((error for error in failures if not isinstance(error, ExchangeError)), failures[0])
            raise ConfigError(
                f"{type(model.module).__name__} does not run on parts of a graph: {first_line(cause)}"
            ) from cause
        outcomes = [future.result() for future in futures]
    totals = {name: torch.stack([outcome[name] for outcome in outcomes]).sum(0) for name in outcomes[0]}
    return {name: outcomes[0][name] if name.startswith("the buffer") else total for name, total in totals.items()}


def _run_part(model: PygModule, graph: Graph, path: Path, store: HashStore, rank: int, size: int) -> Outcome:
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = timedelta(seconds=_SECONDS)
    group: Any = ProcessGroupGloo(store, rank, size, options)
    world = World(rank, size, group=group, timeout=_SECONDS)
    view = RingView.open(Partition.open(path).shard(rank), RingExchange(world))
    return _run(model, [view] * model.num_layers, graph)


def _features(graph: Graph) -> dict[str, Tensor]:
    return {kind: nodes.x for kind, nodes in graph.nodes.items() if nodes.x is not None}


def _run(
    model: PygModule, views: Sequence[GraphView], graph: Graph, rows: Tensor | None = None, *, training: bool = True
) -> Outcome:
    """Run a copy of the model forward and backward in float64; only the outputs of ``rows`` count if they are set.

    Outputs are zeros for nodes of other parts. A tensor has rows of the labelled type.
    """
    copied: Any = copy.deepcopy(model).double().train(training)
    x = {kind: features.double().requires_grad_() for kind, features in _features(graph).items()}
    inputs = {kind: features[views[0].for_type(kind).node_ids] for kind, features in x.items()}
    out = copied([view.with_step(key=_KEY) for view in views], inputs)
    losses, outputs = [], {}
    for kind, table in (out if isinstance(out, dict) else {graph.labelled_type or next(iter(x)): out}).items():
        ids = views[-1].for_type(kind).node_ids[: len(table)]
        if rows is not None:
            table, ids = table[rows], rows
        factor = torch.randn(NODES, *table.shape[1:], generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        losses.append((table * factor[ids]).sum())
        name = "the output" if len(x) == 1 else f"the output of {kind}"
        outputs[name] = table.new_zeros(factor.shape).index_copy(0, ids, table.detach())
    torch.stack(losses).sum().backward()  # type: ignore[no-untyped-call]
    inputs = x if len(x) > 1 else {"x": next(iter(x.values()))}
    gradients = {**inputs, **dict(copied.module.named_parameters())}
    buffers = {f"the buffer {name}": b for name, b in copied.module.named_buffers() if b.is_floating_point()}
    return {
        **outputs,
        **{f"the gradient of {n}": torch.zeros_like(t) if t.grad is None else t.grad for n, t in gradients.items()},
        **buffers,
    }


_OWN_CODE = Path(__file__).parents[1]
_INSTALLED = ("site-packages", "dist-packages", str(Path(os.__file__).parent))


def cached_check(name: str, model: PygModule, graph: Graph, check: Callable[[], str]) -> str:
    """The reason that a check does not pass, or nothing; it runs unless it has passed before.

    Passes are kept by a fingerprint of all that decides them: the state of a module without the values of its
    parameters, the files of its classes and of what these import, except installed packages, versions, and the types
    and widths of the graph.
    """
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

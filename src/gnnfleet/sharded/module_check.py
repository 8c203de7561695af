"""Self-check of an unknown module: on a small random graph, parts and layers must give what the whole gives.

The graph has self-loops, parallel edges, isolated nodes, edge weights and edge features. Parts are threads of this
process that run the exchange of real ranks over loopback. Output, gradients of features and parameters, and buffers are
compared in float64. A random test finds nearly every dependence on the partition; it is no proof.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._C._distributed_c10d import HashStore, ProcessGroupGloo

from gnnfleet.comm.halo_exchange import RingExchange
from gnnfleet.comm.world import World
from gnnfleet.errors import ConfigError, first_line
from gnnfleet.graph.graph import Graph
from gnnfleet.graph.partition.assign import Assignment
from gnnfleet.graph.partition.partitioned_graph import Partition, write_partition
from gnnfleet.graph.sampling.sampler import NeighborSampler
from gnnfleet.graph.views.local import LocalView
from gnnfleet.graph.views.view import GraphView
from gnnfleet.nn.pyg.module import PygModule
from gnnfleet.nn.pyg.random_graph import ISOLATED, NODES, random_graph_like
from gnnfleet.ops.draws import DrawKey
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
        difference = _difference(actual, expected)
        if difference is not None:
            return f"its layers on a part of the rows differ from {name} in {difference[0]}, by {difference[1]:.1e}"
    return ""


def check_parts(model: PygModule, graph: Graph) -> None:
    """Raise ConfigError, with the tensor that differs or the operation that failed, unless parts equal the whole."""
    name, sample = type(model.module).__name__, random_graph_like(graph)
    expected = _run_sample(model, sample)
    for parts in (2, 3):  # the last of three has isolated nodes only
        difference = _difference(_run_on_parts(model, sample, parts), expected)
        if difference is not None:
            raise ConfigError(
                f"{name} on {parts} parts of a graph differs from {name} on the whole graph by {difference[1]:.1e} in "
                f"{difference[0]}: an operation of it depends on the partition. Use strategy local, or a gf.nn.Model"
            )


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
        width = sample.single_nodes.x.shape[1]  # type: ignore[union-attr]
        name = type(model.module).__name__
        raise ConfigError(f"{name} fails on a small random graph with {width} features: {first_line(error)}") from error


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
    part = np.arange(NODES, dtype=np.int32) * 7 % min(parts, 2)
    if parts > 2:
        part[NODES - ISOLATED :] = parts - 1
    with tempfile.TemporaryDirectory(prefix="gnnfleet-check-") as folder, ThreadPoolExecutor(parts) as pool:
        path = Path(folder) / "parts"
        write_partition(graph, Assignment(part=part, parts=parts, method="random"), path)
        store = HashStore()
        futures = [pool.submit(_run_part, model, graph, path, store, rank, parts) for rank in range(parts)]
        failures = [error for future in futures if (error := future.exception()) is not None]
        if failures:
            # A rank that fails leaves the others waiting: theirs are errors of the exchange.
            cause = next((error for error in failures if isinstance(error, ConfigError)), failures[0])
            raise ConfigError(
                f"{type(model.module).__name__} does not run on parts of a graph: {first_line(cause)}"
            ) from cause
        outcomes = [future.result() for future in futures]
    joined: Outcome = {}
    for name, first in outcomes[0][1].items():
        if name == "the output":
            joined[name] = first.new_empty(NODES, *first.shape[1:])
            for ids, tensors in outcomes:
                joined[name][ids] = tensors[name]
        elif name.startswith("the gradient"):
            joined[name] = torch.stack([tensors[name] for _, tensors in outcomes]).sum(0)
        else:
            joined[name] = first
    return joined


def _run_part(
    model: PygModule, graph: Graph, path: Path, store: HashStore, rank: int, size: int
) -> tuple[Tensor, Outcome]:
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = timedelta(seconds=_SECONDS)
    group: Any = ProcessGroupGloo(store, rank, size, options)
    world = World(rank, size, group=group, timeout=_SECONDS)
    view = RingView.open(Partition.open(path).shard(rank), RingExchange(world))
    return view.node_ids, _run(model, [view] * model.num_layers, graph)


def _run(
    model: PygModule, views: Sequence[GraphView], graph: Graph, rows: Tensor | None = None, *, training: bool = True
) -> Outcome:
    """Run a copy of the model forward and backward in float64; only the outputs of ``rows`` count if they are set."""
    copied: Any = copy.deepcopy(model).double().train(training)
    features = graph.single_nodes.x
    assert features is not None
    x = features.double().requires_grad_()
    out = copied([view.with_step(key=_KEY) for view in views], x[views[0].node_ids])
    ids = views[-1].node_ids[: len(out)]
    if rows is not None:
        out, ids = out[rows], rows
    factor = torch.randn(NODES, *out.shape[1:], generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (out * factor[ids]).sum().backward()
    gradients = {"x": x, **dict(copied.module.named_parameters())}
    buffers = {f"the buffer {name}": b for name, b in copied.module.named_buffers() if b.is_floating_point()}
    return {
        "the output": out.detach(),
        **{f"the gradient of {n}": torch.zeros_like(t) if t.grad is None else t.grad for n, t in gradients.items()},
        **buffers,
    }

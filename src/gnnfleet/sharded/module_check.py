"""Self-check of an unknown module: on a small random graph, parts must give what the whole graph gives.

The graph has self-loops, parallel edges, isolated nodes, edge weights and edge features. Parts are threads of this
process that run the exchange of real ranks over loopback. Output, gradients of features and parameters, and buffers are
compared in float64. A random test finds nearly every dependence on the partition; it is no proof.
"""

from __future__ import annotations

import copy
import tempfile
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
from gnnfleet.graph.views.local import LocalView
from gnnfleet.graph.views.view import GraphView
from gnnfleet.nn.pyg.module import PygModule
from gnnfleet.ops.draws import DrawKey
from gnnfleet.sharded.full_batch.ring_view import RingView

_NODES, _ISOLATED, _EDGES = 40, 6, 160
_TOLERANCE = 1e-9
_SECONDS = 30.0
_KEY = DrawKey(seed=1, epoch=2, step=3)

Outcome = dict[str, Tensor]


def check_module(model: PygModule, graph: Graph) -> None:
    """Raise ConfigError, with the tensor that differs or the operation that failed, unless parts equal the whole.

    The random graph has features, edge weights and edge features of the same widths as ``graph``.
    """
    name, features, edges = type(model.module).__name__, graph.single_nodes.x, graph.single_edges
    in_channels = 0 if features is None else int(features.shape[1])
    edge_dim = None if edges.attr is None else int(edges.attr.shape[1])
    graph = _random_graph(in_channels, edge_dim, has_weight=edges.weight is not None)
    try:
        expected = _run(model, LocalView.of_graph(graph), graph)
    except (RuntimeError, TypeError, ValueError, IndexError, AssertionError) as error:
        raise ConfigError(
            f"{name} fails on a small random graph with {in_channels} features: {first_line(error)}"
        ) from error
    for parts in (2, 3):  # the last of three has isolated nodes only
        actual = _run_on_parts(model, graph, parts)
        for tensor, value in expected.items():
            difference = float((actual[tensor] - value).abs().max()) if value.numel() else 0.0
            if not difference <= _TOLERANCE * max(1.0, float(value.abs().max()) if value.numel() else 1.0):
                raise ConfigError(
                    f"{name} on {parts} parts of a graph differs from {name} on the whole graph by {difference:.1e} in "
                    f"{tensor}: an operation of it depends on the partition. Use strategy local, or a gf.nn.Model"
                )


def _random_graph(in_channels: int, edge_dim: int | None, *, has_weight: bool) -> Graph:
    random = torch.Generator().manual_seed(0)
    ends = torch.randint(0, _NODES - _ISOLATED, (2, _EDGES), generator=random)
    loops = torch.arange(0, _NODES - _ISOLATED, 5).repeat(2, 1)
    index = torch.cat([ends, ends[:, :20], loops], 1)
    count = index.shape[1]
    return Graph(
        index,
        x=torch.randn(_NODES, in_channels, generator=random),
        edge_weight=torch.rand(count, generator=random) + 0.1 if has_weight else None,
        edge_attr=None if edge_dim is None else torch.randn(count, edge_dim, generator=random),
        num_nodes=_NODES,
    )


def _run_on_parts(model: PygModule, graph: Graph, parts: int) -> Outcome:
    """Run one thread per part; rows in store order, gradients of parameters summed."""
    part = np.arange(_NODES, dtype=np.int32) * 7 % min(parts, 2)
    if parts > 2:
        part[_NODES - _ISOLATED :] = parts - 1
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
        if name in ("the output", "the gradient of x"):
            joined[name] = first.new_empty(_NODES, *first.shape[1:])
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
    return view.node_ids, _run(model, view, graph)


def _run(model: PygModule, view: GraphView, graph: Graph) -> Outcome:
    """Run a copy of the model forward and backward in float64."""
    copied: Any = copy.deepcopy(model).double().train()
    features = graph.single_nodes.x
    assert features is not None
    x = features.double()[view.node_ids].requires_grad_()
    out = copied(view.with_step(key=_KEY), x)
    factor = torch.randn(_NODES, *out.shape[1:], generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (out * factor[view.node_ids]).sum().backward()
    gradients = {"x": x, **dict(copied.module.named_parameters())}
    buffers = {f"the buffer {name}": b for name, b in copied.module.named_buffers() if b.is_floating_point()}
    return {
        "the output": out.detach(),
        **{f"the gradient of {n}": torch.zeros_like(t) if t.grad is None else t.grad for n, t in gradients.items()},
        **buffers,
    }

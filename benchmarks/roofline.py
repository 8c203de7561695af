"""Kernel speed against memory bandwidth, and the time of an epoch by kind of work. Cells of ``full_batch.py``."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from epochs import HIDDEN, make_local


def best(work: Callable[[], object], times: int = 5) -> float:
    """Seconds of the fastest run, after one to warm up."""
    work()
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def roofline(graph: Any) -> dict[str, Any]:
    """Copy, aggregation in the given and in cluster order, attention forward and backward: one process, interleaved."""
    import torch

    from gnnfleet.graph.reorder import cluster_order, reordered_view
    from gnnfleet.graph.views.local import LocalView

    table = torch.randn(64_000_000)
    copy = torch.empty_like(table)
    views = {"given": LocalView.of_graph(graph), "clustered": reordered_view(graph, cluster_order(graph))}
    report: dict[str, Any] = {"copy_gb_s": 0.0, "aggregate": {}, "attend": {}}
    for _ in range(2):
        report["copy_gb_s"] = max(report["copy_gb_s"], 2 * table.nbytes / best(lambda: copy.copy_(table)) / 1e9)
        for order, view in views.items():
            for width in (128, 256):
                _keep_fastest(report["aggregate"], f"{order}/{width}", _aggregate(graph, view, width))
            _keep_fastest(report["attend"], f"{order}/forward", _attend(graph, view, backward=False))
            _keep_fastest(report["attend"], f"{order}/backward", _attend(graph, view, backward=True))
    return report


def _keep_fastest(table: dict[str, Any], key: str, times: dict[str, float]) -> None:
    if key not in table or times["ms"] < table[key]["ms"]:
        table[key] = times


def _aggregate(graph: Any, view: Any, width: int) -> dict[str, float]:
    import torch

    x = torch.randn(graph.num_nodes, width)
    with torch.no_grad():
        seconds = best(lambda: view.aggregate(x))
    return {"ms": seconds * 1e3, "gathered_gb_s": graph.single_edges.count * width * 4 / seconds / 1e9}


def _attend(graph: Any, view: Any, *, backward: bool) -> dict[str, float]:
    import torch

    value, src, dst = (torch.randn(graph.num_nodes, width, requires_grad=True) for width in (128, 4, 4))
    if not backward:
        with torch.no_grad():
            seconds = best(lambda: view.attend(value, src=src, dst=dst))
        return {"ms": seconds * 1e3}
    out = view.attend(value, src=src, dst=dst)
    grad = torch.randn_like(out)
    return {"ms": 1e3 * best(lambda: torch.autograd.grad(out, (value, src, dst), grad, retain_graph=True), 3)}


def profile_epoch(graph: Any, model: str) -> dict[str, Any]:
    """Seconds of one epoch in torch's profiler: dense products, edges, optimizer, elementwise, Python outside torch."""
    import torch

    strategy = make_local(graph, model, "float32")
    for epoch in range(3):
        list(strategy.train_epoch(epoch))
    start = time.perf_counter()
    list(strategy.train_epoch(3))
    unprofiled = time.perf_counter() - start
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        start = time.perf_counter()
        list(strategy.train_epoch(4))
        total = time.perf_counter() - start
    parts = {"dense": 0.0, "edges": 0.0, "optimizer": 0.0, "elementwise": 0.0}
    for event in profiler.key_averages():
        if event.key.startswith("Optimizer.step"):  # includes its calls, which are counted as elementwise too
            parts["optimizer"] += event.cpu_time_total / 1e6
            parts["elementwise"] -= (event.cpu_time_total - event.self_cpu_time_total) / 1e6
        else:
            parts[_part(event.key)] += event.self_cpu_time_total / 1e6
    parts["python"] = total - sum(parts.values())
    rate = _dense_rate()
    return {
        "seconds": unprofiled,
        "profiled_seconds": total,
        "parts": parts,
        "dense_gflop": _dense_gflop(graph, model),
        "dense_gflop_s": rate,
    }


def _part(name: str) -> str:
    if name.startswith(("_Sum", "_Max", "_Attend", "_Additive", "_Edge")):
        return "edges"
    if name in ("aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm"):
        return "dense"
    return "elementwise"


def _dense_rate() -> float:
    """GFLOP/s of the most frequent product of an epoch."""
    import torch

    x, weight, out = torch.randn(200_000, 256), torch.randn(256, 256), torch.empty(200_000, 256)
    return 2 * x.numel() * 256 / best(lambda: torch.mm(x, weight, out=out)) / 1e9


def _dense_gflop(graph: Any, model: str) -> float:
    """GFLOP of the products of an epoch: forward, gradients of weights and, except in the first layer, of inputs."""
    rows, trained = graph.num_nodes, int(graph.single_nodes.mask("train").sum())
    width, hidden = graph.single_nodes.x.shape[1], HIDDEN[model]
    if model == "sage":  # two products a layer; those of the last layer have only the rows of the loss
        first, middle = 2 * rows * width * hidden, 2 * rows * hidden * hidden
        last = 2 * trained * hidden * graph.single_nodes.num_classes
    else:
        first, middle = rows * width * hidden, rows * hidden * hidden
        last = rows * hidden * 4 * graph.single_nodes.num_classes
    return float(2 * (2 * first + 3 * middle + 3 * last) / 1e9)

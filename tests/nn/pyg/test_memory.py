"""Modes of propagation of unchanged modules give equal results, on a whole graph and on its parts, in less memory."""

from __future__ import annotations

import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor

from gnnfleet.comm.world import World
from gnnfleet.config.resolve import resolve
from gnnfleet.errors import ConfigError
from gnnfleet.graph.datasets import make_dataset
from gnnfleet.graph.graph import Graph
from gnnfleet.graph.partition.partitioned_graph import Partition
from gnnfleet.graph.store import open_store, save_store
from gnnfleet.graph.views.local import LocalView
from gnnfleet.nn.pyg import memory
from gnnfleet.nn.pyg.memory import PROPAGATIONS, Propagation
from gnnfleet.nn.pyg.module import PygModule
from gnnfleet.ops.buffers import unpooled
from gnnfleet.report.memory import peak_tensors
from gnnfleet.sharded import step_tracer
from gnnfleet.sharded.full_batch.source_rows import SourceRows
from gnnfleet.strategies.pipe.config import PipeConfig
from gnnfleet.strategies.sar import strategy as sar
from gnnfleet.training.build import RankContext
from gnnfleet.training.build import build as build_run
from tests.equivalence.spread import KEY, cut_graph, open_view, plain_graph
from tests.nn.pyg.outcomes import assert_equal, build, joined, outcome, run_plain
from tests.nn.pyg.zoo import EDGE_DIM, HIDDEN, IN, MODULES, OUT, Two, two
from tests.ranks import RankPool

MODES = ("chunked", "rebuilt", "routed")
EDGES_AT_ONCE = 120
CUTS = ((2, "random"), (3, "edgeless"))
WHOLE = LocalView.of_graph(plain_graph()).with_step(key=KEY, layer=1)


ON_PARTS = ("EdgeCNN", "message MLP", "mixed", "TransformerConv", "NNConv", "TAGConv", "ChebConv", "DirGNNConv", "PNA")


class Dropping(pyg.MessagePassing):
    """Dropout on messages, twice, and on rows before and after them."""

    def __init__(self, in_channels: int, out_channels: int, aggr: str = "mean") -> None:
        super().__init__(aggr=aggr)
        self.lin = torch.nn.Linear(2 * in_channels, out_channels)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = torch.nn.functional.dropout(x, 0.2, self.training)
        return torch.nn.functional.dropout(self.propagate(edge_index, x=x), 0.1, self.training)

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        drop = torch.nn.functional.dropout
        return drop(self.lin(drop(torch.cat([x_i, x_j], 1), 0.3, self.training)), 0.4, self.training)


class Normed(Dropping):
    """Batch norm of messages."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__(in_channels, out_channels)
        self.norm = torch.nn.BatchNorm1d(out_channels)

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return self.norm(self.lin(torch.cat([x_i, x_j], 1)))


class Rescaled(pyg.MessagePassing):
    """An update, and a tensor of nodes that messages read from an attribute."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        self.scale = x.sum(1, keepdim=True)
        return self.propagate(edge_index, x=x)

    def message(self, x_j: Tensor, index: Tensor) -> Tensor:
        return x_j * self.scale[index]

    def update(self, out: Tensor, x: Tensor) -> Tensor:
        return out + x


class FewParameters(pyg.MessagePassing):
    """A parameter outside of messages, one that nothing uses, and rows of nodes read by number."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__(aggr="sum")
        self.lin, self.unused = torch.nn.Linear(in_channels, out_channels), torch.nn.Linear(2, 2)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=self.lin(x), all_x=self.lin(x))

    def message(self, x_j: Tensor, all_x: Tensor, index: Tensor) -> Tensor:
        return x_j * all_x[index].tanh()


class ChangedLater(pyg.MessagePassing):
    """The input of messages changes after them."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = 2 * x
        out = self.propagate(edge_index, x=x)
        x.add_(1)
        return out + x

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return 3 * x_j


OWN: dict[str, Any] = {
    "dropout": two(Dropping),
    "dropout, standard deviation": two(lambda i, o: Dropping(i, o, "std")),
    "GAT dropout": lambda: pyg.GAT(IN, HIDDEN, 2, OUT, heads=2, dropout=0.4),
    "TransformerConv dropout": two(
        lambda i, o: pyg.TransformerConv(i, o, heads=2, concat=False, edge_dim=EDGE_DIM, dropout=0.3), "edge_attr"
    ),
    "batch norm of messages": two(Normed),
    "update and attribute": lambda: Two(Rescaled(), pyg.SAGEConv(IN, OUT)),
    "few parameters": two(FewParameters),
    "hooks": lambda: with_hook(two(Dropping)()),
    "lstm aggregation": two(lambda i, o: pyg.SAGEConv(i, o, aggr="lstm")),
}


def with_hook(module: Any) -> torch.nn.Module:
    module.first.register_message_forward_hook(lambda conv, inputs, out: 2 * out)
    return module  # type: ignore[no-any-return]


def on_view(view: Any, name: str, mode: Any) -> dict[str, Any]:
    module, features = build((MODULES | OWN)[name]), plain_graph().single_nodes.x
    assert features is not None
    x = features.double()[view.node_ids].requires_grad_()
    model = PygModule(module)
    model.propagation = Propagation(mode, EDGES_AT_ONCE)
    return outcome(module, model(view, x), x, view.node_ids)


def on_rank(world: World, path: str, names: list[str], mode: str) -> dict[str, dict[str, Any]]:
    return {name: on_view(open_view(world, path, 1, 1), name, mode) for name in names}


@pytest.mark.parametrize("mode", MODES)
def test_modes_equal_torch_geometric_on_a_whole_graph(mode: str) -> None:
    for name in MODULES:
        assert_equal(on_view(WHOLE, name, mode), run_plain(MODULES[name]), f"{mode}: {name}")


@pytest.mark.parametrize("mode", MODES)
def test_modes_equal_plain_with_dropout_and_custom_steps(mode: str) -> None:
    for name in OWN:
        assert_equal(on_view(WHOLE, name, mode), on_view(WHOLE, name, "plain"), f"{mode}: {name}")


@pytest.mark.parametrize(
    ("size", "cut", "mode"), [(2, "random", m) for m in MODES] + [(3, "edgeless", m) for m in MODES]
)
def test_modes_are_exact_on_parts(pool: RankPool, tmp_path: Path, size: int, cut: str, mode: str) -> None:
    path = cut_graph(plain_graph(), size, cut, tmp_path / "parts")
    names = [*ON_PARTS, *(name for name in OWN if "lstm" not in name)]
    outcomes = pool.run(size, on_rank, str(path), names, mode)
    for name in names:
        expected = run_plain(MODULES[name]) if name in MODULES else on_view(WHOLE, name, "plain")
        assert_equal(joined([rank[name] for rank in outcomes]), expected, f"{mode}: {name}")


def test_inputs_changed_after_their_messages_are_refused() -> None:
    for mode in ("rebuilt", "chunked"):
        OWN["changed later"] = lambda: Two(ChangedLater(), pyg.SAGEConv(IN, OUT))
        with pytest.raises((ConfigError, RuntimeError), match=r"in ?place"):
            on_view(WHOLE, "changed later", mode)
    del OWN["changed later"]


def test_a_convolution_uses_the_mode_before_one_it_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: Counter[str] = Counter()
    for name in ("rebuilt", "_chunk"):
        original = getattr(memory._Convolution, name)

        def counted(self: Any, *args: Any, _name: str = name, _original: Any = original, **kwargs: Any) -> Any:
            calls[_name] += 1
            return _original(self, *args, **kwargs)

        monkeypatch.setattr(memory._Convolution, name, counted)
    for name, expected in {
        "NNConv": set(),  # routed
        "dropout": set(),
        "few parameters": {"_chunk"},
        "TransformerConv": {"_chunk"},
        "PNA": {"_chunk"},
        "hooks": {"rebuilt"},
        "update and attribute": {"rebuilt"},
        "batch norm of messages": {"rebuilt"},
        "lstm aggregation": {"rebuilt"},
    }.items():
        calls.clear()
        on_view(WHOLE, name, "routed")
        assert set(calls) == expected, (name, calls)


LAYERS, WIDTH = 2, 32


def edge_model(mode: Any, edges_at_once: int) -> PygModule:
    """Edge convolutions, which our kernels do not compute."""
    steps: list[Any] = []
    for _ in range(LAYERS):
        mlp = torch.nn.Sequential(torch.nn.Linear(2 * WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, WIDTH))
        steps += [(pyg.EdgeConv(mlp, aggr="mean"), "x, edge_index -> x"), torch.nn.ReLU()]
    model = PygModule(pyg.Sequential("x, edge_index", steps))
    model.propagation = Propagation(mode, edges_at_once)
    return model


def test_less_memory_than_plain() -> None:
    graph = Graph(torch.randint(0, 4000, (2, 100_000), generator=torch.Generator().manual_seed(0)), num_nodes=4000)
    view, x, peaks = LocalView.of_graph(graph), torch.randn(4000, WIDTH), {}
    for mode in PROPAGATIONS:
        model = edge_model(mode, 1 << 13)
        with unpooled():
            peaks[mode] = peak_tensors(lambda model=model: model(view, x).sum().backward())
    assert max(peaks["chunked"], peaks["routed"]) < 0.3 * peaks["plain"], peaks
    assert peaks["rebuilt"] < 0.8 * peaks["plain"], peaks


def fetched_in_memory(world: World, path: str) -> dict[str, int]:
    """Tables of fetched rows that live after forward, by mode."""
    counts = {}
    for mode in PROPAGATIONS:
        view, tables = open_view(world, path, 1, 1), []
        original = SourceRows._fetched

        def fetched(self: Any, exchange: Any, x: Tensor, tables: Any = tables, original: Any = original) -> Tensor:
            rows: Tensor = original(self, exchange, x)
            tables.append(weakref.finalize(rows.untyped_storage(), int))
            return rows

        SourceRows._fetched = fetched  # type: ignore[method-assign]
        try:
            out = edge_model(mode, 64)(view, torch.randn(view.num_src, WIDTH, requires_grad=True))
            counts[mode] = sum(table.alive for table in tables)
            out.sum().backward()
        finally:
            SourceRows._fetched = original  # type: ignore[method-assign]
    return counts


def test_remote_rows_are_kept_by_chunks_only(pool: RankPool, tmp_path: Path) -> None:
    path = cut_graph(plain_graph(), 2, "random", tmp_path / "parts")
    for counts in pool.run(2, fetched_in_memory, str(path)):
        assert (counts["chunked"], counts["rebuilt"], counts["routed"]) == (LAYERS, 0, 0), counts


FACTORY = f"""
import torch, torch_geometric.nn as pyg
from torch.nn import Linear, ReLU, Sequential

def make(config, graph, out_channels):
    def conv(i, o):
        return pyg.EdgeConv(Sequential(Linear(2 * i, {WIDTH}), ReLU(), Linear({WIDTH}, o)), aggr="mean")
    steps = [(conv(16, {WIDTH}), "x, edge_index -> x"), ReLU(), (conv({WIDTH}, out_channels), "x, edge_index -> x")]
    return pyg.Sequential("x, edge_index", steps)
"""


def sar_strategy(world: World, folder: str, mode: str, memory: int | None = None) -> Any:
    settings = {
        "model": {"name": f"{folder}/model.py:make", "propagate": mode, "execution": "whole"},
        "strategy": {"name": "sar", "restrict_rows": False},
        "memory": memory,
        "workers": world.size,
    }
    context = RankContext(world, Partition.open(f"{folder}/parts{world.size}").shard(world.rank))
    return build_run(open_store(f"{folder}/store"), resolve(settings), context=context).strategy


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("store")
    save_store(make_dataset("communities", nodes=800, mean_degree=12, features=16), path / "store")
    for size in (1, 2):
        cut_graph(open_store(path / "store"), size, "random", path / f"parts{size}")
    (path / "model.py").write_text(FACTORY)
    return path


def predicted_and_measured(world: World, folder: str) -> dict[str, tuple[float, float]]:
    peaks = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_tracer, "SAMPLE_ROWS", (80, 160))
        for mode in PROPAGATIONS:
            peaks[mode] = predict_and_measure(world, folder, mode)
    return peaks


def predict_and_measure(world: World, folder: str, mode: Any) -> tuple[float, float]:
    strategy = sar_strategy(world, folder, mode)
    strategy.model.propagation = Propagation(mode, 1 << 11)
    needs, choice = strategy._memory_needs(), strategy._choose_memory_plan()
    exchanged = max(needs._exchange_bytes(exchange, choice) for exchange in needs.trace.exchanges)
    with unpooled():
        measured = peak_tensors(lambda: list(strategy.train_epoch(0)))
    return needs.peak_bytes + (exchanged if world.size > 1 else 0), measured


@pytest.mark.parametrize("size", [1])
def test_the_peak_of_a_step_is_predicted(pool: RankPool, folder: Path, size: int) -> None:
    for peaks in pool.run(size, predicted_and_measured, str(folder)):
        for mode, (predicted, measured) in peaks.items():
            assert predicted == pytest.approx(measured, rel=0.25), (mode, peaks)


def test_sar_chooses_the_fastest_propagation_within_the_memory_limit(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sar, "rss", lambda: 0)
    monkeypatch.setattr(step_tracer, "SAMPLE_ROWS", (80, 160))
    strategy, least = sar_strategy(World(), str(folder), "auto"), {}
    for mode in ("plain", "rebuilt"):
        strategy.model.propagation = Propagation(mode, 1 << 12)
        needs = strategy._memory_needs()
        least[mode] = int(needs.bytes(sar.least_choice(needs, strategy._config)))
    assert least["plain"] > 1.1 * least["rebuilt"], least
    for mode in ("plain", "rebuilt"):
        remarks: list[str] = []
        limited = sar_strategy(World(), str(folder), "auto", int(1.01 * least[mode]))
        monkeypatch.setattr(type(limited._job), "log_user", lambda self, text, remarks=remarks: remarks.append(text))
        list(limited.train_epoch(0))
        assert limited.model.propagation.mode == mode and f"messages are {mode}" in remarks[0], (mode, remarks, least)
    with pytest.raises(ConfigError, match=r"a worker needs at least .* found --memory"):
        list(sar_strategy(World(), str(folder), "auto", 100 << 10).train_epoch(0))


def test_pipe_refuses_modes_that_fetch_again() -> None:
    with pytest.raises(ConfigError, match=r"leave out model\.propagate"):
        PipeConfig().check_model(SimpleLayers("rebuilt"))


class SimpleLayers(PygModule):
    """A module that runs layer by layer."""

    def __init__(self, mode: Any) -> None:
        super().__init__(pyg.GCN(IN, HIDDEN, 2))
        self.propagation = Propagation(mode)

    reads_whole_graph = False

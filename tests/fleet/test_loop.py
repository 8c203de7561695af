"""Loops of ``gf.Fleet`` on several ranks give what a plain torch_geometric script gives in one process."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn import GAT, GCN, GraphSAGE

import gnnfleet as gf
from gnnfleet.comm.world import World
from gnnfleet.errors import ConfigError
from gnnfleet.fleet.fleet import Fleet
from gnnfleet.nn.model import build_model
from tests.graphs import communities
from tests.ranks import RankPool

Outcome = dict[str, Any]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fleet") / "store"
    gf.save(communities(120), path)
    return path


def make_model(kind: str, width: int, dropout: float = 0.0) -> torch.nn.Module:
    torch.manual_seed(4)
    model = {
        "sage": lambda: GraphSAGE(width, 16, 2, 10, dropout=dropout),
        "gcn": lambda: GCN(width, 16, 2, 10, norm="BatchNorm", dropout=dropout),
        "plain gcn": lambda: GCN(width, 16, 2, 10, dropout=dropout),
        "gat": lambda: GAT(width, 16, 2, 10, heads=2, dropout=dropout),
    }[kind]()
    return model.double()


def make_optimizer(model: torch.nn.Module, loop: str) -> torch.optim.Optimizer:
    """Not Adam with batch norm: it would turn the rounding of zero gradients into steps."""
    kind = torch.optim.SGD if loop == "several" else torch.optim.Adam
    return kind(model.parameters(), lr=0.02)


def plain_loop(graph: gf.Graph, loop: str) -> Outcome:
    """The loop as torch_geometric runs it in one process."""
    nodes = graph.single_nodes
    assert nodes.x is not None and nodes.y is not None
    x, index, y, train = nodes.x.double(), graph.single_edges.edge_index(), nodes.y, nodes.mask("train")
    model = make_model("gcn" if loop == "several" else "sage", x.shape[1])
    optimizer = make_optimizer(model, loop)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        out = model(x, index)
        loss = F.cross_entropy(out[train], y[train])
        if loop == "several":
            loss = loss + 0.1 * out.square().mean() + 1e-2 * sum(p.square().sum() for p in model.parameters())
        loss.backward()
        if loop == "several":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return outcome(model, losses)


def outcome(model: torch.nn.Module, losses: list[float]) -> Outcome:
    grads = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    return {"losses": losses, "weights": {k: v.clone() for k, v in model.state_dict().items()}, "grads": grads}


def fleet_loop(world: World, store: str, loop: str) -> Outcome:
    fleet = Fleet(world=world)
    data = fleet.open(store, partition="random", dtype=torch.float64)
    model = make_model("gcn" if loop == "several" else "sage", data.num_features)
    for parameter in model.parameters():  # of rank 0 alone are the weights that all begin with
        parameter.data += world.rank
    optimizer = make_optimizer(model, loop)
    model, optimizer = fleet.prepare(model, optimizer, check=loop == "one")
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    losses = []
    train = data.train_mask
    for _ in range(5):
        optimizer.zero_grad(set_to_none=loop != "direct")
        out = model(data.x, data.edge_index)
        items = F.cross_entropy(out[train], data.y[train], reduction="none")
        loss = fleet.mean(items)
        if loop == "several":  # two calls, a term that all ranks have alike, and a summed gradient that is clipped
            other = 0.1 * fleet.mean(out.square()) + 1e-2 * sum(p.square().sum() for p in model.parameters())
            fleet.backward(loss, retain_graph=True)
            fleet.backward(other)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            losses.append((loss + other).item())
        elif loop == "accumulated":  # in two halves, of which one is summed late and one follows a sum
            half = torch.arange(len(items)) % 2 == 0
            count = fleet.sum(len(items))
            fleet.backward(fleet.sum(items[half]) / count, retain_graph=True, sync=False)
            fleet.backward(0.5 * fleet.sum(items[~half]) / count, retain_graph=True)
            (0.5 * fleet.sum(items[~half]) / count).backward()
            losses.append(loss.item())
        else:
            loss.backward() if loop == "direct" else fleet.backward(loss)
            losses.append(loss.item())
        optimizer.step()
        scheduler.step()
    return outcome(model, losses)


@pytest.mark.parametrize(
    ("loop", "size"), [("one", 1), ("one", 2), ("several", 1), ("several", 3), ("accumulated", 2), ("direct", 2)]
)
def test_losses_gradients_and_weights_are_those_of_one_process(
    pool: RankPool, store: Path, loop: str, size: int
) -> None:
    expected = plain_loop(gf.open(store), loop)
    for actual in pool.run(size, fleet_loop, str(store), loop):
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)


def dropout_loop(world: World, store: str, kind: str) -> Outcome:
    fleet = Fleet(world=world, seed=3)
    data = fleet.open(store, partition="random", split="0.5/0.3/0.2", dtype=torch.float64)
    if kind == "native":
        torch.manual_seed(4)
        model: Any = build_model(gf.nn.SAGE(hidden=8, layers=2, dropout=0.5), data.graph, out_channels=10).double()
    else:
        model = make_model(kind, data.num_features, dropout=0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model, optimizer = fleet.prepare(model, optimizer, check=False)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        first, second = model(data.x, data.edge_index), model(data.x, data.edge_index)
        assert not torch.equal(first, second)
        loss = fleet.mean(F.cross_entropy((first + second)[data.train_mask], data.y[data.train_mask], reduction="none"))
        fleet.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    correct = model(data.x, data.edge_index).argmax(1) == data.y
    return outcome(model, [*losses, float(fleet.mean(correct[data.test_mask])), float(fleet.sum(correct))])


@pytest.mark.parametrize("kind", ["gat", "gcn", "native"])
def test_dropout_is_the_same_on_any_number_of_ranks(pool: RankPool, store: Path, kind: str) -> None:
    (expected,) = pool.run(1, dropout_loop, str(store), kind)
    for actual in pool.run(2, dropout_loop, str(store), kind):
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)


def sampled_loop(world: World, store: str, fanouts: list[int], kind: str) -> Outcome:
    fleet = Fleet(world=world, seed=1)
    data = fleet.open(store, partition="random", dtype=torch.float64)
    if kind == "native":
        torch.manual_seed(4)
        model: Any = build_model(gf.nn.GCN(hidden=8, layers=2, dropout=0.5), data.graph, out_channels=10).double()
    else:
        model = make_model(kind, data.num_features, dropout=0.3)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model, optimizer = fleet.prepare(model, optimizer, check=False)
    loader = fleet.loader(data, fanouts, batch_size=16, input_nodes=data.train_mask, shuffle=True)
    losses, seeds = [], []
    for _ in range(2):
        for batch in loader:
            optimizer.zero_grad()
            out = model(batch.x, batch.edge_index)[: batch.batch_size]
            loss = fleet.mean(F.cross_entropy(out, batch.y, reduction="none"))
            fleet.backward(loss)
            optimizer.step()
            losses.append(loss.item())
            seeds.append(fleet.gather(batch.n_id[: batch.batch_size]).sort().values)
    assert len(losses) == 2 * len(loader)
    model.eval()
    out = model(batch.x, batch.edge_index)[: batch.batch_size]
    exact = model(data.x, data.edge_index)
    return {
        **outcome(model, losses),
        "seeds": seeds,
        "sampled": fleet.gather(out, batch.n_id[: batch.batch_size]),
        "exact": fleet.gather(exact, data.n_id)[seeds[-1]],
    }


@pytest.mark.parametrize("kind", ["plain gcn", "gat"])
def test_batches_are_the_same_on_any_number_of_ranks(pool: RankPool, store: Path, kind: str) -> None:
    (expected,) = pool.run(1, sampled_loop, str(store), [3, 2], kind)
    for actual in pool.run(3 if kind == "gat" else 2, sampled_loop, str(store), [3, 2], kind):
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)
    assert not torch.allclose(expected["sampled"], expected["exact"])


@pytest.mark.parametrize("kind", ["plain gcn", "native"])
def test_batches_with_all_neighbours_are_exact(pool: RankPool, store: Path, kind: str) -> None:
    for result in pool.run(2, sampled_loop, str(store), [-1, -1], kind):
        torch.testing.assert_close(result["sampled"], result["exact"], rtol=1e-10, atol=1e-12)


def saving_loop(world: World, store: str, path: str, resume: bool) -> Outcome:
    fleet = Fleet(world=world)
    data = fleet.open(store, partition="random")
    model = make_model("sage", data.num_features, dropout=0.5).float()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3], 0.5)
    model, optimizer = fleet.prepare(model, optimizer, check=False)
    loader = fleet.loader(data, [3, 3], batch_size=32, input_nodes=data.train_mask, shuffle=True)
    first = fleet.load(path, model, optimizer, scheduler)["epoch"] if resume else 0
    for epoch in range(first, 4):
        for batch in loader:
            optimizer.zero_grad()
            out = model(batch.x, batch.edge_index)[: batch.batch_size]
            fleet.backward(fleet.mean(F.cross_entropy(out, batch.y, reduction="none")))
            optimizer.step()
        scheduler.step()
        if epoch == 1 and not resume:
            fleet.save(path, model, optimizer, scheduler, epoch=2, note="half")
    table = Path(path).with_suffix(".parquet")
    logits = fleet.predict(model, data, table)
    return {**outcome(model, []), "logits": logits, "summary": fleet.summary()}


def test_a_saved_loop_resumes_to_the_same_bits_and_predicts(pool: RankPool, store: Path, tmp_path: Path) -> None:
    whole = pool.run(2, saving_loop, str(store), str(tmp_path / "run"), False)
    resumed = pool.run(2, saving_loop, str(store), str(tmp_path / "run"), True)
    for one, other in zip(whole, resumed, strict=True):
        assert torch.equal(one["logits"], other["logits"])
        torch.testing.assert_close(one["weights"], other["weights"], rtol=0, atol=0)
    table = pq.read_table(tmp_path / "run.parquet")
    logits: Tensor = whole[0]["logits"]
    assert table["id"].to_pylist() == [f"n{i}" for i in range(120)]
    assert table["prediction"].to_pylist() == [f"kind {'abcdefghij'[c]}" for c in logits.argmax(1).tolist()]
    summary = whole[1]["summary"]
    assert all(len(values) == 2 and min(values) > 0 for values in summary.values()), summary
    (one_process,) = pool.run(1, saving_loop, str(store), str(tmp_path / "run"), True)
    torch.testing.assert_close(one_process["logits"], logits, rtol=1e-3, atol=1e-4)


def closure_loop(world: World, store: str, direct: bool) -> Outcome:
    fleet = Fleet(world=world)
    data = fleet.open(store, partition="random", dtype=torch.float64)
    model = make_model("sage", data.num_features)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    model, optimizer = fleet.prepare(model, optimizer, check=False)

    def closure() -> Tensor:
        optimizer.zero_grad()
        out = model(data.x, data.edge_index)[data.train_mask]
        loss = fleet.mean(F.cross_entropy(out, data.y[data.train_mask], reduction="none"))
        loss.backward() if direct else fleet.backward(loss)
        return loss

    step = partial(optimizer.step, closure=closure) if direct else partial(optimizer.step, closure)
    return outcome(model, [step().item() for _ in range(2)])


def test_closures_of_optimizers_get_sums(pool: RankPool, store: Path) -> None:
    (expected,) = pool.run(1, closure_loop, str(store), False)
    for direct in (False, True):
        torch.testing.assert_close(pool.run(2, closure_loop, str(store), direct)[1], expected, rtol=1e-9, atol=1e-11)


class Centred(torch.nn.Module):
    """Subtracts the mean of the rows it sees: wrong on a part, and no operation on edges shows it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = GraphSAGE(width, 8, 1, 10)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.conv(x - x.mean(0), edge_index)


def mistakes(world: World, store: str) -> list[str]:
    fleet = Fleet(world=world)
    data = fleet.open(store, partition="random", dtype=torch.float64)

    def message(call: Callable[[], object]) -> str:
        try:
            call()
        except ConfigError as error:
            return str(error)
        return ""

    model = fleet.prepare(make_model("sage", data.num_features), check=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        local = F.cross_entropy(model(data.x, data.edge_index)[data.train_mask], data.y[data.train_mask])
        fleet.backward(local)
    norms = fleet.prepare(make_model("gcn", data.num_features), check=False)
    batch = next(iter(fleet.loader(data, [2, 2], batch_size=8)))
    return [
        message(lambda: fleet.prepare(Centred(data.num_features))),
        message(lambda: norms(batch.x, batch.edge_index)),
        "; ".join(str(warning.message) for warning in caught),
    ]


def test_mistakes_are_named(pool: RankPool, store: Path) -> None:
    first, second = pool.run(2, mistakes, str(store))
    assert "depends on the partition" in first[0] and "norm of single nodes" in second[1], first
    assert "the loss differs between workers" in first[2] and not second[2]

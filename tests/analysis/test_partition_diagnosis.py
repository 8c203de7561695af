"""``gnnfleet diagnose``: shares and divergences follow their definitions, gradients are those of autograd."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from gnnfleet.analysis import partition_diagnosis
from gnnfleet.analysis.partition_diagnosis import (
    DiagnosisRow,
    Snapshot,
    choose_clusters,
    cluster_candidates,
    diagnose,
    recommend,
)
from gnnfleet.cli.diagnose import _table
from gnnfleet.cli.output import print_result
from gnnfleet.config.resolve import resolve
from gnnfleet.config.schema import RunConfig
from gnnfleet.graph.graph import Graph
from gnnfleet.graph.partition.edge_scan import measure_partition
from gnnfleet.graph.partition.node_assignment import ClusterMap
from gnnfleet.graph.store import open_store, save_store
from gnnfleet.graph.views.local import LocalView
from gnnfleet.session.prepare import RunLocation, resolve_run
from gnnfleet.training.build import build
from gnnfleet.training.partition_cache import ensure_clusters, trained_graph
from gnnfleet.training.run_dir import RunDirectory
from tests.graphs import communities
from tests.shell import call, fails, run_json

SMALL = {"name": "sage", "hidden": 8, "layers": 2, "dropout": 0.0}
OPTIONS = ("--set", "model.hidden=8", "--set", "model.layers=2", "--steps", "2")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("diagnose") / "store"
    save_store(communities(1500), path)
    return path


def tma_config(workers: int = 3, *, strategy: dict[str, Any] | None = None, **settings: Any) -> RunConfig:
    model = {**SMALL, **settings.pop("model", {})}
    return resolve({"strategy": {"name": "tma", **(strategy or {})}, "workers": workers, "model": model, **settings})


def test_rows_measure_their_assignments(store: Path) -> None:
    graph, config = open_store(store), tma_config()
    rows = diagnose(graph, config, clusters=[12, 100], steps=3)
    assert [(row.scheme, row.clusters) for row in rows] == [
        ("random", None),
        ("super", 12),
        ("super", 100),
        ("mincut", 3),
    ]
    random, few, many, mincut = rows
    assert random.kept == pytest.approx(1 / 3, abs=0.03)
    path = ensure_clusters(graph, trained_graph(graph, config), config.model_copy(update={"partition": "mincut"}))
    assert path is not None
    quality = measure_partition(graph, ClusterMap.open(path).cluster_of_node.numpy(), 3)
    assert mincut.kept == quality.kept_edges / graph.num_edges
    assert mincut.balance == quality.summary()["balance"]["nodes"]
    assert random.kept < many.kept < few.kept < mincut.kept
    assert random.labels is not None and mincut.labels is not None and random.labels < mincut.labels
    assert random.features is not None and mincut.features is not None and random.features < mincut.features
    for row in rows:
        for snapshot in (row.first, row.trained):
            assert snapshot.discrepancy is not None and snapshot.discrepancy > 0
            assert snapshot.cosine is not None and -1 <= snapshot.cosine < 1
        assert row.trained.loss is not None and row.first.loss is not None and row.trained.loss < row.first.loss
    assert diagnose(graph, config, ["super"], [12], steps=3) == [few], "the same seed gives the same figures"


@pytest.mark.parametrize("scheme", ["random", "super", "mincut"])
def test_one_trainer_agrees_with_itself(store: Path, scheme: str) -> None:
    (row,) = diagnose(open_store(store), tma_config(1), [scheme], steps=1)
    assert (row.kept, row.balance, row.labels) == (1, 1, 0)
    assert row.features == pytest.approx(0, abs=1e-12)
    for snapshot in (row.first, row.trained):
        assert (snapshot.discrepancy, snapshot.cosine) == (0, 1) and snapshot.aim == pytest.approx(1, abs=1e-9)


def test_divergences_equal_those_computed_by_hand(tmp_path: Path) -> None:
    """Two islands: each min-cut part has one class and one mean."""
    ids = torch.arange(20)
    ring = torch.stack([ids, (ids + 1) % 20])
    both = torch.cat([ring, ring.flip(0), ring + 20, ring.flip(0) + 20], 1)
    y = torch.cat([torch.zeros(20), torch.ones(20)]).long()
    x = torch.stack([y * 4.0, torch.ones(40)], 1)
    multilabel = torch.stack([y, 1 - y, torch.zeros(40, dtype=torch.int64)], 1)
    for name, labels, divergence in (("class", y, 1 / 2), ("labels", multilabel, 1 / 3)):
        save_store(Graph(both, y=labels, split=torch.zeros(40), x=x), tmp_path / name)
        (row,) = diagnose(open_store(tmp_path / name), tma_config(2), ["mincut"], steps=0)
        assert row.kept == 1 and row.balance == 1
        assert row.labels == pytest.approx(divergence)
        assert row.features == pytest.approx(1), "means 0 and 4 around 2, standard deviation 2"
        assert row.first == row.trained, "no steps"


def test_trainers_with_nothing_to_train_on_are_left_out(tmp_path: Path) -> None:
    """One of two islands has labels."""
    ring = torch.stack([torch.arange(20), torch.arange(1, 21) % 20])
    both = torch.cat([ring, ring.flip(0), ring + 20, ring.flip(0) + 20], 1)
    y = torch.cat([torch.arange(20) % 2, torch.full((20,), -1)])
    save_store(Graph(both, x=torch.ones(40, 2), y=y, split=torch.zeros(40)), tmp_path / "half")
    (row,) = diagnose(open_store(tmp_path / "half"), tma_config(2), ["mincut"], steps=1)
    assert (row.kept, row.labels, row.features) == (1, 0, 0)
    assert row.first.loss is not None and (row.first.discrepancy, row.first.cosine) == (None, None)
    assert recommend([row]) is None


def test_link_runs_and_learnable_rows_need_neither_labels_nor_features(tmp_path: Path) -> None:
    graph = communities(200)
    bare = Graph.of({"node": replace(graph.single_nodes, x=None, y=None, split=None)}, graph.edges)
    save_store(bare, tmp_path / "bare")
    config = tma_config(
        2, task="link", split="0.8/0.1/0.1", model={"embedding": 4}, strategy={"batch": 100, "remote_negatives": 3}
    )
    rows = diagnose(open_store(tmp_path / "bare"), config, ["random", "mincut"], steps=2)
    for row in rows:
        assert row.labels is None and row.features is None
        assert row.trained.cosine is not None and row.trained.discrepancy is not None
    assert rows[0].kept == pytest.approx(1 / 2, abs=0.05)


@pytest.mark.parametrize(
    "options", [{}, {"batch": 100}, {"fanouts": [-1, -1], "batch": 100}, {"fanouts": [-1, -1], "cache_inputs": True}]
)
@pytest.mark.parametrize("name", ["sage", "gcn"])
def test_gradients_are_those_of_the_mean_loss(name: str, options: dict[str, Any]) -> None:
    graph = communities(300)
    tree = {"strategy": {"name": "local", **options}, "model": {**SMALL, "name": name}, "precision": "float64"}
    strategy: Any = build(graph, resolve(tree)).strategy
    list(strategy.train_epoch(0))  # beyond the initial weights, with a state of the optimizer
    before = {part: {k: v.clone() for k, v in tensors.items()} for part, tensors in strategy.state_dict().items()}
    loss, count, gradients = strategy.gradients(1)
    after = strategy.state_dict()
    for part, tensors in before.items():
        assert tensors.keys() == after[part].keys()
        assert all(torch.equal(tensor, after[part][key]) for key, tensor in tensors.items())
    table = graph.single_nodes
    train, x, y = table.mask("train"), table.x, table.y
    assert x is not None and y is not None
    strategy.model.zero_grad(set_to_none=True)
    view = LocalView.of_graph(graph)
    expected = functional.cross_entropy(strategy.model([view] * 2, x.double())[train], y[train])
    expected.backward()
    assert count == int(train.sum()) and loss == pytest.approx(float(expected.detach()), abs=1e-10)
    parameters = dict(strategy.model.named_parameters())
    assert gradients.keys() == parameters.keys()
    for key, gradient in gradients.items():
        torch.testing.assert_close(gradient, parameters[key].grad, rtol=0, atol=1e-10)


def test_gradients_do_not_change_running_statistics() -> None:
    tree = {"strategy": {"name": "local"}, "model": {**SMALL, "norm": "batch", "dropout": 0.5}}
    strategy: Any = build(communities(300), resolve(tree)).strategy
    before = {name: tensor.clone() for name, tensor in strategy.state_dict()["model"].items()}
    (loss, _, gradients), (same_loss, _, same_gradients) = strategy.gradients(0), strategy.gradients(0)
    assert loss == same_loss and all(torch.equal(gradients[name], same_gradients[name]) for name in gradients)
    assert any("running" in name for name in before)
    assert all(torch.equal(tensor, before[name]) for name, tensor in strategy.state_dict()["model"].items())
    assert strategy.gradients(1)[0] != loss, "other draws in another epoch"


def row_of(clusters: int, cosine: float, aim: float | None) -> DiagnosisRow:
    snapshot = Snapshot(1.0, 0.1, cosine, aim)
    return DiagnosisRow("super", clusters, 0.5, 1.0, 0.0, 0.0, snapshot, snapshot)


def test_the_row_with_the_largest_cosine_among_those_of_good_aim_is_recommended() -> None:
    rows = [row_of(3, 0.9, 0.5), row_of(50, 0.7, 0.96), row_of(500, 0.4, 1.0), row_of(5, 0.95, None)]
    assert recommend(rows) is rows[1]
    assert recommend([row_of(3, 0.9, -0.5), row_of(9, 0.5, -0.1)]) == row_of(9, 0.5, -0.1)
    assert recommend(rows[3:]) is None


def test_the_table_fits_120_columns(capsys: pytest.CaptureFixture[str]) -> None:
    print_result({}, as_json=False, human=[_table("sage on shop", [row_of(15_000, 0.123, 0.456)], steps=20)])
    shown = capsys.readouterr().out
    headings = "scheme clusters kept balance labels features loss ± after 20 cosine after 20 aim after 20"
    assert " ".join(text for text in shown.splitlines()[2].split() if text not in "┃│") == headings
    assert max(map(len, shown.splitlines())) <= 120


def test_a_run_uses_the_recommended_number_of_super_nodes(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``strategy.clusters=auto`` becomes a number before the run, and keeps it when the run is resumed."""
    graph = open_store(store)
    numbers = cluster_candidates(graph.num_nodes, 3)
    assert numbers == [30, 90, 150] and cluster_candidates(10**6, 4)[-1] == 15_000 and cluster_candidates(20, 4) == [4]
    config, calls = tma_config(strategy={"clusters": "auto"}), list[Any]()

    def measure(*arguments: Any, **_: Any) -> list[DiagnosisRow]:
        calls.append(arguments[2:4])
        return [row_of(30, 0.9, 0.5), row_of(88, 0.7, 0.96), row_of(150, 0.4, 1.0)]  # METIS may leave some empty

    monkeypatch.setattr(partition_diagnosis, "diagnose", measure)
    chosen = choose_clusters(graph, config, quiet=True)
    assert chosen.strategy.num_clusters == 90 and calls == [(["super"], numbers)]
    mincut = tma_config(strategy={"clusters": "auto", "scheme": "psgd-pa"})
    assert choose_clusters(graph, mincut, quiet=True).strategy.num_clusters == 0
    directory = RunDirectory(tmp_path / "run")
    directory.path.mkdir()
    directory.initialize(chosen, graph, None)
    resumed, _ = resolve_run(
        graph, config.model_dump(mode="json"), RunLocation(directory.path, resume=True), quiet=True
    )
    assert resumed.strategy == chosen.strategy


def test_the_command_prints_rows_and_a_recommendation(store: Path) -> None:
    answer = run_json("diagnose", store, *OPTIONS, "--clusters", "20", "--seed", "1", "-q")
    assert (answer["workers"], answer["seed"], answer["steps"]) == (3, 1, 2)
    assert [row["scheme"] for row in answer["rows"]] == ["random", "super", "mincut"]
    assert answer["rows"][1]["clusters"] == 20 and 0 < answer["rows"][1]["kept"] < 1
    assert answer["recommended"]["scheme"] in ("random", "super", "mincut")
    json.dumps(answer, allow_nan=False)
    done = call("diagnose", store, *OPTIONS, "--scheme", "random", "--workers", "2", "-q")
    assert done.returncode == 0, done.stderr
    assert "cosine" in done.stdout and "recommended: strategy.scheme=random" in done.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--scheme", "magic"), "magic"),
        (("--scheme", "random", "--clusters", "5"), "--scheme super"),
        (("--clusters", "2"), "too few for 3 workers"),
        (("--set", "strategy.scheme=ggs"), "assigns no nodes"),
        (("--split", "9-per-magic"), "9-per-magic"),
    ],
)
def test_mistakes_get_one_message(store: Path, options: tuple[str, ...], message: str) -> None:
    assert message in fails("diagnose", store, *options, "-q", code=2)

"""Averages, deals and the desk: what trainers give is counted once, in its own round, whatever their delays."""

from __future__ import annotations

import math
import random
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from gnnfleet.comm import message_store as posts
from gnnfleet.comm.message_store import Address, MessageStore
from gnnfleet.errors import ExchangeError
from gnnfleet.graph.graph import Graph
from gnnfleet.graph.partition.assign import Assignment, assign_nodes
from gnnfleet.graph.partition.node_assignment import ClusterMap, NodeAssignment, write_clusters
from gnnfleet.graph.partition.partition_metrics import measure_partition
from gnnfleet.graph.store import open_store, save_store
from gnnfleet.strategies.tma.averaging import FlatLayout, OuterOptimizer
from gnnfleet.strategies.tma.config import TmaConfig
from gnnfleet.strategies.tma.coordinator import Coordinator, EmbeddingTable
from gnnfleet.strategies.tma.protocol import CoordinatorClient, RunState, TrainerUpdate, write_round_ack, write_update
from tests.faults.trials import until
from tests.graphs import communities


def test_letters_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(posts, "PIECE_BYTES", 10)
    post = MessageStore.serve()
    other = MessageStore.connect(post.address)
    body = torch.arange(35, dtype=torch.uint8)
    other.write("a", {"n": 1}, body)
    found = post.read("a")
    assert found is not None and found.fields == {"n": 1} and torch.equal(found.body, body)
    other.write("a", {"n": 2}, body[:3])
    found = post.read("a")
    assert found is not None and found.fields == {"n": 2} and len(found.body) == 3
    post.remove("a")
    assert other.read("a") is None and not other.has("a")
    assert [post.count("k"), other.count("k", 2), post.count("k", 0)] == [1, 3, 3]
    with pytest.raises(ValueError, match="HOST:PORT"):
        Address.parse("29500")
    listening = {c.laddr.ip for c in psutil.Process().net_connections("tcp") if c.laddr.port == post.address.port}
    assert listening == {"127.0.0.1"}, "nobody else can knock"
    monkeypatch.setattr(posts, "CONNECT_TIMEOUT", 1.0)
    with pytest.raises(ExchangeError, match=r"lost the coordinator's server at 127\.0\.0\.1:1"):
        MessageStore.connect(Address("127.0.0.1", 1))


def _share(graph: Graph, part: np.ndarray[tuple[int], np.dtype[np.int32]], parts: int) -> float:
    return measure_partition(graph, part, parts).kept_edges / graph.num_edges


def kept_share(graph: Graph, deal: NodeAssignment, among: int, number: int = 0) -> float:
    part = torch.empty(graph.num_nodes, dtype=torch.int32)
    for place in range(among):
        part[deal.nodes_of(place, among, number)["node"]] = place
    return _share(graph, part.numpy(), among)


def test_deals(tmp_path: Path) -> None:
    """Every node once; random keeps 1/M of the edges; fewer clusters keep more; one each keeps all but the cut."""
    graph = communities(3000)
    counts = {"node": graph.num_nodes}
    loops = float((graph.single_edges.src == graph.single_edges.dst()).float().mean())
    assert loops == 0
    shares = []
    for clusters in (0, 1500, 60, 3):
        deal = NodeAssignment(counts, None, seed=4)
        if clusters:
            method, parts = ("mincut", 3) if clusters == 3 else ("super", 1)
            options = {} if clusters == 3 else {"clusters": clusters}
            found = assign_nodes(graph, parts, method, **options)
            write_clusters(graph, found, tmp_path / str(clusters))
            deal = NodeAssignment(counts, ClusterMap.open(tmp_path / str(clusters)), seed=4)
        for among, number in ((3, 0), (2, 0), (3, 5)):
            ids = [deal.nodes_of(place, among, number)["node"] for place in range(among)]
            assert torch.equal(torch.cat(ids).sort().values, torch.arange(graph.num_nodes))
            assert all(torch.equal(rows, rows.sort().values) for rows in ids)
        shares.append(kept_share(graph, deal, 3))
    assert shares[0] == pytest.approx(1 / 3, abs=0.03) and shares == sorted(shares)
    cut = assign_nodes(graph, 3, "mincut")
    assert shares[3] == pytest.approx(_share(graph, cut.part, 3))
    seen = torch.zeros(graph.num_edges, dtype=torch.bool)  # of edges, over many deals
    src, dst = graph.single_edges.edge_index()
    deal = NodeAssignment(counts, ClusterMap.open(tmp_path / "60"), seed=4)
    for number in range(40):
        part = torch.empty(graph.num_nodes, dtype=torch.int64)
        for place in range(3):
            part[deal.nodes_of(place, 3, number)["node"]] = place
        seen |= part[src] == part[dst]
    assert bool(seen.all())


def test_clusters_of_another_graph_are_refused(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 2)):
        save_store(communities(300 + seed), tmp_path / name)
    one, two = open_store(tmp_path / "a"), open_store(tmp_path / "b")
    part = np.zeros(one.num_nodes, dtype=np.int32)
    write_clusters(one, Assignment(part=part, parts=1, method="mincut"), tmp_path / "deal")
    assert len(ClusterMap.open(tmp_path / "deal", one).sizes) == 1
    with pytest.raises(Exception, match="another version"):
        ClusterMap.open(tmp_path / "deal", two)


def test_rows_of_a_trainer_that_was_started_anew_are_kept() -> None:
    """It does not know them yet: it gives none, and finds them with the next round."""
    post = MessageStore.serve()
    layout = FlatLayout({"w": (2,)}, {"w": torch.float64}, torch.float64, 2)
    deal = NodeAssignment({"node": 40}, None)
    own = [deal.nodes_of(place, 2)["node"] for place in range(2)]
    desk = Coordinator(
        config=TmaConfig(steps=1, give_up=20), trainers=2, store=post.reconnect(), layout=layout, first=0, last=3,
        assignment=deal, weights=torch.zeros(2, dtype=torch.float64), outer=OuterOptimizer(0.0),
        tables={"e": EmbeddingTable("node", torch.zeros(40, 1, dtype=torch.float64))},
    )  # fmt: skip
    until(lambda: post.has("now"), 10, "first weights")
    for number in range(2):
        for i in range(2):
            fresh = number == 1 and i == 1
            rows = {} if fresh else {"e": torch.full((len(own[i]), 1), 10.0 + i, dtype=torch.float64)}
            assert post.has(f"rows/1/{number}/{i}") == (number == 0)
            write_update(
                post, RunState(1, number), i, TrainerUpdate(0 if fresh else 1, 1, 0.0, 1, sign(number, i), None, rows)
            )
        closed = desk.wait_round()
        assert closed.rows["e"][own[1]].unique().tolist() == [11.0] and closed.rows["e"][own[0]].unique() == 10.0
    assert post.has("rows/1/2/1") and not post.has("rows/1/2/0")
    desk.close()


def test_statistics_go_by_what_was_seen() -> None:
    """The first number is learnt and averaged evenly, the second is a statistic."""
    post = MessageStore.serve()
    layout = FlatLayout({"w": (1,), "mean": (1,)}, {"w": torch.float64, "mean": torch.float64}, torch.float64, 1)
    desk = Coordinator(
        config=TmaConfig(steps=1, give_up=20), trainers=2, store=post.reconnect(), layout=layout, first=0, last=1,
        assignment=NodeAssignment({"node": 4}, None), weights=torch.zeros(2, dtype=torch.float64), outer=OuterOptimizer(0.0),
    )  # fmt: skip
    until(lambda: post.has("now"), 10, "first weights")
    for i, seen in enumerate((1, 3)):
        write_update(
            post, RunState(1, 0), i, TrainerUpdate(1, seen, 0.0, 1, torch.full((2,), float(i), dtype=torch.float64))
        )
    assert desk.wait_round().weights.tolist() == [0.5, 0.75]
    desk.close()


LAYOUT = FlatLayout({"w": (2,)}, {"w": torch.float64}, torch.float64, 2)


def desk_of(post: MessageStore, config: TmaConfig, last: int, **more: Any) -> Coordinator:
    """With two trainers, whose letters the test writes."""
    desk = Coordinator(
        config=config, trainers=2, store=post.reconnect(), layout=LAYOUT, first=0, last=last, outer=OuterOptimizer(0.0),
        assignment=NodeAssignment({"node": 40}, None), weights=torch.zeros(2, dtype=torch.float64), **more,
    )  # fmt: skip
    until(lambda: post.has("now"), 10, "first weights")
    return desk


@pytest.mark.parametrize(("weighting", "mean"), [("uniform", 0.5), ("edges", 0.8), ("steps", 0.9)])
def test_trainers_count_by_their_edges_or_steps(weighting: Any, mean: float) -> None:
    post = MessageStore.serve()
    desk = desk_of(post, TmaConfig(steps=1, give_up=20, weighting=weighting), 1)
    for i, (steps, edges) in enumerate(((1, 10), (9, 40))):
        write_update(
            post,
            RunState(1, 0),
            i,
            TrainerUpdate(steps, 1, 0.0, edges, torch.full((2,), float(i), dtype=torch.float64)),
        )
    torch.testing.assert_close(desk.wait_round().weights, torch.full((2,), mean, dtype=torch.float64))
    desk.close()


GONE: list[tuple[Any, dict[str, Any] | None, tuple[int, ...]]] = [
    ("reassign", {}, (0,)),
    ("drop", {}, (0, 1)),
    ("reassign", None, (0, 1)),  # only silent: it may be back in the next round
    ("reassign", {"raised": True}, (0, 1)),  # its nodes might bring it upon others
]


@pytest.mark.parametrize(("lost", "gone", "left"), GONE)
def test_nodes_are_dealt_anew_when_a_trainer_is_gone_for_good(
    lost: Any, gone: dict[str, Any] | None, left: tuple[int, ...]
) -> None:
    post = MessageStore.serve()
    desk = desk_of(post, TmaConfig(steps=1, deadline=0.2, silence=0.2, give_up=60, on_trainer_loss=lost), 2)
    if gone is not None:
        post.write("gone/1", gone)
    write_update(post, RunState(1, 0), 0, TrainerUpdate(1, 1, 0.0, 1, sign(0, 0)))
    assert desk.wait_round().trainers == (0,)
    assert among(post, 1, 1) == left
    desk.close()
    again = desk_of(
        post, TmaConfig(steps=1, give_up=60, on_trainer_loss=lost), 2
    )  # a coordinator that was started again
    until(lambda: post.has("take/2/0"), 10, "weights of another era")
    assert among(post, 2, 0) == left
    again.close()


def among(post: MessageStore, era: int, number: int) -> tuple[int, ...]:
    """Who shares the nodes in a round."""
    letter = post.read(f"take/{era}/{number}")
    assert letter is not None
    return tuple(letter.fields["among"])


def test_nodes_are_dealt_anew_after_a_long_silence_and_when_it_is_over() -> None:
    post = MessageStore.serve()
    desk = desk_of(post, TmaConfig(steps=1, deadline=0.1, silence=0.5, give_up=1), 4)
    for _ in range(12):
        post.count("beat/0")
        time.sleep(0.1)
    for number, left in enumerate(((0,), (0, 1))):
        for i in range(number + 1):
            post.count(f"beat/{i}")
        time.sleep(0.2)
        write_update(post, RunState(1, number), 0, TrainerUpdate(1, 1, 0.0, 1, sign(number, 0)))
        assert desk.wait_round().trainers == (0,)
        assert among(post, 1, number + 1) == left
    desk.close()


def test_who_comes_back_when_all_others_are_gone_has_nodes_again() -> None:
    """Nothing is counted in the round in which nobody was left."""
    post = MessageStore.serve()
    desk = desk_of(post, TmaConfig(steps=1, deadline=0.2, silence=0.2, give_up=20), 4)
    post.write("gone/1", {})
    write_update(post, RunState(1, 0), 0, TrainerUpdate(1, 1, 0.0, 1, sign(0, 0)))
    assert desk.wait_round().trainers == (0,) and among(post, 1, 1) == (0,)
    post.remove("gone/1")
    post.write("gone/0", {})
    for _ in range(3):
        post.count("beat/1")
        time.sleep(0.1)
    closed = desk.wait_round()
    assert closed.trainers == () and closed.steps == 0 and torch.equal(closed.weights, sign(0, 0))
    assert among(post, 1, 2) == (1,)
    desk.close()


def test_trainers_hear_that_all_is_over_when_all_is_kept() -> None:
    """Until then a coordinator that was lost may be started again, and needs them."""
    post = MessageStore.serve()
    desk = desk_of(post, TmaConfig(steps=1, give_up=20), 1)
    for i in range(2):
        write_update(post, RunState(1, 0), i, TrainerUpdate(1, 1, 0.0, 1, sign(0, i)))
    desk.wait_round()
    until(lambda: post.has("take/1/1"), 10, "the end of the last round")
    now = post.read("now")
    assert among(post, 1, 1) == () and now is not None and now.fields == {"era": 1, "round": 1, "done": False}
    assert desk.close()
    now = post.read("now")
    assert now is not None and now.fields["done"]


def test_weights_that_are_not_finite_do_not_count() -> None:
    post, said = MessageStore.serve(), []
    desk = desk_of(post, TmaConfig(steps=1, give_up=20), 1, say=said.append)
    for i, value in enumerate((3.0, math.inf)):
        write_update(post, RunState(1, 0), i, TrainerUpdate(1, 1, 0.0, 1, torch.full((2,), value, dtype=torch.float64)))
    closed = desk.wait_round()
    assert closed.weights.tolist() == [3.0, 3.0] and closed.trainers == (0,)
    assert said == ["round 1: the weights of trainer 1 are not finite, so they are not counted"]
    desk.close()


def test_who_was_late_is_waited_for_when_it_is_back() -> None:
    """Trainer 1 beats but hangs: rounds do not wait for it, whatever the deadline, until it has begun one."""
    post = MessageStore.serve()
    desk = desk_of(post, TmaConfig(steps=1, deadline=600, give_up=20), 3)
    desk._known[1].late = True  # a round has waited for it for as long as the deadline
    for number in range(2):
        post.count("beat/1")
        write_update(post, RunState(1, number), 0, TrainerUpdate(1, 1, 0.0, 1, sign(number, 0)))
        assert desk.wait_round().trainers == (0,)
    write_round_ack(post, RunState(1, 2), 1)
    post.count("beat/1")
    write_update(post, RunState(1, 2), 0, TrainerUpdate(1, 1, 0.0, 1, sign(2, 0)))
    time.sleep(0.2)
    write_update(post, RunState(1, 2), 1, TrainerUpdate(1, 1, 0.0, 1, sign(2, 1)))
    assert desk.wait_round().trainers == (0, 1)
    desk.close()


class Counting:
    """A correction that knows how often it was made."""

    made = 0

    def apply(self, weights: torch.Tensor, rows: Any) -> torch.Tensor:
        self.made += 1
        return weights + 1

    def memory(self) -> dict[str, torch.Tensor]:
        return {}


def test_rounds_in_which_nobody_worked_are_corrected_too() -> None:
    """So that a run that goes on knows from the number of rounds which batches come next."""
    post, correction = MessageStore.serve(), Counting()
    desk = desk_of(post, TmaConfig(steps=1, give_up=20), 2, correction=correction)
    for number in range(2):
        for i in range(2):
            write_update(post, RunState(1, number), i, TrainerUpdate(number, number, 0.0, 1, sign(number, i)))
        desk.wait_round()
        assert correction.made == number + 1
    desk.close()


def test_a_coordinator_that_stands_still_is_lost() -> None:
    """Though the server of the post, which is the launcher's, answers."""
    post, lost = MessageStore.serve(), list[str]()
    with CoordinatorClient(post.reconnect(), 1, give_up=1, lost=lost.append):
        for _ in range(3):
            post.count("beat/coordinator")
            time.sleep(0.3)
        post.write("gone/1", {})  # of a process that had this number before
        assert not lost
        until(lambda: bool(lost), 15, "the end")
    assert "has not heard of the coordinator" in lost[0] and not post.has("gone/1")


def test_the_last_to_sit_down_is_the_trainer() -> None:
    """A process that was silent for so long that it was replaced finds that out and beats no more."""
    post, lost = MessageStore.serve(), []
    with CoordinatorClient(post.reconnect(), 1, give_up=20, lost=lost.append) as first:
        until(lambda: post.count("beat/1", 0) > 0, 10, "a beat")
        with CoordinatorClient(post.reconnect(), 1, give_up=20, lost=lost.append) as second:
            until(lambda: first.replaced, 10, "the end of the first")
            assert not second.replaced
    assert not lost


def test_a_letter_that_is_replaced_is_never_torn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has read the head of the old one finds its pieces or none, never those of the new one."""
    monkeypatch.setattr(posts, "PIECE_BYTES", 4)
    post = MessageStore.serve()
    heads = []
    for value in (1, 2):
        post.write("a", {"n": value}, torch.full((16,), value, dtype=torch.uint8))
        heads.append(post._pieces("a"))
    assert len(heads[0]) == len(heads[1]) == 4 and not set(heads[0]) & set(heads[1])
    assert not any(post.has(name) for name in heads[0]), "nothing of the old one is left"
    post.remove("a")
    assert not any(post.has(name) for name in heads[1])


def sign(number: int, trainer: int) -> torch.Tensor:
    """Weights that tell whose they are and of which round."""
    return torch.tensor([1000.0 * number + trainer, 1.0], dtype=torch.float64)


@pytest.mark.parametrize("seed", range(3))
def test_nothing_is_counted_twice_or_late(seed: int) -> None:
    """Trainers answer after random delays, twice, for rounds that are over, or not at all for a while."""
    post = MessageStore.serve()
    config = TmaConfig(interval=0.03, deadline=0.06, silence=0.4, give_up=20)
    layout = FlatLayout({"w": (2,)}, {"w": torch.float64}, torch.float64, 2)
    deal = NodeAssignment({"node": 9}, None)
    stop = threading.Event()

    def trainer(index: int) -> None:
        own, dice = post.reconnect(), random.Random(f"{seed}/{index}")
        while not stop.is_set():
            own.count(f"beat/{index}")
            letter = own.read("now")
            if letter is None:
                continue
            now = RunState(**letter.fields)
            time.sleep(dice.uniform(0, 0.09))
            give = TrainerUpdate(1, 1, 0.0, 1, sign(now.round, index))
            for _ in range(dice.choice([0, 1, 1, 1, 2])):
                write_update(own, now, index, give)
            if dice.random() < 0.3 and now.round:  # of a round that is closed
                old = TrainerUpdate(1, 1, 0.0, 1, sign(now.round - 1, index))
                write_update(own, RunState(now.incarnation, now.round - 1), index, old)

    threads = [threading.Thread(target=trainer, args=(index,), daemon=True) for index in range(3)]
    for thread in threads:
        thread.start()
    desk = Coordinator(
        config=config, trainers=3, store=post.reconnect(), layout=layout, weights=torch.zeros(2, dtype=torch.float64),
        first=2, last=22, assignment=deal, outer=OuterOptimizer(0.0),
    )  # fmt: skip
    sizes, looked = set(), 0
    for number in range(2, 22):
        closed = desk.wait_round()
        assert closed.round == number
        if closed.state == number:  # else others are over too
            wanted = torch.stack([sign(number, index) for index in closed.trainers]).mean(0)
            torch.testing.assert_close(closed.weights, wanted)
            looked += 1
        sizes.add(len(closed.trainers))
    stop.set()
    for thread in threads:
        thread.join(5)
    desk.close()
    assert len(sizes) > 1, "some rounds had to do without somebody"
    assert looked > 10


def test_a_round_by_the_clock_begins_when_trainers_do() -> None:
    """They make what they work on first, which may take longer than a round."""
    post = MessageStore.serve()
    desk = desk_of(post, TmaConfig(interval=0.2, deadline=20, give_up=60), 2)
    for i in range(2):
        post.count(f"beat/{i}")
    write_round_ack(post, RunState(1, 0), 0)
    time.sleep(0.6)
    assert not post.has("call/1")
    write_round_ack(post, RunState(1, 0), 1)
    began = time.monotonic()
    until(lambda: post.has("call/1"), 10, "the end of the round")
    assert time.monotonic() - began > 0.15
    for i in range(2):
        write_update(post, RunState(1, 0), i, TrainerUpdate(1, 1, 0.0, 1, sign(0, i)))
    closed = desk.wait_round()
    assert closed.seconds < 5 and time.monotonic() - began > closed.seconds, "starting is no part of it"
    desk.close()


def test_only_the_newest_round_by_the_clock_has_learnt_rows() -> None:
    """The loop may look at one round while the clock closes many."""
    post = MessageStore.serve()
    tables = {"e": EmbeddingTable("node", torch.zeros(40, 1, dtype=torch.float64))}
    desk = desk_of(post, TmaConfig(interval=0.01, deadline=5, give_up=60), 4, tables=tables)
    own = [NodeAssignment({"node": 40}, None).nodes_of(place, 2)["node"] for place in range(2)]
    for number in range(4):
        for i in range(2):
            rows = {"e": torch.full((len(own[i]), 1), float(number), dtype=torch.float64)}
            write_update(post, RunState(1, number), i, TrainerUpdate(1, 1, 0.0, 1, sign(number, i), None, rows))
        until(lambda number=number: desk.newest == number, 10, "the end of a round")  # type: ignore[misc]
    until(lambda: desk._closed.qsize() == 4, 10, "all rounds")
    assert all(not each.rows for each in desk._closed.queue)  # type: ignore[union-attr]
    for number in range(4):
        closed = desk.wait_round()
        assert (closed.round, closed.state) == (number, 3) and closed.rows["e"].unique().tolist() == [3.0]
        assert closed.weights.tolist() == [3000.5, 1.0] and closed.steps == 2
    desk.close()


def test_whoever_makes_steps_is_waited_for() -> None:
    """Rounds of so many steps: the deadline is for those that make none."""
    post = MessageStore.serve()
    desk = desk_of(post, TmaConfig(steps=5, deadline=0.4, silence=5, give_up=60), 1)
    write_update(post, RunState(1, 0), 0, TrainerUpdate(5, 1, 0.0, 1, sign(0, 0)))
    for _ in range(12):
        post.count("beat/1")
        post.count("steps/1")
        time.sleep(0.1)
    write_update(post, RunState(1, 0), 1, TrainerUpdate(5, 1, 0.0, 1, sign(0, 1)))
    assert desk.wait_round().trainers == (0, 1)
    desk.close()


def test_who_stays_away_is_named_again_after_a_while() -> None:
    post, said = MessageStore.serve(), []
    desk = desk_of(
        post, TmaConfig(steps=1, deadline=0.1, silence=0.1, give_up=60, on_trainer_loss="drop"), 45, say=said.append
    )
    for number in range(45):
        write_update(post, RunState(1, number), 0, TrainerUpdate(1, 1, 0.0, 1, sign(number, 0)))
        desk.wait_round()
    assert [text.split(" is closed")[0] for text in said] == ["round 1", "round 21", "round 41"]
    desk.close()

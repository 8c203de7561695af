"""Who lives is judged by beats: several ranks in one process, at fifty times the usual pace."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import pytest
from torch.distributed import HashStore, Store, TCPStore

from gnnfleet.comm.failure import Failure, FailureKind
from gnnfleet.comm.heartbeat import FailureDetector, HeartbeatConfig
from gnnfleet.comm.launch_env import LaunchEnv
from gnnfleet.comm.rendezvous import ProcessInfo, Rendezvous
from gnnfleet.errors import ExchangeError, RunError

FAST = HeartbeatConfig(interval=0.02, timeout=0.5, suspect_timeout=0.2)


class Rank:
    """A rank whose end is written down instead of happening."""

    def __init__(self, meeting: Rendezvous, pace: HeartbeatConfig) -> None:
        self.found: Failure | None = None
        self.code: int | None = None
        self.gone = threading.Event()
        self.liveness = FailureDetector(meeting, self.report, pace=pace, leave=self.leave)

    def report(self, failure: Failure) -> None:
        self.found = failure

    def leave(self, code: int) -> NoReturn:
        self.code = code
        self.liveness._stop.set()
        self.gone.set()
        if threading.current_thread() is threading.main_thread():
            sys.exit(code)
        while True:  # a thread of its own has nothing left to do
            time.sleep(1)

    def die(self) -> None:
        """No beat any more, and no last word."""
        self.liveness._stop.set()
        for thread in self.liveness._threads:
            thread.join(1)

    def raises(self, error: BaseException) -> None:
        with suppress(SystemExit):
            self.liveness.fail(error)

    def ended(self) -> Failure:
        assert self.gone.wait(5), "still alive"
        assert self.found is not None and self.code == self.found.exit_code
        return self.found


def meeting(seat: LaunchEnv, members: tuple[ProcessInfo, ...], store: Store) -> Rendezvous:
    bare = Rendezvous(seat, "t", members, store, store)
    return replace(bare, spare_connections=(bare.connection(), bare.connection()))


@contextmanager
def ranks(count: int = 3, paces: dict[int, HeartbeatConfig] | None = None) -> Iterator[list[Rank]]:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5))
    members = tuple(ProcessInfo(f"host{rank}", "m", 1000 + rank, f"elsewhere {rank}", "0") for rank in range(count))
    seats = [LaunchEnv(rank=rank, size=count, port=store.port, external_store=True) for rank in range(count)]
    made = [Rank(meeting(seat, members, store), (paces or {}).get(seat.rank, FAST)) for seat in seats]
    with ExitStack() as stack:
        for rank in made:
            stack.enter_context(rank.liveness)
        time.sleep(0.1)
        yield made


def test_a_silent_rank_is_named_by_all_others() -> None:
    with ranks() as (first, second, third):
        second.die()
        for rank in (first, third):
            failure = rank.ended()
            assert failure.kind is FailureKind.silent and failure.ranks == (1,) and failure.exit_code == 8
            assert "rank 1 (pid 1001 on host1) has given no sign of life" in failure.text


def test_a_clean_end_is_no_death() -> None:
    with ranks() as (first, second, third):
        second.liveness.close()
        time.sleep(2 * FAST.timeout)
        assert not first.gone.is_set() and not third.gone.is_set()


def test_a_rank_at_a_tenth_of_the_pace_is_healthy() -> None:
    with ranks(paces={1: HeartbeatConfig(interval=0.2, timeout=0.5)}) as made:
        time.sleep(3 * FAST.timeout)
        assert not any(rank.gone.is_set() for rank in made)


def test_a_pause_of_the_observer_accuses_nobody() -> None:
    with ranks() as (first, _, third):
        first.liveness._forgive_pause(-10 * FAST.timeout)  # as if nothing had been heard for long
        first.liveness._forgive_pause(10 * FAST.timeout)
        time.sleep(FAST.timeout)
        assert not first.gone.is_set() and not third.gone.is_set()


def test_an_exception_reaches_all_and_its_traceback_one() -> None:
    with ranks() as (first, second, third):
        try:
            raise KeyError("no such thing")
        except KeyError as error:
            second.raises(error)
        told = second.ended()
        assert "Traceback" in told.trace and "KeyError: 'no such thing'" in told.trace and told.exit_code == 1
        for rank in (first, third):
            failure = rank.ended()
            assert failure.kind is FailureKind.raised and failure.ranks == (1,) and not failure.trace
            assert "unexpected KeyError on rank 1: 'no such thing'" in failure.text and failure.exit_code == 1


def test_an_error_of_the_users_is_its_message() -> None:
    with ranks() as (first, second, _):
        second.raises(RunError("the loss is nan"))
        assert second.ended().trace == "" and second.ended().text == "the loss is nan"
        assert first.ended().text == "the loss is nan" and first.ended().exit_code == RunError.exit_code


def test_a_failed_exchange_is_laid_to_the_one_that_died() -> None:
    with ranks() as (first, second, third):
        second.die()
        third.raises(ExchangeError("connection closed by rank 0"))
        failure = third.ended()
        assert failure.kind is FailureKind.silent and failure.ranks == (1,) and "connection closed" in failure.text
        assert first.ended().ranks == (1,)


def test_a_failed_exchange_with_one_that_was_stopped() -> None:
    with ranks() as (first, second, third):
        second.liveness.stopping()
        second.die()
        third.raises(ExchangeError("connection closed"))
        assert third.ended().kind is FailureKind.stopped and third.ended().ranks == (1,)
        assert first.ended().ranks == (1,)


def test_a_failed_exchange_between_living_ranks_is_its_own_fault() -> None:
    with ranks() as (first, _, third):
        third.raises(ExchangeError("expected 3 rows, found 4"))
        assert third.ended().kind is FailureKind.lost and third.ended().ranks == (2,)
        assert first.ended().text == "expected 3 rows, found 4"


def test_a_rank_given_up_by_the_others_ends_when_it_comes_back() -> None:
    with ranks() as (first, second, third):
        second.liveness._stop.set()
        for rank in (first, third):
            rank.ended()
        back = Rank(second.liveness._rendezvous, FAST)
        with back.liveness:
            assert back.ended().kind is FailureKind.cut_off and "others gave it up" in back.ended().text


def test_without_a_store_a_rank_ends_and_says_so() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5))
    member = ProcessInfo("host", "m", 1, "p", "0")
    seat = LaunchEnv(rank=1, size=2, port=store.port, external_store=True)
    rank = Rank(meeting(seat, (member, member), store), FAST)
    store.set("t/beat/0", "done")
    with rank.liveness:
        time.sleep(0.1)
        rank.liveness._rendezvous = replace(rank.liveness._rendezvous, store=HashStore(), raw_store=HashStore())
        del store  # the last that held it
        failure = rank.ended()
    assert failure.kind is FailureKind.cut_off and failure.ranks == (1,) and "has not reached the store" in failure.text


def test_alone_nothing_runs() -> None:
    rank = Rank(Rendezvous(LaunchEnv(rank=0, size=1), "t", (ProcessInfo.current(),), None, None), FAST)  # type: ignore[arg-type]
    with rank.liveness:
        assert not rank.liveness._threads


@pytest.mark.parametrize("trace", ["", "Traceback ..."])
def test_a_failure_survives_store_and_file(tmp_path: Path, trace: str) -> None:
    import json

    failure = Failure(kind=FailureKind.cut_off, ranks=(1, 2), found_by=0, text="gone", trace=trace, exit_code=8)
    assert Failure.from_json(failure.as_json()) == failure
    failure.write(tmp_path / "error.json")
    content = json.loads((tmp_path / "error.json").read_text())
    assert Failure.from_file(content) == failure and Failure.from_file({"message": "x"}) is None
    assert content["message"]["extraInfo"]["py_callstack"] == (trace or "gone")

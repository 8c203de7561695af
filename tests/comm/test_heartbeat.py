"""Failure detection by heartbeats: several ranks in one process, at fifty times the usual frequency."""

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

    def __init__(self, rendezvous: Rendezvous, config: HeartbeatConfig) -> None:
        self.failure: Failure | None = None
        self.code: int | None = None
        self.gone = threading.Event()
        self.detector = FailureDetector(rendezvous, self.report, config=config, exit_process=self.exit_process)

    def report(self, failure: Failure) -> None:
        self.failure = failure

    def exit_process(self, code: int) -> NoReturn:
        self.code = code
        self.detector._stop.set()
        self.gone.set()
        if threading.current_thread() is threading.main_thread():
            sys.exit(code)
        while True:  # a thread of its own has nothing left to do
            time.sleep(1)

    def die(self) -> None:
        """No beat any more, and no last word."""
        self.detector._stop.set()
        for thread in self.detector._threads:
            thread.join(1)

    def raises(self, error: BaseException) -> None:
        with suppress(SystemExit):
            self.detector.fail(error)

    def ended(self) -> Failure:
        assert self.gone.wait(5), "still alive"
        assert self.failure is not None and self.code == self.failure.exit_code
        return self.failure


def rendezvous(env: LaunchEnv, members: tuple[ProcessInfo, ...], store: Store) -> Rendezvous:
    bare = Rendezvous(env, "t", members, store, store)
    return replace(bare, spare_connections=(bare.connection(), bare.connection()))


@contextmanager
def ranks(count: int = 3, configs: dict[int, HeartbeatConfig] | None = None) -> Iterator[list[Rank]]:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5))
    members = tuple(ProcessInfo(f"host{rank}", "m", 1000 + rank, f"elsewhere {rank}", "0") for rank in range(count))
    envs = [LaunchEnv(rank=rank, size=count, port=store.port, external_store=True) for rank in range(count)]
    started = [Rank(rendezvous(env, members, store), (configs or {}).get(env.rank, FAST)) for env in envs]
    with ExitStack() as stack:
        for rank in started:
            stack.enter_context(rank.detector)
        time.sleep(0.1)
        yield started


def test_a_silent_rank_is_named_by_all_others() -> None:
    with ranks() as (first, second, third):
        second.die()
        for rank in (first, third):
            failure = rank.ended()
            assert failure.kind is FailureKind.silent and failure.ranks == (1,) and failure.exit_code == 8
            assert "rank 1 (pid 1001 on host1) sent no heartbeat" in failure.text


def test_a_clean_end_is_no_failure() -> None:
    with ranks() as (first, second, third):
        second.detector.close()
        time.sleep(2 * FAST.timeout)
        assert not first.gone.is_set() and not third.gone.is_set()


def test_a_slow_heartbeat_within_the_limit_is_healthy() -> None:
    with ranks(configs={1: HeartbeatConfig(interval=0.2, timeout=0.5)}) as started:
        time.sleep(3 * FAST.timeout)
        assert not any(rank.gone.is_set() for rank in started)


def test_silence_within_the_limit_ends_nobody() -> None:
    with ranks(2, configs={0: replace(FAST, timeout=60.0)}) as (first, second):
        second.die()
        time.sleep(2 * FAST.timeout)
        assert not first.gone.is_set()


@pytest.mark.parametrize("method", ["_read_peers", "_check"])
def test_an_unexpected_error_in_a_detector_thread_ends_all_ranks(method: str) -> None:
    def fail(*_: object) -> NoReturn:
        raise OSError(24, "too many open files")

    with ranks() as (first, second, third):
        setattr(second.detector, method, fail)
        failure = second.ended()
        assert failure.kind is FailureKind.raised and "unexpected OSError on rank 1" in failure.text and failure.trace
        for rank in (first, third):
            assert rank.ended().ranks == (1,) and "too many open files" in rank.ended().text


def test_a_pause_of_the_observer_reports_nobody() -> None:
    with ranks() as (first, _, third):
        first.detector._forgive_pause(-10 * FAST.timeout)  # as if nothing had been heard for long
        first.detector._forgive_pause(10 * FAST.timeout)
        time.sleep(FAST.timeout)
        assert not first.gone.is_set() and not third.gone.is_set()


def test_an_exception_ends_all_ranks_and_its_rank_keeps_the_traceback() -> None:
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


def test_a_user_error_is_reported_without_traceback() -> None:
    with ranks() as (first, second, _):
        second.raises(RunError("the loss is nan"))
        assert second.ended().trace == "" and second.ended().text == "the loss is nan"
        assert first.ended().text == "the loss is nan" and first.ended().exit_code == RunError.exit_code


def test_a_failed_exchange_names_the_dead_peer() -> None:
    with ranks() as (first, second, third):
        second.die()
        third.raises(ExchangeError("connection closed by rank 0"))
        failure = third.ended()
        assert failure.kind is FailureKind.silent and failure.ranks == (1,) and "connection closed" in failure.text
        assert first.ended().ranks == (1,)


def test_a_failed_exchange_names_the_stopped_peer() -> None:
    with ranks() as (first, second, third):
        second.detector.stopping()
        second.die()
        third.raises(ExchangeError("connection closed"))
        assert third.ended().kind is FailureKind.stopped and third.ended().ranks == (1,)
        assert first.ended().ranks == (1,)


def test_a_failed_exchange_between_live_ranks_keeps_its_error() -> None:
    with ranks() as (first, _, third):
        third.raises(ExchangeError("expected 3 rows, found 4"))
        assert third.ended().kind is FailureKind.lost and third.ended().ranks == (2,)
        assert first.ended().text == "expected 3 rows, found 4"


def test_a_rank_declared_dead_ends_when_it_returns() -> None:
    with ranks() as (first, second, third):
        second.detector._stop.set()
        for rank in (first, third):
            rank.ended()
        back = Rank(second.detector._rendezvous, FAST)
        with back.detector:
            assert back.ended().kind is FailureKind.cut_off and "others gave it up" in back.ended().text


def test_a_rank_without_a_store_ends_with_that_reason() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5))
    member = ProcessInfo("host", "m", 1, "p", "0")
    env = LaunchEnv(rank=1, size=2, port=store.port, external_store=True)
    rank = Rank(rendezvous(env, (member, member), store), FAST)
    store.set("t/beat/0", "done")
    with rank.detector:
        time.sleep(0.1)
        rank.detector._rendezvous = replace(rank.detector._rendezvous, store=HashStore(), raw_store=HashStore())
        del store  # the last that held it
        failure = rank.ended()
    assert failure.kind is FailureKind.cut_off and failure.ranks == (1,) and "has not reached the store" in failure.text


def test_a_single_rank_starts_no_threads() -> None:
    rank = Rank(Rendezvous(LaunchEnv(rank=0, size=1), "t", (ProcessInfo.current(),), None, None), FAST)  # type: ignore[arg-type]
    with rank.detector:
        assert not rank.detector._threads


@pytest.mark.parametrize("trace", ["", "Traceback ..."])
def test_a_failure_round_trips_through_store_and_file(tmp_path: Path, trace: str) -> None:
    import json

    failure = Failure(kind=FailureKind.cut_off, ranks=(1, 2), found_by=0, text="gone", trace=trace, exit_code=8)
    assert Failure.from_json(failure.as_json()) == failure
    failure.write(tmp_path / "error.json")
    content = json.loads((tmp_path / "error.json").read_text())
    assert Failure.from_file(content) == failure and Failure.from_file({"message": "x"}) is None
    assert content["message"]["extraInfo"]["py_callstack"] == (trace or "gone")

"""A trainer's view of the coordinator: heartbeats, and the newest state of the run, polled in a thread."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable

from gnnfleet.comm.message_store import RETRY_INTERVAL, HeartbeatReader
from gnnfleet.errors import ExchangeError
from gnnfleet.strategies.tma.protocol import HEARTBEAT_SECONDS, POLL_INTERVAL, RunMessages, RunState


class CoordinatorClient:
    """Sends a trainer's heartbeats and polls the state of the run.

    ``on_lost`` is called in another thread after ``give_up`` seconds without a heartbeat of the coordinator. Answers of
    the message store do not count: it belongs to the launcher. ``replaced`` is set if another process has taken this
    trainer's number while this one was silent.
    """

    def __init__(self, messages: RunMessages, trainer: int, *, give_up: float, on_lost: Callable[[str], None]) -> None:
        self.state: RunState | None = None
        self.replaced = False
        self.collect_requested = -1  # the last round of this incarnation whose updates are due
        self._token = secrets.token_hex(8)
        self._steps = 0
        self._messages, self._trainer = messages, trainer
        self._give_up, self._on_lost = give_up, on_lost
        self._stop = threading.Event()
        self._last_heard = time.monotonic()
        self._threads = [threading.Thread(target=loop, daemon=True) for loop in (self._poll_loop, self._guard_loop)]

    def __enter__(self) -> CoordinatorClient:
        self._messages.take_lease(self._trainer, self._token)
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._threads[0].join(5)

    def count_step(self) -> None:
        """Count an optimizer step, which the next heartbeat reports."""
        self._steps += 1

    def _poll_loop(self) -> None:
        messages, last_beat, reported_steps, reader = self._messages, 0.0, 0, HeartbeatReader()
        while not self._stop.is_set():
            try:
                if time.monotonic() - last_beat >= HEARTBEAT_SECONDS:
                    if not messages.holds_lease(self._trainer, self._token):
                        self.replaced = True
                        return
                    messages.beat(self._trainer)
                    if (new_steps := self._steps - reported_steps) > 0:
                        messages.add_steps(self._trainer, new_steps)
                        reported_steps += new_steps
                    messages.clear_exit(self._trainer)
                    last_beat = time.monotonic()
                    self._last_heard = last_beat - reader.silent_seconds(messages.heartbeats())
                state = messages.read_state()
                if state is not None:
                    self.collect_requested = messages.collect_requested(state.incarnation)
                    self.state = state
            except ExchangeError:
                self._stop.wait(RETRY_INTERVAL)
                try:
                    messages = self._messages.reconnect()
                except ExchangeError:
                    continue
            self._stop.wait(POLL_INTERVAL)

    def _guard_loop(self) -> None:
        before = 0.0  # a process that was paused looks silent until it has polled again
        while not self._stop.wait(1.0) and not self.replaced:
            silent, last = time.monotonic() - self._last_heard, before
            before = silent
            if last > self._give_up and silent > self._give_up + 3:
                self._on_lost(
                    f"trainer {self._trainer} has received no heartbeat of the coordinator for {silent:.0f} s and exits"
                )
                return

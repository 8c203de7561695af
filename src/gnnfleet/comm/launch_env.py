"""Seat: which rank this process is and where the others are found, as a launcher's environment says it.

The only place of ``comm`` that reads environment variables.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from gnnfleet.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class LaunchEnv:
    """Rank ``rank`` of ``size``; they meet in a store at ``host:port``."""

    rank: int
    size: int
    local_rank: int = 0
    host: str = "127.0.0.1"
    port: int = 0
    external_store: bool = False  # somebody else keeps the store; otherwise rank 0 does
    attempt: int = 0  # how often the launcher has started this process again
    interface: str | None = None  # network interfaces for exchanges, by name; None finds one
    agent: bool = False  # the parent process is a launcher that stays as long as the run
    shares_memory: bool = True  # whether rows for ranks of this machine may go through memory that both map

    @property
    def hosts_store(self) -> bool:
        """Whether the store lives in this process."""
        return self.rank == 0 and self.size > 1 and not self.external_store

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> LaunchEnv | None:
        """The seat that torchrun and its kin assign; None without one. Raises ConfigError for half a one."""
        words = {name: environ[name] for name in ("RANK", "WORLD_SIZE") if environ.get(name)}
        if len(words) < 2:
            return None
        seat = cls(
            rank=_number(environ, "RANK"),
            size=_number(environ, "WORLD_SIZE"),
            local_rank=_number(environ, "LOCAL_RANK", 0),
            host=environ.get("MASTER_ADDR", ""),
            port=_number(environ, "MASTER_PORT", 0),
            external_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            attempt=_number(environ, "TORCHELASTIC_RESTART_COUNT", 0),
            interface=environ.get("GLOO_SOCKET_IFNAME") or None,
            agent="TORCHELASTIC_RUN_ID" in environ,
            shares_memory=environ.get("GNNFLEET_SHARED_MEMORY", "1") != "0",
        )
        if not 0 <= seat.rank < seat.size:
            raise ConfigError(f"RANK is a number below WORLD_SIZE={seat.size}, found {seat.rank}: start with torchrun")
        if seat.size > 1 and not (seat.host and seat.port):
            raise ConfigError("RANK and WORLD_SIZE are set, MASTER_ADDR and MASTER_PORT are not: start with torchrun")
        return seat


def _number(environ: Mapping[str, str], name: str, otherwise: int | None = None) -> int:
    text = environ.get(name, "")
    if not text and otherwise is not None:
        return otherwise
    if not text.isdigit():
        raise ConfigError(f"{name} is a number from 0, found {text!r}: start with torchrun")
    return int(text)

"""Launch environment: this process's rank and the address of the store, from the launcher's environment variables.

The only module of ``comm`` that reads environment variables.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from gnnfleet.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class LaunchEnv:
    """Rank ``rank`` of ``size``, with a store at ``host:port``."""

    rank: int
    size: int
    local_rank: int = 0
    host: str = "127.0.0.1"
    port: int = 0
    external_store: bool = False  # the launcher hosts the store; otherwise rank 0 does
    attempt: int = 0  # restarts by the launcher so far
    interface: str | None = None  # names of network interfaces; None selects one
    agent: bool = False  # the parent process is a launcher that lives as long as the run
    shares_memory: bool = True  # may use shared memory with ranks of this machine

    @property
    def hosts_store(self) -> bool:
        """True if the store runs in this process."""
        return self.rank == 0 and self.size > 1 and not self.external_store

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> LaunchEnv | None:
        """The environment that torchrun sets; None without one. Raises ConfigError for an incomplete one."""
        if not (environ.get("RANK") and environ.get("WORLD_SIZE")):
            return None
        env = cls(
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
        if not 0 <= env.rank < env.size:
            raise ConfigError(f"RANK={env.rank} is not below WORLD_SIZE={env.size}: start the ranks with torchrun")
        if env.size > 1 and not (env.host and env.port):
            raise ConfigError(
                "RANK and WORLD_SIZE are set, but MASTER_ADDR and MASTER_PORT are not: start the ranks with torchrun"
            )
        return env


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name, "")
    if not text and default is not None:
        return default
    if not text.isdigit():
        raise ConfigError(f"{name}={text!r} is not a number from 0 on: start the ranks with torchrun")
    return int(text)

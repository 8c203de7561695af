"""Failure: why a rank ended, as it goes to the other ranks, into a file for the launcher, and to the user."""

from __future__ import annotations

import json
import time
import traceback
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from gnnfleet.errors import ExchangeError, GnnfleetError

MAX_TRACE_CHARS = 100_000
"""A store drops values of 8 MiB; the end of a traceback says most."""


class FailureKind(StrEnum):
    """What became of the rank at fault, or of the one that speaks."""

    raised = "raised"  # an exception of its own
    lost = "lost"  # it lost others for a reason that nobody knows
    silent = "silent"  # no heartbeat
    cut_off = "cut off"  # it cannot reach the store
    stopped = "stopped"  # it was told to, by a signal


@dataclass(frozen=True, kw_only=True)
class Failure:
    """``ranks`` are at fault, ``found_by`` says so in ``text``: one line for people."""

    kind: FailureKind
    ranks: tuple[int, ...]
    found_by: int
    text: str
    trace: str = ""  # of an exception that is no GnnfleetError: a defect, or a machine's
    exit_code: int = ExchangeError.exit_code
    at: float = field(default_factory=time.time)  # for people only: clocks of machines differ

    @classmethod
    def from_error(cls, error: BaseException, rank: int, name: str = "") -> Failure:
        """What an exception on a rank means before anybody has asked whether a peer is behind it."""
        if isinstance(error, GnnfleetError):
            kind = FailureKind.lost if isinstance(error, ExchangeError) else FailureKind.raised
            return cls(kind=kind, ranks=(rank,), found_by=rank, text=str(error), exit_code=error.exit_code)
        trace = "".join(traceback.format_exception(error))
        text = f"unexpected {type(error).__name__} on {name or f'rank {rank}'}: {error}. This is a defect of gnnfleet."
        return cls(
            kind=FailureKind.raised,
            ranks=(rank,),
            found_by=rank,
            text=" ".join(text.split()),
            trace=trace[-MAX_TRACE_CHARS:],
            exit_code=1,
        )

    def as_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Failure:
        return cls._from_dict(json.loads(text))

    @classmethod
    def _from_dict(cls, words: dict[str, Any]) -> Failure:
        return cls(**{**words, "kind": FailureKind(words["kind"]), "ranks": tuple(words["ranks"])})

    def write(self, path: Path) -> None:
        """An error file as torchrun reads it, with this beside."""
        shown = {"py_callstack": self.trace or self.text, "timestamp": str(int(self.at))}
        content = {"message": {"message": self.text, "extraInfo": shown}, "gnnfleet": asdict(self)}
        path.write_text(json.dumps(content))

    @classmethod
    def read(cls, path: Path) -> Failure | None:
        """What ``write`` wrote; None where nothing whole is there."""
        try:
            return cls.from_file(json.loads(path.read_bytes()))
        except (OSError, ValueError):
            return None

    @classmethod
    def from_file(cls, content: dict[str, Any]) -> Failure | None:
        """What ``write`` wrote, read by torchrun's API; None for anything else."""
        return cls._from_dict(content["gnnfleet"]) if "gnnfleet" in content else None

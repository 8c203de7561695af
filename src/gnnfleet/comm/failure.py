"""Failure: the reason a rank ended, for the other ranks, for the launcher (a file) and for the user."""

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
"""A store drops values of 8 MiB; the end of a traceback matters most."""


class FailureKind(StrEnum):
    """State of the rank at fault, or of the one that reports."""

    raised = "raised"  # an exception of the rank itself
    lost = "lost"  # it lost peers for an unknown reason
    silent = "silent"  # no heartbeat
    cut_off = "cut off"  # it cannot reach the store
    stopped = "stopped"  # by a signal


@dataclass(frozen=True, kw_only=True)
class Failure:
    """``ranks`` are at fault, rank ``found_by`` reports it; ``text`` is one line for the user."""

    kind: FailureKind
    ranks: tuple[int, ...]
    found_by: int
    text: str
    trace: str = ""  # of an exception other than GnnfleetError, or of one in a user's file
    exit_code: int = ExchangeError.exit_code
    at: float = field(default_factory=time.time)  # for display only: clocks of machines differ

    @classmethod
    def from_error(cls, error: BaseException, rank: int, name: str = "") -> Failure:
        """The failure that an exception on a rank stands for; a peer may yet turn out to be its cause."""
        if isinstance(error, GnnfleetError):
            kind = FailureKind.lost if isinstance(error, ExchangeError) else FailureKind.raised
            notes = "\n".join(getattr(error, "__notes__", ()))  # the traceback of an error in a user's file
            return cls(kind=kind, ranks=(rank,), found_by=rank, text=str(error), trace=notes, exit_code=error.exit_code)
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
    def _from_dict(cls, fields: dict[str, Any]) -> Failure:
        return cls(**{**fields, "kind": FailureKind(fields["kind"]), "ranks": tuple(fields["ranks"])})

    def write(self, path: Path) -> None:
        """Write an error file in torchrun's format, with this failure added."""
        extra = {"py_callstack": self.trace or self.text, "timestamp": str(int(self.at))}
        content = {"message": {"message": self.text, "extraInfo": extra}, "gnnfleet": asdict(self)}
        path.write_text(json.dumps(content))

    @classmethod
    def read(cls, path: Path) -> Failure | None:
        """Read what ``write`` wrote; None if the file is missing or incomplete."""
        try:
            return cls.from_file(json.loads(path.read_bytes()))
        except (OSError, ValueError):
            return None

    @classmethod
    def from_file(cls, content: dict[str, Any]) -> Failure | None:
        """The failure in an error file; None if gnnfleet did not write it."""
        return cls._from_dict(content["gnnfleet"]) if "gnnfleet" in content else None

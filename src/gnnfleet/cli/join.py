"""``gnnfleet join``: run trainers on this machine for a tma run whose coordinator is on another machine."""

from __future__ import annotations

import os
import re
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from gnnfleet.cli.options import QuietFlag
from gnnfleet.errors import ConfigError
from gnnfleet.report.remarks import print_note

MAX_TRAINERS = 1024
JOIN_EXAMPLES = """\
gnnfleet train /data/shop --strategy tma --workers 8 --set strategy.listen=0.0.0.0:29500 --set strategy.local_trainers=4

gnnfleet join first-machine:29500 /data/shop --trainers 4-7  # on the second machine
"""


def join(
    address: Annotated[str, typer.Argument(metavar="HOST:PORT", help="Address of the coordinator.")],
    store: Annotated[Path, typer.Argument(metavar="STORE", help="Path of the same store on this machine.")],
    trainers: Annotated[
        str, typer.Option(metavar="NUMBERS", help="Trainers to run on this machine, for example 4-7 or 4,6.")
    ],
    model: Annotated[
        str | None,
        typer.Option(metavar="FILE.py:FACTORY", help="Your copy of the run's model file. Needed if it uses one."),
    ] = None,
    model_sha256: Annotated[
        str | None,
        typer.Option(metavar="HEX", help="Instead of --model: run the coordinator's copy if it has this SHA-256."),
    ] = None,
    max_restarts: Annotated[
        int, typer.Option("--max-restarts", metavar="N", help="Restart each trainer up to N times after a failure.")
    ] = 0,
    quiet: QuietFlag = False,
) -> None:
    """Run some trainers of a tma run on this machine until the run ends.

    A trainer that starts late or restarts continues with the newest weights.
    A model file runs here only if you pass it (--model) or confirm its SHA-256 (--model-sha256).
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # gnnfleet reports an unreachable coordinator once, by itself
    from gnnfleet.launch.tma_supervisor import join_supervised

    join_supervised(
        address,
        store,
        parse_numbers(trainers),
        restarts=max_restarts,
        log_user=partial(print_note, quiet=quiet),
        model=model,
        model_sha256=model_sha256,
    )


def parse_numbers(text: str) -> list[int]:
    """Parse ``4-7`` or ``4,6``; raises ConfigError."""
    numbers: list[int] = []
    for part in text.split(","):
        span = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
        if span is None:
            raise ConfigError(f"--trainers takes numbers, for example 4-7 or 4,6; found {text!r}")
        low, high = int(span[1]), int(span[2] or span[1])
        if high - low >= MAX_TRAINERS:
            raise ConfigError(f"--trainers takes at most {MAX_TRAINERS} numbers, found {text!r}")
        numbers += range(low, high + 1)
    if not numbers or len(set(numbers)) < len(numbers):
        raise ConfigError(f"--trainers takes different numbers, for example 4-7 or 4,6; found {text!r}")
    return numbers

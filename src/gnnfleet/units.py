"""Sizes and rates as users write them: ``4GiB``, ``500 MB``, ``1Gbit``; a plain number is bytes."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import BeforeValidator

from gnnfleet.errors import ConfigError

UNITS = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}


def parse_size(text: object) -> int:
    """Bytes; raises ConfigError for anything that is not a positive amount."""
    is_size = isinstance(text, (str, int)) and not isinstance(text, bool)
    amount = int(_parse_amount(str(text).strip().lower())) if is_size else 0
    if amount < 1:
        raise ConfigError(f"memory {text!r} is not a size: write 4GiB, 500MB or a number of bytes")
    return amount


OptionalSize = Annotated[int | None, BeforeValidator(lambda size: None if size is None else parse_size(size))]
"""A size in a config; None if it is not set."""


def _parse_amount(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text)
    unit = UNITS.get(match[2] or "b") if match else None
    return float(match[1]) * unit if match and unit else 0.0


def parse_rate(text: object) -> float:
    """Bytes per second from ``1Gbit``, ``800 Mbit`` or ``125MB``, each per second; raises ConfigError."""
    amount = str(text).strip().lower().removesuffix("/s")
    bits = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)bit", amount)
    rate = float(bits[1]) * 1000.0 ** " kmgt".index(bits[2] or " ") / 8 if bits else _parse_amount(amount)
    if rate <= 0:
        raise ConfigError(f"{text!r} is not a bandwidth: write 1Gbit, 800Mbit or 125MB")
    return rate


def format_size(count: float) -> str:
    """Bytes in MiB or GiB."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"

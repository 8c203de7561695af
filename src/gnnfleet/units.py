"""Amounts of memory as people write them: ``4GiB``, ``500 MB``; a plain number is bytes."""

from __future__ import annotations

import re

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
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", str(text).strip().lower()) if _is_size(text) else None
    unit = UNITS.get(found[2] or "b") if found else None
    amount = int(float(found[1]) * unit) if found and unit else 0
    if amount < 1:
        raise ConfigError(f"memory reads as 4GiB, 500MB or a number of bytes, found {text!r}")
    return amount


def parse_rate(text: object) -> float:
    """Bytes per second from ``1Gbit``, ``800 Mbit`` or ``125MB``, each per second; raises ConfigError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)bit(?:/s)?", str(text).strip().lower())
    if found:
        rate = float(found[1]) * 1000.0 ** " kmgt".index(found[2] or " ") / 8
    else:
        plain = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*?)(?:/s)?", str(text).strip().lower())
        unit = UNITS.get(plain[2] or "b") if plain else None
        rate = float(plain[1]) * unit if plain and unit else 0.0
    if rate <= 0:
        raise ConfigError(f"a bandwidth reads as 1Gbit, 800Mbit or 125MB, found {text!r}")
    return float(rate)


def _is_size(value: object) -> bool:
    return isinstance(value, (str, int)) and not isinstance(value, bool)


def format_size(count: float) -> str:
    """Bytes as people read them."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"

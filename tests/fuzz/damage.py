"""Damage to files, drawn from a seed; every function returns a description of the damage."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gnnfleet.io.bundle import manifest_digest

HUGE: list[Any] = [-1, 2**31, 2**40, 2**62, 2**63, 2**64, 10**30, 1e308, float("nan"), float("inf")]
STRANGE: list[Any] = [*HUGE, None, True, "", "x", [], {}, [[]], "\0", "../../etc/passwd", "/etc/passwd", 0, 1.5]


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def damage_files(folder: Path, draw: random.Random) -> str:
    """Damage one file below a folder in one way."""
    path = draw.choice(files_of(folder))
    operations = (flip, flip, flip, cut, lengthen, blank, empty, delete, swap, link, loop, fifo, into_folder)
    return f"{draw.choice(operations)(path, draw)} {path.relative_to(folder)}"


def flip(path: Path, draw: random.Random) -> str:
    content = bytearray(path.read_bytes())
    if not content:
        return empty(path, draw)
    for _ in range(draw.choice((1, 1, 3, 20))):
        index = draw.randrange(len(content)) if draw.random() < 0.6 else draw.randrange(min(len(content), 160))
        content[index] ^= 1 << draw.randrange(8)
    path.write_bytes(content)
    return "flipped"


def cut(path: Path, draw: random.Random) -> str:
    content = path.read_bytes()
    path.write_bytes(content[: draw.randrange(len(content) + 1)])
    return "cut"


def lengthen(path: Path, draw: random.Random) -> str:
    with path.open("ab") as file:
        file.write(draw.randbytes(draw.choice((1, 8, 4096))))
    return "lengthened"


def blank(path: Path, draw: random.Random) -> str:
    content = bytearray(path.read_bytes())
    low = draw.randrange(len(content) + 1)
    high = min(len(content), low + draw.choice((8, 64, 4096)))
    content[low:high] = draw.choice((b"\0", b"\xff", b"9")) * (high - low)
    path.write_bytes(content)
    return "overwrote"


def empty(path: Path, draw: random.Random) -> str:
    path.write_bytes(b"")
    return "emptied"


def delete(path: Path, draw: random.Random) -> str:
    path.unlink()
    return "deleted"


def swap(path: Path, draw: random.Random) -> str:
    other = draw.choice(files_of(path.parent))
    content, other_content = path.read_bytes(), other.read_bytes()
    path.write_bytes(other_content)
    other.write_bytes(content)
    return f"swapped with {other.name}"


def link(path: Path, draw: random.Random) -> str:
    target = draw.choice((Path("/etc/passwd"), Path("/nowhere"), *files_of(path.parent)))
    path.unlink()
    path.symlink_to(target)
    return f"linked to {target.name}"


def loop(path: Path, draw: random.Random) -> str:
    path.unlink()
    path.symlink_to(path.name)
    return "linked to itself"


def fifo(path: Path, draw: random.Random) -> str:
    path.unlink()
    os.mkfifo(path)
    return "made a pipe of"


def into_folder(path: Path, draw: random.Random) -> str:
    path.unlink()
    path.mkdir()
    return "made a folder of"


def forge(manifest: Path, draw: random.Random) -> str:
    """Change one value anywhere in a manifest and update its digest, which then does not show the damage."""
    tree = json.loads(manifest.read_bytes())
    owner, key = draw.choice(list(_values(tree)))
    before = owner[key]
    choice = draw.random()
    if choice < 0.15:
        if isinstance(owner, dict):
            del owner[key]
        else:
            owner.append(before)
        change = "dropped or doubled"
    elif choice < 0.3 and isinstance(owner, dict):
        new = draw.choice(("../x.npy", "/etc/passwd", "a/../../b.npy", "", "nodes//x.npy", key + "x"))
        owner[new] = owner.pop(key)
        change = f"renamed to {new!r}"
    elif isinstance(before, int) and not isinstance(before, bool) and choice < 0.6:
        owner[key] = before + draw.choice((-1, 1, 8, -8, 1000))
        change = f"{before} → {owner[key]}"
    else:
        owner[key] = draw.choice(STRANGE)
        change = f"→ {owner[key]!r}"
    tree["digest"] = manifest_digest(tree)
    manifest.write_text(json.dumps(tree))
    return f"forged {manifest.name}: {key!r} {change}"


def nest_deep(path: Path, draw: random.Random) -> str:
    path.write_text(draw.choice(("[" * 200_000, '{"a":' * 200_000, "9" * 100_000, '"' + "x" * 100_000)))
    return f"nested {path.name}"


def _values(tree: Any) -> Any:
    """(owner, key) of every value in a tree, without digest, kind and version."""
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in pairs:
        if key not in ("digest", "kind", "version"):
            yield tree, key
            yield from _values(value)


Damage = Callable[[Path, random.Random], str]

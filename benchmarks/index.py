"""Writes what is kept in benchmarks/results into docs/benchmarks.md: file, machine, commit, cells.

usage: python benchmarks/index.py
"""

from __future__ import annotations

import json
from pathlib import Path

from record import RESULTS

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"


def put(mark: str, text: str, page: Path = PAGE) -> None:
    """Put text between two marks of a page."""
    begin, end = f"<!-- {mark} -->", f"<!-- /{mark} -->"
    before, _, rest = page.read_text().partition(begin)
    page.write_text(f"{before}{begin}\n{text}\n{end}{rest.partition(end)[2]}")


def main() -> None:
    lines = ["| results | machine | commit | cells |", "|---|---|---|---|"]
    for path in sorted(RESULTS.glob("*.json")):
        kept = json.loads(path.read_text())
        machine = kept["machine"]
        words = f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']:.0f} GiB"
        older = sum("commit" in cell for cell in kept["cells"])
        cells = f"{len(kept['cells'])}" + (f", {older} of them older" if older else "")
        lines.append(f"| `benchmarks/results/{path.name}` | {words} | `{kept['commit']}` | {cells} |")
    put("results", "\n".join(lines))
    print("\n".join(lines))


if __name__ == "__main__":
    main()

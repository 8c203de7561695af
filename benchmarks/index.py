"""Lists the files of benchmarks/results in docs/benchmarks.md: machine, commit, number of cells.

usage: python benchmarks/index.py
"""

from __future__ import annotations

import json
from pathlib import Path

from record import RESULTS

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"


def replace_between_marks(mark: str, text: str, page: Path = PAGE) -> None:
    """Replace the text between two marks of a page."""
    begin, end = f"<!-- {mark} -->", f"<!-- /{mark} -->"
    before, _, rest = page.read_text().partition(begin)
    page.write_text(f"{before}{begin}\n{text}\n{end}{rest.partition(end)[2]}")


def main() -> None:
    lines = ["| results | machine | commit | cells |", "|---|---|---|---|"]
    for path in sorted(RESULTS.glob("*.json")):
        results = json.loads(path.read_text())
        machine = results["machine"]
        description = f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']:.0f} GiB"
        older_cells = sum("commit" in cell for cell in results["cells"])
        cells = f"{len(results['cells'])}" + (f", {older_cells} of them older" if older_cells else "")
        lines.append(f"| `benchmarks/results/{path.name}` | {description} | `{results['commit']}` | {cells} |")
    replace_between_marks("results", "\n".join(lines))
    print("\n".join(lines))


if __name__ == "__main__":
    main()

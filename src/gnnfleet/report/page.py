"""One HTML page about some runs, without external resources; user text never becomes markup.

The data is embedded as JSON in which no tag can begin; page.js draws it and inserts strings as text only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from gnnfleet.report.metrics import none_if_not_finite
from gnnfleet.report.run_reader import Run, mean_phase_seconds, summarize, worker_names

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; connect-src 'self'"


def page_data(
    runs: Sequence[Run],
    *,
    title: str,
    equals: Mapping[str, str] | None = None,
    partitions: Sequence[Mapping[str, Any]] = (),
    live: bool = False,
) -> dict[str, Any]:
    """The data of the page. ``equals`` compares a run, by name, with local; ``partitions`` compares partitions."""
    return {
        "title": title,
        "live": live,
        "runs": [
            {
                **{key: value for key, value in run.items() if key not in ("record", "totals")},
                "bytes": (run["totals"] or {}).get("bytes"),
                "peaks": (run["totals"] or {}).get("peak_rss"),
                "summary": summarize(run),
                "split": mean_phase_seconds(run),
                "workers_named": worker_names(run),
                "equals": (equals or {}).get(run["name"]),
            }
            for run in runs
        ],
        "partitions": list(partitions),
    }


def render_page(data: Mapping[str, Any]) -> str:
    assets = files("gnnfleet.report") / "assets"
    style, script = (assets / "page.css").read_text(), (assets / "page.js").read_text()
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(str(data['title']))}</title>\n<style>\n{style}</style>\n</head>\n<body>\n<main></main>\n"
        f'<script type="application/json" id="data">{as_json(data)}</script>\n'
        f"<script>\n{script}</script>\n</body>\n</html>\n"
    )


def as_json(data: Mapping[str, Any]) -> str:
    """JSON that is safe inside a script element; NaN and infinities become null."""
    return json.dumps(none_if_not_finite(data), allow_nan=False).replace("<", "\\u003c")

"""One HTML page about some runs, without external resources; user text never becomes markup.

The data is embedded as JSON in which no tag can begin; page.js draws it and inserts strings as text only. While a run
is training, the page may be served over HTTP; it then fetches new data every two seconds.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import Any

from gnnfleet.errors import ConfigError, GnnfleetError
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


PageData = Callable[[], Mapping[str, Any]]

_LOOPBACK = ("127.0.0.1", "localhost", "::1")


class PageServer(ThreadingHTTPServer):
    """Serves / and /data.json. On loopback it serves requests for loopback hosts only, which stops DNS rebinding."""

    daemon_threads = True

    def __init__(self, data: PageData, host: str, port: int) -> None:
        self.data, self.host = data, host
        super().__init__((host, port), _Handler)

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.server_address[1]}/"


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    timeout = 30

    def do_GET(self) -> None:
        host = (self.headers.get("Host") or "").rpartition(":")[0].strip("[]")
        if self.server.host in _LOOPBACK and host not in _LOOPBACK:
            self._answer(403, "text/plain", "this page is available on this machine only")
            return
        try:
            if self.path == "/":
                self._answer(200, "text/html", render_page(self.server.data()))
            elif self.path == "/data.json":
                self._answer(200, "application/json", as_json(self.server.data()))
            else:
                self._answer(404, "text/plain", "not found: the page is at /")
        except GnnfleetError as error:
            self._answer(500, "text/plain", str(error))

    def _answer(self, code: int, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(code)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        return None


def serve_page(data: PageData, host: str, port: int, *, log_user: Callable[[str], None]) -> None:
    """Serve until Ctrl-C; raises ConfigError if the port is not available."""
    try:
        server = PageServer(data, host, port)
    except OSError as error:
        raise ConfigError(
            f"cannot serve on {host}:{port}: {error.strerror or error}. Choose another --host or --port"
        ) from error
    log_user(f"the page is at {server.url} (press Ctrl-C to stop)")
    try:
        server.serve_forever(poll_interval=0.2)
    except KeyboardInterrupt:
        pass
    finally:
        server.server_close()

"""The report page over HTTP; it fetches new data every two seconds while a run is training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from gnnfleet.errors import ConfigError, GnnfleetError
from gnnfleet.report.page import as_json, render_page

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

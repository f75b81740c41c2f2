"""The page of a run that goes on: one HTML file and one JSON document, served to this machine alone.

    GET /            the page: `templates/watch.html`, complete in itself
    GET /run.json    what is known of the run now, which the page asks for every second

Read-only: nothing else is answered, no file is named by an address, and nothing is written. The server listens on
127.0.0.1; for another machine, forward the port by ssh. A request must name this machine as its host, so that no web
site can reach the page through a name of its own.
"""

import base64
import hashlib
import json
import math
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from typing import Any

from equipoise.core import EquipoiseError

LOOPBACK = "127.0.0.1"
HOSTS = (LOOPBACK, "localhost")
"""Names of this machine by which the page is asked for, with any port: ssh forwards another one."""
PATIENCE_S = 30.0
"""How long an open page may take to ask again; one in a hidden tab asks less often."""


class WatchServer(ThreadingHTTPServer):
    """Answers with the page and with the last document it was given."""

    daemon_threads = True

    def __init__(self, port: int) -> None:
        """Listen on a port of this machine; 0 takes a free one."""
        self.page = (resources.files("equipoise.report") / "templates" / "watch.html").read_bytes()
        self.policy = content_policy(self.page.decode())
        self.document = self.told = b"null"
        self.asked_s = -math.inf
        try:
            super().__init__((LOOPBACK, port), WatchHandler)
        except (OSError, OverflowError) as error:
            raise EquipoiseError(f"--port {port}: no page can be served there ({error}); give another, or 0") from error

    @property
    def address(self) -> str:
        """What a browser opens."""
        return f"http://{LOOPBACK}:{self.server_port}/"

    def show(self, document: dict[str, Any]) -> None:
        """Answer with this document from now on."""
        self.document = json.dumps(document, allow_nan=False).encode()

    def tell_last(self) -> None:
        """Wait until an open page has got the last document; no longer than for a page that asks no more."""
        while self.told is not self.document and time.monotonic() - self.asked_s < PATIENCE_S:
            time.sleep(0.05)


class WatchHandler(BaseHTTPRequestHandler):
    """Answers one request; methods other than GET have no function here, and are refused by the base class."""

    server: WatchServer
    server_version, sys_version = "equipoise", ""
    timeout = 10.0

    def do_GET(self) -> None:
        """Answer with the page or the document."""
        host = self.headers.get("Host", "").rpartition(":")[0] or self.headers.get("Host", "")
        if host not in HOSTS:
            self._answer(HTTPStatus.FORBIDDEN, b"this page is for the machine it runs on\n", "text/plain")
        elif self.path == "/":
            self._answer(HTTPStatus.OK, self.server.page, "text/html")
        elif self.path == "/run.json":
            document = self.server.document
            self.server.asked_s = time.monotonic()
            self._answer(HTTPStatus.OK, document, "application/json")
            self.server.told = document
        else:
            self._answer(HTTPStatus.NOT_FOUND, b"there is only / and /run.json\n", "text/plain")

    def _answer(self, status: HTTPStatus, content: bytes, kind: str) -> None:
        self.send_response(status)
        headers = {
            "Content-Type": f"{kind}; charset=utf-8",
            "Content-Length": str(len(content)),
            "Content-Security-Policy": self.server.policy,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Cache-Control": "no-store",
        }
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: the terminal shows the run."""


def content_policy(page: str) -> str:
    """Return the policy that lets a browser run the page's own script and style, and ask this server alone."""

    def digests(tag: str) -> str:
        parts = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(p.encode()).digest()).decode()}'" for p in parts)

    return (
        f"default-src 'none'; script-src {digests('script')}; style-src {digests('style')}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


@contextmanager
def serving(port: int) -> Iterator[WatchServer]:
    """Serve the page from a thread in a `with` block."""
    with WatchServer(port) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()

"""One HTTP server: JSON requests, retried while the server is busy or away, and held back for all threads meanwhile.

Retried, each time after twice the wait: a refused or broken connection, an answer that ends early, and the statuses
429, 502, 503 and 504, which engines and gateways send while they are full, start or restart. A wait that the server
asks for (`Retry-After`, in seconds) is used if it is longer. During a wait no thread sends: a server that is full is
not asked for more. Every other error is final: asking again would give the same answer.
"""

import http.client
import json
import threading
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any

from equipoise.core.errors import TrainingError
from equipoise.core.value import require_int

BUSY = frozenset({429, 502, 503, 504})
_QUOTED = 300
"""Bytes of a server's own error that are quoted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long a client waits for a server, and how much it asks at once."""

    attempts: int = 6
    """Requests that are sent before a busy or absent server is given up."""
    wait_s: float = 0.5
    """Wait before the second attempt; it doubles with each further one."""
    longest_wait_s: float = 30.0
    timeout_s: float = 600.0
    """Longest time without a byte of the answer."""
    open_requests: int = 8
    """Requests that are open at once; answers that nobody has taken yet count as open."""

    def __post_init__(self) -> None:
        for name in ("attempts", "open_requests"):
            require_int(f"Patience.{name}", getattr(self, name), low=1, error=TrainingError)
        for name in ("wait_s", "longest_wait_s", "timeout_s"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise TrainingError(f"Patience.{name} is {getattr(self, name)}; give seconds, 0 or more")

    def wait(self, attempt: int, asked_s: float = 0.0) -> float:
        """Return the wait after attempt 0, 1, ...; `asked_s` is what the server asked for."""
        return min(max(self.wait_s * 2**attempt, asked_s), self.longest_wait_s)


class Connection:
    """A server at one address; its methods may be called from several threads."""

    def __init__(self, url: str, patience: Patience) -> None:
        """Keep the address; nothing is sent yet."""
        self.url, self.patience = url.rstrip("/"), patience
        self._lock = threading.Lock()
        self._not_before = 0.0

    def post(self, path: str, body: dict[str, Any], *, once: bool = False) -> Any:
        """Return the JSON value that the server answers with.

        Args:
            once: do not ask again, because what was done before is lost where the server is another one by then
        """
        return self._ask(path, json.dumps(body).encode(), attempts=1 if once else self.patience.attempts)

    def get(self, path: str) -> Any:
        """Return the JSON value at `path`, or None if the server has none there."""
        try:
            return self._ask(path, None, attempts=self.patience.attempts)
        except TrainingError as error:
            cause = error.__cause__
            if isinstance(cause, ValueError) or (isinstance(cause, urllib.error.HTTPError) and cause.code == 404):
                return None
            raise

    def pause(self, seconds: float) -> None:
        """Let no thread send for so long."""
        with self._lock:
            self._not_before = max(self._not_before, time.monotonic() + seconds)

    def _ask(self, path: str, content: bytes | None, *, attempts: int) -> Any:
        last = attempts - 1
        for attempt in range(attempts):
            # Another thread may prolong a pause meanwhile.
            while (left := self._not_before - time.monotonic()) > 0:
                time.sleep(left)
            try:
                return self._send(path, content)
            except (OSError, http.client.HTTPException, ValueError) as error:
                if attempt == last or not _is_passing(error):
                    raise TrainingError(
                        f"the engine at {self.url}{path} gave no usable answer: {_describe_failure(error)}"
                        + (f" (asked {attempt + 1} times)" if attempt else "")
                    ) from error
                self.pause(self.patience.wait(attempt, _asked_wait(error)))
        raise AssertionError("the last attempt returns or raises")

    def _send(self, path: str, content: bytes | None) -> Any:
        request = urllib.request.Request(self.url + path, data=content, headers={"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=self.patience.timeout_s) as answer:
            return json.loads(answer.read())


def _is_passing(error: Exception) -> bool:
    """Whether the same request may succeed later."""
    if isinstance(error, urllib.error.HTTPError):
        return error.code in BUSY
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    # A request that timed out is still computed by the server: sent again, it would be computed twice.
    return isinstance(reason, ConnectionError | http.client.HTTPException)


def _asked_wait(error: Exception) -> float:
    text = error.headers.get("Retry-After", "") if isinstance(error, urllib.error.HTTPError) else ""
    return float(text) if text.isascii() and text.isdigit() else 0.0


def _describe_failure(error: Exception) -> str:
    said = error.read(_QUOTED) if isinstance(error, urllib.error.HTTPError) else b""
    return " ".join(f"{error} {said.decode(errors='replace')}".split())

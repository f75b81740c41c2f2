"""`PlanWorker`: the process that plans for one training rank: persistent, never forked, and the only one with numba.

It is a fresh interpreter that imports this package and not the training script, so scripts need no main guard, and
ranks that may not have children of `multiprocessing` (daemons) can have it.

Messages, one pickle each, over the worker's standard input and output:
    to the worker    (method of Desk, or "open" for a new desk; arguments)
    back             (True, result) or (False, error)
An error of this package comes back as itself, any other as an InfeasiblePlanError with its traceback.

Invariants (asserted by the tests):
1. The worker ends with its parent, also with a killed one, because its standard input ends.
2. A worker that died is an error that says so, never a hang.
3. A worker plans for one balancer at a time, because plans start from the homes of the one before: a second one whose
   first window comes before the other has closed is refused.
4. Ctrl-C does not end a worker, nor make it speak: it ends when its rank does.
"""

import os
import pickle
import subprocess
import sys
import threading
import traceback
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from equipoise.core.errors import EquipoiseError, InfeasiblePlanError

_SERVE = (
    # First of all: Ctrl-C is the rank's to hear, and imports take seconds.
    "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); "
    "import sys; sys.path.insert(0, sys.argv[1]); from equipoise.planning.worker import serve; serve()"
)
_END_S = 5.0
"""How long an idle worker may take to end before it is killed."""


class PlanWorker:
    """A rank's planning process, seen from the rank."""

    def __init__(self) -> None:
        """Start the process; it imports the planner while training goes on."""
        package_parent = str(Path(__file__).parents[2])
        self._process = subprocess.Popen(
            [sys.executable, "-c", _SERVE, package_parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._turn = threading.Lock()
        self._lent_to: object = None

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def lend(self, planner: object) -> None:
        """Let one balancer's planner have the worker until it is taken back, or raise if another has it."""
        if self._lent_to not in (None, planner):
            raise InfeasiblePlanError(
                f"the planning process {self.pid} plans for another balancer; close that one first, or give each a "
                "worker of its own"
            )
        self._lent_to = planner

    def take_back(self, planner: object) -> None:
        """Note that a planner has closed, whether it had the worker or not."""
        if self._lent_to is planner:
            self._lent_to = None

    def call(self, method: str, *args: Any) -> Any:
        """Have the worker's desk do something, and wait for it; callers in several threads take turns."""
        with self._turn:
            return self._call(method, *args)

    def _call(self, method: str, *args: Any) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None, "pipes are asked for above"
        try:
            pickle.dump((method, args), self._process.stdin)
            self._process.stdin.flush()
            is_good, value = pickle.load(self._process.stdout)
        except (EOFError, OSError, ValueError, pickle.UnpicklingError) as error:
            raise InfeasiblePlanError(
                f"the planning process {self.pid} ended with code {self._process.poll()}; see its standard error, and "
                "start the balancer anew"
            ) from error
        if not is_good:
            raise value
        return value

    def close(self) -> None:
        """End the process. Closing twice is allowed."""
        assert self._process.stdin is not None and self._process.stdout is not None, "pipes are asked for above"
        # What was still to be written to a worker that died does not matter any more.
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        # Last, because a thread may be reading an answer: it has ended by now.
        self._process.stdout.close()


def serve() -> None:
    """Run in the worker: answer messages until the parent is gone."""
    # Whatever else is printed in this process must not get between the answers.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    answer_all(sys.stdin.buffer, answers)


def answer_all(messages: IO[bytes], answers: IO[bytes]) -> None:
    """Answer every message of a stream."""
    from equipoise.planning.server import Desk

    desk: Desk | None = None
    while True:
        try:
            method, args = pickle.load(messages)
        except EOFError:
            return
        try:
            if method == "open":
                desk, result = Desk(*args), None
            else:
                result = getattr(desk, method)(*args)
            answer = (True, result)
        except EquipoiseError as error:
            answer = (False, error)
        except Exception:  # noqa: BLE001  # the rank shows it, whatever it is
            answer = (False, InfeasiblePlanError(f"planning failed:\n{traceback.format_exc()}"))
        try:
            pickle.dump(answer, answers)
            answers.flush()
        except BrokenPipeError:
            return

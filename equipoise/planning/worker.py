"""`PlanWorker`: the process that plans for one training rank; it persists, is never forked, and alone imports numba.

The process is a fresh interpreter that imports this package and not the training script, so scripts need no main guard,
and daemonic ranks, which may not have children of `multiprocessing`, can start it. It ends with its parent, even with a
killed one, because its standard input ends. It ignores Ctrl-C and ends when its rank does.

Messages, one pickle each, over the process's standard input and output:
    to the process   (method of PlanServer, or "open" for a new server; arguments)
    back             (True, result) or (False, error)
An error of this package is sent back as itself, any other as an InfeasiblePlanError with its traceback.
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
    # Before the imports, which take seconds: the rank handles Ctrl-C.
    "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); "
    "import sys; sys.path.insert(0, sys.argv[1]); from equipoise.planning.worker import serve; serve()"
)
_END_S = 5.0
"""Seconds that an idle worker may take to end before it is killed."""


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
        """Reserve the worker for one balancer's planner: plans start from the homes of the plan before."""
        if self._lent_to not in (None, planner):
            raise InfeasiblePlanError(
                f"the planning process {self.pid} plans for another balancer; close that one first, or give each a "
                "worker of its own"
            )
        self._lent_to = planner

    def take_back(self, planner: object) -> None:
        """Release the worker where this planner had it."""
        if self._lent_to is planner:
            self._lent_to = None

    def call(self, method: str, *args: Any) -> Any:
        """Call a method of the process's `PlanServer` and wait for its result; threads take turns."""
        assert self._process.stdin is not None and self._process.stdout is not None, "pipes are asked for above"
        with self._turn:
            try:
                pickle.dump((method, args), self._process.stdin)
                self._process.stdin.flush()
                is_good, value = pickle.load(self._process.stdout)
            except (EOFError, OSError, ValueError, pickle.UnpicklingError) as error:
                raise InfeasiblePlanError(
                    f"the planning process {self.pid} ended with code {self._process.poll()}; see its standard error, "
                    "and make a new balancer"
                ) from error
        if not is_good:
            raise value
        return value

    def close(self) -> None:
        """End the process. Closing twice is allowed."""
        assert self._process.stdin is not None and self._process.stdout is not None, "pipes are asked for above"
        # A process that died reads nothing more.
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        # Last: a thread that was reading an answer has ended by now.
        self._process.stdout.close()


def serve() -> None:
    """Run in the worker: answer messages until the parent is gone."""
    # Prints of this process must not mix with the answers, so they go to standard error.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    answer_all(sys.stdin.buffer, answers)


def answer_all(messages: IO[bytes], answers: IO[bytes]) -> None:
    """Answer every message of a stream."""
    from equipoise.planning.server import PlanServer

    server: PlanServer | None = None
    while True:
        try:
            method, args = pickle.load(messages)
        except EOFError:
            return
        try:
            if method == "open":
                server, result = PlanServer(*args), None
            else:
                result = getattr(server, method)(*args)
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

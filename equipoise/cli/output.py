"""Where words go: tables to standard output, progress to standard error, one JSON document last.

Knows terminals. Does not know what is shown.

Invariants (asserted by the tests):
1. A reader of standard output that goes early is no error; a full disk behind it is one, in one line.
"""

import errno
import functools
import io
import json
import os
import select
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from equipoise.cli import INTERRUPTED as INTERRUPTED  # what verbs that answer an interrupt leave with, as `main` does
from equipoise.core.errors import EquipoiseError
from equipoise.core.whole_file import whole_file

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What a full disk, an exhausted share of it or a limit answer."""


class _Screen(Console):
    """A console that leaves a reader who has gone to `guarded`: rich would end with code 1, which means findings."""

    def on_broken_pipe(self) -> None:
        """Say so."""
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


def screen(*, as_json: bool) -> Console:
    """The console for tables: standard output, or nothing where a program reads the JSON line."""
    # Without markup: shapes such as [T, L, K] and file names are words, not styles.
    return _Screen(quiet=as_json, highlight=False, markup=False)


def print_json(document: dict[str, Any]) -> None:
    """Print one JSON document as one line, the last of standard output."""
    typer.echo(json.dumps(document, allow_nan=False))


def remark(words: str) -> None:
    """Say on standard error, in one line, what a user should know and what is no part of the result."""
    typer.echo(f"equipoise: {words}", err=True)


def write_json(document: Any, path: Path, *, indent: int | None = None) -> None:
    """Write one JSON document to a file, or raise saying why not."""
    with whole_file(path) as draft:
        draft.write_text(json.dumps(document, allow_nan=False, indent=indent) + "\n", encoding="utf-8")


def guarded(verb: Callable[..., None]) -> Callable[..., None]:
    """Return the verb with what standard output refuses told apart: a reader that has gone is no fault, a full disk is.

    Files of results do not come here: what they refuse is an error of ours already (`whole_file`).
    """

    @functools.wraps(verb)
    def call(*args: Any, **given: Any) -> None:
        try:
            verb(*args, **given)
            sys.stdout.flush()
        except OSError as error:
            # A pipe between processes that broke is not a reader that has gone.
            if error.errno == errno.EPIPE and not _has_reader():
                _drop_output()
                raise typer.Exit(0) from None
            if error.errno in _FULL and error.filename is None:
                _drop_output()
                raise EquipoiseError(f"standard output cannot be written: {error.strerror}") from error
            raise

    return call


def _has_reader() -> bool:
    """Whether somebody is at the other end of standard output."""
    try:
        place = sys.stdout.fileno()
    except io.UnsupportedOperation:
        # Not the system's: whoever put it there reads it.
        return True
    poll = select.poll()
    # Errors are reported whatever is asked for.
    poll.register(place, 0)
    return not any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def _drop_output() -> None:
    """Forget what is left to say: Python would try again at its end, and say so."""
    with Path(os.devnull).open("w") as nothing:
        os.dup2(nothing.fileno(), sys.stdout.fileno())


@contextmanager
def progress(words: str) -> Iterator[Callable[[int, int], None]]:
    """Show a bar on standard error while samples are worked on; yields what to call with (done, total).

    A total of 0 means that it is not known. Nothing is shown where standard error is not a terminal.
    """
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(words, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total or None)

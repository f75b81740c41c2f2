"""Where words go: tables to standard output, progress to standard error, one JSON document last.

Knows terminals. Does not know what is shown.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from equipoise.core.whole_file import whole_file


def screen(*, as_json: bool) -> Console:
    """The console for tables: standard output, or nothing where a program reads the JSON line."""
    # Without markup: shapes such as [T, L, K] and file names are words, not styles.
    return Console(quiet=as_json, highlight=False, markup=False)


def print_json(document: dict[str, Any]) -> None:
    """Print one JSON document as one line, the last of standard output."""
    typer.echo(json.dumps(document, allow_nan=False))


def write_json(document: Any, path: Path, *, indent: int | None = None) -> None:
    """Write one JSON document to a file, or raise saying why not."""
    with whole_file(path) as draft:
        draft.write_text(json.dumps(document, allow_nan=False, indent=indent) + "\n", encoding="utf-8")


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

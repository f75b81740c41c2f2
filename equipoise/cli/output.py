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
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from equipoise.cli import INTERRUPTED as INTERRUPTED  # what verbs that answer an interrupt leave with, as `main` does
from equipoise.core.errors import EquipoiseError
from equipoise.core.files import whole_file
from equipoise.core.plan import Seconds
from equipoise.sim.analysis import WORTH, Analysis, Prediction, Trial, transfer_seconds

# Draw what is predicted of a step's seconds: the answer in two sentences, a table by stage and part, the small print.


MIB = 2**20


def answer(analysis: Analysis) -> Table:
    """How much is lost, what a plan would give back, and whether that is worth it."""
    seconds, trial = analysis.seconds, analysis.trial
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold")
    grid.add_column()
    lost = f"{_time(seconds.lost_seconds)} of {_time(seconds.now.total)}, {seconds.share(seconds.lost_seconds):.1%}"
    grid.add_row("\n  lost", f"\n{lost} of the time in expert layers per step")
    if trial is None:
        grid.add_row("  plan", Text(f"none tried: {analysis.no_trial}", style="yellow"))
        return grid
    saved = f"saves {_time(seconds.saved_seconds)}, {seconds.share(seconds.saved_seconds):.1%}"
    verdict = (saved, "bold green")
    if not analysis.worth_it:
        verdict = (f"not worth it here: {saved}, less than {WORTH:.0%}", "bold yellow")
    grid.add_row("  plan", Text.assemble(verdict, f", with {_slots(trial)}"))
    grid.add_row("  skew", f"mean {_skews(analysis)}")
    return grid


def seconds_table(analysis: Analysis) -> Table:
    """Now, if balanced and with a plan, by stage and part."""
    scale = _scale(analysis)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("  stage")
    table.add_column("part")
    names = ["now", "balanced", "lost", "lost, %"]
    for name in [*names, "planned", "saved"] if analysis.trial is not None else names:
        table.add_column(name, justify="right")
    for name, stage in analysis.stages.items():
        for i, cells in enumerate(_part_rows(stage.seconds, scale)):
            table.add_row(f"  {name}" if i == 0 else "", *cells)
    table.add_row("  step", "total", *_total_cells(analysis.seconds, scale), style="bold")
    return table


def seconds_unit(analysis: Analysis) -> str:
    """The unit of the table."""
    return "seconds" if _scale(analysis) == 1 else "milliseconds"


def seconds_notes(analysis: Analysis) -> Table:
    """By whose figures the seconds are predicted, and what is assumed."""
    profile, seconds, trial = analysis.profile, analysis.seconds, analysis.trial
    made = "measured" if profile.kind == "measured" else "derived from an H200's measured figures"
    notes = {"  compute": f"{profile.device}, {made}; busiest rank, against mean rank"}
    if seconds.has_all_to_all:
        notes["  all-to-all"] = "busiest link at an assumed share of its published rate, against even spread"
    else:
        notes["  all-to-all"] = "not priced: source ranks are not the ranks of the EP group"
    if trial is not None:
        notes["  transfers"] = "pulls, returns, publish and collect of experts, where nothing hides them"
    if trial is not None and trial.estimated_share:
        notes["  estimated"] = f"{trial.estimated_share:.1%} of the rows, whose routes are unknown"
    if seconds.planned is not None and seconds.planned.all_to_all < seconds.balanced.all_to_all:
        notes["  planned"] = "sends less than an even spread: replicas take rows of their own rank first"
    notes["  left out"] = "attention, optimizer, rollout; compute and all-to-all do not overlap"
    grid = Table.grid(padding=(0, 2))
    for name, words in notes.items():
        grid.add_row(Text(name, style="dim"), Text(words, style="dim"))
    return grid


def _part_rows(seconds: Prediction, scale: float) -> list[list[str]]:
    """Cells of each part; transfers only where there is a plan."""
    rows = [["compute", *_cells(seconds, "compute", scale)]]
    if seconds.has_all_to_all:
        rows.append(["all-to-all", *_cells(seconds, "all_to_all", scale)])
    if seconds.planned is not None:
        moved = transfer_seconds(seconds.planned) * scale
        rows.append(["transfers", "", "", "", "", _figure(moved), _figure(-moved)])
    return rows


def _cells(seconds: Prediction, part: str, scale: float) -> list[str]:
    now, balanced = getattr(seconds.now, part), getattr(seconds.balanced, part)
    return _row(now, balanced, None if seconds.planned is None else getattr(seconds.planned, part), scale)


def _total_cells(seconds: Prediction, scale: float) -> list[str]:
    planned: Seconds | None = seconds.planned
    return _row(seconds.now.total, seconds.balanced.total, None if planned is None else planned.total, scale)


def _row(now: float, balanced: float, planned: float | None, scale: float) -> list[str]:
    cells = [_figure(x * scale) for x in (now, balanced, now - balanced)]
    cells.append(f"{(now - balanced) / now:.1%}" if now else "-")
    if planned is not None:
        cells += [_figure(planned * scale), _figure((now - planned) * scale)]
    return cells


def _figure(value: float) -> str:
    """Two decimals, and no minus before a zero."""
    return f"{round(value, 2) + 0.0:.2f}"


def _scale(analysis: Analysis) -> float:
    return 1.0 if analysis.seconds.now.total >= 1 else 1e3


def _slots(trial: Trial) -> str:
    if not trial.slots:
        return "placement alone, no memory taken"
    plural = "" if trial.slots == 1 else "s"
    return f"{trial.slots} replica slot{plural}, {trial.buffer_bytes / MIB:.0f} MiB per GPU"


def _skews(analysis: Analysis) -> str:
    """Mean skew before and after, of the stage that takes longest."""
    trial = analysis.trial
    assert trial is not None, "only asked for where a plan was tried"
    name = max(analysis.stages, key=lambda stage: analysis.stages[stage].seconds.now.total)
    return f"{trial.skew_before(name).mean:.2f} now, {trial.skew_after(name).mean:.2f} with the plan ({name})"


def _time(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 10 else f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


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

"""The command line: `equipoise VERB`. A verb reads a file and writes a file, so that any stage can be run alone.

    app.py        the list of verbs; to add one, write its function and add it to `VERBS`
    options.py    flags that verbs share, in groups, and the checks that run before any work
    output.py     the terminal: tables, progress, the JSON line
    step_loads.py from a dump to the loads of a step
    doctor.py     is the recorded routing right?
    convert.py    a dump into a store, histograms or loads; `pack` makes a schedule, `generate` a workload
    plan.py       the loads of one window into a plan
    simulate.py   a step predicted: `analyze` is the short answer, `simulate` compares policies
    report.py     a result as a page and as a summary
    train.py      RL post-training, balanced by foresight
    watch.py      a training run while it goes on, in the terminal and as a page
    calibrate.py  measure this GPU into a profile, or check one

Exit codes: 0 good, 1 findings, 2 bad input, 130 interrupted. With `--json` the last line of standard output is one JSON
document, and tables are left out. A file that exists is replaced only with `--force`; a training run replaces the run
in its folder. `-` instead of a dump reads JSON from standard input, packed or not. A module imports what is heavy
inside the function that needs it, so that `--help` is quick.
"""

import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

INTERRUPTED = 130
"""Exit code after Ctrl-C, as in shells."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run one verb and exit; what the user got wrong is one line on standard error and exit code 2."""
    from equipoise.core.errors import EquipoiseError

    try:
        from equipoise.cli.app import build_app, refuse_renamed

        arguments = list(sys.argv[1:] if argv is None else argv)
        refuse_renamed(arguments)
        with _with_standard_input(arguments) as arguments:
            build_app()(args=arguments, prog_name="equipoise")
    except KeyboardInterrupt:
        _exit("interrupted", INTERRUPTED)
    except SystemExit as stop:
        # Typer catches Ctrl-C and exits without a message; the context tells this from a verb's own exit.
        if isinstance(getattr(stop.__context__, "__cause__", None), KeyboardInterrupt):
            _exit("interrupted", INTERRUPTED)
        raise
    except EquipoiseError as error:
        _exit(str(error), 2)
    except MemoryError as error:
        _exit(f"there is not enough memory ({error or 'size unknown'}); give less input at once", 2)


@contextmanager
def _with_standard_input(arguments: Sequence[str]) -> Iterator[list[str]]:
    """Put a file with standard input in place of an argument `-`: a dump is read more than once."""
    if "-" not in arguments:
        yield list(arguments)
        return
    from equipoise.launch import temporary_folder

    at = arguments.index("-")
    with temporary_folder() as folder:
        path = folder / "stdin.jsonl"
        with path.open("wb") as file:
            shutil.copyfileobj(sys.stdin.buffer, file)
        path = path.rename(path.with_suffix(_suffix_of(path)))
        yield [*arguments[:at], str(path), *arguments[at + 1 :]]


def _suffix_of(path: Path) -> str:
    """Return what standard input holds, by its first bytes: lines of JSON, packed or not, or one JSON document."""
    with path.open("rb") as file:
        line = file.readline()
    if packed := {b"\x1f\x8b": ".jsonl.gz", b"(\xb5": ".jsonl.zst"}.get(line[:2]):
        return packed
    # The first line of a document over several lines opens a bracket or more.
    return ".json" if line.strip().endswith((b"[", b"{", b",")) else ".jsonl"


def _exit(message: str, code: int) -> NoReturn:
    sys.stderr.write(f"equipoise: {message}\n")
    raise SystemExit(code) from None

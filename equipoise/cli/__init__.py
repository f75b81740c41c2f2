"""The command line: `equipoise VERB`. Each verb reads a file and writes a file, so that any stage can be run alone.

    app.py        the list of verbs; to add one, write its module and add one line there
    options.py    options that verbs share, alone and in groups, and how a dump on the command line is understood
    flags.py      groups of options as flags of a verb, and as sections of its help
    kinds.py      which of our files a path is
    output.py     tables, progress, the JSON line, and how errors are shown
    doctor.py     is the routing right?
    ingest.py     any dump into the native store
    count.py      any dump into histograms
    loads.py      any dump and a schedule into loads, window by window
    plan.py       loads into a plan (`plan_view.py` draws it)
    slots.py      how many replica slots a rank can hold
    simulate.py   a step replayed under several policies, sweeps and break-even (`simulation.py` runs them)
    generate.py   a generated workload into the native store (`storing.py` writes it, for ingest too)
    analyze.py    seconds lost, what a plan gives back, skew, memory (`step_loads.py` counts what it needs,
                  `analysis_view.py` and `seconds_view.py` draw it)
    report.py     a result as a page and as a summary
    train.py      RL post-training, balanced by foresight (`train_view.py` shows it)
    calibrate.py  this GPU measured into a profile, or a profile checked
    formats.py    the forms that can be read

Exit codes: 0 good, 1 findings, 2 bad input, 130 interrupted. With `--json` the last line of standard output is one JSON
document and tables are left out. A file that exists is replaced only with `--force`; a training run's folder and its
page are replaced by the next run (`train`). Knows every room; no room knows it. Anything heavy is imported inside the
verb that needs it.
"""

import sys
from collections.abc import Sequence
from typing import NoReturn

INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells have it."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run one verb and exit; an interrupt that the verb has not answered itself is one word on standard error."""
    try:
        _run(list(sys.argv[1:] if argv is None else argv))
    except KeyboardInterrupt:
        _stop("interrupted", INTERRUPTED)
    except SystemExit as stop:
        # Typer takes Ctrl-C for itself and leaves in silence; what a verb leaves with has no such cause.
        if isinstance(getattr(stop.__context__, "__cause__", None), KeyboardInterrupt):
            _stop("interrupted", INTERRUPTED)
        raise


def _run(argv: list[str]) -> None:
    """Run one verb and exit; what the user got wrong is one message on standard error and exit code 2."""
    from equipoise.cli.app import build_app
    from equipoise.core.errors import EquipoiseError

    try:
        build_app()(args=argv, prog_name="equipoise")
    except EquipoiseError as error:
        _stop(str(error), 2)
    except MemoryError as error:
        _stop(f"there is not enough memory here ({error or 'no figure known'}); give less at once", 2)


def _stop(words: str, code: int) -> NoReturn:
    sys.stderr.write(f"equipoise: {words}\n")
    raise SystemExit(code) from None

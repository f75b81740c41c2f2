"""The list of verbs. To add one: write `cli/VERB.py` with a function of that name, and add it to `VERBS`.

Knows which verbs exist and nothing of what they do. A verb's help ends with the examples of its module's docstring.
"""

import sys
from collections.abc import Callable
from typing import Annotated

import typer

from equipoise import __version__
from equipoise.cli.analyze import analyze
from equipoise.cli.calibrate import calibrate
from equipoise.cli.count import count
from equipoise.cli.doctor import doctor
from equipoise.cli.flags import SectionedCommand, flatten
from equipoise.cli.formats import formats
from equipoise.cli.generate import generate
from equipoise.cli.ingest import ingest
from equipoise.cli.loads import loads
from equipoise.cli.output import guarded
from equipoise.cli.parity import parity
from equipoise.cli.plan import plan
from equipoise.cli.report import report
from equipoise.cli.simulate import simulate
from equipoise.cli.train import train

VERBS = (analyze, doctor, ingest, count, loads, plan, simulate, report, generate, parity, train, calibrate, formats)

HELP = """Expert load balancing by foresight for RL post-training of Mixture-of-Experts models.

Start here:
equipoise analyze --demo

Your own rollouts:
equipoise doctor rollouts.jsonl --model qwen3-30b-a3b
equipoise analyze rollouts.jsonl --model qwen3-30b-a3b --cluster h100 --ep 8

Exit codes: 0 good, 1 findings, 2 bad input.
With --json the last line is one JSON document.
Files that exist are replaced only with --force.
"""


def build_app() -> typer.Typer:
    """Build the command line anew; nothing is kept between calls."""
    app = typer.Typer(
        name="equipoise",
        help=HELP.replace("\n\n", "\n\n\b\n"),
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_before_verbs)
    for verb in VERBS:
        app.command(name=verb.__name__, cls=SectionedCommand, epilog=_examples(verb))(flatten(guarded(verb)))
    return app


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"equipoise {__version__}")
        raise typer.Exit


def _before_verbs(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Take the options before a verb; typer also keeps the verb in the command for it if only one is listed."""


def _examples(verb: Callable[..., None]) -> str | None:
    """The command lines of a verb's module docstring, one a line; None where its own help has them."""
    if "equipoise " in (verb.__doc__ or ""):
        return None
    lines = (sys.modules[verb.__module__].__doc__ or "").splitlines()
    return "\b\nExamples:\n" + "\n".join(line.strip() for line in lines if line.strip().startswith("equipoise "))

"""The list of verbs, and how their options become flags.

A verb is a function whose parameters are flags. Options that belong together are one parameter, a frozen dataclass
whose fields are annotated with `typer.Option` and whose class variable `SECTION` is their heading in the help. `--help`
fits on one screen: the options of `USUAL` and two examples. `--help-all` shows every option, and every example of the
verb's module docstring.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import MISSING, fields, is_dataclass
from typing import Annotated, Any, get_args, get_type_hints

import typer
from typer.core import TyperCommand

from equipoise import __version__
from equipoise.cli.calibrate import calibrate
from equipoise.cli.convert import convert, generate, pack
from equipoise.cli.doctor import doctor
from equipoise.cli.output import guarded
from equipoise.cli.plan import plan
from equipoise.cli.report import report
from equipoise.cli.simulate import analyze, simulate
from equipoise.cli.train import train
from equipoise.cli.watch import watch
from equipoise.core.errors import EquipoiseError

VERBS = (doctor, convert, generate, pack, plan, analyze, simulate, report, train, watch, calibrate)
USUAL = {
    "doctor": ("model", "form", "second", "self_check", "as_json"),
    "convert": ("out", "to", "model", "ep", "schedule", "formats"),
    "generate": ("model", "out", "samples", "tokens", "seed"),
    "pack": ("out", "model", "ep", "schedule", "mini_batches", "ranks_per_node", "as_json"),
    "plan": ("model", "cluster", "slots", "policy", "explain", "out"),
    "analyze": ("demo", "model", "ep", "schedule", "cluster", "sends", "memory_gib", "report"),
    "simulate": ("demo", "model", "ep", "schedule", "cluster", "policies", "slots", "sweep", "report"),
    "report": ("out", "trace", "title", "force"),
    "train": ("preset", "settings", "ranks", "model", "compare", "resume", "out", "report"),
    "watch": ("port", "once", "as_json"),
    "calibrate": ("out", "check", "ranks", "cluster", "trial"),
}
"""Parameters of each verb that its `--help` shows, in this order; `--help-all` shows all."""
UNLISTED = (generate, pack)
"""Verbs that `equipoise --help` does not list, so that it lists nine: made-up workloads are for trials, and packing is
first tried with `simulate --pack`."""
RENAMED = {
    "ingest": "equipoise convert DUMP -o routes.eqr",
    "count": "equipoise convert DUMP --to counts -o counts.npz",
    "loads": "equipoise convert DUMP --to loads -o loads.npz",
    "formats": "equipoise convert --formats",
    "parity": "equipoise train --compare off,static,equipoise",
}
"""Old verbs, and the command that does the same."""

HELP = """Expert load balancing by foresight for RL post-training of MoE models.

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
    """Build the command line."""
    app = typer.Typer(
        name="equipoise",
        help=HELP.replace("\n\n", "\n\n\b\n"),
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    # A callback also keeps the verb's name on the command line if only one verb is listed.
    app.callback()(_options_before_verb)
    for verb in VERBS:
        command = app.command(verb.__name__, cls=SectionedCommand, epilog=_examples(verb), hidden=verb in UNLISTED)
        command(flatten(guarded(verb)))
    return app


def refuse_renamed(arguments: Sequence[str]) -> None:
    """Raise if the verb is an old name, and name the command that does the same."""
    if arguments and arguments[0] in RENAMED:
        raise EquipoiseError(f"there is no verb {arguments[0]!r} any more; use: {RENAMED[arguments[0]]}")


def flatten(verb: Callable[..., None]) -> Callable[..., None]:
    """Return the verb with every field of its groups as a parameter of its own, which typer turns into a flag."""
    hints = get_type_hints(verb, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    flat: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(verb).parameters.items():
        if name in groups:
            flat += _flags(groups[name], parameter.default)
        else:
            flat.append(parameter.replace(kind=parameter.KEYWORD_ONLY, annotation=hints[name]))
    flat.append(inspect.Parameter("help_all", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=HelpAllFlag))

    @functools.wraps(verb)
    def call(*, help_all: bool, **given: Any) -> None:
        built = {name: group(**{f.name: given.pop(f.name) for f in fields(group)}) for name, group in groups.items()}
        verb(**given, **built)

    call.__annotations__ = {parameter.name: parameter.annotation for parameter in flat}
    call.__signature__ = inspect.Signature(flat)  # type: ignore[attr-defined]  # read by inspect.signature
    return call


def _flags(group: Any, default: object) -> Iterator[inspect.Parameter]:
    """Yield the fields of a group as parameters, with the defaults of the verb's own default group if it has one."""
    hints = get_type_hints(group, include_extras=True)
    for field in fields(group):
        kind, option = get_args(hints[field.name])
        # A copy, because the same option may be in another group, or in none.
        option = copy(option)
        option.rich_help_panel = group.SECTION
        value = field.default if default is inspect.Parameter.empty else getattr(default, field.name)
        yield inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if value is MISSING else value,
            annotation=Annotated[kind, option],
        )


def _show_all(ctx: typer.Context, asked: bool) -> None:
    if asked:
        ctx.meta[SHOWS_ALL] = True
        typer.echo(ctx.get_help())
        raise typer.Exit


SHOWS_ALL = "equipoise.shows_all"
HelpAllFlag = Annotated[
    bool, typer.Option("--help-all", callback=_show_all, is_eager=True, help="Show every option and example, and exit.")
]


class SectionedCommand(TyperCommand):
    """A verb whose help is plain text for any terminal and pager: the usual options, or all under their headings."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments, then the usual options in their order, or all by section in the verb's order."""
        shows_all = self.name not in USUAL or SHOWS_ALL in ctx.meta
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx) if shows_all else self._usual_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                plain = "Arguments" if param.param_type_name == "argument" else "Options"
                section = getattr(param, "rich_help_panel", None) if shows_all else None
                sections.setdefault(section or plain, []).append(record)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write two examples, or all of them."""
        examples = (self.epilog or "").splitlines()
        if examples:
            with formatter.section("Examples"):
                for line in examples if SHOWS_ALL in ctx.meta else examples[:2]:
                    formatter.write(f"  {line}\n")

    def _usual_params(self, ctx: Any) -> list[Any]:
        params = {param.name: param for param in self.get_params(ctx)}
        arguments = [param for param in params.values() if param.param_type_name == "argument"]
        return [*arguments, *(params[name] for name in (*USUAL[self.name or ""], "help_all", "help"))]


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"equipoise {__version__}")
        raise typer.Exit


def _options_before_verb(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Take the options before a verb."""


def _examples(verb: Callable[..., None]) -> str:
    """Return a verb's examples, one a line: those of its module's docstring."""
    lines = (sys.modules[verb.__module__].__doc__ or "").splitlines()
    return "\n".join(line.strip() for line in lines if line.strip().startswith(f"equipoise {verb.__name__}"))

"""Options that go together are one parameter of a verb; here they become flags, and sections of its help.

A group is a frozen dataclass whose fields are annotated with `typer.Option`; its class variable `SECTION` heads them in
the help. A verb takes a group by keyword, with a default instance where its defaults differ from the fields'.
Knows typer. Does not know which options there are: those that verbs share are in `options.py`.

Invariants (asserted by the tests):
1. A verb gets each group as one object, with what was on the command line or the defaults.
2. The help lists every flag once, under its group's section; flags of no group stand under Options.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import MISSING, fields, is_dataclass
from typing import Annotated, Any, get_args, get_type_hints

from typer.core import TyperCommand


def flatten(verb: Callable[..., None]) -> Callable[..., None]:
    """Return the verb with every field of its groups as a parameter of its own, as typer reads them."""
    hints = get_type_hints(verb, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    flat: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(verb).parameters.items():
        if name in groups:
            flat += _flags(groups[name], parameter.default)
        else:
            flat.append(parameter.replace(kind=parameter.KEYWORD_ONLY, annotation=hints[name]))

    @functools.wraps(verb)
    def call(**given: Any) -> None:
        built = {name: group(**{f.name: given.pop(f.name) for f in fields(group)}) for name, group in groups.items()}
        verb(**given, **built)

    call.__annotations__ = {parameter.name: parameter.annotation for parameter in flat}
    call.__signature__ = inspect.Signature(flat)  # type: ignore[attr-defined]  # read by inspect.signature
    return call


def _flags(group: Any, default: object) -> Iterator[inspect.Parameter]:
    """The fields of a group, each with the group's section and its default."""
    hints = get_type_hints(group, include_extras=True)
    for field in fields(group):
        kind, option = get_args(hints[field.name])
        # The same option may stand in another group, or in none.
        option = copy(option)
        option.rich_help_panel = group.SECTION
        value = field.default if default is inspect.Parameter.empty else getattr(default, field.name)
        yield inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if value is MISSING else value,
            annotation=Annotated[kind, option],
        )


class SectionedCommand(TyperCommand):
    """A verb whose help has a heading for each group of options: plain text, for any terminal and pager."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments, then the options by section, in the order of the verb's parameters."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                plain = "Arguments" if param.param_type_name == "argument" else "Options"
                sections.setdefault(getattr(param, "rich_help_panel", None) or plain, []).append(record)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)

"""Write docs/api.md: the public names of `equipoise` and `equipoise.torch`, from their signatures and docstrings.

python docs/api.py
"""

import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

PAGE = Path(__file__).with_name("api.md")
HEAD = """# Public names

`python docs/api.py` writes this page from signatures and docstrings; a test keeps it current. `help(name)` shows more.
"""
FACES = ("equipoise", "equipoise.torch")
LONGEST_DEFAULT = 30
"""Characters of a default that is still shown."""


def render() -> str:
    """Return the page."""
    lines = [HEAD]
    for face in FACES:
        module = importlib.import_module(face)
        lines += [f"## {face}\n", f"{first_line(module)}\n"]
        for name in module.__all__:
            lines += describe(name, getattr(module, name))
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def describe(name: str, value: Any) -> Iterator[str]:
    """Yield the line of a name, and below it those of its members."""
    yield f"- `{name}{signature(value)}`: {first_line(value)}"
    if isinstance(value, ModuleType):
        members = [(key, getattr(value, key)) for key in value.__all__]
    elif inspect.isclass(value) and not issubclass(value, Exception):
        members = [(key, unwrapped(member)) for key, member in vars(value).items() if not key.startswith("_")]
    else:
        members = []
    for key, member in members:
        if callable(member) and member.__doc__:
            yield f"  - `{key}{signature(member)}`: {first_line(member)}"


def unwrapped(member: Any) -> Any:
    """Return the function of a class or static method, anything else as it is."""
    return member.__func__ if isinstance(member, classmethod | staticmethod) else member


def signature(value: Any) -> str:
    """Return parameters and short defaults, without types; nothing for modules and errors."""
    if isinstance(value, ModuleType) or (inspect.isclass(value) and issubclass(value, Exception)):
        return ""
    shown = []
    for parameter in inspect.signature(value).parameters.values():
        if parameter.name in ("self", "cls"):
            continue
        default = parameter.default
        if default is not parameter.empty and (len(repr(default)) > LONGEST_DEFAULT or repr(default).startswith("<")):
            default = ...
        shown.append(parameter.replace(annotation=parameter.empty, default=default))
    return str(inspect.Signature(shown)).replace("Ellipsis", "...")


def first_line(value: Any) -> str:
    """Return the first line of a docstring."""
    return (inspect.getdoc(value) or "").partition("\n")[0]


if __name__ == "__main__":
    PAGE.write_text(render())

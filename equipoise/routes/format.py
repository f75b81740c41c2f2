"""`Format`: the face every wire or file format shows. One module per format family, one `Format` value per form.

To add one: write a module with a `matches`, a `read` and a `write` function whose docstring is the format's spec, make
a `Format` of them, and add it to `FORMATS` in `registry.py`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from equipoise.core import ModelShape, Routes
from equipoise.routes.recording import Recording
from equipoise.routes.source import Source


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """One form in which an engine or trainer hands out routes."""

    name: str
    """What users write after `--format`."""
    summary: str
    """One line for `--help` and for errors that list candidates."""
    suffixes: tuple[str, ...]
    """File suffixes this form is written to, first one preferred."""
    matches: Callable[[Source], bool]
    """Whether the content (never the file name) can be this form; must not raise on foreign content."""
    read: Callable[[Source, ModelShape], Iterator[Recording]]
    """Decode one recording after another; raises RoutesError only."""
    write: Callable[[Routes, Path], None]
    """Write routes in this form, so that reading them back gives the same routes wherever the form can hold them."""

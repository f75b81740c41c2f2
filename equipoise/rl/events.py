"""`Event`: what a run tells whoever watches: a terminal, a test, another process.

    start      facts of the run: model, ranks, mode, where results go
    progress   words, done, total: something that takes a while
    stage      step, name of the stage that begins; sent by every rank
    metrics    one step's figures
    note       words
    end        summary

Knows names only.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

Kind = Literal["start", "progress", "stage", "metrics", "note", "end"]


class Event(NamedTuple):
    """One thing that happened."""

    kind: Kind
    values: Mapping[str, Any]


Show = Callable[[Event], None]


def ignore(event: Event) -> None:
    """Show nothing."""

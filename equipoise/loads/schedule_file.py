"""Schedules on disk: a trainer's own micro-batches as JSON, so that loads are counted where they really fall.

File: one JSON object
    format     "equipoise-schedule-1"
    windows    one object per window, in order:
        stage            "recompute" or "update"
        ranks            source ranks
        pieces           [sample, start, stop, micro_step, rank] each, in the order the trainer packs them
        micro_steps      optional: the last one named plus one
        padding          optional: padding tokens, one list of `ranks` numbers per micro-step
        padding_policy   optional: "spread", "arange", "first" or "unknown"
        last_token       optional: "drop", "spread" or "unknown"

Invariants (asserted by the tests):
1. `read_schedules(write_schedules(x)) == x`.
2. An unknown key, a missing one or a wrong type is a ScheduleError that names file and window.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from equipoise.core import Schedule, ScheduleError
from equipoise.core.value import require_int
from equipoise.core.whole_file import whole_file

FORMAT = "equipoise-schedule-1"
_NEEDED = ("stage", "ranks", "pieces")
_OPTIONAL = ("micro_steps", "padding", "padding_policy", "last_token")


def write_schedules(schedules: Sequence[Schedule], path: str | Path) -> None:
    """Write the windows of one step."""
    windows = [
        {
            "stage": s.stage,
            "ranks": s.ranks,
            "micro_steps": s.micro_steps,
            "pieces": s.pieces.tolist(),
            "padding": s.padding_MR.tolist(),
            "padding_policy": s.padding_policy,
            "last_token": s.last_token,
        }
        for s in schedules
    ]
    with whole_file(path, error=ScheduleError) as draft:
        draft.write_text(json.dumps({"format": FORMAT, "windows": windows}) + "\n", encoding="utf-8")


def read_schedules(path: str | Path) -> tuple[Schedule, ...]:
    """Read the windows of one step."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ScheduleError(f"no schedule at {path}; give samples:N, tokens:N or a schedule file") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ScheduleError(f"{path} is not a readable JSON file: {error}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT or not isinstance(content.get("windows"), list):
        raise ScheduleError(f"{path} is not a schedule file: expected an object with format {FORMAT!r} and windows")
    if not content["windows"]:
        raise ScheduleError(f"{path} holds no windows; a step has at least one")
    return tuple(_window(w, f"{path}: window {i}") for i, w in enumerate(content["windows"]))


def _window(window: Any, place: str) -> Schedule:
    if not isinstance(window, Mapping):
        raise ScheduleError(f"{place} is a {type(window).__name__}; it must be an object")
    wrong = [key for key in window if key not in _NEEDED + _OPTIONAL] + [key for key in _NEEDED if key not in window]
    if wrong:
        known = ", ".join(_NEEDED + _OPTIONAL)
        raise ScheduleError(f"{place}: key {wrong[0]!r} is unknown or missing; known: {known}")
    options = {key: window[key] for key in ("padding_policy", "last_token") if key in window}
    try:
        if "padding" in window:
            options["padding_MR"] = np.array(window["padding"])
        if "micro_steps" in window:
            options["micro_steps"] = require_int("micro_steps", window["micro_steps"], low=1, error=ScheduleError)
        return Schedule.of(_whole(window["pieces"]), ranks=window["ranks"], stage=window["stage"], **options)
    except (ScheduleError, TypeError, ValueError, OverflowError) as error:
        raise ScheduleError(f"{place}: {error}") from error


def _whole(pieces: Any) -> list[list[int]]:
    """The pieces, if they are lists of five whole numbers each."""
    if not isinstance(pieces, list):
        raise ScheduleError(f"pieces must be a list, got {type(pieces).__name__}")
    for i, piece in enumerate(pieces):
        if not isinstance(piece, list) or len(piece) != 5 or any(type(n) is not int for n in piece):
            raise ScheduleError(f"piece {i} is {piece!r}; it must be [sample, start, stop, micro_step, rank]")
    return pieces

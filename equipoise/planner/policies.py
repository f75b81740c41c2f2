"""Baselines: being written."""

from typing import Any

POLICIES: tuple[str, ...] = ("static",)


def draft_baseline(task: Any, *, history: Any) -> Any:
    raise NotImplementedError

"""Run a verb as the command line does."""

import json
import multiprocessing
from dataclasses import dataclass
from typing import Any

import pytest

from equipoise.cli import main
from tests.pool import preloaded_context


@dataclass(frozen=True)
class Outcome:
    """What a verb left behind."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        """The JSON document on the last line of standard output."""
        return json.loads(self.out.splitlines()[-1])


@pytest.fixture
def equipoise(capsys, monkeypatch):
    """Call `equipoise(verb, option, ...)` on a terminal of 100 columns."""
    monkeypatch.setenv("COLUMNS", "100")

    def call(*arguments: object) -> Outcome:
        with pytest.raises(SystemExit) as stop:
            main([str(a) for a in arguments])
        captured = capsys.readouterr()
        return Outcome(int(stop.value.code or 0), captured.out, captured.err)

    return call


@pytest.fixture
def quick_ranks(monkeypatch):
    """Fork the ranks that a verb starts from one import of torch; `tests/test_launch.py` spawns them as users do."""
    get_context = multiprocessing.get_context
    monkeypatch.setattr(
        multiprocessing, "get_context", lambda kind=None: preloaded_context() if kind == "spawn" else get_context(kind)
    )

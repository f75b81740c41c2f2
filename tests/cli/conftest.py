"""Run a verb as the command line does."""

import json
from dataclasses import dataclass
from typing import Any

import pytest

from equipoise.cli import main


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

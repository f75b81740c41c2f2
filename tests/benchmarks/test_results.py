"""What every benchmark prints: a table, then one JSON document as the last line."""

import json
import re

import pytest

from benchmarks.results import Limit, publish

ROWS = [{"case": "a", "seconds": 0.25}, {"case": "longer", "seconds": 12.0}]


@pytest.mark.parametrize(("value", "code", "word"), [(3.0, 0, "holds"), (2.9, 1, "FAILS")], ids=["kept", "broken"])
def test_the_last_line_is_the_document_and_a_broken_limit_the_exit_code(capsys, value, code, word):
    assert publish("demo", ROWS, limits=[Limit(name="speed", value=value, at_least=3.0)], packages=["numpy"]) == code
    lines = capsys.readouterr().out.splitlines()
    document = json.loads(lines[-1])
    assert document["rows"] == ROWS
    assert document["limits"][0]["holds"] is (code == 0)
    assert re.fullmatch(r"[0-9a-f]{40}(-dirty)?", document["commit"])
    assert set(document["versions"]) == {"python", "numpy"}
    assert lines[1:5] == [
        "case    seconds",
        "a          0.25",
        "longer       12",
        f"{word}: speed is {value:g}, at least 3",
    ]


def test_a_limit_has_two_ends():
    assert Limit(name="x", value=5, at_least=5, at_most=5).holds
    assert not Limit(name="x", value=5.1, at_least=5, at_most=5).holds
    assert not Limit(name="x", value=4.9, at_least=5, at_most=5).holds

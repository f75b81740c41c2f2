"""A run while it goes on: lines as they are appended, figures, and each warning where it is due and nowhere else."""

import http.client
import json

import pytest

from equipoise.core import EquipoiseError
from equipoise.report.live import SHOWN, Follower, LiveReader, describe, find_warnings
from equipoise.report.serve import serving
from tests.report.documents import metrics, write_run

SETTINGS = {"steps": 40, "ranks": 2, "model": {"family": "olmoe"}, "balance": {"mode": "equipoise"}}
MEMORY = {
    "kind": "memory",
    "step": 3,
    "stage": "update",
    "peak_bytes": 3 * 2**30,
    "rank": 1,
    "micro_step": 4,
    "layer": 7,
    "slot_bytes": 2**30,
    "limit_bytes": 80 * 2**30,
}
GOOD = [metrics(step, waited_s=0.0) for step in range(8)]


def test_lines_are_read_once_as_they_are_finished_and_anew_where_the_file_is_another(tmp_path):
    path = tmp_path / "metrics.jsonl"
    follower = Follower(path)
    assert follower.read() == []
    path.write_text('{"step": 0}\n{"st')
    assert follower.read() == [{"step": 0}]
    with path.open("a") as file:
        file.write('ep": 1}\n')
    assert follower.read() == follower.read() == [{"step": 0}, {"step": 1}]
    # A resumed run drops lines; another run begins otherwise.
    path.write_text('{"step": 0}\n')
    assert follower.read() == [{"step": 0}]
    path.write_text('{"step": 9, "loss": 1}\n{"step": 10}\n')
    assert follower.read() == [{"step": 9, "loss": 1}, {"step": 10}]
    with path.open("a") as file:
        file.write("no JSON\n")
    with pytest.raises(EquipoiseError, match=r"metrics.jsonl, line 3, is not JSON"):
        follower.read()


def test_figures_are_the_sums_and_the_last_step_and_say_what_is_predicted():
    stage = {"kind": "stage", "step": 8, "name": "update", "rank": 0}
    seen = describe("run", SETTINGS, GOOD, [{"kind": "start"}, MEMORY, stage], quiet_s=1.0)
    assert (seen.state, seen.doing, seen.warnings) == ("running", "step 8: update", ())
    figures = {figure.label: (figure.value, figure.text) for figure in seen.figures}
    assert figures["Steps"] == ("8 of 40", "2.00 s each, measured")
    assert figures["Skew"][0] == "1.50 to 1.02"
    assert figures["Saved"] == ("800 ms", "25.0 % of 3.20 s of expert layers, predicted")
    assert figures["Exposed"] == ("400 ms", "2.5 % of all steps, measured")
    assert figures["Coverage"][0] == "100 %"
    value, text = figures["Memory of the next window"]
    assert value == "4.00 GiB" and "step 3, update" in text and "rank 1, micro-step 4, layer 7" in text
    assert seen.steps == tuple(range(8))
    lines = {name: line for chart in seen.charts for name, line in chart.lines.items()}
    assert lines["before"] == (1.5,) * 8 and lines["transfers"] == (0.05,) * 8
    assert json.loads(json.dumps(seen.to_dict()))["charts"][0]["lines"]["after"] == [1.02] * 8


def test_a_run_starts_ends_and_goes_on_when_it_is_resumed():
    warm_up = {"kind": "progress", "message": "warm-up", "done": 5, "total": 20}
    seen = describe("run", SETTINGS, [], [warm_up], quiet_s=1.0)
    assert (seen.state, seen.doing, seen.figures) == ("starting", "warm-up: 5 of 20", ())
    ended = describe("run", SETTINGS, GOOD, [MEMORY, {"kind": "end"}], quiet_s=1e6)
    assert (
        ended.is_ended and ended.warnings == () and "Memory of the next window" not in {f.label for f in ended.figures}
    )
    note = {"kind": "note", "message": "resumed"}
    assert describe("run", SETTINGS, GOOD, [{"kind": "end"}, note], quiet_s=1.0).state == "running"
    without = describe("run", SETTINGS | {"balance": {"mode": "off"}}, [metrics(0, skew_after=None)], [], quiet_s=1.0)
    assert without.figures[1].value == "1.50"
    long = describe("run", SETTINGS, [metrics(step) for step in range(SHOWN + 9)], [], quiet_s=1.0)
    assert len(long.steps) == SHOWN and long.steps[-1] == SHOWN + 8


BAD = {
    "nothing was written for 61.0 s": {"quiet_s": 61.0},
    "the next window needs 96.0 GiB on rank 1": {"memory": MEMORY | {"peak_bytes": 95 * 2**30}},
    "routes of 10.0 % of the rows are unknown in step 7": {"coverage": 0.9},
    "skew is 1.20 as run": {"skew_after": 1.2},
    "cost 2.50 s more than none, predicted": {"saved_s": -0.5},
    "training stood still for 20.8 % of the last 5 steps": {"exposed_s": 0.25},
}


@pytest.mark.parametrize("words", BAD)
def test_every_warning_is_given_where_it_is_due_and_alone(words):
    others = dict(BAD[words])
    quiet_s, memory = others.pop("quiet_s", 59.0), others.pop("memory", MEMORY)
    assert find_warnings(SETTINGS, GOOD, MEMORY, quiet_s=59.0) == []
    (found,) = find_warnings(SETTINGS, [step | others for step in GOOD], memory, quiet_s=quiet_s)
    assert words in found


def test_what_is_usual_is_no_warning():
    levelled = SETTINGS | {"balance": {"mode": "equipoise", "objective": "skew"}}
    assert find_warnings(levelled, [step | {"saved_s": -0.5} for step in GOOD], None, quiet_s=0.0) == []
    slow = [step | {"seconds": 100.0} for step in GOOD]
    assert find_warnings(SETTINGS, slow, None, quiet_s=400.0) == []
    one_odd = [*GOOD[:-1], GOOD[-1] | {"skew_after": 1.4}]
    assert find_warnings(SETTINGS, one_odd, None, quiet_s=0.0) == []


def test_what_is_no_run_is_refused_by_name(tmp_path):
    with pytest.raises(EquipoiseError, match=r"is no training run, it has no config.toml; give the folder"):
        LiveReader(tmp_path)
    reader = LiveReader(write_run(tmp_path / "run", [{"step": 0}]))
    with pytest.raises(EquipoiseError, match=r"has a line without what this version shows"):
        reader.read()


def answer(port, path="/", method="GET", host="127.0.0.1"):
    asked = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    asked.request(method, path, headers={"Host": host})
    found = asked.getresponse()
    return found.status, found.headers, found.read()


def test_the_page_is_read_only_and_for_this_machine_alone():
    with serving(0) as server:
        port = server.server_port
        assert server.server_address[0] == "127.0.0.1"
        server.show({"state": "running"})
        status, headers, page = answer(port)
        assert status == 200 and page.startswith(b"<!doctype html>")
        assert headers["Content-Security-Policy"].startswith("default-src 'none'; script-src 'sha256-")
        assert "unsafe" not in headers["Content-Security-Policy"] and headers["X-Content-Type-Options"] == "nosniff"
        assert json.loads(answer(port, "/run.json", host="localhost:8000")[2]) == {"state": "running"}
        for path in ("/config.toml", "/../config.toml", "//etc/passwd", "/run.json?a=1", "/?x"):
            assert answer(port, path)[0] == 404, path
        for method in ("POST", "PUT", "DELETE", "HEAD", "OPTIONS"):
            assert answer(port, "/run.json", method)[0] == 501, method
        for host in ("evil.example", f"evil.example:{port}", "", "127.0.0.1.evil.example"):
            assert answer(port, "/run.json", host=host)[0] == 403, host
        with pytest.raises(EquipoiseError, match=rf"--port {port}: no page can be served there"), serving(port):
            pass
    with pytest.raises(OSError, match="refused"):
        answer(port)


def test_an_open_page_hears_of_the_end_and_none_is_waited_for(monkeypatch):
    with serving(0) as server:
        server.show({"state": "ended"})
        monkeypatch.setattr("equipoise.report.serve.PATIENCE_S", 0.0)
        server.tell_last()
        monkeypatch.setattr("equipoise.report.serve.PATIENCE_S", 1e9)
        answer(server.server_port, "/run.json")
        server.tell_last()
        assert server.told is server.document

"""`equipoise report`: the summary, the page and the trace from the command line."""

import json

import pytest

from tests.report.documents import metrics, simulation, write_run


@pytest.fixture
def result(tmp_path):
    path = tmp_path / "result.json"
    path.write_text(json.dumps(simulation().to_dict()))
    return path


def test_it_prints_the_summary_and_writes_page_and_trace(equipoise, result, tmp_path):
    outcome = equipoise("report", result, "-o", tmp_path / "page.html", "--trace", tmp_path / "trace.json")
    assert outcome.code == 0, outcome.err
    assert "would recover 20.3 %" in " ".join(outcome.out.split())
    assert "Policies by cost part" in outcome.out
    assert "no network needed" in outcome.out
    assert "<title>result.json - Equipoise</title>" in (tmp_path / "page.html").read_text()
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


def test_with_json_the_last_line_is_the_answer_for_programs(equipoise, result, tmp_path):
    outcome = equipoise("report", result, "-o", tmp_path / "page.html", "--title", "mine", "--json")
    assert len(outcome.out.splitlines()) == 1
    assert outcome.document["answer"].endswith("would recover 20.3 %.")
    assert outcome.document["report"] == str(tmp_path / "page.html")
    assert "timeline" in outcome.document["charts"]
    assert "<title>mine - Equipoise</title>" in (tmp_path / "page.html").read_text()


def test_a_trace_that_cannot_be_made_is_refused_before_anything_is_written(equipoise, tmp_path):
    (tmp_path / "bare.json").write_text(json.dumps(simulation(timed=False).to_dict()))
    outcome = equipoise("report", tmp_path / "bare.json", "-o", tmp_path / "page.html", "--trace", tmp_path / "t.json")
    assert outcome.code == 2
    assert "no timeline" in outcome.err
    assert not (tmp_path / "page.html").exists()


def test_what_is_no_result_gives_exit_code_2(equipoise, tmp_path):
    (tmp_path / "odd.json").write_text("{}")
    outcome = equipoise("report", tmp_path / "odd.json")
    assert (outcome.code, outcome.out) == (2, "")
    assert "odd.json has format None" in outcome.err


def test_a_place_that_cannot_be_written_gives_exit_code_2(equipoise, result, tmp_path):
    for option in ("-o", "--trace"):
        outcome = equipoise("report", result, option, tmp_path / "absent" / "x")
        assert outcome.code == 2
        assert "absent/x cannot be written" in outcome.err


def test_the_doctors_words_come_along(equipoise, result, tmp_path):
    verdict = {"ok": True, "num_samples": 3, "num_rows": 9, "findings": []}
    (tmp_path / "doctor.json").write_text(json.dumps(verdict))
    outcome = equipoise("report", result, "--doctor", tmp_path / "doctor.json")
    assert "No check found anything in 3 samples, 9 rows" in outcome.out


def test_analyze_writes_its_page(equipoise, tmp_path):
    outcome = equipoise("analyze", "--demo", "--no-plan", "--report", tmp_path / "page.html")
    assert outcome.code == 0, outcome.err
    html = (tmp_path / "page.html").read_text()
    assert "no plan was tried: not asked for." in html
    assert "<title>a generated step - Equipoise</title>" in html


def test_train_writes_the_page_of_its_run(equipoise, tmp_path, monkeypatch):
    def pretend(_work, _config, places, *, show):
        del show
        write_run(places.out, [metrics(step) for step in range(4)])
        return {"steps": 4}

    monkeypatch.setattr("equipoise.rl.train.launch", pretend)
    outcome = equipoise("train", "-o", tmp_path / "run", "--report", tmp_path / "page.html")
    assert outcome.code == 0, outcome.err
    assert "Training run of 4 steps, olmoe" in (tmp_path / "page.html").read_text()


def test_files_are_written_before_a_word_is_printed(equipoise, result, tmp_path, monkeypatch):
    written = []

    def look(*_: object, **__: object) -> None:
        written.append(sorted(path.name for path in tmp_path.iterdir()))

    monkeypatch.setattr("equipoise.cli.report.show_page", look)
    assert equipoise("report", result, "-o", tmp_path / "page.html", "--trace", tmp_path / "t.json").code == 0
    monkeypatch.setattr("equipoise.cli.simulate.show_analysis", look)
    given = ("--demo", "--model", "olmoe", "--no-plan")
    assert equipoise("analyze", *given, "-o", tmp_path / "a.json", "--report", tmp_path / "a.html").code == 0
    first = ["page.html", "result.json", "t.json"]
    assert written == [first, ["a.html", "a.json", *first]]

"""`python -m equipoise.report` shows a demo without arguments."""

import runpy

import pytest

from tests.report.documents import simulation


def test_the_demo_writes_a_page_and_says_where(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("equipoise.sim.step.simulate_demo", simulation)
    runpy.run_module("equipoise.report", run_name="__main__")
    said = capsys.readouterr().out
    assert "would recover 20.3 %" in " ".join(said.split())
    assert f"Written: {tmp_path / 'report.html'}" in said
    assert "<title>a generated step - Equipoise</title>" in (tmp_path / "report.html").read_text()


def test_a_page_that_is_there_is_not_replaced_and_nothing_is_simulated(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("equipoise.sim.step.simulate_demo", lambda: pytest.fail("simulated"))
    (tmp_path / "report.html").write_text("precious")
    with pytest.raises(SystemExit) as stop:
        runpy.run_module("equipoise.report", run_name="__main__")
    assert stop.value.code == 2
    assert "report.html already exists" in capsys.readouterr().err
    assert (tmp_path / "report.html").read_text() == "precious"

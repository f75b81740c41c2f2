"""`python -m equipoise.report` shows a demo without arguments."""

import runpy

from tests.report.documents import simulation


def test_the_demo_writes_a_page_and_says_where(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("equipoise.sim.demo.simulate_demo", simulation)
    runpy.run_module("equipoise.report", run_name="__main__")
    said = capsys.readouterr().out
    assert "would recover 20.3 %" in " ".join(said.split())
    assert f"Written: {tmp_path / 'report.html'}" in said
    assert "<title>a generated step - Equipoise</title>" in (tmp_path / "report.html").read_text()

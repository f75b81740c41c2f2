"""`equipoise watch`: a run that goes on in a terminal, in a file and in a browser; one look for programs."""

import io
import json
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from rich.console import Console

from tests.browser import PATIENCE_MS
from tests.report.documents import metrics, write_run
from tests.rl import work


def append(path, *lines):
    with path.open("a") as file:
        file.write("".join(json.dumps(line) + "\n" for line in lines))


def test_one_look_is_printed_and_is_the_document_of_the_page(equipoise, tmp_path):
    run = write_run(tmp_path / "run", [metrics(step, coverage=0.9) for step in range(3)])
    append(run / "events.jsonl", {"kind": "note", "message": "tokenizer: characters"})
    shown = equipoise("watch", run, "--once")
    assert (shown.code, shown.err) == (0, "")
    for words in ("1.50 to 1.02", "warning: routes of 10.0 % of the rows", "tokenizer: characters", "3 of"):
        assert words in shown.out
    document = equipoise("watch", run, "--json").document
    assert document["format"] == "equipoise-watch-1" and document["steps"] == [0, 1, 2]
    append(run / "events.jsonl", {"kind": "end"})
    assert "ended: the run has ended" in equipoise("watch", run).out
    refused = equipoise("watch", tmp_path)
    assert refused.code == 2 and "is no training run, it has no config.toml" in refused.err


@pytest.mark.parametrize("is_terminal", [True, False], ids=["terminal", "file"])
def test_new_steps_and_warnings_are_shown_until_the_run_ends(equipoise, monkeypatch, tmp_path, is_terminal):
    run, text = write_run(tmp_path / "run", [metrics(0)]), io.StringIO()
    console = Console(file=text, force_terminal=is_terminal, width=120, markup=False, highlight=False)
    monkeypatch.setattr("equipoise.cli.watch.screen", lambda as_json: console)
    monkeypatch.setattr("equipoise.cli.watch.EVERY_S", 0.02)

    def go_on():
        while "page: http://127.0.0.1:" not in text.getvalue():
            time.sleep(0.02)
        append(run / "metrics.jsonl", metrics(1, skew_after=1.2, coverage=0.5))
        while "routes of 50.0 % of the rows are unknown in step 1" not in text.getvalue():
            time.sleep(0.02)
        append(run / "events.jsonl", {"kind": "end"})

    writer = threading.Thread(target=go_on, daemon=True)
    writer.start()
    shown = equipoise("watch", run)
    writer.join(60)
    assert (shown.code, shown.err) == (0, "")
    assert "1.50 to 1.20" in text.getvalue() and "ended: the run has ended" in text.getvalue()


@pytest.mark.dist(2)
def test_a_page_in_a_browser_follows_a_run_that_writes(pool, browser, tmp_path):
    from equipoise.rl.train import prepare

    config, out = work.small(steps=12), tmp_path / "run"
    out.mkdir()
    prepare(config, out)
    command = [sys.executable, "-m", "equipoise", "watch", str(out)]
    with (
        ThreadPoolExecutor(1) as thread,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as watcher,
    ):
        address = watcher.stdout.readline().split()[1]
        page, asked, complaints = browser.new_page(), set(), []
        page.set_default_timeout(PATIENCE_MS)
        page.on("request", lambda request: asked.add(request.url))
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(address)
        page.locator("#state", has_text="starting").wait_for()
        running = thread.submit(pool.run, work.train_run, 2, config, out)
        page.locator("#state", has_text="running").wait_for()
        page.locator("#charts path").first.wait_for(state="attached")
        seen = [page.evaluate("document.body.dataset.steps")]
        page.locator("#figures", has_text="Memory of the next window").wait_for()
        page.locator("#state", has_text="ended").wait_for()
        seen.append(page.evaluate("document.body.dataset.steps"))
        running.result(PATIENCE_MS / 1000)
        assert watcher.wait(60) == 0 and "ended: the run has ended" in watcher.stdout.read()
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert 0 < int(seen[0]) <= int(seen[1]) == len(lines) == 12
    assert f"{lines[-1]['skew_before']:.2f} to {lines[-1]['skew_after']:.2f}" in page.locator("#figures").inner_text()
    assert page.locator("#charts section").count() == 4 and page.locator("#charts path").count() == 6
    assert asked == {address, f"{address}run.json"} and page.locator("#lost").is_hidden()
    page.set_viewport_size({"width": 400, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    # The watcher has gone by now: what the browser says about that is no complaint of the page.
    assert [words for words in complaints if "ERR_CONNECTION_REFUSED" not in words] == []
    page.close()

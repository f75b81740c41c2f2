"""`equipoise parity`: verdict, table, JSON, and clear words where torch is missing."""

import dataclasses
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from equipoise.cli import parity
from equipoise.parity import verdict as verdicts
from equipoise.parity.verdict import Measure, Verdict

GOOD = Measure(name="loss, window 1", static=2.0, balanced=2.0, difference=0.0, limit=0.0)


def decided(case, progress=None, **changed):
    return Verdict(case=case, displaced=3, replicas=2, pulls=4, measures=(dataclasses.replace(GOOD, **changed),))


def test_two_ranks_hold_parity(equipoise):
    outcome = equipoise("parity", "--ranks", 2, "--steps", 2, "--json")
    assert outcome.code == 0, outcome.err
    document = outcome.document
    assert document["is_good"] and document["displaced"] > 0 and document["pulls"] > 0
    assert [measure["is_good"] for measure in document["measures"]] == [True] * 7
    assert document["measures"][1]["difference"] == 0.0


def test_a_finding_is_exit_code_1_and_shown(equipoise, monkeypatch):
    monkeypatch.setattr(verdicts, "check_parity", lambda case, progress: decided(case, difference=0.25, balanced=2.5))
    outcome = equipoise("parity", "--ranks", 4, "--nodes", 2, "--slots", 2)
    assert outcome.code == 1
    assert "ranks 4, nodes 2, slots 2" in outcome.out
    assert "FINDING" in outcome.out and "parity does not hold" in outcome.out


def test_the_table_says_when_parity_holds(equipoise, monkeypatch):
    monkeypatch.setattr(verdicts, "check_parity", decided)
    outcome = equipoise("parity")
    assert outcome.code == 0
    for words in ("loss, window 1", "exact", "good", "3 experts displaced, 2 replicas, 4 pulls", "parity holds"):
        assert words in outcome.out


def test_the_matrix_goes_through_all_sizes_and_shows_what_does_not_hold(equipoise, monkeypatch):
    seen = []

    def check(case, progress):
        seen.append((case.ranks, case.nodes, case.slots, case.dispatch))
        return decided(case, difference=1.0 if case.ranks == 8 and case.slots == 2 else 0.0)

    monkeypatch.setattr(verdicts, "check_parity", check)
    outcome = equipoise("parity", "--matrix", "--dispatch", "two_level", "--json")
    assert outcome.code == 1
    assert len(seen) == len(set(seen)) == 18
    assert {(1, 1, 0, "two_level"), (4, 2, 1, "two_level"), (8, 2, 2, "two_level")} <= set(seen)
    assert [case["is_good"] for case in outcome.document["cases"]].count(False) == 2
    seen.clear()
    shown = equipoise("parity", "--matrix", "--ranks", 4).out
    assert {ranks for ranks, *_ in seen} == {1, 2, 4}
    assert "ranks 4, nodes 2, slots 2" in shown and "ranks 8" not in shown
    shown = equipoise("parity", "--matrix").out
    assert "ranks 8, nodes 2, slots 2, steps 9, direct: FINDING: loss, window 1" in shown
    assert "ranks 1, nodes 1, slots 0, steps 9, direct: good" in shown


def test_a_run_that_diverged_is_null_in_json(equipoise, monkeypatch):
    monkeypatch.setattr(verdicts, "check_parity", lambda case, progress: decided(case, difference=float("nan")))
    outcome = equipoise("parity", "--json")
    assert outcome.code == 1
    assert outcome.document["measures"][0]["difference"] is None


def test_without_torch_the_words_name_the_extra(equipoise, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    outcome = equipoise("parity")
    assert outcome.code == 2
    assert "needs torch" in outcome.err and "pip install 'equipoise[torch]'" in outcome.err


REFUSED = {
    "nodes": (("--ranks", 4, "--nodes", 3), "--ranks 4 do not divide into --nodes 3"),
    "no rank": (("--ranks", 0), "Invalid value for '--ranks'"),
    "nodes of a matrix": (("--matrix", "--nodes", 2), "--matrix goes through nodes by itself; leave out --nodes 2"),
    "slots of a matrix": (("--matrix", "--slots", 0), "--matrix goes through slots by itself; leave out --slots 0"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_sizes_that_make_no_sense_are_refused_by_name(equipoise, case):
    arguments, words = REFUSED[case]
    outcome = equipoise("parity", *arguments)
    assert outcome.code == 2
    assert words in outcome.err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_refused_by_name(equipoise):
    outcome = equipoise("parity", "--device", "cuda")
    assert outcome.code == 2
    assert "--device cuda: torch finds no CUDA device here" in outcome.err


def test_windows_are_told_while_they_train(equipoise, monkeypatch):
    told, words = [], []

    @contextmanager
    def noted(description):
        words.append(description)
        yield lambda done, total: told.append((done, total))

    monkeypatch.setattr(parity, "progress", noted)
    assert equipoise("parity", "--ranks", 1, "--slots", 0, "--steps", 2).code == 0
    assert words == ["windows, ranks 1, nodes 1, slots 0 (1 of 1)"]
    assert told == [(done, 4) for done in (1, 2, 3, 4)]


@pytest.mark.parametrize("seconds", [0.5, 4.0], ids=["ranks import", "ranks train"])
def test_an_interrupt_is_one_line_though_every_rank_and_worker_gets_it(seconds):
    command = [sys.executable, "-m", "equipoise", "parity", "--ranks", "2", "--steps", "1000"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    run = subprocess.Popen(command, text=True, start_new_session=True, preexec_fn=_hear, **pipes)
    children = Path(f"/proc/{run.pid}/task/{run.pid}/children")
    # Two ranks, and the process in which multiprocessing tracks what they share.
    while len(children.read_text().split()) < 3:
        assert run.poll() is None, "it ended before it could be interrupted"
        time.sleep(0.05)
    time.sleep(seconds)
    os.killpg(run.pid, signal.SIGINT)
    out, err = run.communicate(timeout=60)
    assert (run.returncode, out, err) == (130, "", "equipoise: interrupted\n")


def _hear() -> None:
    """Let SIGINT interrupt what is started, as in a terminal; processes that share tests ignore it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)

"""`equipoise parity`: verdict, table, JSON, and clear words where torch is missing."""

import dataclasses
import sys

import pytest

from equipoise.parity import verdict as verdicts
from equipoise.parity.verdict import Measure, Verdict

GOOD = Measure(name="loss, window 1", static=2.0, balanced=2.0, difference=0.0, limit=0.0)


def decided(case, **changed):
    return Verdict(case=case, displaced=3, replicas=2, pulls=4, measures=(dataclasses.replace(GOOD, **changed),))


def test_two_ranks_hold_parity(equipoise):
    outcome = equipoise("parity", "--ranks", 2, "--steps", 2, "--json")
    assert outcome.code == 0, outcome.err
    document = outcome.document
    assert document["is_good"] and document["displaced"] > 0 and document["pulls"] > 0
    assert [measure["is_good"] for measure in document["measures"]] == [True] * 7
    assert document["measures"][1]["difference"] == 0.0


def test_a_finding_is_exit_code_1_and_shown(equipoise, monkeypatch):
    monkeypatch.setattr(verdicts, "check_parity", lambda case: decided(case, difference=0.25, balanced=2.5))
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

    def check(case):
        seen.append((case.ranks, case.nodes, case.slots, case.dispatch))
        return decided(case, difference=1.0 if case.ranks == 8 and case.slots == 2 else 0.0)

    monkeypatch.setattr(verdicts, "check_parity", check)
    outcome = equipoise("parity", "--matrix", "--dispatch", "two_level", "--json")
    assert outcome.code == 1
    assert len(seen) == len(set(seen)) == 18
    assert {(1, 1, 0, "two_level"), (4, 2, 1, "two_level"), (8, 2, 2, "two_level")} <= set(seen)
    assert [case["is_good"] for case in outcome.document["cases"]].count(False) == 2
    shown = equipoise("parity", "--matrix").out
    assert "ranks 8, nodes 2, slots 2, steps 9, direct: FINDING: loss, window 1" in shown
    assert "ranks 1, nodes 1, slots 0, steps 9, direct: good" in shown


def test_a_run_that_diverged_is_null_in_json(equipoise, monkeypatch):
    monkeypatch.setattr(verdicts, "check_parity", lambda case: decided(case, difference=float("nan")))
    outcome = equipoise("parity", "--json")
    assert outcome.code == 1
    assert outcome.document["measures"][0]["difference"] is None


def test_without_torch_the_words_name_the_extra(equipoise, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    outcome = equipoise("parity")
    assert outcome.code == 2
    assert "needs torch" in outcome.err and "pip install 'equipoise[torch]'" in outcome.err


@pytest.mark.parametrize("arguments", [("--ranks", 4, "--nodes", 3), ("--ranks", 0)], ids=["nodes", "no rank"])
def test_sizes_that_make_no_sense_are_exit_code_2(equipoise, arguments):
    assert equipoise("parity", *arguments).code == 2

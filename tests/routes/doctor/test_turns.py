"""What spans the turns of a sample: contradictions and weight versions."""

from dataclasses import replace

import pytest

from equipoise.routes.doctor.diagnosis import diagnose
from tests.routes.doctor.recordings import MODEL, edit, fired, good


class TestTurns:
    def split(self, *, overlap=0):
        """One sample in two turns, the second beginning `overlap` tokens before the first one's end."""
        whole = good(samples=1)[0]
        early = replace(whole, rows=whole.rows[:40], num_tokens=41, tokens=whole.tokens[:41])
        return [early, replace(whole, rows=whole.rows[40 - overlap :], start=40 - overlap)]

    @pytest.mark.parametrize("overlap", [0, 1, 40])
    def test_turns_that_agree_are_good(self, overlap):
        diagnosis = diagnose(self.split(overlap=overlap), model=MODEL)
        assert diagnosis.ok
        assert diagnosis["turns"].total == 1

    @pytest.mark.parametrize("row", [0, 3, 9], ids=["first", "inside", "last"])
    def test_other_routes_where_turns_overlap(self, row):
        def change(rows):
            rows[row, 2] = [60, 61, 62, 63]

        diagnosis = diagnose(edit(self.split(overlap=10), 1, change), model=MODEL)
        assert diagnosis.fired == ("turns",)
        assert diagnosis["turns"].first_place == f"sample 's0': two turns give token {30 + row} different routes"

    @pytest.mark.parametrize("token", [0, 12, 40], ids=["first", "inside", "last"])
    def test_other_tokens_where_turns_overlap(self, token):
        turns = self.split()
        ids = turns[1].tokens.copy()
        ids[token] += 1
        turns[1] = replace(turns[1], tokens=ids)
        diagnosis = diagnose(turns, model=MODEL)
        assert diagnosis.fired == ("turns",)
        assert diagnosis["turns"].first_place == f"sample 's0': two turns disagree on the id of token {token}"

    def test_a_turn_that_stands_apart_is_not_joined(self):
        early, late = self.split()
        stranger = replace(good(seed=9, samples=1)[0], name="other")
        # Read as a sample of its own, the late turn also lacks its first tokens.
        assert fired([early, stranger, late]) == ("missing-rows", "turns")

    def test_a_gap_between_turns_costs_no_memory(self):
        early, late = (replace(turn, tokens=None, num_tokens=None) for turn in self.split())
        far = replace(late, start=2**40)
        assert fired([early, far], second=[early, far]) == ("missing-rows",)

    def test_samples_of_one_turn_are_skipped(self):
        finding = diagnose(good(), model=MODEL)["turns"]
        assert (finding.verdict, finding.detail) == ("skipped", "needs samples of several turns")


class TestVersions:
    def test_two_versions_within_a_sample(self):
        recordings = good()
        first = recordings[0]
        turns = [
            replace(first, rows=first.rows[:40], num_tokens=41, tokens=first.tokens[:41]),
            replace(first, rows=first.rows[40:], start=40, weight_version="v8"),
        ]
        diagnosis = diagnose([*turns, *recordings[1:]], model=MODEL)
        assert diagnosis.fired == ("versions-in-sample",)
        assert diagnosis["versions-in-sample"].first_place == "sample 's0': versions v7, v8"

    def test_two_versions_across_samples(self):
        recordings = good()
        recordings[3] = replace(recordings[3], weight_version="v8")
        diagnosis = diagnose(recordings, model=MODEL)
        assert diagnosis.fired == ("versions-across",)
        assert (diagnosis["versions-across"].count, diagnosis["versions-across"].total) == (1, 4)

    def test_unnamed_versions_are_skipped(self):
        diagnosis = diagnose([replace(r, weight_version="") for r in good()], model=MODEL)
        assert diagnosis.ok
        assert diagnosis["versions-across"].verdict == diagnosis["versions-in-sample"].verdict == "skipped"

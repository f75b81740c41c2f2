"""Rows of another sample are found; samples of one prompt are not taken for stale."""

from dataclasses import replace

import pytest

from equipoise.routes.doctor.diagnosis import diagnose
from equipoise.routes.doctor.stale import BLOCK
from tests.routes.doctor.recordings import MODEL, edit, fired, good


class TestStaleRows:
    def steal(self, recordings, *, start, stop):
        """Sample 1 holds rows of sample 0 in `[start, stop)`."""

        def change(rows):
            rows[start:stop] = recordings[0].rows[start:stop]

        return edit(recordings, 1, change)

    @pytest.mark.parametrize("tokens", ["known", "unknown"])
    def test_rows_of_another_sample(self, tokens):
        recordings = self.steal(good(), start=BLOCK, stop=2 * BLOCK)
        if tokens == "unknown":
            recordings = [replace(r, tokens=None) for r in recordings]
        diagnosis = diagnose(recordings, model=MODEL)
        assert diagnosis.fired == ("stale-rows",)
        assert diagnosis["stale-rows"].count == BLOCK
        assert "'s1', tokens 8 to 15: the rows of sample 's0'" in diagnosis["stale-rows"].first_place

    def test_common_beginning_with_other_tokens(self):
        diagnosis = diagnose(self.steal(good(), start=0, stop=70), model=MODEL)
        assert diagnosis.fired == ("stale-rows",)
        assert diagnosis["stale-rows"].count == 70 // BLOCK * BLOCK == 64

    @pytest.mark.parametrize("start", range(8, 16))
    def test_fifteen_rows_are_found_wherever_they_stand(self, start):
        assert fired(self.steal(good(), start=start, stop=start + 15)) == ("stale-rows",)

    @pytest.mark.parametrize("tokens", ["known", "unknown"])
    def test_samples_of_one_prompt_are_not_stale(self, tokens):
        recordings = self.steal(good(), start=0, stop=70)
        ids = recordings[1].tokens.copy()
        ids[:70] = recordings[0].tokens[:70]
        recordings[1] = replace(recordings[1], tokens=ids)
        if tokens == "unknown":
            recordings = [replace(r, tokens=None) for r in recordings]
        assert not fired(recordings)

    def test_a_few_tokens_that_chose_the_same_experts_by_chance_are_not_stale(self):
        recordings = self.steal(good(), start=0, stop=BLOCK)
        ids = recordings[1].tokens.copy()
        ids[: BLOCK - 3] = recordings[0].tokens[: BLOCK - 3]
        assert not fired([recordings[0], replace(recordings[1], tokens=ids)])
        ids[BLOCK - 4] += 1
        assert fired([recordings[0], replace(recordings[1], tokens=ids)]) == ("stale-rows",)

    def test_the_same_sample_twice_with_the_same_tokens_is_good(self):
        recordings = good()
        assert not fired([*recordings, replace(recordings[0], name="again")])

    def test_a_whole_sample_twice_is_stale_where_tokens_are_unknown(self):
        recordings = [replace(r, tokens=None) for r in good()]
        diagnosis = diagnose([*recordings, replace(recordings[1], name="again")], model=MODEL)
        assert diagnosis.fired == ("stale-rows",)
        assert diagnosis["stale-rows"].first_place == "sample 'again': every row is that of sample 's1'"

    def test_short_answers_to_one_prompt_are_told_apart_by_their_last_rows(self):
        recordings = [replace(r, tokens=None) for r in good(samples=1, tokens=68)]
        other = edit(recordings, 0, lambda rows: rows[64:, 1:].__ixor__(1))
        assert not fired([*recordings, replace(other[0], name="other")])

    def test_turns_that_repeat_their_history_are_not_stale(self):
        whole = replace(good(samples=1)[0], tokens=None)
        turns = [replace(whole, rows=whole.rows[:n], num_tokens=n + 1) for n in (40, 70, 99)]
        stranger = replace(good(seed=5, samples=1)[0], name="other", tokens=None)
        assert not fired([stranger, *turns])

    def test_fillers_are_not_stale(self):
        assert fired([edit(good(), i, lambda rows: rows.fill(0))[i] for i in range(4)]) == ("equal-rows",)

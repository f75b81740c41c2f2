"""Two recordings of the same tokens: pairing, agreement by layer, shifts by one row."""

from dataclasses import replace

import numpy as np
import pytest

from equipoise.routes.doctor.diagnosis import diagnose
from tests.routes.doctor.recordings import MODEL, edit, fired, good


class TestSecondRecording:
    def test_agrees_with_itself_whatever_the_order_of_ids(self):
        first = good()
        second = [replace(r, rows=r.rows[:, :, ::-1]) for r in first]
        diagnosis = diagnose(first, model=MODEL, second=second)
        assert diagnosis.ok
        assert diagnosis["agreement"].rate_L == (1.0, 1.0, 1.0)

    def test_agrees_across_layer_axes(self):
        assert diagnose(good(), model=MODEL, second=good(layers="moe"))["agreement"].rate_L == (1.0, 1.0, 1.0)

    def test_rate_is_counted_layer_by_layer(self):
        second = [edit(good(), i, lambda rows: rows[: len(rows) // 2, 2].__iadd__(1))[i] for i in range(4)]
        second = [replace(r, rows=r.rows % 64) for r in second]
        diagnosis = diagnose(good(), model=MODEL, second=second)
        rows = [len(r.rows) for r in second]
        expected = 1 - sum(n // 2 for n in rows) / sum(rows)
        assert diagnosis.fired == ("agreement",)
        assert diagnosis["agreement"].rate_L == pytest.approx((1.0, expected, 1.0))
        assert diagnosis["agreement"].first_place == "sample 's0', token 0, layer 2"
        assert diagnose(good(), model=MODEL, second=second, min_agreement=0.4).ok

    @pytest.mark.parametrize(("shift", "word"), [(1, "later"), (-1, "earlier")])
    def test_shift_by_one_row_is_named(self, shift, word):
        second = [replace(r, rows=np.roll(r.rows, shift, axis=0)) for r in good()]
        diagnosis = diagnose(good(), model=MODEL, second=second)
        # Misaligned rows cannot agree: the low agreement is the consequence.
        assert diagnosis.fired == ("agreement", "token-order")
        assert diagnosis["token-order"].first_place == f"the second recording is one row {word}"
        assert diagnosis["token-order"].share == 1.0

    def test_rows_only_one_side_has_are_not_compared(self):
        second = edit(good(), 0, lambda rows: rows[:50, 1:].fill(-1))
        diagnosis = diagnose(good(), model=MODEL, second=second)
        assert diagnosis.ok
        assert diagnosis["agreement"].total == 3 * (438 - 50)

    def test_other_tokens_are_no_partner(self):
        second = good()
        ids = second[1].tokens.copy()
        ids[12] += 1
        second[1] = replace(second[1], tokens=ids)
        diagnosis = diagnose(good(), model=MODEL, second=second)
        assert diagnosis.fired == ("pairing",)
        assert diagnosis["pairing"].first_place == "sample 's1' and sample 's1' differ at token 12"

    @pytest.mark.parametrize(("here", "there"), [(4, 3), (3, 4)])
    def test_a_sample_without_partner(self, here, there):
        assert fired(good(samples=here), second=good(samples=there)) == ("pairing",)

    @pytest.mark.parametrize(
        ("cut", "words"),
        [(np.s_[:, :, :3], "have 4 and 3 ids per route"), (np.s_[:, 3:], "have no layer in common")],
        ids=["columns", "layers"],
    )
    def test_recordings_that_cannot_be_compared_are_no_partners(self, cut, words):
        second = [replace(r, rows=r.rows[cut]) for r in good()]
        if second[0].rows.shape[1] == 1:
            second = [replace(r, layer_numbers=(3,)) for r in second]
            first = [replace(r, rows=r.rows[:, 1:3], layer_numbers=(1, 2)) for r in good()]
            diagnosis = diagnose(first, model=MODEL, second=second)
        else:
            diagnosis = diagnose(good(), model=MODEL, second=second)
        assert diagnosis["pairing"].count == 4
        assert words in diagnosis["pairing"].first_place
        assert diagnosis["agreement"].verdict == "skipped"

    def test_turns_are_put_on_one_axis(self):
        whole = good(samples=1)[0]
        turns = [replace(whole, rows=whole.rows[:40], num_tokens=41, tokens=whole.tokens[:41])]
        turns.append(replace(whole, rows=whole.rows[40:], start=40))
        diagnosis = diagnose([whole], model=MODEL, second=turns)
        assert diagnosis.ok
        assert diagnosis["agreement"].total == 99 * 3

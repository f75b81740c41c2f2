"""Rows, layers and padding: good recordings, broken in one way, one way at a time."""

from dataclasses import replace

import numpy as np
import pytest

from equipoise.routes.doctor.diagnosis import diagnose
from equipoise.routes.doctor.reading import read
from tests.routes.doctor.recordings import MODEL, edit, fired, good


class TestRowsAndTokens:
    @pytest.mark.parametrize("rows", [98, 97, 50, 0])
    def test_rows_short_of_the_tokens(self, rows):
        recordings = good()
        recordings[0] = replace(recordings[0], rows=recordings[0].rows[:rows])
        diagnosis = diagnose(recordings, model=MODEL)
        assert diagnosis.fired == ("rows-tokens",)
        assert (diagnosis["rows-tokens"].count, diagnosis["rows-tokens"].total) == (1, 4)
        assert f"'s0': {rows} rows from token 0 on, 100 tokens" in diagnosis["rows-tokens"].first_place

    def test_more_rows_than_tokens(self):
        recordings = good()
        recordings[2] = replace(recordings[2], num_tokens=112, tokens=recordings[2].tokens[:112])
        assert fired(recordings) == ("rows-tokens",)

    def test_token_ids_that_are_not_as_many_as_the_tokens(self):
        recordings = good()
        recordings[1] = replace(recordings[1], tokens=recordings[1].tokens[:-1])
        diagnosis = diagnose(recordings, model=MODEL)
        assert diagnosis.fired == ("rows-tokens",)
        assert "106 token ids" in diagnosis["rows-tokens"].first_place

    def test_as_many_rows_as_tokens_is_good(self):
        recordings = [replace(r, num_tokens=r.num_tokens - 1, tokens=r.tokens[:-1]) for r in good()]
        diagnosis = diagnose(recordings, model=MODEL)
        assert diagnosis.ok
        assert diagnosis["rows-tokens"].detail == "T rows in 4 recordings, T-1 in 0"

    def test_is_skipped_where_tokens_are_unknown(self):
        recordings = [replace(r, num_tokens=None, tokens=None) for r in good()]
        assert diagnose(recordings, model=MODEL)["rows-tokens"].verdict == "skipped"


class TestLayers:
    def test_neither_all_nor_moe_layers(self):
        recordings = [replace(r, rows=r.rows[:, 2:]) for r in good()]
        diagnosis = diagnose(recordings, model=MODEL)
        assert diagnosis.fired == ("layer-map",)
        assert "2 layers on the wire; 'small' has 4 decoder layers, 3 of them MoE" in diagnosis["layer-map"].first_place

    def test_mtp_layers_on_the_wire_are_named_as_such(self):
        recordings = [replace(r, rows=np.concatenate([r.rows, r.rows[:, -1:]], axis=1)) for r in good()]
        diagnosis = diagnose(recordings, model=MODEL)
        assert "layer-map" in diagnosis.fired
        assert "are the 1 MTP layers in it?" in diagnosis["layer-map"].first_place

    @pytest.mark.parametrize(
        ("numbers", "words"),
        [((1, 2), "MoE layer 3 is absent"), ((1, 2, 4), "names layer 4"), ((1, 2, 2), "names a layer twice")],
        ids=["absent", "strange", "twice"],
    )
    def test_named_layers_that_do_not_fit(self, numbers, words):
        recordings = [replace(r, rows=r.rows[:, : len(numbers)], layer_numbers=numbers) for r in good(layers="moe")]
        diagnosis = diagnose(recordings, model=MODEL)
        assert diagnosis.fired == ("layer-map",)
        assert words in diagnosis["layer-map"].first_place

    def test_named_layers_that_fit_are_good(self):
        assert not fired([replace(r, layer_numbers=(1, 2, 3)) for r in good(layers="moe")])

    def test_recordings_with_different_layer_axes(self):
        recordings = [*good(samples=2), *good(samples=3, layers="moe")[2:]]
        diagnosis = diagnose(recordings, model=MODEL)
        assert diagnosis.fired == ("layer-map",)
        assert "'s2': 3 layers, unlike the first recording's axis" in diagnosis["layer-map"].first_place

    def test_recordings_that_name_their_layers_otherwise(self):
        recordings = good(layers="moe")
        recordings[1] = replace(recordings[1], layer_numbers=(1, 2, 3))
        diagnosis = diagnose(recordings, model=MODEL)
        assert diagnosis.fired == ("layer-map",)
        assert "'s1': 3 layers, unlike the first recording's axis" in diagnosis["layer-map"].first_place

    @pytest.mark.parametrize("columns", [[0, 1, 2], [0, 1, 2, 3, 3]], ids=len)
    def test_wrong_number_of_columns(self, columns):
        diagnosis = diagnose([replace(r, rows=r.rows[:, :, columns]) for r in good()], model=MODEL)
        assert "top-k" in diagnosis.fired
        assert f"{len(columns)} ids per route, top-4 model" in diagnosis["top-k"].first_place

    @pytest.mark.parametrize(("tokens", "check"), [(2, "equal-rows"), (3, "zero-layers")])
    def test_two_rows_of_zeros_make_a_dead_layer_and_one_is_a_filler(self, tokens, check):
        recordings = good(samples=1, tokens=tokens)
        # One row alone is the last token's too, whose filler nobody reads.
        recordings = [replace(recordings[0], num_tokens=None, tokens=None)]
        assert fired(edit(recordings, 0, lambda rows: rows[:, 2].fill(0))) == (check,)

    def test_moe_layer_of_zeros_is_a_capture_that_was_not_merged(self):
        recordings = edit(good(), 2, lambda rows: rows[:, 2].fill(0))
        diagnosis = diagnose(recordings, model=MODEL)
        assert diagnosis.fired == ("zero-layers",)
        assert (diagnosis["zero-layers"].count, diagnosis["zero-layers"].total) == (1, 12)
        assert diagnosis["zero-layers"].first_place == "sample 's2', layers [2]"

    def test_dense_layer_that_holds_ids(self):
        def shift(rows):
            rows[5, 0] = [1, 2, 3, 4]

        diagnosis = diagnose(edit(good(), 1, shift), model=MODEL)
        assert diagnosis.fired == ("dense-layers",)
        assert diagnosis["dense-layers"].first_place == "sample 's1', layers [0]"

    def test_a_layer_axis_moved_by_one_shows_in_both_layer_checks(self):
        recordings = [replace(r, rows=np.roll(r.rows, -1, axis=1)) for r in good()]
        assert fired(recordings) == ("zero-layers", "dense-layers")

    def test_top_1_model_may_choose_expert_0_in_a_short_sample(self):
        model = MODEL.replace(top_k=1)
        recordings = edit(good(model, tokens=20, samples=1), 0, lambda rows: rows[:, 2].fill(0))
        assert not fired(recordings, model)


class TestRowsWithoutRoutes:
    def test_missing_rows(self):
        def lose(rows):
            rows[10:13, 1:] = -1

        diagnosis = diagnose(edit(good(), 1, lose), model=MODEL)
        assert diagnosis.fired == ("missing-rows",)
        assert diagnosis["missing-rows"].count == 9
        assert diagnosis["missing-rows"].first_place == "sample 's1', token 10, layer 1: [-1, -1, -1, -1]"

    @pytest.mark.parametrize("filler", [-1, 0], ids=["minus-one", "zero"])
    def test_filler_in_the_row_of_the_last_token_is_good(self, filler):
        recordings = [
            replace(r, rows=np.concatenate([r.rows, np.full_like(r.rows[:1], filler)])) for r in good(layers="moe")
        ]
        assert not fired(recordings)

    def test_tokens_before_the_start_offset_are_missing(self):
        recordings = good()
        recordings[0] = replace(recordings[0], rows=recordings[0].rows[20:], start=20)
        diagnosis = diagnose(recordings, model=MODEL)
        assert diagnosis.fired == ("missing-rows",)
        assert diagnosis["missing-rows"].count == 20 * 3
        assert "tokens 0 to 19 have no row" in diagnosis["missing-rows"].first_place

    def test_turns_that_follow_each_other_miss_nothing(self):
        whole = good(samples=1)[0]
        turns = [
            replace(whole, rows=whole.rows[:40], num_tokens=41, tokens=whole.tokens[:41]),
            replace(whole, rows=whole.rows[40:], start=40),
        ]
        assert not fired(turns)
        # A turn within an earlier one takes nothing away.
        within = replace(turns[0], rows=turns[0].rows[:20], num_tokens=21, tokens=turns[0].tokens[:21])
        assert not fired([turns[0], within, turns[1]])
        lost = [turns[0], replace(turns[1], rows=turns[1].rows[5:], start=45)]
        assert fired(lost) == ("missing-rows",)

    @pytest.mark.parametrize("value", [0, 9])
    def test_equal_rows_are_fillers(self, value):
        def fill(rows):
            rows[30:34, 2] = value

        diagnosis = diagnose(edit(good(), 0, fill), model=MODEL)
        assert diagnosis.fired == ("equal-rows",)
        assert diagnosis["equal-rows"].count == 4
        assert diagnosis["equal-rows"].first_place == f"sample 's0', token 30, layer 2: {[value] * 4}"

    def test_a_sample_of_zero_rows_is_filler_not_a_dead_layer(self):
        assert fired(edit(good(), 3, lambda rows: rows.fill(0))) == ("equal-rows",)

    def test_no_route_is_blamed_twice(self):
        def ruin(rows):
            rows[:, 3] = 0
            rows[4, 1:] = -1
            rows[9:12, 1] = 5

        reading = read(edit(good(), 0, ruin)[0], sample=0, model=MODEL)
        causes = reading.missing_TL.astype(int) + reading.equal_TL + (reading.dead_L & ~reading.missing_TL)
        assert causes.max() == 1
        assert (causes == 0).sum() == reading.routed_TL.sum()


class TestPadding:
    def pad(self, recordings, ids_TK):
        """Append padding rows with the given ids in every MoE layer."""
        padded = []
        for r in recordings:
            rows = np.zeros((len(ids_TK), *r.rows.shape[1:]), dtype=r.rows.dtype)
            rows[:, 1:] = ids_TK[:, None]
            mask = np.arange(len(r.rows) + len(ids_TK)) >= len(r.rows)
            padded.append(replace(r, rows=np.concatenate([r.rows, rows]), padding=mask))
        return padded

    @pytest.mark.parametrize("ids", [[0, 0, 0, 0], [0, 1, 2, 3]], ids=["zeros", "first-k"])
    def test_padding_on_one_rank_is_a_finding(self, ids):
        diagnosis = diagnose(self.pad(good(), np.tile(ids, (28, 1))), model=MODEL)
        assert diagnosis.fired == ("padding",)
        assert diagnosis["padding"].count == 4 * 28
        assert "takes 100% of padding" in diagnosis["padding"].detail

    def test_padding_that_runs_through_all_experts_is_good(self):
        ids_TK = (np.arange(28 * 4) % 64).reshape(28, 4)
        diagnosis = diagnose(self.pad(good(), ids_TK), model=MODEL)
        assert diagnosis.ok
        assert diagnosis["padding"].count == 4 * 28
        assert diagnosis["padding"].share == pytest.approx(112 / (112 + 438))

    def test_natively_routed_padding_concentrates_layer_by_layer(self):
        recordings = self.pad(good(), np.zeros((28, 4), dtype=int))
        for i, r in enumerate(recordings):
            rows = r.rows.copy()
            for layer in (1, 2, 3):
                rows[-28:, layer] = np.arange(4) + 10 * layer
            recordings[i] = replace(r, rows=rows)
        assert fired(recordings) == ("padding",)

    @pytest.mark.parametrize("value", [64, 900, -2])
    def test_stray_ids_in_padding_are_out_of_range(self, value):
        ids_TK = (np.arange(28 * 4) % 64).reshape(28, 4)
        ids_TK[3, 1] = value
        diagnosis = diagnose(self.pad(good(), ids_TK), model=MODEL)
        assert diagnosis.fired == ("id-range",)
        assert diagnosis["id-range"].first_place == "sample 's0', padding row 3"

"""Each check fires on exactly the thing it is for: good recordings, broken in one way, one way at a time."""

import weakref
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.core import ModelShape, RoutesError
from equipoise.routes.doctor.diagnosis import CHECKS, diagnose
from equipoise.routes.doctor.finding import Tally, judge
from equipoise.routes.doctor.reading import read
from equipoise.routes.doctor.stale import BLOCK
from equipoise.routes.interpret import interpret
from equipoise.routes.recording import Recording

MODEL = ModelShape(
    name="small", experts=64, top_k=4, layer_numbers=(1, 2, 3), hidden_layers=4, hidden=8, expert_width=8, mtp_layers=1
)
DATA = Path(__file__).parents[2].parent / "shared" / "data"


def draw_ids(rng, shape, experts, top_k):
    """Distinct ids, uniformly drawn: [*shape, top_k]."""
    return rng.random((*shape, experts)).argpartition(top_k, axis=-1)[..., :top_k]


def good(model=MODEL, *, samples=4, tokens=100, seed=0, dtype=np.int16, layers="all"):
    """Good recordings: T-1 rows, dense layers zero, token ids, one version."""
    rng = np.random.default_rng(seed)
    recordings = []
    for i in range(samples):
        length = tokens + 7 * i
        rows = draw_ids(rng, (length - 1, model.layers), model.experts, model.top_k)
        if layers == "all":
            rows, moe = np.zeros((length - 1, model.hidden_layers, model.top_k), dtype=np.int64), rows
            rows[:, list(model.layer_numbers)] = moe
        recordings.append(
            Recording(
                name=f"s{i}",
                rows=rows.astype(dtype),
                num_tokens=length,
                tokens=rng.integers(0, 1000, length),
                weight_version="v7",
            )
        )
    return recordings


def edit(recordings, index, change):
    """A copy of the recordings in which `change` has edited the rows of one of them in place."""
    rows = recordings[index].rows.copy()
    change(rows)
    return [replace(r, rows=rows) if i == index else r for i, r in enumerate(recordings)]


def fired(recordings, model=MODEL, **kwargs):
    return diagnose(recordings, model=model, **kwargs).fired


@pytest.mark.parametrize("layers", ["all", "moe"])
@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int16, np.uint16, np.int32, np.int64])
def test_good_data_has_no_finding(dtype, layers):
    diagnosis = diagnose(good(dtype=dtype, layers=layers), model=MODEL)
    assert diagnosis.ok
    assert diagnosis.num_samples == 4
    assert diagnosis.num_rows == 99 + 106 + 113 + 120


def test_every_check_gives_a_finding_that_is_named_once():
    names = [f.check for f in diagnose(good(), model=MODEL).findings]
    assert len(names) == len(set(names)) == 20
    assert len(CHECKS) == 13


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

    def test_wrong_number_of_columns(self):
        diagnosis = diagnose([replace(r, rows=r.rows[:, :, :3]) for r in good()], model=MODEL)
        assert diagnosis.fired == ("top-k",)
        assert "3 ids per route, top-4 model" in diagnosis["top-k"].first_place

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


class TestIds:
    def test_duplicates(self):
        def double(rows):
            rows[8, 1] = [3, 5, 3, 7]

        diagnosis = diagnose(edit(good(), 1, double), model=MODEL)
        assert diagnosis.fired == ("distinct-ids",)
        assert diagnosis["distinct-ids"].first_place == "sample 's1', token 8, layer 1: [3, 5, 3, 7]"

    @pytest.mark.parametrize("value", [64, 127, 128, 30_000, -2, -300])
    def test_stray_id_is_out_of_range(self, value):
        def stray(rows):
            rows[8, 1, 2] = value

        diagnosis = diagnose(edit(good(), 1, stray), model=MODEL)
        assert diagnosis.fired == ("id-range",)
        assert diagnosis["id-range"].count == 1
        assert "token 8, layer 1" in diagnosis["id-range"].first_place

    def test_a_partly_missing_route_is_out_of_range(self):
        def stray(rows):
            rows[8, 1, 2] = -1

        assert fired(edit(good(), 1, stray)) == ("id-range",)

    def test_int8_that_wrapped(self):
        model = MODEL.replace(experts=256, top_k=4)
        recordings = [replace(r, rows=r.rows.astype(np.int8)) for r in good(model)]
        assert "dtype-overflow" in fired(recordings, model)

    def test_int8_wrapped_and_widened_again(self):
        model = MODEL.replace(experts=200, top_k=4)
        recordings = [replace(r, rows=r.rows.astype(np.int8).astype(np.int32)) for r in good(model)]
        diagnosis = diagnose(recordings, model=model)
        assert diagnosis.fired == ("dtype-overflow",)
        assert diagnosis["dtype-overflow"].share > 0.5

    def test_uint8_for_more_than_256_experts(self):
        model = MODEL.replace(experts=300, top_k=4)
        recordings = [replace(r, rows=r.rows % 256) for r in good(model)]
        recordings = [replace(r, rows=without_duplicates(r.rows, 256).astype(np.uint8)) for r in recordings]
        assert fired(recordings, model) == ("dtype-overflow",)

    def test_ids_folded_into_a_byte_and_widened_again(self):
        model = MODEL.replace(experts=300, top_k=4)
        recordings = good(model, samples=12, tokens=200)
        recordings = [replace(r, rows=without_duplicates(r.rows % 256, 256)) for r in recordings]
        diagnosis = diagnose(recordings, model=model)
        assert diagnosis.fired == ("dtype-overflow",)
        assert "no id above 255" in diagnosis["dtype-overflow"].first_place

    @pytest.mark.parametrize("redundant", [2, 16, 32])
    def test_physical_ids(self, redundant):
        engine = MODEL.replace(experts=64 + redundant)
        diagnosis = diagnose(good(engine), model=MODEL)
        assert diagnosis.fired == ("physical-ids",)
        assert f"64 experts and {redundant} more" in diagnosis["physical-ids"].detail

    def test_strays_in_one_layer_are_not_physical_ids(self):
        def stray(rows):
            rows[:, 1, 2] = 70

        assert fired(edit(good(samples=1), 0, stray)) == ("id-range",)


def without_duplicates(rows, modulus):
    """Move later duplicates within a route on to the next free id, dense layers aside."""
    rows = rows.copy()
    for row in rows[:, 1:]:
        for route in row:
            seen = set()
            for k, value in enumerate(route.tolist()):
                while value in seen:
                    value = (value + 1) % modulus
                seen.add(value)
                route[k] = value
    return rows


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
        assert "'s1', tokens 32 to 63: the rows of sample 's0'" in diagnosis["stale-rows"].first_place

    def test_common_beginning_with_other_tokens(self):
        diagnosis = diagnose(self.steal(good(), start=0, stop=70), model=MODEL)
        assert diagnosis.fired == ("stale-rows",)
        assert diagnosis["stale-rows"].count == 2 * BLOCK

    @pytest.mark.parametrize("tokens", ["known", "unknown"])
    def test_samples_of_one_prompt_are_not_stale(self, tokens):
        recordings = self.steal(good(), start=0, stop=70)
        ids = recordings[1].tokens.copy()
        ids[:70] = recordings[0].tokens[:70]
        recordings[1] = replace(recordings[1], tokens=ids)
        if tokens == "unknown":
            recordings = [replace(r, tokens=None) for r in recordings]
        assert not fired(recordings)

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

    def test_stray_ids_in_padding_are_out_of_range(self):
        ids_TK = (np.arange(28 * 4) % 64).reshape(28, 4)
        ids_TK[3, 1] = 900
        diagnosis = diagnose(self.pad(good(), ids_TK), model=MODEL)
        assert diagnosis.fired == ("id-range",)
        assert diagnosis["id-range"].first_place == "sample 's0', padding row 3"


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

    def test_other_routes_where_turns_overlap(self):
        def change(rows):
            rows[3, 2] = [60, 61, 62, 63]

        diagnosis = diagnose(edit(self.split(overlap=10), 1, change), model=MODEL)
        assert diagnosis.fired == ("turns",)
        assert diagnosis["turns"].first_place == "sample 's0': two turns give token 33 different routes"

    def test_other_tokens_where_turns_overlap(self):
        turns = self.split()
        ids = turns[1].tokens.copy()
        ids[12] += 1
        turns[1] = replace(turns[1], tokens=ids)
        diagnosis = diagnose(turns, model=MODEL)
        assert diagnosis.fired == ("turns",)
        assert diagnosis["turns"].first_place == "sample 's0': two turns disagree on the id of token 12"

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
        assert diagnosis["token-order"].first_place == f"the second recording stands one row {word}"
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


class TestStream:
    def test_reader_error_is_a_finding_and_what_came_before_is_judged(self):
        def stream():
            yield from good(samples=2)
            raise RoutesError("line 3: base64 is damaged")

        diagnosis = diagnose(stream(), model=MODEL)
        assert diagnosis.fired == ("decode",)
        assert diagnosis["decode"].first_place == "line 3: base64 is damaged"
        assert diagnosis.num_samples == 2

    def test_empty_dump_is_a_finding(self):
        diagnosis = diagnose([], model=MODEL)
        assert diagnosis.fired == ("decode",)
        assert all(f.verdict == "skipped" for f in diagnosis.findings[1:])

    def test_nothing_is_asked_ahead_of_the_sample_being_judged(self):
        alive = []

        def stream():
            for r in good(samples=6):
                alive.append(r.name)
                yield r

        def partner():
            for i, r in enumerate(good(samples=6)):
                # A sample ends when the next one begins, so one more has been taken from the stream.
                assert len(alive) <= i + 2
                yield r

        assert not fired(stream(), second=partner())

    def test_nothing_is_kept_of_a_sample_that_has_been_judged(self):
        alive = []

        def stream():
            for i, r in enumerate(good(samples=6)):
                rows = r.rows.copy()
                alive.append(weakref.ref(rows))
                yield Recording(name=r.name, rows=rows, num_tokens=r.num_tokens, weight_version="v1")
                del rows
                # The sample just yielded, the one before it (being closed), and nothing older.
                assert [a() for a in alive[: max(0, i - 1)]] == [None] * max(0, i - 1)

        assert not fired(stream())

    @settings(max_examples=100, deadline=None)
    @given(seed=st.integers(0, 2**32 - 1), faults=st.integers(0, 2))
    def test_what_the_doctor_passes_can_be_interpreted(self, seed, faults):
        rng = np.random.default_rng(seed)
        recordings = shake(good(tokens=12, seed=seed), rng, faults)
        diagnosis = diagnose(recordings, model=MODEL)
        if diagnosis.ok:
            samples = list(interpret(recordings, model=MODEL))
            assert len(samples) == diagnosis.num_samples
            assert all(s.known_TL is None or s.known_TL.all() for s in samples)

    @settings(max_examples=80, deadline=None)
    @given(
        shape=st.tuples(st.integers(0, 40), st.integers(0, 5), st.integers(0, 5)),
        dtype=st.sampled_from(["i1", "u1", "i2", "u2", "i4", "i8", "u8"]),
        start=st.integers(0, 50) | st.sampled_from([2**31, 2**62]),
        num_tokens=st.none() | st.integers(0, 60),
        seed=st.integers(0, 2**32 - 1),
    )
    def test_no_content_raises(self, shape, dtype, start, num_tokens, seed):
        rng = np.random.default_rng(seed)
        info = np.iinfo(dtype)
        rows = rng.integers(info.min, info.max, size=shape, dtype=dtype, endpoint=True)
        padding = rng.random(shape[0]) < 0.3
        recording = Recording(name="x", rows=rows, start=start, num_tokens=num_tokens, padding=padding)
        diagnosis = diagnose([recording, recording], model=MODEL, second=[recording])
        assert all(0 <= f.share <= 1 for f in diagnosis.findings)


def shake(recordings, rng, faults):
    """Do some of the things that go wrong to randomly chosen recordings."""
    for _ in range(faults):
        i = int(rng.integers(len(recordings)))
        r = recordings[i]
        if not r.rows.size:
            continue
        row, layer, column = (int(rng.integers(n)) for n in r.rows.shape)
        rows = r.rows.copy()
        rows[row, layer, column] = rng.choice([-2, -1, 0, 3, 63, 64, 500])
        changes = [
            {"rows": rows},
            {"rows": r.rows[:row]},
            {"num_tokens": r.num_tokens + int(rng.integers(-2, 3))},
            {"start": int(rng.integers(3))},
            {"tokens": None},
            {"name": recordings[i - 1].name},
            {"rows": r.rows[:, 1:]},
            {"rows": r.rows[:, :, 1:]},
            {"rows": r.rows[:, 1:3], "layer_numbers": (1, 2)},
            {"padding": rng.random(len(r.rows)) < 0.2},
        ]
        recordings[i] = attempt(r, changes[int(rng.integers(len(changes)))])
    return recordings


def attempt(recording, change):
    """The recording with a change, or as it was where the change does not even make a recording."""
    try:
        return replace(recording, **change)
    except RoutesError:
        return recording


def test_a_finding_has_a_share_and_advice_exactly_when_it_is_one():
    tally = Tally()
    none = judge("x", tally, unit="rows", advice="do", needs="pears")
    assert (none.verdict, none.detail, none.advice) == ("skipped", "needs pears", "")
    tally.add(0, 8, lambda: "nowhere")
    good_one = judge("x", tally, unit="rows", advice="do")
    assert (good_one.verdict, good_one.share, good_one.advice, good_one.first_place) == ("good", 0.0, "", "")
    tally.add(1, 2, lambda: "first")
    tally.add(1, 2, lambda: "second")
    bad_one = judge("x", tally, unit="rows", advice="do")
    assert (bad_one.verdict, bad_one.advice, bad_one.first_place) == ("finding", "do", "first")
    assert bad_one.share == pytest.approx(2 / 12)


@pytest.mark.data
@pytest.mark.skipif(not DATA.exists(), reason="real traces are not beside the project")
@pytest.mark.parametrize(
    ("file", "ids", "offsets", "preset"),
    [
        ("dsv2lite_esft_routes.npz", "law_ids", "law_offsets", "deepseek-v2-lite"),
        ("gptoss20b_decode_routes.npz", "ids", "offsets", "gpt-oss-20b"),
    ],
)
def test_real_traces_are_good(file, ids, offsets, preset):
    with np.load(DATA / file) as data:
        rows, edges = data[ids], data[offsets][:201]
    recordings = [
        Recording(name=f"s{i}", rows=rows[a:b], num_tokens=int(b - a) + 1) for i, (a, b) in enumerate(pairwise(edges))
    ]
    diagnosis = diagnose(recordings, model=ModelShape.preset(preset))
    assert diagnosis.fired == (), [f for f in diagnosis.findings if f.verdict == "finding"]

"""Markers name their token and layer; slicing them shows whether each route arrives with its token."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.core import ModelShape, RoutesError
from equipoise.core.model import preset_names
from equipoise.loads.packing import TokenPolicy, schedule_samples, slice_context, slice_sequence
from equipoise.routes.doctor import diagnose
from equipoise.routes.doctor.markers import (
    PADDING,
    WIDTHS,
    Delivery,
    check_arrival,
    check_schedule,
    pack_rows,
    pack_tokens,
    plant_markers,
    prove_slicing,
    self_check,
    slice_arrays,
    slice_markers,
    slice_numbers,
)
from equipoise.routes.registry import FORMATS, read_routes
from tests.routes.writers import write_dump

MODEL = ModelShape.preset("olmoe", layers=4)
LENGTHS = (7, 64, 33, 1, 120)


@pytest.mark.parametrize("preset", preset_names())
def test_marker_rows_are_good_routes_and_name_their_token(preset):
    markers = plant_markers((3000, 17, 1), model=ModelShape.preset(preset))
    tokens = np.arange(markers.num_tokens)
    assert np.array_equal(markers.read(markers.rows(tokens)[:, :, ::-1]), tokens)
    assert diagnose(markers.recordings(), model=markers.model).ok


@settings(max_examples=60, deadline=None)
@given(
    top_k=st.integers(1, 6),
    spare=st.integers(0, 30),
    layers=st.integers(1, 6),
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=5),
)
def test_reading_gives_back_what_was_planted_or_planting_is_refused(top_k, spare, layers, lengths):
    model = MODEL.replace(experts=2 * top_k + spare, top_k=top_k, layers=layers)
    try:
        markers = plant_markers(lengths, model=model)
    except RoutesError as error:
        assert "cannot be marked" in str(error)
        assert sum(lengths) > 2 ** (layers * top_k)
        return
    tokens = np.arange(sum(lengths))
    rows = markers.rows(tokens)
    assert rows.min() >= 0
    assert rows.max() < model.experts
    assert (np.diff(rows, axis=2) > 0).all()
    assert np.array_equal(markers.read(rows), tokens)


@pytest.mark.parametrize("preset", preset_names())
def test_rows_of_any_two_layers_differ(preset):
    model = ModelShape.preset(preset)
    markers = plant_markers((500,), model=model)
    rows = markers.rows(np.arange(500)).transpose(1, 0, 2).reshape(model.layers, -1)
    assert len(np.unique(rows, axis=0)) == model.layers


def test_what_is_no_marker_is_not_read_as_one():
    markers = plant_markers(LENGTHS, model=MODEL)
    rows = markers.rows(np.arange(markers.num_tokens))
    rows[5, 2, 3] += 1
    assert np.flatnonzero(markers.read(rows) == -1).tolist() == [5]


def test_token_numbers_are_named_by_sample():
    markers = plant_markers(LENGTHS, model=MODEL)
    assert markers.name(0) == "token 0 of sample 0"
    assert markers.name(7) == "token 0 of sample 1"
    assert markers.name(104) == "token 0 of sample 3"
    assert markers.name(PADDING) == "padding"
    assert markers.name(225) == "no marker"


def test_too_few_experts_and_empty_samples_are_refused():
    with pytest.raises(RoutesError, match="at least 16 experts"):
        plant_markers((3,), model=MODEL.replace(experts=15, top_k=8))
    with pytest.raises(RoutesError, match="at least one token"):
        plant_markers((3, 0), model=MODEL)


@pytest.mark.parametrize(("cp", "sp", "pp"), WIDTHS)
def test_built_in_slicing_delivers_every_route_with_its_token(cp, sp, pp):
    markers = plant_markers(LENGTHS, model=MODEL)
    finding = check_arrival(markers, slice_markers(markers, cp=cp, sp=sp, pp=pp))
    assert finding.verdict == "good", finding
    assert finding.total == sum(LENGTHS) * MODEL.layers


def test_self_check_runs_every_width():
    findings = self_check(plant_markers(LENGTHS, model=MODEL))
    assert [f.verdict for f in findings] == ["good"] * len(WIDTHS)


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=5), cp=st.integers(1, 5), sp=st.integers(1, 5))
def test_array_and_coordinate_slicing_hold_the_same_places(lengths, cp, sp):
    markers = plant_markers(lengths, model=MODEL)
    rows = slice_arrays(markers, cp=cp, sp=sp)
    for c in range(cp):
        for s in range(sp):
            tokens = slice_numbers(markers, cp=(c, cp), sp=(s, sp))
            real = tokens != PADDING
            assert np.array_equal(markers.read(rows[c][s][real]), tokens[real])
            assert len(tokens) == len(rows[c][s])


class TestBrokenSlicing:
    """What a trainer may get wrong is found and named."""

    def run(self, change):
        """A slicer that cuts into two halves, rows changed by `change` before."""

        def slicer(tokens, rows):
            rows = change(rows.copy())
            for i, half in enumerate(np.array_split(np.arange(len(tokens)), 2)):
                yield Delivery(name=f"rank {i}", tokens_T=tokens[half], ids_TLK=rows[half], layers=range(MODEL.layers))

        return prove_slicing(slicer, markers=plant_markers(LENGTHS, model=MODEL), multiple=4)

    def test_right_slicing_is_good(self):
        assert self.run(lambda rows: rows).verdict == "good"

    def test_rows_shifted_by_one(self):
        finding = self.run(lambda rows: np.roll(rows, 1, axis=0))
        assert finding.verdict == "finding"
        assert finding.share == 1.0
        words = "rank 0: token 0 of sample 0, layer index 0, delivered with the route of token 119 of sample 4"
        assert finding.first_place == words

    def test_two_neighbours_swapped(self):
        def swap(rows):
            rows[[20, 21]] = rows[[21, 20]]
            return rows

        finding = self.run(swap)
        assert finding.count == 2 * MODEL.layers
        # Sample 0 has 7 tokens, padded to 8: packed place 20 is token 12 of sample 1.
        assert "token 12 of sample 1" in finding.first_place
        assert "route of token 13 of sample 1" in finding.first_place

    def test_layers_swapped(self):
        assert self.run(lambda rows: rows[:, [0, 2, 1, 3]]).verdict == "finding"

    def test_contiguous_instead_of_zigzag(self):
        markers = plant_markers((64, 64), model=MODEL)
        right = list(slice_markers(markers, cp=2, sp=1, pp=1))
        rows = np.split(pack_rows(markers, multiple=4), 2)
        wrong = [replace(d, ids_TLK=r) for d, r in zip(right, rows, strict=True)]
        assert check_arrival(markers, wrong).verdict == "finding"

    def test_stage_with_the_wrong_layers(self):
        markers = plant_markers(LENGTHS, model=MODEL)
        stages = list(slice_markers(markers, cp=1, sp=1, pp=2))
        crossed = [replace(stages[0], layers=stages[1].layers), replace(stages[1], layers=stages[0].layers)]
        assert check_arrival(markers, crossed).verdict == "finding"

    @pytest.mark.parametrize(("kept", "times"), [((0,), 0), ((0, 1, 1), 2)], ids=["lost", "doubled"])
    def test_a_rank_lost_or_doubled(self, kept, times):
        markers = plant_markers(LENGTHS, model=MODEL)
        ranks = list(slice_markers(markers, cp=2, sp=1, pp=1))
        finding = check_arrival(markers, [ranks[i] for i in kept])
        assert finding.verdict == "finding"
        assert f"delivered {times} times" in finding.first_place


def test_packing_pads_each_sample():
    markers = plant_markers((3, 5), model=MODEL)
    assert pack_tokens(markers, multiple=4).tolist() == [0, 1, 2, -1, 3, 4, 5, 6, 7, -1, -1, -1]
    assert len(pack_rows(markers, multiple=4)) == 12


def schedule_of(lengths, *, cp, sp):
    schedule = schedule_samples(
        np.array(lengths),
        ranks=1,
        samples_per_micro_step=len(lengths),
        policy=TokenPolicy(last_token="unknown"),
    )
    return slice_sequence(slice_context(schedule, cp), sp)


@pytest.mark.parametrize("cp", [1, 2, 3, 4])
def test_schedules_cut_by_context_hold_the_tokens_that_arrays_hold(cp):
    markers = plant_markers(LENGTHS, model=MODEL)
    finding = check_schedule(schedule_of(LENGTHS, cp=cp, sp=1), markers, cp=cp, sp=1)
    assert finding.verdict == "good", finding


@pytest.mark.parametrize(("cp", "sp"), [(1, 2), (1, 4), (2, 2), (4, 2), (3, 4)])
def test_schedules_cut_by_context_and_sequence_hold_the_tokens_that_arrays_hold(cp, sp):
    lengths = (48, 96, 144)
    finding = check_schedule(schedule_of(lengths, cp=cp, sp=sp), plant_markers(lengths, model=MODEL), cp=cp, sp=sp)
    assert finding.verdict == "good", finding


def test_a_schedule_cut_otherwise_is_found():
    markers = plant_markers((48, 96), model=MODEL)
    contiguous = slice_sequence(schedule_of((48, 96), cp=1, sp=1), 2)
    assert check_schedule(contiguous, markers, cp=2, sp=1).verdict == "finding"


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_markers_pass_through_every_format(form, tmp_path):
    markers = plant_markers((48, 96, 144), model=MODEL)
    target = tmp_path / f"dump{form.suffixes[0].replace('/', '')}"
    write_dump(markers.routes(), target, format=form.name)
    samples = list(read_routes(target, model=MODEL, format=form.name))
    own = [s.ids_TLK if s.padding_T is None else s.ids_TLK[~s.padding_T] for s in samples]
    got = np.concatenate(own)
    assert np.array_equal(markers.read(got), np.arange(markers.num_tokens))

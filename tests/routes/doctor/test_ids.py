"""Each stray id is blamed on one cause."""

from dataclasses import replace

import numpy as np
import pytest

from equipoise.routes.doctor.diagnosis import diagnose
from tests.routes.doctor.recordings import MODEL, edit, fired, good


class TestIds:
    @pytest.mark.parametrize("twice", [0, 3])
    def test_duplicates(self, twice):
        def double(rows):
            rows[8, 1] = [twice, 5, twice, 7]

        diagnosis = diagnose(edit(good(), 1, double), model=MODEL)
        assert diagnosis.fired == ("distinct-ids",)
        assert diagnosis["distinct-ids"].first_place == f"sample 's1', token 8, layer 1: {[twice, 5, twice, 7]}"

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
        assert fired(recordings, model) == ("dtype-overflow",)

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

    def test_a_dtype_that_just_holds_the_last_expert_is_good(self):
        assert not fired(good(MODEL.replace(experts=256), dtype=np.uint8), MODEL.replace(experts=256))

    def test_ids_above_a_byte_are_not_folded(self):
        model = MODEL.replace(experts=300)
        # 256 is the highest id that is used.
        recordings = good(MODEL.replace(experts=257), samples=12, tokens=200)
        assert max(int(r.rows.max()) for r in recordings) == 256
        assert not fired(recordings, model)

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

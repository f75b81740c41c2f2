"""The writers of the tests lay routes out as engines do, or refuse."""

import numpy as np
import pytest

from equipoise.core import Routes, RoutesError, SampleRoutes
from equipoise.routes.interpret import Recording
from tests.routes.test_interpret import MODEL, good_rows, one
from tests.routes.writers import wire_rows


def routes_of(sample, model=MODEL, **layers):
    return Routes.of([sample], model=model, **layers)


def test_wire_rows_are_what_engines_hand_out():
    known = np.array([[True, True], [False, True]])
    ids = np.array([[[1, 2], [3, 4]], [[0, 0], [5, 0]]], dtype=np.uint8)
    sample = SampleRoutes(name="a", ids_TLK=ids, known_TL=known, num_tokens=3)
    wire = wire_rows(sample, routes_of(sample), dtype=np.int16)
    assert wire.tolist() == [[[0, 0], [1, 2], [0, 0], [3, 4]], [[0, 0], [-1, -1], [0, 0], [5, 0]]]
    assert one(Recording(name="a", rows=wire, num_tokens=3)) == sample


@pytest.mark.parametrize(
    ("change", "dtype", "words"),
    [
        pytest.param({"known_TL": np.zeros((1, 2), dtype=bool)}, np.uint8, "cannot hold -1", id="unknown, unsigned"),
        pytest.param({"padding_T": np.ones(1, dtype=bool)}, np.int16, "1 padding rows", id="padding"),
    ],
)
def test_wire_rows_refuse_what_a_form_cannot_hold(change, dtype, words):
    sample = SampleRoutes(name="a", ids_TLK=good_rows(1), num_tokens=2, **change)
    with pytest.raises(RoutesError, match=words):
        wire_rows(sample, routes_of(sample), dtype=dtype)


def test_wire_rows_refuse_a_dtype_that_is_too_small_and_layers_without_names():
    sample = SampleRoutes(name="a", ids_TLK=good_rows(1), num_tokens=2)
    with pytest.raises(RoutesError, match="expert 299 does not fit int8"):
        wire_rows(sample, routes_of(sample, MODEL.replace(experts=300)), dtype=np.int8)
    part = SampleRoutes(name="a", ids_TLK=good_rows(1, layers=1), num_tokens=2)
    with pytest.raises(RoutesError, match="1 of 2 MoE layers"):
        wire_rows(part, routes_of(part, layer_numbers=(3,)), dtype=np.int8)

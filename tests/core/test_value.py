"""What value types share: equality by content, read-only arrays, integers that are integers."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.core.errors import LoadsError, TopologyError
from equipoise.core.value import Value, frozen_array, int64_array, require_int, require_kind


@dataclass(frozen=True, slots=True, eq=False)
class Box(Value):
    array: Any
    label: str = ""
    note: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True, eq=False)
class OtherBox(Value):
    array: Any
    label: str = ""


@pytest.mark.parametrize(
    ("a", "b", "equal"),
    [
        pytest.param(Box(np.arange(3)), Box(np.arange(3)), True, id="same-content"),
        pytest.param(Box(np.arange(3)), Box(np.arange(3, dtype=np.uint8)), True, id="dtype-does-not-count"),
        pytest.param(Box(np.arange(3)), Box(np.array([0, 1, 3])), False, id="one-element"),
        pytest.param(Box(np.arange(4)), Box(np.arange(4).reshape(2, 2)), False, id="shape"),
        pytest.param(Box(np.zeros((2, 1))), Box(np.zeros((1, 1))), False, id="no-broadcasting"),
        pytest.param(Box(np.arange(3), "a"), Box(np.arange(3), "b"), False, id="other-field"),
        pytest.param(Box(np.arange(3), note="a"), Box(np.arange(3), note="b"), True, id="field-left-out"),
        pytest.param(Box(np.arange(3)), Box(None), False, id="array-against-none"),
        pytest.param(Box(None), Box(np.zeros(0)), False, id="none-against-empty"),
        pytest.param(Box(None), Box(None), True, id="none"),
        pytest.param(Box(np.arange(3)), OtherBox(np.arange(3)), False, id="type"),
        pytest.param(Box(np.arange(3)), 7, False, id="foreign-object"),
    ],
)
def test_values_are_equal_exactly_when_types_and_fields_are(a, b, equal):
    assert (a == b) is equal
    assert (a != b) is not equal


def test_a_value_with_arrays_cannot_be_hashed():
    with pytest.raises(TypeError, match="unhashable"):
        hash(Box(np.arange(3)))


@pytest.mark.parametrize(
    "value",
    [[False, 0], [[1, 2], [3, True]], ([1], (np.True_,)), [np.array([True]), np.array([2])]],
    ids=["flat", "nested", "numpy-scalar", "array-in-list"],
)
def test_a_bool_among_integers_is_not_an_integer(value):
    with pytest.raises(LoadsError, match="a bool in it"):
        int64_array("x", value, ndim=np.asarray(value).ndim, error=LoadsError)


def test_a_kept_array_cannot_be_written():
    kept = frozen_array(np.zeros(3))
    with pytest.raises(ValueError, match="read-only"):
        kept[0] = 1


def test_freezing_leaves_the_callers_array_writable():
    given_array = np.zeros(3)
    frozen_array(given_array)
    given_array[0] = 1
    assert given_array[0] == 1


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64])
def test_every_integer_dtype_becomes_int64_with_the_same_numbers(dtype):
    numbers = [0, 1, np.iinfo(dtype).max if dtype is not np.uint64 else 2**63 - 1]
    found = int64_array("load_E", np.array(numbers, dtype=dtype), ndim=1, error=LoadsError)
    assert found.dtype == np.int64
    assert found.tolist() == numbers
    assert not found.flags.writeable


def test_a_strided_array_becomes_contiguous_with_the_same_numbers():
    given_array = np.arange(12, dtype=np.int64).reshape(3, 4).T
    found = int64_array("x", given_array, ndim=2, error=LoadsError)
    assert found.flags.c_contiguous
    np.testing.assert_array_equal(found, given_array)


@pytest.mark.parametrize(
    ("array", "words"),
    [
        pytest.param([0.0, 1.0], "float64", id="float"),
        pytest.param([True, False], "bool", id="bool"),
        pytest.param([np.nan], "float64", id="nan"),
        pytest.param(["1"], "<U1", id="text"),
        pytest.param([1, 2**70], "object", id="above-every-dtype"),
        pytest.param([None], "object", id="none"),
    ],
)
def test_what_is_not_an_integer_is_refused_by_its_dtype(array, words):
    with pytest.raises(LoadsError, match=f"load_E must hold integers, got dtype {words}"):
        int64_array("load_E", array, ndim=1, error=LoadsError)


def test_a_number_outside_int64_is_refused_and_named():
    with pytest.raises(LoadsError, match=f"load_E holds {2**63}, above the limit of int64"):
        int64_array("load_E", np.array([0, 2**63], dtype=np.uint64), ndim=1, error=LoadsError)


def test_a_wrong_number_of_axes_is_refused_with_the_shape():
    with pytest.raises(LoadsError, match=r"load_LE must have 2 axes, got shape \(3,\)"):
        int64_array("load_LE", [1, 2, 3], ndim=2, error=LoadsError)


@settings(max_examples=100, deadline=None)
@given(value=st.integers(), low=st.integers(-5, 5))
def test_require_int_returns_the_number_or_refuses_it(value, low):
    if value >= low:
        assert require_int("x", value, low=low, error=TopologyError) == value
    else:
        with pytest.raises(TopologyError, match=f"x is {value}; it must be at least {low}"):
            require_int("x", value, low=low, error=TopologyError)


@pytest.mark.parametrize("value", [1.0, True, np.bool_(True), np.float64(1), float("nan"), "1", None, [1]], ids=repr)
def test_require_int_never_turns_another_kind_into_an_integer(value):
    with pytest.raises(TopologyError, match="x must be a whole number"):
        require_int("x", value, low=0, error=TopologyError)


def test_require_int_takes_numpy_integers_as_plain_ones():
    found = require_int("x", np.uint8(7), low=0, error=TopologyError)
    assert type(found) is int
    assert found == 7


@pytest.mark.parametrize("value", [-1, 4])
def test_require_int_names_both_limits(value):
    with pytest.raises(TopologyError, match=f"x is {value}; it must be from 0 to 3"):
        require_int("x", value, low=0, high=3, error=TopologyError)


def test_require_kind_names_what_was_given_and_what_is_taken():
    require_kind("x", (), list, tuple, error=TopologyError)
    with pytest.raises(TopologyError, match=r"^x is a float; it must be a list or a tuple$"):
        require_kind("x", 3.0, list, tuple, error=TopologyError)

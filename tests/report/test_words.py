"""Figures as people read them."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.report import words


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (0.145, "14.5 %"),
        (0, "0 %"),
        (1, "100 %"),
        (1e-5, "under 0.1 %"),
        (-1e-5, "above -0.1 %"),
        (0.99999, "over 99.9 %"),
    ],
)
def test_shares(share, text):
    assert words.percent(share) == text


@pytest.mark.parametrize(
    ("saved", "text"),
    [(0.08, "8.0 %"), (0.09, "9.0 %"), (0.0901, "9.0 %"), (0.136, "that and more, 13.6 %")],
)
def test_what_is_recovered_may_be_more_than_is_lost(saved, text):
    assert words.recovered(saved, lost=0.09) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(25.0, "25.0 s"), (3.638, "3.64 s"), (0.0123, "12.3 ms"), (0.000412, "412 us"), (2e-9, "2.00 ns"), (0, "0 s")],
)
def test_seconds(value, text):
    assert words.seconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(18874368, "18.0 MiB"), (80 * 2**30, "80.0 GiB"), (12, "12 B"), (5 * 2**41, "10.0 TiB")]
)
def test_bytes(value, text):
    assert words.num_bytes(value) == text


@pytest.mark.parametrize(("value", "text"), [(512, "512"), (9999, "9,999"), (12345, "12.3 k"), (1627300608, "1.63 G")])
def test_counts(value, text):
    assert words.count(value) == text


def test_plurals():
    assert [words.plural(n, "slot") for n in (0, 1, 2000)] == ["0 slots", "1 slot", "2,000 slots"]


@settings(max_examples=60, deadline=None)
@given(value=st.floats(min_value=1e-8, max_value=1e12))
def test_what_is_not_zero_is_never_written_as_zero_and_three_digits_are_right(value):
    shown = float(words.digits(value).replace(",", ""))
    assert shown > 0
    assert math.isclose(shown, value, rel_tol=0.006)
    assert words.digits(-value) == f"-{words.digits(value)}"

"""Figures as people read them."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.core.value import plural
from equipoise.report import page


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
    assert page.percent(share) == text


@pytest.mark.parametrize(("values", "text"), [([1.5, 1.38], "1.38 to 1.50"), ([1.001, 1.004], "1.00")])
def test_a_range_that_reads_alike_at_both_ends_is_one_figure(values, text):
    assert page.ratios(values) == text


def test_nothing_is_lost_where_balanced_takes_as_long_or_longer():
    assert page.lost(0.09) == "9.0 % of the time in expert layers is lost to uneven experts"
    assert page.lost(0.0) == page.lost(-0.208) == "Balanced ranks would not be faster here"


@pytest.mark.parametrize(
    ("saved", "lost", "text"),
    [
        (0.08, 0.09, "recover 8.0 %"),
        (0.09, 0.09, "recover 9.0 %"),
        (0.0901, 0.09, "recover 9.0 %"),
        (0.136, 0.09, "recover that and save 4.6 % beyond it"),
        (0.02, 0.0, "save 2.0 %"),
        (0.0, -0.208, "save 0 %"),
        (-0.271, 0.09, "take 27.1 % more time"),
        (-0.271, -0.208, "take 27.1 % more time"),
        (-1e-5, 0.09, "take under 0.1 % more time"),
    ],
)
def test_what_a_plan_gains_may_be_more_than_is_lost_or_less_than_nothing(saved, lost, text):
    assert page.gained(saved, lost=lost) == text


@pytest.mark.parametrize(
    ("sends_less", "computes_less", "said", "not_said"),
    [
        (True, False, ["its all-to-all takes less", "rows stay on their own rank"], ["experts", "slots"]),
        (False, True, ["its experts take less", "fewer slots"], ["all-to-all", "rows stay"]),
        (True, True, ["its all-to-all takes and its experts take less", "rows stay", "fewer slots"], []),
        (False, False, ["x takes less time than balanced."], ["because"]),
    ],
    ids=["sends less", "computes less", "both", "neither"],
)
def test_the_reason_is_the_part_that_takes_less_than_balanced(sends_less, computes_less, said, not_said):
    text = page.beyond_balanced("x", sends_less=sends_less, computes_less=computes_less)
    assert all(part in text for part in said)
    assert not any(part in text for part in not_said)


@pytest.mark.parametrize(
    ("value", "text"),
    [(25.0, "25.0 s"), (3.638, "3.64 s"), (0.0123, "12.3 ms"), (0.000412, "412 us"), (2e-9, "2.00 ns"), (0, "0 s")],
)
def test_seconds(value, text):
    assert page.seconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(18874368, "18.0 MiB"), (80 * 2**30, "80.0 GiB"), (12, "12 B"), (5 * 2**41, "10.0 TiB")]
)
def test_bytes(value, text):
    assert page.num_bytes(value) == text


@pytest.mark.parametrize(("value", "text"), [(512, "512"), (9999, "9,999"), (12345, "12.3 k"), (1627300608, "1.63 G")])
def test_counts(value, text):
    assert page.count(value) == text


def test_plurals():
    assert [plural(n, "slot") for n in (0, 1, 2000)] == ["0 slots", "1 slot", "2,000 slots"]


@settings(max_examples=60, deadline=None)
@given(value=st.floats(min_value=1e-8, max_value=1e12))
def test_what_is_not_zero_is_never_written_as_zero_and_three_digits_are_right(value):
    shown = float(page.digits(value).replace(",", ""))
    assert shown > 0
    assert math.isclose(shown, value, rel_tol=0.006)
    assert page.digits(-value) == f"-{page.digits(value)}"

"""Cuts of rows into groups, and the sizes that are visited."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.calibrate.bench import Grid, cut_rows


@given(st.integers(0, 5000), st.integers(1, 40), st.sampled_from([0.0, 0.5, 1.0, 2.0]))
@settings(max_examples=60, deadline=None)
def test_a_cut_has_all_rows_and_no_group_is_empty_where_rows_suffice(rows, slots, zipf):
    count_S = np.diff(cut_rows(rows, slots, zipf=zipf), prepend=0)
    assert len(count_S) == slots
    assert count_S.sum() == rows
    assert (count_S >= (1 if rows >= slots else 0)).all()
    assert (np.diff(count_S) <= 0).all(), "groups never ascend"


@given(st.integers(0, 5000), st.integers(1, 40))
@settings(max_examples=40, deadline=None)
def test_an_even_cuts_groups_differ_by_one_row_at_most(rows, slots):
    count_S = np.diff(cut_rows(rows, slots, zipf=0.0), prepend=0)
    assert count_S.max() - count_S.min() <= 1


def test_an_uneven_cut_follows_zipfs_law():
    count_S = np.diff(cut_rows(25_004, 4, zipf=1.0), prepend=0)
    # One row each, and 25,000 by 1, 1/2, 1/3, 1/4.
    assert count_S.tolist() == [12001, 6001, 4001, 3001]


def test_ends_are_what_grouped_products_want():
    assert cut_rows(100, 8, zipf=1.0).dtype == np.int32


@pytest.mark.parametrize("grid", [Grid.full(), Grid.smoke()], ids=["full", "smoke"])
def test_axes_ascend_and_rows_suffice_for_every_slot(grid):
    for axis in (grid.slots, grid.rows, grid.tokens, grid.moved_rows):
        assert list(axis) == sorted(set(axis))
    assert grid.rows[0] >= grid.slots[-1]
    assert len(set(grid.shapes)) == len(grid.shapes)

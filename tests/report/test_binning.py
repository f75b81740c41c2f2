"""Large arrays are binned, small ones kept, and the page says which."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.report.page import bin_labels, bin_matrix, binning_note


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 40), columns=st.integers(1, 40), limit=st.integers(1, 12))
def test_each_cell_is_the_mean_of_its_block(rows, columns, limit):
    matrix = np.random.default_rng(rows * 41 + columns).integers(0, 100, size=(rows, columns))
    binned = bin_matrix(matrix, limits=(limit, limit))
    assert max(binned.cells.shape) <= limit
    for i in range(binned.cells.shape[0]):
        for j in range(binned.cells.shape[1]):
            block = matrix[i * binned.row_size :][: binned.row_size, j * binned.column_size :][:, : binned.column_size]
            assert np.isclose(binned.cells[i, j], block.mean())


def test_a_matrix_within_the_limits_is_kept_and_nothing_is_said():
    matrix = np.arange(12.0).reshape(3, 4)
    binned = bin_matrix(matrix, limits=(3, 4))
    assert binned.cells is matrix
    assert (binned.row_size, binned.column_size) == (1, 1)
    assert binning_note(binned, "ranks", "micro-steps") == ""


def test_words_name_how_many_make_one_cell():
    binned = bin_matrix(np.zeros((5, 300)), limits=(8, 100))
    assert "a cell is the mean of 3 micro-steps" in binning_note(binned, "ranks", "micro-steps")
    both = bin_matrix(np.zeros((9, 300)), limits=(3, 100))
    assert "the mean of 3 ranks and 3 micro-steps" in binning_note(both, "ranks", "micro-steps")


def test_labels_name_the_whole_block():
    assert bin_labels([3, 4, 5, 6, 7], 2) == ["3-4", "5-6", "7"]
    assert bin_labels([3, 4], 1) == ["3", "4"]
    assert bin_labels([999, 1000, 1001], 2) == ["999-1,000", "1,001"]

"""Make large arrays small enough for a page: cells of a matrix are averaged in blocks, and the page says so.

Knows arrays alone. The full array stays in the data that the page offers for download.

Invariants (asserted by the tests):
1. A matrix within the limits is kept bit for bit, and nothing is said.
2. Blocks are of equal size but the last ones; each binned cell is the mean of its block.
3. The words name how many rows and columns make one cell.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MAX_CELLS = (192, 256)
"""Rows and columns of a heat map: about as many as a screen shows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Binned:
    """A matrix as it is drawn."""

    cells: np.ndarray
    """[rows, columns] binned."""
    row_size: int
    column_size: int

    @property
    def is_binned(self) -> bool:
        """Whether anything was averaged."""
        return self.row_size > 1 or self.column_size > 1


def bin_matrix(matrix: np.ndarray, *, limits: tuple[int, int] = MAX_CELLS) -> Binned:
    """Bin a matrix to at most `limits` rows and columns.

    Args:
        matrix: [rows, columns] with at least one cell
        limits: most rows and columns
    """
    row_size, column_size = (-(-size // limit) for size, limit in zip(matrix.shape, limits, strict=True))
    cells = matrix
    for axis, size in enumerate((row_size, column_size)):
        cells = cells if size == 1 else _blocks(cells, size, axis=axis)
    return Binned(cells=cells, row_size=row_size, column_size=column_size)


def bin_labels(labels: Sequence[int], size: int) -> list[str]:
    """'12' for a label of its own, '1,012-1,015' for a block of four."""
    blocks = [labels[i : i + size] for i in range(0, len(labels), size)]
    return [f"{block[0]:,}" if len(block) == 1 else f"{block[0]:,}-{block[-1]:,}" for block in blocks]


def binning_note(binned: Binned, rows: str, columns: str) -> str:
    """What was averaged, in words; empty where nothing was."""
    if not binned.is_binned:
        return ""
    parts = [f"{n} {word}" for n, word in ((binned.row_size, rows), (binned.column_size, columns)) if n > 1]
    return f"Binned to keep the page small: a cell is the mean of {' and '.join(parts)}. The CSV has them all."


def _blocks(matrix: np.ndarray, size: int, *, axis: int) -> np.ndarray:
    starts = np.arange(0, matrix.shape[axis], size)
    lengths = np.diff(np.append(starts, matrix.shape[axis]))
    sums = np.add.reduceat(matrix.astype(float), starts, axis=axis)
    return np.asarray(sums / (lengths[:, None] if axis == 0 else lengths))

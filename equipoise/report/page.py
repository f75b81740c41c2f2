"""What a page holds: the answer, key figures, charts, tables, and what is missing. Plain values, no HTML.

The HTML file (`render.py`) and the text (`summary.py`) are both made of this description, so that they cannot differ.
Below it are figures as people read them, the binning of large matrices, and the definitions.
"""

import math
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any, Literal

import numpy as np

Cell = str | int | float | None
Scale = Literal["", "diverging", "sequential"]
"""Which colours a heat map takes from the theme."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChartView:
    """One choice of a chart's switch, such as before and after."""

    label: str
    visible: tuple[bool, ...]
    """Whether each trace is shown."""
    layout: dict[str, Any] = field(default_factory=dict)
    """What else changes, such as the texts beside bars, by plotly's names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows under named columns."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]

    def __post_init__(self) -> None:
        odd = [row for row in self.rows if len(row) != len(self.columns)]
        assert not odd, f"a row of {len(odd[0])} cells under {len(self.columns)} columns: {odd[0]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """One chart, as plotly draws it, with its texts and its data."""

    name: str
    """Its id in the page and the name of its data file: letters and dashes."""
    title: str
    caption: str
    """What is seen, with the figure that matters."""
    traces: tuple[dict[str, Any], ...]
    layout: dict[str, Any]
    data: Table
    """What is drawn, for download; not binned."""
    terms: tuple[str, ...]
    """Terms that a reader of this chart needs defined."""
    views: tuple[ChartView, ...] = ()
    """Choices of the switch, the first one shown; none where there is nothing to switch."""
    scale: Scale = ""
    note: str = ""
    """What was binned or left out to keep the page small."""
    wide: bool = True
    """Whether it takes the whole width of the page."""

    @property
    def legend(self) -> tuple[tuple[str, str, str], ...]:
        """(name, colour, dash) of every series, once; nothing where there is only one, or where cells are coloured."""
        found: dict[str, tuple[str, str]] = {}
        for trace in self.traces:
            if trace["type"] == "bar":
                found[trace["name"]] = trace["marker"]["color"], "block"
            elif trace["type"] != "heatmap":
                found[trace["name"]] = trace["line"]["color"], trace["line"]["dash"]
        return tuple((name, *ink) for name, ink in found.items()) if len(found) > 1 else ()

    def __post_init__(self) -> None:
        # Points and rows are the result's, which may be damaged: an error. Texts are ours: an assertion.
        has_points = all(np.size(trace["z"] if "z" in trace else trace["x"]) for trace in self.traces)
        if not self.traces or not has_points or not self.data.rows:
            raise ValueError(f"chart {self.name} has no data")
        assert self.caption, f"chart {self.name} has no caption"
        unknown = set(self.terms) - set(DEFINITIONS)
        assert not unknown, f"chart {self.name} uses terms without definition: {sorted(unknown)}"
        for view in self.views:
            assert len(view.visible) == len(self.traces) and any(view.visible), f"view {view.label} of {self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """A table to be read, such as the doctor's findings."""

    name: str
    title: str
    caption: str
    data: Table
    terms: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """A part this result cannot have, and the command that would give it; an empty one where none would."""

    title: str
    text: str
    command: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One key number."""

    label: str
    value: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """Everything that is shown of one result."""

    title: str
    kind: str
    """What was made: an analysis, a simulation, a training run."""
    answer: str
    """One sentence with its number."""
    conditions: tuple[str, ...]
    """Under which the answer holds, and what is predicted or measured."""
    notes: tuple[str, ...]
    """How it was computed, one click away."""
    figures: tuple[Figure, ...]
    sections: tuple[Chart | Listing, ...]
    missing: tuple[Missing, ...]
    document: dict[str, Any] = field(repr=False)
    """The result itself, for download."""
    num_open: int = 5
    """Sections that are shown at once; the others are folded, one click away."""

    def __post_init__(self) -> None:
        names = [section.name for section in self.sections]
        assert len(set(names)) == len(names), f"two sections of one name: {names}"

    @property
    def open_and_folded(self) -> tuple[tuple[Chart | Listing, ...], tuple[Chart | Listing, ...]]:
        """The sections that are shown at once, and those that are folded."""
        return self.sections[: self.num_open], self.sections[self.num_open :]

    @property
    def charts(self) -> tuple[Chart, ...]:
        """The sections that are drawn."""
        return tuple(section for section in self.sections if isinstance(section, Chart))


_COUNT_UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_BYTE_UNITS = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def percent(share: float) -> str:
    """Format a share: 0.145 as '14.5 %'."""
    if share in (0, 1):
        return f"{share:.0%}".replace("%", " %")
    if abs(share) < 0.0005:
        return "under 0.1 %" if share > 0 else "above -0.1 %"
    return "over 99.9 %" if 0.9995 <= share < 1 else f"{share * 100:.1f} %"


def lost(share: float) -> str:
    """Say what uneven ranks cost: nothing if `balanced` takes as long as now, or longer."""
    if share <= 0:
        return "Balanced ranks would not be faster here"
    return f"{percent(share)} of the time in expert layers is lost to uneven experts"


def gained(saved: float, *, lost: float) -> str:
    """Say what a plan saves: of what is lost to uneven ranks, and beyond it, or something although nothing is lost.

    A plan that takes longer than now gives nothing back, and is never said to.
    """
    if saved < 0:
        return f"take {percent(-saved)} more time"
    if lost <= 0:
        return f"save {percent(saved)}"
    beyond = percent(saved - lost)
    if saved > lost and percent(saved) != percent(lost) and beyond != percent(0.0):
        return f"recover that and save {beyond} beyond it"
    return f"recover {percent(min(saved, lost))}"


def beyond_balanced(name: str, *, sends_less: bool, computes_less: bool) -> str:
    """Say why `name` can recover more than is lost, by the parts that take less time than in balanced."""
    parts, reasons = [], []
    if sends_less:
        parts.append("its all-to-all takes")
        reasons.append("rows stay on their own rank and node where they can")
    if computes_less:
        parts.append("its experts take")
        reasons.append("fewer slots of a rank have rows, and each of them costs time")
    if not parts:
        return f"{name} takes less time than balanced."
    why, how = " and ".join(parts), "; ".join(reasons)
    return f"{name} takes less time than balanced because {why} less than with an even spread: {how}."


def seconds(value: float) -> str:
    """Format seconds in the unit that suits them: '3.64 s', '12.3 ms', '412 us'."""
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "us")):
        if abs(value) * factor >= 0.9995 or value == 0:
            return f"{digits(value * factor)} {unit}"
    return f"{digits(value * 1e9)} ns"


def num_bytes(value: float) -> str:
    """Format bytes in powers of 1024: '18.0 MiB'."""
    for size, unit in _BYTE_UNITS:
        if abs(value) >= size:
            return f"{digits(value / size)} {unit}"
    return f"{value:.0f} B"


def count(value: float) -> str:
    """Format a count: '512', '1.63 G'."""
    for size, unit in _COUNT_UNITS:
        # Four digits are read as easily as three and a unit.
        if abs(value) >= max(size, 10_000):
            return f"{digits(value / size)} {unit}"
    return f"{value:,.0f}"


def ratio(value: float) -> str:
    """Format a ratio near one: '1.44'."""
    return f"{value:.2f}"


def ratios(values: Sequence[float]) -> str:
    """Format the least and the largest of several ratios: '1.38 to 1.56', or '1.00' where both read alike."""
    return " to ".join(dict.fromkeys((ratio(min(values)), ratio(max(values)))))


def digits(value: float) -> str:
    """Format a number with three significant digits: '0.00123', '1.23', '123', '1,230'."""
    if value == 0:
        return "0"
    decimals = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{decimals}f}"


MAX_CELLS = (192, 256)
"""Rows and columns of a heat map: about as many as a screen shows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Binned:
    """A matrix as it is drawn."""

    cells: np.ndarray
    """[rows, columns] binned."""
    row_size: int
    column_size: int


def bin_matrix(matrix: np.ndarray, *, limits: tuple[int, int] = MAX_CELLS) -> Binned:
    """Bin a [rows, columns] matrix with at least one cell to at most `limits` rows and columns."""
    row_size, column_size = (-(-size // limit) for size, limit in zip(matrix.shape, limits, strict=True))
    cells = matrix
    for axis, size in enumerate((row_size, column_size)):
        if size > 1:
            starts = np.arange(0, matrix.shape[axis], size)
            lengths = np.diff(np.append(starts, matrix.shape[axis]))
            sums = np.add.reduceat(cells.astype(float), starts, axis=axis)
            cells = np.asarray(sums / (lengths[:, None] if axis == 0 else lengths))
    return Binned(cells=cells, row_size=row_size, column_size=column_size)


def bin_labels(labels: Sequence[int], size: int) -> list[str]:
    """Return a label per block: '12' for a block of one, '1,012-1,015' for a block of four."""
    blocks = [labels[i : i + size] for i in range(0, len(labels), size)]
    return [f"{block[0]:,}" if len(block) == 1 else f"{block[0]:,}-{block[-1]:,}" for block in blocks]


def binning_note(binned: Binned, rows: str, columns: str) -> str:
    """Say what was averaged; empty if nothing was."""
    parts = [f"{n} {word}" for n, word in ((binned.row_size, rows), (binned.column_size, columns)) if n > 1]
    if not parts:
        return ""
    return f"Binned to keep the page small: a cell is the mean of {' and '.join(parts)}. The CSV has them all."


DEFINITIONS: dict[str, str] = tomllib.loads(
    (resources.files("equipoise.report") / "templates" / "definitions.toml").read_text(encoding="utf-8")
)
"""Every term that a page uses, and what it means."""

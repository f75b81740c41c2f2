"""What a page holds: the answer, key figures, charts, tables, and what is missing. Plain values, no HTML.

The one description that the HTML file (`render.py`) and the terminal (`summary.py`) both draw, so that they cannot
differ. Does not know where figures come from: `analysis.py`, `simulation.py` and `run.py` make pages.

Invariants (asserted by the tests):
1. A chart has data: one without a single point cannot be made; what is not there is a `Missing`.
2. Every chart says in its caption what is seen, has its data as a table, and names only words that are defined.
3. Of a chart's views exactly one is shown, and each shows at least one trace.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

from equipoise.report.definitions import DEFINITIONS

Cell = str | int | float | None
Scale = Literal["", "diverging", "sequential"]
"""Which colours a heat map takes from the theme."""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """One choice of a chart's switch, such as before and after."""

    label: str
    visible: tuple[bool, ...]
    """Whether each trace is shown."""
    layout: dict[str, Any] = field(default_factory=dict)
    """What changes in the layout with it, such as an axis title."""


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
    """One chart, as plotly draws it, with its words and its data."""

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
    """Words of the definitions that a reader of this chart needs."""
    views: tuple[View, ...] = ()
    """Choices of the switch, the first one shown; none where there is nothing to switch."""
    scale: Scale = ""
    note: str = ""
    """What was binned or left out to keep the page small."""
    wide: bool = True
    """Whether it takes the whole width of the page."""

    @property
    def legend(self) -> tuple[tuple[str, str, str], ...]:
        """(name, colour, dash) of every series, once; nothing where there is only one, or where cells are coloured."""
        found = {trace["name"]: _ink(trace) for trace in self.traces if trace["type"] != "heatmap"}
        return tuple((name, *ink) for name, ink in found.items()) if len(found) > 1 else ()

    def __post_init__(self) -> None:
        # Points and rows come from the result, which may be damaged; the words are ours.
        if not self.traces or not all(_points(trace) for trace in self.traces) or not self.data.rows:
            raise ValueError(f"chart {self.name} has no data")
        assert self.caption, f"chart {self.name} has no caption"
        unknown = set(self.terms) - set(DEFINITIONS)
        assert not unknown, f"chart {self.name} uses words without definition: {sorted(unknown)}"
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
    words: str
    command: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One key number."""

    label: str
    value: str
    words: str


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

    def __post_init__(self) -> None:
        names = [section.name for section in self.sections]
        assert len(set(names)) == len(names), f"two sections of one name: {names}"

    @property
    def charts(self) -> tuple[Chart, ...]:
        """The sections that are drawn."""
        return tuple(section for section in self.sections if isinstance(section, Chart))


def _ink(trace: dict[str, Any]) -> tuple[str, str]:
    """Colour and dash of a series; a bar is a block."""
    return (
        (trace["marker"]["color"], "block")
        if trace["type"] == "bar"
        else (trace["line"]["color"], trace["line"]["dash"])
    )


def _points(trace: dict[str, Any]) -> int:
    """How many points a trace has."""
    values = trace["z"] if "z" in trace else trace["x"]
    return len(values) and (len(values[0]) if "z" in trace else 1)

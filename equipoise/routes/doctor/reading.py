"""`Reading`: one recording, prepared once for all checks; `Check` and `Finding`: how checks count and report.

1. Map the wire's layer axis to global layer numbers; if that fails, keep the reason and continue.
2. Separate padding rows and dense layers; transpose the rest, so that each check is a few passes over flat arrays.
3. Mark what is not a route: *missing* (every id is -1), *equal* (k > 1 and every id is the same), *dead* layers
   (zero throughout). The three are disjoint, so that no route is reported twice.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import ClassVar, Literal

import numpy as np

from equipoise.core import ModelShape, RoutesError
from equipoise.routes.interpret import LayerMap, Recording, map_recording

_DEAD_ROWS_TOP1 = 64
"""With one id per route a short run of zeros is a fair choice of expert 0; with more it never is."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reading:
    """One recording, prepared. T counts rows that are not padding, L the MoE layers on the wire."""

    recording: Recording
    sample: int
    """Running number of the sample in the dump; its turns share it."""
    unmapped: str
    """Why the layer axis cannot be mapped; empty if it can."""
    numbers_L: tuple[int, ...]
    """Global numbers of the L axis; positions on the wire if there is no map."""
    ids_KTL: np.ndarray
    """[K, T, L] ids as on the wire, MoE layers only, without padding rows."""
    dense_TLK: np.ndarray
    """[T, dense layers on the wire, K] ids in layers where the model has no experts."""
    dense_numbers: tuple[int, ...]
    """Global numbers of the dense layers on the wire."""
    padding_TLK: np.ndarray
    """[padding rows, L, K] ids of padding rows."""
    missing_TL: np.ndarray
    """[T, L] bool, every id is -1."""
    equal_TL: np.ndarray
    """[T, L] bool, every one of k > 1 ids is the same, dead layers not included."""
    dead_L: np.ndarray
    """[L] bool, zero in every row of a recording whose other layers hold routes."""

    @property
    def num_rows(self) -> int:
        """Rows that belong to tokens, T."""
        return int(self.ids_KTL.shape[1])

    @property
    def num_routes(self) -> int:
        """Tokens times MoE layers on the wire."""
        return int(self.ids_KTL.shape[1] * self.ids_KTL.shape[2])

    @property
    def num_judged(self) -> int:
        """Rows that should hold routes: all, or all but the last token's if it is filler.

        The last token was sampled but never forwarded; trainers that need T rows append a placeholder for it.
        """
        recording = self.recording
        if not self.num_rows or recording.num_tokens not in (None, recording.start + self.num_rows):
            return self.num_rows
        return self.num_rows - int((self.missing_TL | self.equal_TL | self.dead_L)[-1].all())

    @property
    def routed_TL(self) -> np.ndarray:
        """[T, L] bool, routes that are neither missing nor equal nor of a dead layer."""
        return ~(self.missing_TL | self.equal_TL | self.dead_L)

    @property
    def title(self) -> str:
        """How messages refer to the sample."""
        return f"sample {self.recording.name!r}"

    def place(self, bad_TL: np.ndarray) -> str:
        """Name sample, token and global layer of the first True of `bad_TL`, with the ids there."""
        row, layer = (int(i) for i in np.argwhere(bad_TL)[0])
        ids = self.ids_KTL[:, row, layer].tolist()
        return f"{self.title}, token {self.recording.start + row}, layer {self.numbers_L[layer]}: {ids}"


def read(recording: Recording, *, sample: int, model: ModelShape) -> Reading:
    """Prepare one recording for the checks."""
    # Step 1: map layers, or take every layer for an MoE layer.
    try:
        layers, unmapped = map_recording(recording, model), ""
    except RoutesError as error:
        places = tuple(range(recording.rows.shape[1]))
        layers, unmapped = LayerMap(numbers=places, wire_L=places), str(error)
    # Step 2: separate padding rows.
    real, padding = recording.rows, recording.rows[:0]
    if recording.padding is not None and recording.padding.any():
        real, padding = recording.rows[~recording.padding], recording.rows[recording.padding]
    moe = list(layers.wire_L)
    ids_KTL = np.ascontiguousarray(real[:, moe].transpose(2, 0, 1))
    # Step 3: mark what is not a route.
    missing_TL, equal_TL = np.zeros((2, *ids_KTL.shape[1:]), dtype=bool)
    if ids_KTL.dtype.kind == "i" and len(ids_KTL):
        missing_TL = (ids_KTL == -1).all(axis=0)
    if len(ids_KTL) > 1:
        equal_TL = (ids_KTL[1:] == ids_KTL[0]).all(axis=0)
    dead_L = _dead_layers(ids_KTL, missing_TL)
    return Reading(
        recording=recording,
        sample=sample,
        unmapped=unmapped,
        numbers_L=layers.numbers,
        ids_KTL=ids_KTL,
        dense_TLK=real[:, [place for place, _ in layers.dense]],
        dense_numbers=tuple(number for _, number in layers.dense),
        padding_TLK=padding[:, moe],
        missing_TL=missing_TL,
        equal_TL=equal_TL & ~missing_TL & ~dead_L,
        dead_L=dead_L,
    )


def read_samples(recordings: Iterable[Recording], *, model: ModelShape) -> Iterator[list[Reading]]:
    """Yield the readings of one sample after another: neighbours of one name are turns of one sample."""
    for number, (_, turns) in enumerate(groupby(recordings, key=lambda recording: recording.name)):
        yield [read(recording, sample=number, model=model) for recording in turns]


def _dead_layers(ids_KTL: np.ndarray, missing_TL: np.ndarray) -> np.ndarray:
    """Find layers that are zero in every recorded row, unless all are: then the rows are filler, not the layers."""
    used_L = ((ids_KTL != 0).any(axis=0) & ~missing_TL).any(axis=0)
    recorded_L = (~missing_TL).sum(axis=0)
    enough = 2 if len(ids_KTL) > 1 else _DEAD_ROWS_TOP1
    return ~used_L & (recorded_L >= enough) & bool(used_L.any())


Verdict = Literal["good", "finding", "skipped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The outcome of one named check."""

    check: str
    verdict: Verdict
    count: int = 0
    """How many of `total` are wrong (or, for padding, are padding)."""
    total: int = 0
    """How many were examined."""
    unit: str = "routes"
    """What is counted: "routes" (one token in one layer), "rows" (one token), "layers", "samples", "recordings"."""
    first_place: str = ""
    """Sample, token and layer of the first wrong one."""
    detail: str = ""
    """Figures as text, also if nothing is wrong."""
    advice: str = ""
    """What to do; empty unless the verdict is `finding`."""
    rate_L: tuple[float, ...] = ()
    """Agreement by layer, for the check that compares two recordings."""

    @property
    def share(self) -> float:
        """Wrong share of those examined, 0 to 1."""
        return self.count / self.total if self.total else 0.0


@dataclass(slots=True)
class CheckCounts:
    """A running count of faults, and the place of the first one."""

    count: int = 0
    total: int = 0
    first_place: str = ""

    def add(self, count: int, total: int, place: Callable[[], str]) -> None:
        """Add `count` wrong ones of `total`; `place` is only called for the first wrong one."""
        if count and not self.count:
            self.first_place = place()
        self.count += count
        self.total += total

    def add_routes(self, bad_TL: np.ndarray, reading: Reading) -> None:
        """Add the routes of a reading, those of `bad_TL` as wrong."""
        self.add(int(bad_TL.sum()), bad_TL.size, lambda: reading.place(bad_TL))


class Check:
    """One named check: examines one reading after another, then reports. Keeps only running counts."""

    name: ClassVar[str]
    unit: ClassVar[str] = "routes"
    advice: ClassVar[str]
    needs: ClassVar[str] = "rows"
    """What a dump must hold for this check; a skipped check reports it."""

    def __init__(self, model: ModelShape) -> None:
        self.model = model
        self.counts = CheckCounts()

    def look(self, reading: Reading) -> None:
        """Examine the next recording."""
        raise NotImplementedError

    def findings(self) -> tuple[Finding, ...]:
        """Report what was found."""
        return (
            judge(self.name, self.counts, unit=self.unit, advice=self.advice, detail=self.detail(), needs=self.needs),
        )

    def detail(self) -> str:
        """Return figures for the report."""
        return ""


def judge(check: str, counts: CheckCounts, *, unit: str, advice: str, detail: str = "", needs: str = "rows") -> Finding:
    """Make a finding of counts: `finding` if any is wrong, `skipped`, with what it needs, if none was examined."""
    verdict: Verdict = "finding" if counts.count else ("good" if counts.total else "skipped")
    return Finding(
        check=check,
        verdict=verdict,
        count=counts.count,
        total=counts.total,
        unit=unit,
        first_place=counts.first_place,
        detail=f"needs {needs}" if verdict == "skipped" else detail,
        advice=advice if verdict == "finding" else "",
    )

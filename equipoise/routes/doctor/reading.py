"""`Reading`: one recording with what every check of the doctor needs, worked out once.

1. Map the wire's layer axis to global layer numbers (`layer_map.py`); where that fails, keep the reason and go on.
2. Set padding rows and dense layers aside; turn the rest column-major, so that each check is a few flat passes.
3. Mark routes that are no routes: *missing* (every id is -1) and *equal* (k > 1 and every id is the same).

Knows shapes and the model. Judges nothing, and never raises on what a recording holds.

Invariants (asserted by the tests):
1. Missing, equal and dead layers are disjoint: no route is blamed twice.
2. `place` names the sample, the token and the global layer number.
3. A recording of no rows, no layers or no columns gives empty arrays, not an error.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
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
    """Why the layer axis cannot be mapped; empty where it can."""
    numbers_L: tuple[int, ...]
    """Global numbers of the L axis here; positions on the wire where there is no map."""
    ids_KTL: np.ndarray
    """[K, T, L] ids as on the wire, MoE layers only, without padding rows."""
    dense_TLK: np.ndarray
    """[T, dense layers on the wire, K] what stands where the model has no experts."""
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
        """Rows that should hold routes: all, or all but the last token's if that holds a filler.

        The last token was sampled but never forwarded; trainers that want T rows append a placeholder for it.
        """
        recording = self.recording
        if not self.num_rows or recording.num_tokens not in (None, recording.start + self.num_rows):
            return self.num_rows
        return self.num_rows - int((self.missing_TL | self.equal_TL | self.dead_L)[-1].all())

    @property
    def routed_TL(self) -> np.ndarray:
        """[T, L] bool, routes that look like routes: neither missing nor equal nor of a dead layer."""
        routed: np.ndarray = ~(self.missing_TL | self.equal_TL | self.dead_L)
        return routed

    @property
    def title(self) -> str:
        """The sample as messages call it."""
        return f"sample {self.recording.name!r}"

    def place(self, bad_TL: np.ndarray) -> str:
        """Name the first True of `bad_TL`, with the ids that stand there."""
        row, layer = (int(i) for i in np.argwhere(bad_TL)[0])
        ids = self.ids_KTL[:, row, layer].tolist()
        return f"{self.title}, token {self.recording.start + row}, layer {self.numbers_L[layer]}: {ids}"


def read(recording: Recording, *, sample: int, model: ModelShape) -> Reading:
    """Prepare one recording for the checks."""
    layers, unmapped = _map(recording, model)
    moe = list(layers.wire_L)
    real, padding = _split_padding(recording)
    ids_KTL = np.ascontiguousarray(real[:, moe].transpose(2, 0, 1))
    missing_TL = _missing(ids_KTL)
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
        equal_TL=_equal(ids_KTL) & ~missing_TL & ~dead_L,
        dead_L=dead_L,
    )


def read_samples(recordings: Iterable[Recording], *, model: ModelShape) -> Iterator[list[Reading]]:
    """Yield the readings of one sample after another: neighbours of one name are turns of one sample."""
    turns: list[Reading] = []
    number = -1
    for recording in recordings:
        if not turns or turns[-1].recording.name != recording.name:
            if turns:
                yield turns
            turns, number = [], number + 1
        turns.append(read(recording, sample=number, model=model))
    if turns:
        yield turns


def _map(recording: Recording, model: ModelShape) -> tuple[LayerMap, str]:
    """The layer map, or one that takes every layer for an MoE layer and the reason why there is no better one."""
    try:
        return map_recording(recording, model), ""
    except RoutesError as error:
        places = tuple(range(recording.rows.shape[1]))
        return LayerMap(numbers=places, wire_L=places), str(error)


def _split_padding(recording: Recording) -> tuple[np.ndarray, np.ndarray]:
    if recording.padding is None or not recording.padding.any():
        return recording.rows, recording.rows[:0]
    return recording.rows[~recording.padding], recording.rows[recording.padding]


def _missing(ids_KTL: np.ndarray) -> np.ndarray:
    if ids_KTL.dtype.kind == "u" or not len(ids_KTL):
        return np.zeros(ids_KTL.shape[1:], dtype=bool)
    missing: np.ndarray = (ids_KTL == -1).all(axis=0)
    return missing


def _equal(ids_KTL: np.ndarray) -> np.ndarray:
    if len(ids_KTL) < 2:
        return np.zeros(ids_KTL.shape[1:], dtype=bool)
    equal: np.ndarray = (ids_KTL[1:] == ids_KTL[0]).all(axis=0)
    return equal


def _dead_layers(ids_KTL: np.ndarray, missing_TL: np.ndarray) -> np.ndarray:
    """Layers that are zero in every recorded row, unless all are: then the rows are filler, not the layers."""
    used_L = ((ids_KTL != 0).any(axis=0) & ~missing_TL).any(axis=0)
    recorded_L = (~missing_TL).sum(axis=0)
    enough = 2 if len(ids_KTL) > 1 else _DEAD_ROWS_TOP1
    dead_L: np.ndarray = ~used_L & (recorded_L >= enough) & bool(used_L.any())
    return dead_L


# `Finding`, `Check`: what the doctor says, and the face every one of its checks shows.
#
# Invariants (asserted by the tests):
# 1. `share` is `count / total`, and 0 where nothing was looked at.
# 2. A check that looked at nothing is `skipped`, never `good`, and says what it needs.
# 3. Advice is given exactly with the verdict `finding`.


Verdict = Literal["good", "finding", "skipped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The outcome of one named check."""

    check: str
    verdict: Verdict
    count: int = 0
    """How many of `total` are wrong (or, for padding, are padding)."""
    total: int = 0
    """How many were looked at."""
    unit: str = "routes"
    """What is counted: "routes" (one token in one layer), "rows" (one token), "layers", "samples", "recordings"."""
    first_place: str = ""
    """Where the first wrong one stands: sample, token, layer."""
    detail: str = ""
    """Figures worth knowing, in words; also where nothing is wrong."""
    advice: str = ""
    """What to do; empty unless the verdict is `finding`."""
    rate_L: tuple[float, ...] = ()
    """Agreement by layer, for the check that compares two recordings."""

    @property
    def share(self) -> float:
        """Wrong part of what was looked at, 0 to 1."""
        return self.count / self.total if self.total else 0.0


@dataclass(slots=True)
class Tally:
    """A running count of wrong things, which remembers where the first one stood."""

    count: int = 0
    total: int = 0
    first_place: str = ""

    def add(self, count: int, total: int, place: Callable[[], str]) -> None:
        """Add `count` wrong ones of `total`; `place` is only called for the first wrong one."""
        if count and not self.count:
            self.first_place = place()
        self.count += count
        self.total += total


class Check:
    """One named check: looks at one reading after another, then gives its findings. Keeps only running counts."""

    name: ClassVar[str]
    unit: ClassVar[str] = "routes"
    advice: ClassVar[str]
    needs: ClassVar[str] = "rows"
    """What a dump must hold for this check, told where it is skipped."""

    def __init__(self, model: ModelShape) -> None:
        self.model = model
        self.tally = Tally()

    def look(self, reading: Reading) -> None:
        """Take in the next recording."""
        raise NotImplementedError

    def findings(self) -> tuple[Finding, ...]:
        """Judge what was seen."""
        return (
            judge(self.name, self.tally, unit=self.unit, advice=self.advice, detail=self.detail(), needs=self.needs),
        )

    def detail(self) -> str:
        """Figures worth knowing, in words."""
        return ""


def judge(check: str, tally: Tally, *, unit: str, advice: str, detail: str = "", needs: str = "rows") -> Finding:
    """Make a finding of a tally: any wrong one is a finding, nothing looked at is skipped."""
    verdict: Verdict = "finding" if tally.count else ("good" if tally.total else "skipped")
    return Finding(
        check=check,
        verdict=verdict,
        count=tally.count,
        total=tally.total,
        unit=unit,
        first_place=tally.first_place,
        detail=f"needs {needs}" if verdict == "skipped" else detail,
        advice=advice if verdict == "finding" else "",
    )

"""The doctor's checks of what spans the turns of a sample.

    missing-rows        every token but the last has a route in every layer, by one turn or another
    turns               turns agree on tokens and routes where they overlap, and follow each other
    versions-in-sample  one sample, one version of the weights
    versions-across     all samples of one version

Neighbouring recordings of one name are the turns of one sample. Knows one sample at a time, and of earlier ones only
their names. Does not know any wire form, and never raises on what a dump holds.

Invariants (asserted by the tests):
1. Breaking one thing in good data fires that thing's check and no other.
2. A sample of one turn is skipped by `turns`; a dump that names no version is skipped by the last two.
3. What these and the other checks find good can be interpreted: `interpret.py` raises on nothing the doctor passed.
"""

from collections import Counter

import numpy as np

from equipoise.core import ModelShape
from equipoise.routes.doctor.finding import Check, Finding, Tally, judge
from equipoise.routes.doctor.reading import Reading


class MissingRows(Check):
    """Tokens without a route: -1 rows, and tokens before a start offset that no earlier turn covers."""

    name = "missing-rows"
    advice = (
        "these tokens will be routed natively and the plan cannot foresee them: record prompts and every turn, "
        "or accept the share as uncovered"
    )

    def __init__(self, model: ModelShape) -> None:
        super().__init__(model)
        self.sample = -1
        self.covered = 0

    def look(self, reading: Reading) -> None:
        recording = reading.recording
        if reading.sample != self.sample:
            self.sample, self.covered = reading.sample, 0
        gap = max(0, recording.start - self.covered)
        layers = len(reading.numbers_L)
        before = f"{reading.title}, tokens {self.covered} to {recording.start - 1} have no row"
        self.tally.add(gap * layers, gap * layers, lambda: before)
        self.covered = max(self.covered, recording.start + reading.num_rows)

        missing_TL = reading.missing_TL[: reading.num_judged]
        self.tally.add(int(missing_TL.sum()), missing_TL.size, lambda: reading.place(missing_TL))


class Turns(Check):
    """Turns of one sample tell the same story."""

    name = "turns"
    unit = "recordings"
    needs = "samples of several turns"
    advice = (
        "turns of a sample contradict each other: give re-generated samples their own name, record later turns from "
        "their own start, and keep the turns of a sample together"
    )

    def __init__(self, model: ModelShape) -> None:
        super().__init__(model)
        self.turns: list[Reading] = []
        self.names: set[str] = set()

    def look(self, reading: Reading) -> None:
        if self.turns and self.turns[-1].sample != reading.sample:
            self.names.add(self.turns[-1].recording.name)
            self.turns = []
        wrong = self._apart(reading) or next(filter(None, (_contradict(t, reading) for t in self.turns)), "")
        has_company = bool(self.turns) or reading.recording.name in self.names
        self.turns.append(reading)
        self.tally.add(int(bool(wrong)), int(has_company or bool(wrong)), lambda: f"{reading.title}: {wrong}")

    def _apart(self, reading: Reading) -> str:
        start, has_padding = reading.recording.start, bool(len(reading.padding_TLK))
        if not self.turns and start and reading.recording.name in self.names:
            return f"a turn from token {start} stands apart from its earlier turns"
        if has_padding and (self.turns or start):
            return "padding rows in a sample of several turns or with a start offset"
        return ""


def _contradict(early: Reading, late: Reading) -> str:
    """In which token two turns of one sample contradict each other, in words; empty where they do not."""
    a, b = early.recording.tokens, late.recording.tokens
    if a is not None and b is not None:
        common = min(len(a), len(b))
        differ = np.flatnonzero(np.asarray(a[:common]) != np.asarray(b[:common]))
        if len(differ):
            return f"two turns disagree on the id of token {int(differ[0])}"
    start = max(early.recording.start, late.recording.start)
    stop = min(turn.recording.start + turn.num_rows for turn in (early, late))
    if stop <= start or early.ids_KTL.shape[::2] != late.ids_KTL.shape[::2]:
        return ""
    spans = [slice(start - t.recording.start, stop - t.recording.start) for t in (early, late)]
    both_TL = early.routed_TL[spans[0]] & late.routed_TL[spans[1]]
    sets = [np.sort(t.ids_KTL[:, span], axis=0) for t, span in zip((early, late), spans, strict=True)]
    bad_T = (both_TL & (sets[0] != sets[1]).any(axis=0)).any(axis=1)
    return f"two turns give token {start + int(np.flatnonzero(bad_T)[0])} different routes" if bad_T.any() else ""


class Versions(Check):
    """Weight versions, within samples and across them. Samples mixed inside are not counted again across."""

    needs = "weight versions"
    advice_in = (
        "a sample was made by two versions of the weights: its routes differ from any one policy's, mask or drop it"
    )
    advice_across = "samples of several weight versions are mixed: expect lower agreement, or keep one version per step"

    def __init__(self, model: ModelShape) -> None:
        super().__init__(model)
        self.sample = -1
        self.title = ""
        self.seen: set[str] = set()
        self.mixed = Tally()
        self.by_version: Counter[str] = Counter()
        self.first_other = ""

    def look(self, reading: Reading) -> None:
        if reading.sample != self.sample:
            self._close()
            self.sample, self.title = reading.sample, reading.title
        # A dump that knows a sample's versions but not their rows (slime) joins them by commas.
        self.seen.update(v for v in reading.recording.weight_version.split(",") if v)

    def _close(self) -> None:
        """Take in the sample that has just ended."""
        versions, self.seen = sorted(self.seen), set()
        if not versions:
            return
        self.mixed.add(int(len(versions) > 1), 1, lambda: f"{self.title}: versions {', '.join(versions)}")
        if len(versions) == 1:
            if self.by_version and versions[0] not in self.by_version and not self.first_other:
                self.first_other = f"{self.title}: version {versions[0]}, before it {next(iter(self.by_version))}"
            self.by_version[versions[0]] += 1

    def findings(self) -> tuple[Finding, ...]:
        self._close()
        total = sum(self.by_version.values())
        other = total - max(self.by_version.values(), default=0)
        across = Tally(count=other, total=total, first_place=self.first_other)
        listed = ", ".join(f"{version}: {count}" for version, count in self.by_version.most_common(4))
        return (
            judge("versions-in-sample", self.mixed, unit="samples", advice=self.advice_in, needs=self.needs),
            judge(
                "versions-across", across, unit="samples", advice=self.advice_across, detail=listed, needs=self.needs
            ),
        )

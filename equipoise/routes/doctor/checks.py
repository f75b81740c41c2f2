"""The doctor's checks of single recordings: rows, layers, padding, ids, turns and weight versions.

    rows-tokens         rows end at the last token (T) or one before it (T-1)
    layer-map           the layer axis is all hidden layers, all MoE layers, or names the MoE layers one by one
    top-k               as many ids per route as the model chooses experts
    zero-layers         no MoE layer is zero throughout: such captures were not merged across pipeline stages
    dense-layers        dense layers hold nothing (0 or -1)
    equal-rows          no route has k equal ids: those are fillers that were never recorded
    padding             padding rows are not all sent to the same few experts
    distinct-ids        k different experts per route
    id-range            every id is one of the model's experts
    dtype-overflow      no id was wrapped by a dtype too small for the model
    physical-ids        ids are logical experts, not the engine's physical slots (redundant experts included)
    missing-rows        every token but the last has a route in every layer, in one turn or another
    turns               turns agree on tokens and routes where they overlap, and follow each other
    versions-in-sample  one sample, one version of the weights
    versions-across     all samples of one version

No check raises on the content of a dump. Padding rows concern `padding` only, except for ids that do not exist, which
are `id-range`'s. A filler in the row of the last token, which has no route, is correct.
"""

from collections import Counter
from dataclasses import replace
from itertools import combinations

import numpy as np

from equipoise.core import ModelShape
from equipoise.routes.doctor.reading import Check, CheckCounts, Finding, Reading, judge

PADDING_SHARE = 0.5
"""Padding is concentrated if one expert of a layer takes more than this share of the padding tokens."""
_MIN_PADDING = 8
"""Fewer padding tokens can neither be concentrated nor matter."""
_INT8_WRAP = 256
_FOLD_IDS_PER_EXPERT = 64
"""Ids per expert that must have been seen before "none above 255" means that ids were folded into a byte."""
_PHYSICAL_MIN = 16
_PHYSICAL_SHARE = 0.005
"""Redundant experts take part in at least this share of the routes; stray garbage rarely does."""


class RowsTokens(Check):
    """The last row is that of the last token (T) or of the one before (T-1)."""

    name = "rows-tokens"
    unit = "recordings"
    needs = "token ids or token counts"
    advice = (
        "rows do not reach the end of the sample, or pass it: look for a lost turn, a wrong start offset, "
        "a dropped or doubled row where routes and tokens are joined"
    )

    def __init__(self, model: ModelShape) -> None:
        super().__init__(model)
        self.short_by: Counter[int] = Counter()

    def look(self, reading: Reading) -> None:
        recording = reading.recording
        tokens = len(recording.tokens) if recording.tokens is not None else recording.num_tokens
        if tokens is None:
            return
        named = tokens if recording.num_tokens is None else recording.num_tokens
        stop = recording.start + reading.num_rows
        self.short_by[tokens - stop] += 1
        wrong = tokens - stop not in (0, 1) or named != tokens
        figures = f"{reading.num_rows} rows from token {recording.start} on, {named} tokens"
        if named != tokens:
            figures += f", {tokens} token ids"
        self.counts.add(int(wrong), 1, lambda: f"{reading.title}: {figures}")

    def detail(self) -> str:
        return f"T rows in {self.short_by[0]} recordings, T-1 in {self.short_by[1]}" if self.counts.total else ""


class LayerAxis(Check):
    """The layer axis is all decoder layers, the MoE layers, or numbers that name every MoE layer."""

    name = "layer-map"
    unit = "recordings"
    advice = (
        "layers cannot be mapped to the model's: check --model, merge the captures of all pipeline stages, "
        "and leave MTP layers out"
    )

    def __init__(self, model: ModelShape) -> None:
        super().__init__(model)
        self.axis: tuple[int, tuple[int, ...] | None] | None = None

    def look(self, reading: Reading) -> None:
        axis = (reading.recording.rows.shape[1], reading.recording.layer_numbers)
        absent = sorted(set(self.model.layer_numbers) - set(reading.numbers_L))
        wrong = reading.unmapped
        if not wrong and absent:
            wrong = f"{reading.title}: MoE layer {absent[0]} is absent, {len(absent)} of {self.model.layers} are"
        elif not wrong:
            self.axis = self.axis or axis
            wrong = "" if axis == self.axis else f"{reading.title}: {axis[0]} layers, unlike the first recording's axis"
        self.counts.add(int(bool(wrong)), 1, lambda: wrong)

    def detail(self) -> str:
        if self.axis is None:
            return ""
        named = ", named" if self.axis[1] else ""
        return f"{self.axis[0]} layers on the wire{named}; the model has {self.model.layers} MoE layers"


class TopK(Check):
    """As many ids per route as the model chooses experts."""

    name = "top-k"
    unit = "recordings"
    advice = "check --model; drop the columns of fused shared experts before writing routes"

    def look(self, reading: Reading) -> None:
        columns = reading.recording.rows.shape[2]
        wrong = columns != self.model.top_k
        self.counts.add(
            int(wrong), 1, lambda: f"{reading.title}: {columns} ids per route, top-{self.model.top_k} model"
        )


class ZeroLayers(Check):
    """MoE layers that are zero throughout a recording."""

    name = "zero-layers"
    unit = "layers"
    advice = (
        "routes of these layers were never captured: merge the captures of all pipeline stages, or upgrade the engine"
    )

    def look(self, reading: Reading) -> None:
        dead = np.flatnonzero(reading.dead_L).tolist()
        layers = [reading.numbers_L[i] for i in dead]
        self.counts.add(len(dead), len(reading.dead_L), lambda: f"{reading.title}, layers {layers}")


class DenseLayers(Check):
    """Dense layers on the wire hold nothing."""

    name = "dense-layers"
    unit = "layers"
    needs = "dense layers on the wire"
    advice = "ids in layers without experts: the layer axis is shifted, or --model names the wrong dense layers"

    def look(self, reading: Reading) -> None:
        dense_TLK = reading.dense_TLK
        # Two tests, so that unsigned ids are never compared with -1.
        filled_TLK = dense_TLK != 0
        if dense_TLK.dtype.kind == "i":
            filled_TLK &= dense_TLK != -1
        filled = np.flatnonzero(filled_TLK.any(axis=(0, 2))).tolist()
        layers = [reading.dense_numbers[i] for i in filled]
        self.counts.add(len(filled), dense_TLK.shape[1], lambda: f"{reading.title}, layers {layers}")


class EqualRows(Check):
    """Routes of k equal ids."""

    name = "equal-rows"
    advice = "fillers in place of routes (0 is a valid expert): write -1 for rows that were not recorded"

    def look(self, reading: Reading) -> None:
        if len(reading.ids_KTL) > 1:
            self.counts.add_routes(reading.equal_TL[: reading.num_judged], reading)


class Padding(Check):
    """How many rows are padding, and which experts they are sent to."""

    name = "padding"
    unit = "rows"
    advice = (
        "padding is dispatched too, here to the same few experts and so to one rank: pack tighter, "
        "or fill padding with distinct ids that run through all experts"
    )

    def __init__(self, model: ModelShape) -> None:
        super().__init__(model)
        self.sent: dict[int, np.ndarray] = {}

    def look(self, reading: Reading) -> None:
        padding = reading.padding_TLK
        self.counts.add(len(padding), len(padding) + reading.num_rows, lambda: reading.title)
        for layer, number in enumerate(reading.numbers_L if len(padding) else ()):
            ids_TK = np.sort(padding[:, layer], axis=1)
            # A token that names an expert twice is still sent there once.
            first = np.diff(ids_TK, axis=1, prepend=ids_TK[:, :1]) != 0
            first[:, :1] = True
            ids = ids_TK[first & (ids_TK >= 0) & (ids_TK < self.model.experts)]
            count_E = np.bincount(ids.astype(np.int64), minlength=self.model.experts)
            self.sent[number] = self.sent.get(number, 0) + count_E

    @property
    def busiest_share(self) -> float:
        """Share of the padding tokens that the busiest expert takes, mean over layers."""
        if not self.sent or not self.counts.count:
            return 0.0
        return float(np.mean([count_E.max() for count_E in self.sent.values()])) / self.counts.count

    def findings(self) -> tuple[Finding, ...]:
        even = self.model.top_k / self.model.experts
        limit = max(PADDING_SHARE, min(1.0, 2 * even))
        concentrated = self.counts.count >= _MIN_PADDING and self.busiest_share > limit
        (found,) = super().findings()
        if concentrated or found.verdict == "skipped":
            return (found,)
        # Padding alone is not a fault; its share stays in the table.
        return (replace(found, verdict="good", first_place="", advice=""),)

    def detail(self) -> str:
        if not self.sent:
            return ""
        total_E = sum(self.sent.values(), np.zeros(self.model.experts, dtype=np.int64))
        top = [f"{e}: {int(total_E[e])}" for e in np.argsort(-total_E, kind="stable")[:4].tolist() if total_E[e]]
        return f"busiest expert of a layer takes {self.busiest_share:.0%} of padding; rows by expert {', '.join(top)}"


class DistinctIds(Check):
    """A route names k different experts."""

    name = "distinct-ids"
    advice = (
        "duplicates collapse in a multi-hot routing map and break row counts: look for ids that were cast, clipped, "
        "or mapped from physical to logical twice"
    )

    def look(self, reading: Reading) -> None:
        ids_KTL = reading.ids_KTL
        twice_TL = np.zeros(ids_KTL.shape[1:], dtype=bool)
        for a, b in combinations(range(len(ids_KTL)), 2):
            twice_TL |= (ids_KTL[a] == ids_KTL[b]) & (ids_KTL[a] >= 0)
        twice_TL &= reading.routed_TL
        self.counts.add_routes(twice_TL, reading)


class IdCauses(Check):
    """Ids outside the model's experts, each attributed to exactly one cause.

    1. wrapped: negative, and the model has more than 128 experts, so that an int8 turned 128..255 into -128..-1; or the
       dtype on the wire cannot hold the last expert; or more than 256 experts and, in many ids, not one above 255.
    2. physical: from `experts` to twice that, in most layers and not rare, as slots of redundant experts are.
    3. out of range: every other one.
    """

    advice_range = "check --model; look for uninitialised buffers and for routes of another model"
    advice_overflow = "write ids in a dtype that holds every expert (uint8 up to 256, int8 only up to 128, else int16)"
    advice_physical = (
        "the engine's expert balancer renumbered experts: record ids before its logical-to-physical map, "
        "or upgrade (vLLM and SGLang capture logical ids)"
    )

    def __init__(self, model: ModelShape) -> None:
        super().__init__(model)
        self.wrapped = CheckCounts()
        self.above = CheckCounts()
        self.wild = CheckCounts()
        self.num_ids = 0
        self.top_id = -1
        self.layers: set[int] = set()
        self.above_layers: set[int] = set()
        self.first_title = ""

    def look(self, reading: Reading) -> None:
        # Padding rows are dispatched as recorded, so their ids must exist too; -1 leaves them to the router.
        padding = reading.padding_TLK
        stray_TL = ((padding < -1) | (padding >= self.model.experts)).any(axis=2)
        count = int(stray_TL.sum())
        self.wild.add(count, count, lambda: f"{reading.title}, padding row {int(np.argwhere(stray_TL)[0][0])}")
        ids_KTL, experts = reading.ids_KTL, self.model.experts
        self.layers.update(reading.numbers_L)
        self.num_ids += ids_KTL.size
        if not ids_KTL.size:
            return
        self.first_title = self.first_title or reading.title
        low, high = int(ids_KTL.min()), int(ids_KTL.max())
        self.top_id = max(self.top_id, high)
        if np.iinfo(ids_KTL.dtype).max < experts - 1:
            place = f"{reading.title}: {ids_KTL.dtype} on the wire for {experts} experts"
            self.wrapped.add(reading.num_routes, reading.num_routes, lambda: place)
        elif low >= 0 and high < experts:
            for counts in (self.wrapped, self.above, self.wild):
                counts.total += reading.num_routes
        else:
            self._attribute(reading)

    def _attribute(self, reading: Reading) -> None:
        """Attribute each route with a stray id to one cause."""
        ids_KTL, experts = reading.ids_KTL.astype(np.int64), self.model.experts
        routed_TL = reading.routed_TL
        wraps_KTL = (ids_KTL < 0) & (ids_KTL + _INT8_WRAP >= 128) & (ids_KTL + _INT8_WRAP < experts)
        above_KTL = (ids_KTL >= experts) & (ids_KTL < 2 * experts)
        wild_KTL = ((ids_KTL < 0) & ~wraps_KTL) | (ids_KTL >= 2 * experts)
        for counts, bad_KTL in ((self.wrapped, wraps_KTL), (self.wild, wild_KTL), (self.above, above_KTL)):
            bad_TL = bad_KTL.any(axis=0) & routed_TL
            counts.add_routes(bad_TL, reading)
            # The first cause keeps the route: none is counted twice.
            routed_TL &= ~bad_TL
        hit = np.flatnonzero(bad_TL.any(axis=0)).tolist()
        self.above_layers.update(reading.numbers_L[i] for i in hit)

    def findings(self) -> tuple[Finding, ...]:
        experts = self.model.experts
        stray, physical, wrapped = self.wild, CheckCounts(total=self.above.total), self.wrapped
        is_wide = 2 * len(self.above_layers) > len(self.layers)
        if is_wide and self.above.count >= max(_PHYSICAL_MIN, _PHYSICAL_SHARE * self.above.total):
            physical = self.above
        else:
            place = self.wild.first_place or self.above.first_place
            stray = CheckCounts(self.wild.count + self.above.count, self.wild.total, place)
        is_folded = experts > _INT8_WRAP > self.top_id and self.num_ids >= _FOLD_IDS_PER_EXPERT * experts
        if is_folded and not wrapped.count:
            place = f"{self.first_title}: no id above {self.top_id} in {self.num_ids} ids of {experts} experts"
            wrapped = CheckCounts(wrapped.total, wrapped.total, place)
        limits = f"ids up to {self.top_id}, experts 0..{experts - 1}"
        redundant = f"ids up to {self.top_id}: {experts} experts and {self.top_id + 1 - experts} more"
        return (
            judge("id-range", stray, unit=self.unit, advice=self.advice_range, detail=limits),
            judge("dtype-overflow", wrapped, unit=self.unit, advice=self.advice_overflow),
            judge(
                "physical-ids",
                physical,
                unit=self.unit,
                advice=self.advice_physical,
                detail=redundant if physical.count else "",
            ),
        )


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
        self.counts.add(gap * layers, gap * layers, lambda: before)
        self.covered = max(self.covered, recording.start + reading.num_rows)
        self.counts.add_routes(reading.missing_TL[: reading.num_judged], reading)


class TurnConflicts(Check):
    """Turns of one sample agree where they overlap, and follow each other."""

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
        start, is_known = reading.recording.start, reading.recording.name in self.names
        if not self.turns and start and is_known:
            wrong = f"a turn from token {start} does not follow its earlier turns"
        elif len(reading.padding_TLK) and (self.turns or start):
            wrong = "padding rows in a sample of several turns or with a start offset"
        else:
            wrong = next(filter(None, (_contradiction(turn, reading) for turn in self.turns)), "")
        has_others = bool(self.turns) or is_known
        self.turns.append(reading)
        self.counts.add(int(bool(wrong)), int(has_others or bool(wrong)), lambda: f"{reading.title}: {wrong}")


def _contradiction(early: Reading, late: Reading) -> str:
    """Say at which token two turns of one sample contradict each other; empty if they do not."""
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
    """Weight versions, within samples and across them. Samples of several versions are not counted again across."""

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
        self.mixed = CheckCounts()
        self.by_version: Counter[str] = Counter()
        self.first_other = ""

    def look(self, reading: Reading) -> None:
        if reading.sample != self.sample:
            self._close()
            self.sample, self.title = reading.sample, reading.title
        # A dump that has a sample's versions but not their rows (slime) joins them by commas.
        self.seen.update(v for v in reading.recording.weight_version.split(",") if v)

    def _close(self) -> None:
        """Count the sample that has just ended."""
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
        across = CheckCounts(count=other, total=total, first_place=self.first_other)
        listed = ", ".join(f"{version}: {count}" for version, count in self.by_version.most_common(4))
        return (
            judge("versions-in-sample", self.mixed, unit="samples", advice=self.advice_in, needs=self.needs),
            judge(
                "versions-across", across, unit="samples", advice=self.advice_across, detail=listed, needs=self.needs
            ),
        )

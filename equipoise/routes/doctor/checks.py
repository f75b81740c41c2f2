"""The doctor's checks of rows, layers and padding.

    rows-tokens   rows end at the last token (T) or one before it (T-1)
    layer-map     the layer axis is all hidden layers, all MoE layers, or names the MoE layers one by one
    top-k         as many ids per route as the model chooses experts
    zero-layers   no MoE layer is zero throughout: such captures were not merged across pipeline stages
    dense-layers  dense layers on the wire hold nothing (0 or -1)
    equal-rows    no route has k equal ids: those are fillers that were never recorded
    padding       padding rows are not all sent to the same few experts

Checks across the turns of a sample are in `turns.py`, of the ids themselves in `ids.py`, of repeated rows in
`stale.py`, of two recordings in `agreement.py`.
Knows what is wrong with a dump. Does not know any wire form, and never raises on what a dump holds.

Invariants (asserted by the tests):
1. Breaking one thing in good data fires that thing's check and no other.
2. Padding rows are seen by `padding` only, but for stray ids, which are `id-range`'s.
3. A filler in the row of the last token, which has no route, is nothing wrong.
4. A dump that lacks what a check needs (token counts, dense layers) is skipped by it.
"""

from collections import Counter

import numpy as np

from equipoise.core import ModelShape
from equipoise.routes.doctor.finding import Check, Finding, judge
from equipoise.routes.doctor.reading import Reading

PADDING_SHARE = 0.5
"""Padding is concentrated where one expert of a layer takes more than this share of the padding tokens."""
_MIN_PADDING = 8
"""Fewer padding tokens can neither be concentrated nor hurt."""


class RowsTokens(Check):
    """Rows against tokens: the last row is the last token's (T) or the one before (T-1)."""

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
        words = f"{reading.num_rows} rows from token {recording.start} on, {named} tokens"
        if named != tokens:
            words += f", {tokens} token ids"
        self.tally.add(int(wrong), 1, lambda: f"{reading.title}: {words}")

    def detail(self) -> str:
        return f"T rows in {self.short_by[0]} recordings, T-1 in {self.short_by[1]}" if self.tally.total else ""


class LayerAxis(Check):
    """The wire's layer axis: all decoder layers, the MoE layers, or numbers that name every MoE layer."""

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
        wrong = reading.unmapped or self._incomplete(reading) or self._unlike_others(reading)
        self.tally.add(int(bool(wrong)), 1, lambda: wrong)

    def _incomplete(self, reading: Reading) -> str:
        absent = sorted(set(self.model.layer_numbers) - set(reading.numbers_L))
        if not absent:
            return ""
        return f"{reading.title}: MoE layer {absent[0]} is absent, {len(absent)} of {self.model.layers} are"

    def _unlike_others(self, reading: Reading) -> str:
        axis = (reading.recording.rows.shape[1], reading.recording.layer_numbers)
        self.axis = self.axis or axis
        return "" if axis == self.axis else f"{reading.title}: {axis[0]} layers, unlike the first recording's axis"

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
        self.tally.add(int(wrong), 1, lambda: f"{reading.title}: {columns} ids per route, top-{self.model.top_k} model")


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
        self.tally.add(len(dead), len(reading.dead_L), lambda: f"{reading.title}, layers {layers}")


class DenseLayers(Check):
    """Dense layers on the wire hold nothing."""

    name = "dense-layers"
    unit = "layers"
    needs = "dense layers on the wire"
    advice = (
        "ids stand where the model has no experts: the layer axis is shifted, or --model names the wrong dense layers"
    )

    def look(self, reading: Reading) -> None:
        dense_TLK = reading.dense_TLK
        # Written as two tests so that unsigned ids are never compared with -1.
        filled_TLK = dense_TLK != 0
        if dense_TLK.dtype.kind == "i":
            filled_TLK &= dense_TLK != -1
        filled = np.flatnonzero(filled_TLK.any(axis=(0, 2))).tolist()
        layers = [reading.dense_numbers[i] for i in filled]
        self.tally.add(len(filled), dense_TLK.shape[1], lambda: f"{reading.title}, layers {layers}")


class EqualRows(Check):
    """Routes of k equal ids."""

    name = "equal-rows"
    advice = "fillers stand where routes should be (0 is a valid expert): write -1 for rows that were not recorded"

    def look(self, reading: Reading) -> None:
        if len(reading.ids_KTL) > 1:
            bad_TL = reading.equal_TL[: reading.num_judged]
            self.tally.add(int(bad_TL.sum()), bad_TL.size, lambda: reading.place(bad_TL))


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
        self.tally.add(len(padding), len(padding) + reading.num_rows, lambda: reading.title)
        for layer, number in enumerate(reading.numbers_L if len(padding) else ()):
            ids_TK = np.sort(padding[:, layer], axis=1)
            # A token that names an expert twice is still one token sent there.
            first = np.diff(ids_TK, axis=1, prepend=ids_TK[:, :1]) != 0
            first[:, :1] = True
            ids = ids_TK[first & (ids_TK >= 0) & (ids_TK < self.model.experts)]
            count_E = np.bincount(ids.astype(np.int64), minlength=self.model.experts)
            self.sent[number] = self.sent.get(number, 0) + count_E

    @property
    def busiest_share(self) -> float:
        """Share of the padding tokens that the busiest expert takes, mean over layers."""
        if not self.sent or not self.tally.count:
            return 0.0
        return float(np.mean([count_E.max() for count_E in self.sent.values()])) / self.tally.count

    def findings(self) -> tuple[Finding, ...]:
        even = self.model.top_k / self.model.experts
        limit = max(PADDING_SHARE, min(1.0, 2 * even))
        concentrated = self.tally.count >= _MIN_PADDING and self.busiest_share > limit
        verdict = judge(self.name, self.tally, unit=self.unit, advice=self.advice, detail=self.detail())
        if concentrated or verdict.verdict == "skipped":
            return (verdict,)
        # Padding as such is nothing wrong; its share stays in the table.
        return (
            Finding(
                check=self.name,
                verdict="good",
                count=self.tally.count,
                total=self.tally.total,
                unit=self.unit,
                detail=self.detail(),
            ),
        )

    def detail(self) -> str:
        if not self.sent:
            return ""
        total_E = sum(self.sent.values(), np.zeros(self.model.experts, dtype=np.int64))
        top = [f"{e}: {int(total_E[e])}" for e in np.argsort(-total_E, kind="stable")[:4].tolist() if total_E[e]]
        return f"busiest expert of a layer takes {self.busiest_share:.0%} of padding; rows by expert {', '.join(top)}"

"""Turn recordings into routes: the one place that decides what recorded rows mean.

For each sample:
1. Take the MoE layers out of the wire's layer axis, by global layer number.
2. Decide which rows are unknown, and check every id against the model.
3. Apply the last-row policy, and join the turns of the sample at their start offsets.
4. Compare the number of rows with the number of tokens.

A row with a -1, and a row whose k > 1 ids are all equal, is unknown in that layer; no row gets a default expert.
Padding rows are dispatched as recorded, so for them only -1 means unknown.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, groupby
from pathlib import Path
from typing import Literal

import numpy as np

from equipoise.core import ModelShape, Routes, RoutesError, SampleRoutes, Segment
from equipoise.core.routes import id_dtype
from equipoise.core.value import Value, frozen_array, require_choice, require_int
from equipoise.routes.source import Source


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Recording(Value):
    """One sample, or one turn of a sample, as decoded: nothing is mapped or checked.

    Turns of a sample share its name and follow each other. The doctor reads recordings, because mapping hides faults.
    """

    name: str
    """Id of the sample in the dump, or its place: "line 3", "choice 0 of line 3", "row 7"."""
    rows: np.ndarray
    """[rows, layers on the wire, K] integers exactly as decoded, any integer dtype."""
    start: int = 0
    """Token of the sample that the first row belongs to (`routed_experts_prompt_start`, `routed_experts_start_len`)."""
    num_tokens: int | None = None
    """Tokens of the sample up to the end of this turn, prompt and response; None if the dump does not say."""
    tokens: np.ndarray | None = None
    """Token ids of the sample up to the end of this turn, if the dump has them."""
    num_prompt: int | None = None
    """Tokens of the sample before the first one that this turn generated; None if the dump does not say."""
    padding: np.ndarray | None = None
    """[rows] bool, True for rows that were forwarded but belong to no token."""
    layer_numbers: tuple[int, ...] | None = None
    """Global layer numbers of the wire's layer axis if the dump names them; None: the length determines them."""
    weight_version: str = ""
    """The engine's name for the weights that made these rows; empty if it is not recorded."""

    def __post_init__(self) -> None:
        rows = np.asarray(self.rows)
        if rows.ndim != 3 or rows.dtype.kind not in "iu":
            raise RoutesError(
                f"sample {self.name!r}: routes must be integers of shape [rows, layers, top-k], "
                f"got {rows.dtype} of shape {rows.shape}"
            )
        object.__setattr__(self, "rows", frozen_array(rows))
        require_int(f"sample {self.name!r}: start", self.start, low=0, error=RoutesError)
        if self.num_tokens is not None:
            require_int(f"sample {self.name!r}: num_tokens", self.num_tokens, low=0, error=RoutesError)
        if self.padding is not None and (self.padding.dtype != np.bool_ or self.padding.shape != rows.shape[:1]):
            raise RoutesError(f"sample {self.name!r}: padding must be bool of shape {rows.shape[:1]}")
        if self.layer_numbers is not None and len(self.layer_numbers) != rows.shape[1]:
            raise RoutesError(
                f"sample {self.name!r}: {len(self.layer_numbers)} layer numbers for {rows.shape[1]} layers on the wire"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """One format in which an engine or trainer records routes.

    To add one, write a module with a `matches` and a `read` function whose docstring is the format's spec, make a
    `Format` of them, and add it to `FORMATS` in `registry.py`, to `docs/formats.md` and to `tests/routes/writers.py`.
    """

    name: str
    """What users write after `--format`."""
    summary: str
    """One line for `--help` and for errors that list candidates."""
    suffixes: tuple[str, ...]
    """File suffixes of this format; the first is the one that is written."""
    matches: Callable[[Source], bool]
    """Whether the content (never the file name) can have this format; must not raise on foreign content."""
    read: Callable[[Source, ModelShape], Iterator[Recording]]
    """Decode one recording after another; raises RoutesError only."""
    write: Callable[[Routes, Path], None] | None = None
    """Write routes, so that reading them back gives the same routes; None: the format is only read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerMap:
    """From the wire's layer axis to global layer numbers. Hash-routed layers are kept, MTP layers never recorded."""

    numbers: tuple[int, ...]
    """Global numbers of the MoE layers on the wire, ascending: the L axis of the routes."""
    wire_L: tuple[int, ...]
    """Index of each of them on the wire."""
    dense: tuple[tuple[int, int], ...] = ()
    """(index on the wire, global number) of the dense layers; they hold no routes."""


def map_recording(recording: Recording, model: ModelShape) -> LayerMap:
    """Map the layer axis of one recording, by its own numbers or by its length; errors name its sample."""
    try:
        if recording.layer_numbers is None:
            return map_layers(recording.rows.shape[1], model)
        return map_named_layers(recording.layer_numbers, model)
    except RoutesError as error:
        raise RoutesError(f"sample {recording.name!r}: {error}") from error


def map_layers(num_wire_layers: int, model: ModelShape) -> LayerMap:
    """Map an unnamed layer axis by its length: all decoder layers, or the MoE layers in order."""
    if num_wire_layers == model.hidden_layers:
        return map_named_layers(range(num_wire_layers), model)
    if num_wire_layers == model.layers:
        return map_named_layers(model.layer_numbers, model)
    hint = "is it another model's recording? A capture of some layers, such as one pipeline stage's, must name them"
    if model.mtp_layers and num_wire_layers - model.mtp_layers in (model.hidden_layers, model.layers):
        hint = f"are the {model.mtp_layers} MTP layers in it? They are never part of recorded routes: cut them off"
    raise RoutesError(
        f"{num_wire_layers} layers on the wire; {model.name!r} has {model.hidden_layers} decoder layers, "
        f"{model.layers} of them MoE; {hint}"
    )


def map_named_layers(numbers: Sequence[int], model: ModelShape) -> LayerMap:
    """Map a layer axis whose global layer numbers are known: any of the model's layers, in any order."""
    strangers = sorted(n for n in set(numbers) if not 0 <= n < model.hidden_layers)
    if strangers or len(set(numbers)) != len(numbers):
        wrong = f"layer {strangers[0]}" if strangers else "a layer twice"
        raise RoutesError(
            f"the recording names {wrong}; {model.name!r} has decoder layers 0..{model.hidden_layers - 1}"
        )
    moe = set(model.layer_numbers)
    kept = sorted((number, place) for place, number in enumerate(numbers) if number in moe)
    if not kept:
        raise RoutesError(f"the recording names no MoE layer of {model.name!r}, only {sorted(numbers)}")
    return LayerMap(
        numbers=tuple(number for number, _ in kept),
        wire_L=tuple(place for _, place in kept),
        dense=tuple((place, number) for place, number in enumerate(numbers) if number not in moe),
    )


LastRow = Literal["recorded", "placeholder"]
"""What the row of a sample's last token is, if it has one: `recorded` a route like any other; `placeholder` filler that
some trainers append to make rows and tokens equal in number, dropped on reading."""

MAX_GAP_BYTES = 2**30
"""Most bytes of unknown rows before one turn; a million tokens of 48 layers of top-8 take 0.4 of it."""


@dataclass(frozen=True, slots=True)
class SampleStream(Iterator[SampleRoutes]):
    """An iterator over samples, and the layers they all have."""

    samples: Iterator[SampleRoutes]
    layer_numbers: tuple[int, ...]
    """Global layer number of each entry of the L axis."""

    def __next__(self) -> SampleRoutes:
        return next(self.samples)


def interpret(
    recordings: Iterable[Recording], *, model: ModelShape, last_row: LastRow = "recorded", allow_short: bool = False
) -> SampleStream:
    """Turn recordings into samples of routes, one at a time.

    Args:
        recordings: as a reader yields them
        model: whose layers and experts they are
        last_row: what the row of a sample's last token is
        allow_short: accept samples with fewer rows than tokens - 1; their last tokens stay without a route
    """
    require_choice("last_row", last_row, LastRow, error=RoutesError)
    stream = iter(recordings)
    first = next(stream, None)
    if first is None:
        return SampleStream(iter(()), model.layer_numbers)
    layer_map = map_recording(first, model)
    rules = _Rules(model=model, first=first, layer_map=layer_map, last_row=last_row, allow_short=allow_short)
    return SampleStream(_samples(chain([first], stream), rules), layer_map.numbers)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rules:
    """What holds for all recordings of one dump."""

    model: ModelShape
    first: Recording
    layer_map: LayerMap
    last_row: LastRow
    allow_short: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """Interpreted rows of one or more turns, for tokens `[0, T)`, with all masks present."""

    ids_TLK: np.ndarray
    known_TL: np.ndarray
    padding_T: np.ndarray
    segments: tuple[Segment, ...] = field(default=())


def _samples(recordings: Iterable[Recording], rules: _Rules) -> Iterator[SampleRoutes]:
    seen: set[str] = set()
    for name, group in groupby(recordings, key=lambda recording: recording.name):
        turns = list(group)
        if name in seen and turns[0].start > 0:
            raise RoutesError(f"sample {name!r}: a turn from token {turns[0].start} does not follow its earlier turns")
        seen.add(name)
        yield _sample(turns, rules)


def _sample(turns: list[Recording], rules: _Rules) -> SampleRoutes:
    name, layers = turns[0].name, len(rules.layer_map.numbers)
    rows = _Rows(
        ids_TLK=np.zeros((0, layers, rules.model.top_k), dtype=id_dtype(rules.model.experts)),
        known_TL=np.zeros((0, layers), dtype=bool),
        padding_T=np.zeros(0, dtype=bool),
    )
    tokens, num_tokens = None, 0
    for turn in turns:
        _check_axis(turn, rules)
        tokens = _extend_tokens(name, tokens, turn.tokens)
        num_tokens = _count_tokens(turn)
        rows = _append(name, rows, _interpret_turn(turn, rules), turn)
    _check_rows(name, len(rows.ids_TLK) - int(rows.padding_T.sum()), num_tokens, rules)
    return SampleRoutes(
        name=name,
        ids_TLK=rows.ids_TLK,
        num_tokens=num_tokens,
        known_TL=None if rows.known_TL.all() else rows.known_TL,
        padding_T=rows.padding_T if rows.padding_T.any() else None,
        segments=() if len(rows.segments) == 1 and not rows.segments[0].weight_version else rows.segments,
        tokens_T=tokens,
    )


def _check_axis(turn: Recording, rules: _Rules) -> None:
    """Compare layers and top-k of this turn with the dump's first recording and the model."""
    layers, top_k = turn.rows.shape[1:]
    if top_k != rules.model.top_k:
        raise RoutesError(
            f"sample {turn.name!r}: {top_k} ids per row; {rules.model.name!r} chooses {rules.model.top_k} experts"
        )
    first = rules.first
    if layers != first.rows.shape[1] or turn.layer_numbers != first.layer_numbers:
        raise RoutesError(
            f"sample {turn.name!r} has {layers} layers {turn.layer_numbers or ''}, sample {first.name!r} has "
            f"{first.rows.shape[1]} {first.layer_numbers or ''}; all samples of a dump must have the same layers"
        )


def _count_tokens(turn: Recording) -> int:
    """Count the tokens up to the end of this turn; one per row if the dump does not say."""
    if turn.num_tokens is not None:
        return turn.num_tokens
    if turn.tokens is not None:
        return len(turn.tokens)
    padding = 0 if turn.padding is None else int(turn.padding.sum())
    return turn.start + len(turn.rows) - padding


def _interpret_turn(turn: Recording, rules: _Rules) -> _Rows:
    """Interpret the rows of one turn alone."""
    name, layer_map, experts = turn.name, rules.layer_map, rules.model.experts
    rows = turn.rows
    padding_T = np.zeros(len(rows), dtype=bool) if turn.padding is None else turn.padding
    # Step 1: drop the placeholder of the last token, if rows reach that far.
    real = np.flatnonzero(~padding_T)
    if rules.last_row == "placeholder" and len(real) and turn.start + len(real) == _count_tokens(turn):
        rows, padding_T = np.delete(rows, real[-1], axis=0), np.delete(padding_T, real[-1])
    # Step 2: take the MoE layers; dense layers hold nothing but zeros, and -1 where a row is missing in every layer.
    real_rows = rows[~padding_T] if padding_T.any() else rows
    for place, number in layer_map.dense:
        bad = (real_rows[:, place] != 0) & (real_rows[:, place] != -1)
        if bad.any():
            row, column = (int(i) for i in np.argwhere(bad)[0])
            raise RoutesError(
                f"sample {name!r}: row {row} holds expert {int(real_rows[row, place, column])} in dense layer "
                f"{number}; is the layer axis shifted, or is this another model's recording?"
            )
    if layer_map.wire_L != tuple(range(rows.shape[1])):
        rows = rows[:, list(layer_map.wire_L)]
    # Step 3: refuse ids that the model does not have.
    if rows.size and (int(rows.max()) >= experts or int(rows.min()) < -1):
        row, layer, column = (int(i) for i in np.argwhere((rows >= experts) | (rows < -1))[0])
        raise RoutesError(
            f"sample {name!r}: token {turn.start + row}, layer {layer_map.numbers[layer]} holds expert "
            f"{int(rows[row, layer, column])}; {rules.model.name!r} has experts 0..{experts - 1}. "
            "Are these physical ids, or another model's?"
        )
    # Step 4: mark what is not a route.
    known_TL = np.ones(rows.shape[:2], dtype=bool)
    if rows.shape[2] > 1:
        # Two equal leading ids are rare in good data: compare all k only where they occur.
        suspect_at = np.nonzero(rows[:, :, 0] == rows[:, :, 1])
        suspect = rows[suspect_at]
        known_TL[suspect_at] = ~(suspect == suspect[:, :1]).all(axis=1)
    known_TL[padding_T] = True
    if rows.dtype.kind == "i":
        known_TL &= ~(rows < 0).any(axis=2)
    ids_TLK = rows if known_TL.all() else np.where(known_TL[:, :, None], rows, 0)
    return _Rows(ids_TLK=ids_TLK.astype(id_dtype(experts), copy=False), known_TL=known_TL, padding_T=padding_T)


def _append(name: str, rows: _Rows, more: _Rows, turn: Recording) -> _Rows:
    """Append a turn's rows: a gap stays unknown, an overlap must agree."""
    num_rows = len(rows.ids_TLK)
    num_tokens = num_rows - int(rows.padding_T.sum())
    if turn.start != num_tokens and (rows.padding_T.any() or more.padding_T.any()):
        raise RoutesError(
            f"sample {name!r}: a turn with padding rows begins at token {turn.start}, after {num_tokens} tokens; "
            "padding rows have no token, so such turns must follow each other exactly"
        )
    overlap = min(max(num_tokens - turn.start, 0), len(more.ids_TLK))
    if overlap:
        rows = _merge_overlap(name, rows, more, start=turn.start, overlap=overlap)
    gap = max(turn.start - num_tokens, 0)
    layers, top_k = rows.ids_TLK.shape[1:]
    needed = gap * (layers * (top_k * rows.ids_TLK.dtype.itemsize + 1) + 1)
    if needed > MAX_GAP_BYTES:
        raise RoutesError(
            f"sample {name!r}: {gap} tokens without a row precede a recording and take {needed / 2**30:.1f} GiB; "
            f"the limit is {MAX_GAP_BYTES / 2**30:g} GiB. Is its start offset right?"
        )
    edges = (num_rows, num_rows + gap, num_rows + gap + len(more.ids_TLK) - overlap)
    parts = (
        Segment(start=edges[0], stop=edges[1]),
        Segment(start=edges[1], stop=edges[2], weight_version=turn.weight_version),
    )
    segments = (*rows.segments, *(part for part in parts if part.stop > part.start))
    if not edges[1]:
        return replace(more, segments=segments)
    unknown_TLK = np.zeros((gap, layers, top_k), dtype=rows.ids_TLK.dtype)
    return _Rows(
        ids_TLK=np.concatenate([rows.ids_TLK, unknown_TLK, more.ids_TLK[overlap:]]),
        known_TL=np.concatenate([rows.known_TL, np.zeros((gap, layers), dtype=bool), more.known_TL[overlap:]]),
        padding_T=np.concatenate([rows.padding_T, np.zeros(gap, dtype=bool), more.padding_T[overlap:]]),
        segments=segments,
    )


def _merge_overlap(name: str, rows: _Rows, more: _Rows, *, start: int, overlap: int) -> _Rows:
    here, there = slice(start, start + overlap), slice(0, overlap)
    old, new = rows.ids_TLK[here], more.ids_TLK[there]
    both_TL = rows.known_TL[here] & more.known_TL[there]
    differ_TL = both_TL & (np.sort(old, axis=2) != np.sort(new, axis=2)).any(axis=2)
    if differ_TL.any():
        raise RoutesError(
            f"sample {name!r}: two turns give token {start + int(np.argwhere(differ_TL)[0][0])} different routes; "
            "record later turns from their own start, or give re-generated samples their own name"
        )
    ids_TLK, known_TL = rows.ids_TLK.copy(), rows.known_TL.copy()
    ids_TLK[here] = np.where(rows.known_TL[here][:, :, None], old, new)
    known_TL[here] |= more.known_TL[there]
    return replace(rows, ids_TLK=ids_TLK, known_TL=known_TL)


def _extend_tokens(name: str, tokens: np.ndarray | None, more: np.ndarray | None) -> np.ndarray | None:
    """Return the later turn's token ids, which must continue the earlier ones."""
    if tokens is None or more is None:
        return more
    common = min(len(tokens), len(more))
    differ = np.flatnonzero(tokens[:common] != more[:common])
    if len(differ):
        raise RoutesError(
            f"sample {name!r}: two turns disagree on token {int(differ[0])}; they are not turns of one sample"
        )
    return more


def _check_rows(name: str, num_rows: int, num_tokens: int, rules: _Rules) -> None:
    if num_rows > num_tokens:
        raise RoutesError(
            f"sample {name!r}: {num_rows} rows for {num_tokens} tokens; at most one row per token. "
            "Does the recording belong to another sample?"
        )
    if num_rows < num_tokens - 1 and not rules.allow_short:
        raise RoutesError(
            f"sample {name!r}: {num_rows} rows for {num_tokens} tokens; expected {num_tokens} or {num_tokens - 1}. "
            "Did the recording stop early? allow_short accepts it and leaves the other tokens without a route"
        )

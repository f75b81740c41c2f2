"""verl batches: `verl` (padded) and `verl-jagged`. Checked with verl 1dda039b (2026-08-22).

`verl`: one batch as `.npz`, `.pt` (weights only), a dict, a TensorDict or a DataProto, or a list of such batches, with
    routed_experts   [bsz, prompt + response, layers, K] int16 (any integer dtype is read): ids by token position;
                     prompts are padded on the left, responses on the right, filler rows are 0
    attention_mask   [bsz, prompt + response] 0 or 1: 1 on the tokens of a sample, which are contiguous
    input_ids        [bsz, prompt + response] token ids, optional
`verl-jagged`: the same without padding, as `left_right_2_no_padding` returns it, with
    routed_experts   jagged nested tensor [bsz, j, layers, K]; input_ids, optional, jagged [bsz, j]
                     (`.pt`, dict, TensorDict; a bare nested tensor is read too)
    or, as `.npz` or a dict of arrays: the nested tensor's parts
    values [sum of j, layers, K]; offsets [bsz + 1] ascending from 0; input_ids [sum of j], optional

layers is all decoder layers (dense ones zero) or the MoE layers only. A sample is named "row i", after the place of its
batch where there are several.

The last token of a sample is sampled but never forwarded, so verl fills its row with zeros and does not replay it: a
last row that is zero in every layer is that filler and is not read as a row. (In mode R2 the trainer records the last
row too; it is then read.) Trailing zero rows before it, which multi-turn loops leave, are unknown; where K is 1, so
that zero rows cannot be recognised by their equal ids, they are set to -1.

A row belongs to the token at its column of the attention mask. An id outside the mask is an error: mask and routes are
then shifted against each other. A batch with neither `attention_mask` nor NeMo-RL's `input_lengths` can be either's:
both formats match it, and the caller must name one.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from equipoise.core import ModelShape, RoutesError
from equipoise.routes.interpret import Format, Recording
from equipoise.routes.source import Source, integer_array, is_tensor, plain_array

_KEY = "routed_experts"


def _fields(record: Any) -> Mapping[Any, Any]:
    """Return the named arrays of a batch; none if the record is no batch."""
    batch = getattr(record, "batch", record)  # a DataProto keeps its tensors there
    if isinstance(batch, Mapping):
        return batch
    if hasattr(batch, "keys") and hasattr(batch, "__getitem__"):
        return {key: batch[key] for key in batch.keys()}  # noqa: SIM118  # a TensorDict iterates over rows, not keys
    return {}


def _ndim(value: Any) -> int:
    """Return the number of axes of an array or tensor, -1 for anything else, lists included."""
    return int(getattr(value, "ndim", -1)) if isinstance(value, np.ndarray) or is_tensor(value) else -1


def _is_nested(value: Any) -> bool:
    return is_tensor(value) and bool(getattr(value, "is_nested", False))


def _matches_padded(source: Source) -> bool:
    fields = _fields(source.first())
    value, mask = fields.get(_KEY), fields.get("attention_mask")
    if _is_nested(value) or _ndim(value) != 4:
        return False
    # Without a mask it can still be a padded batch that lost it, unless NeMo-RL's lengths say what it is.
    return _ndim(mask) == 2 or (mask is None and fields.get("input_lengths") is None)


def _matches_jagged(source: Source) -> bool:
    record = source.first()
    if _is_nested(record):
        return _ndim(record) == 4
    fields = _fields(record)
    if _is_nested(fields.get(_KEY)):
        return True
    return _ndim(fields.get("values")) == 3 and _ndim(fields.get("offsets")) == 1


def _read_padded(source: Source, model: ModelShape) -> Iterator[Recording]:
    for place, record in source.nonempty_records():
        fields, title = _fields(record), f"{source.name} {place}"
        missing = [key for key in (_KEY, "attention_mask") if key not in fields]
        if missing:
            raise RoutesError(f"{title}: no {missing[0]!r}; a padded verl batch has routed_experts and attention_mask")
        ids = integer_array(f"{title}: routed_experts", fields[_KEY], ndim=4)
        mask = plain_array(fields["attention_mask"])
        if mask is None or mask.dtype.kind not in "iub" or not np.isin(mask, (0, 1)).all():
            raise RoutesError(f"{title}: attention_mask must hold 0 and 1")
        _check_shape(f"{title}: attention_mask", mask.shape, ids.shape[:2])
        tokens = fields.get("input_ids")
        if tokens is not None:
            tokens = integer_array(f"{title}: input_ids", tokens, ndim=2)
            _check_shape(f"{title}: input_ids", tokens.shape, ids.shape[:2])
        for b in range(len(ids)):
            begin, end = _span(f"{title}: row {b}", mask[b].astype(bool), ids[b])
            yield _recording(
                _name(place, b), ids[b, begin:end], tokens=None if tokens is None else tokens[b, begin:end]
            )


def _check_shape(what: str, got: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    if got != wanted:
        raise RoutesError(f"{what} has shape {list(got)}; routed_experts needs {list(wanted)}")


def _span(what: str, mask: np.ndarray, ids: np.ndarray) -> tuple[int, int]:
    """Return the columns `[begin, end)` of a sample's tokens."""
    columns = np.flatnonzero(mask)
    begin, end = (int(columns[0]), int(columns[-1]) + 1) if len(columns) else (0, 0)
    if end - begin != len(columns):
        hole = begin + int(np.flatnonzero(~mask[begin:end])[0])
        raise RoutesError(
            f"{what}: attention_mask has a hole at column {hole}; the tokens of a sample must be contiguous"
        )
    outside = np.flatnonzero(ids.any(axis=(1, 2)) & ~mask)
    if len(outside):
        raise RoutesError(
            f"{what}: column {int(outside[0])} holds ids outside the attention mask (columns {begin}..{end - 1}); "
            "mask and routes are shifted against each other"
        )
    return begin, end


def _read_jagged(source: Source, model: ModelShape) -> Iterator[Recording]:
    for place, record in source.nonempty_records():
        rows, tokens = _jagged_parts(f"{source.name} {place}", record)
        for b, sample_rows in enumerate(rows):
            yield _recording(_name(place, b), sample_rows, tokens=None if tokens is None else tokens[b])


def _jagged_parts(title: str, record: Any) -> tuple[list[np.ndarray], list[np.ndarray] | None]:
    """Return the rows of each sample, and its tokens if the batch has them."""
    fields = {_KEY: record} if _is_nested(record) else _fields(record)
    nested, tokens = fields.get(_KEY), fields.get("input_ids")
    if _is_nested(nested):
        rows = _unbind(f"{title}: routed_experts", nested, ndim=3)
        if tokens is None:
            return rows, None
        if not _is_nested(tokens):
            raise RoutesError(f"{title}: routed_experts is jagged, input_ids is not")
        parts = _unbind(f"{title}: input_ids", tokens, ndim=1)
    else:
        if "values" not in fields or "offsets" not in fields:
            raise RoutesError(f"{title}: neither a jagged routed_experts nor values and offsets")
        values = integer_array(f"{title}: values", fields["values"], ndim=3)
        rows = _cut(title, values, fields["offsets"])
        if tokens is None:
            return rows, None
        flat = integer_array(f"{title}: input_ids", tokens, ndim=1)
        _check_shape(f"{title}: input_ids", flat.shape, values.shape[:1])
        parts = _cut(title, flat, fields["offsets"])
    if [len(part) for part in parts] != [len(part) for part in rows]:
        raise RoutesError(f"{title}: input_ids and routed_experts have samples of different length")
    return rows, parts


def _unbind(what: str, nested: Any, *, ndim: int) -> list[np.ndarray]:
    """Return the samples of a jagged tensor, its offsets checked."""
    try:
        values, offsets, lengths = nested.values(), nested.offsets(), nested.lengths()
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        raise RoutesError(f"{what} is not a whole jagged tensor: {error}") from error
    flat = integer_array(f"{what}: values", values, ndim=ndim)
    if lengths is not None or nested.ndim != ndim + 1:
        raise RoutesError(f"{what} has holes or other ragged axes; verl's tensors are jagged in their second axis only")
    return _cut(what, flat, offsets)


def _cut(what: str, flat: np.ndarray, value: Any) -> list[np.ndarray]:
    """Cut flat rows into samples at their offsets, which are checked."""
    offsets = integer_array(f"{what}: offsets", value, ndim=1).astype(np.int64)
    if not len(offsets) or offsets[0] != 0 or offsets[-1] != len(flat) or (np.diff(offsets) < 0).any():
        raise RoutesError(
            f"{what}: offsets must ascend from 0 to the {len(flat)} rows of values, got {offsets.tolist()}"
        )
    return np.split(flat, offsets[1:-1]) if len(offsets) > 1 else []


def _name(place: str, row: int) -> str:
    return f"row {row}" if place == "record 0" else f"{place} row {row}"


def _recording(name: str, rows: np.ndarray, *, tokens: np.ndarray | None) -> Recording:
    """Make a recording without the zero row of the last token, which is filler."""
    num_tokens = len(rows)
    filled = np.flatnonzero(rows.any(axis=(1, 2)))
    num_filled = int(filled[-1]) + 1 if len(filled) else 0
    if num_filled < num_tokens:
        rows = rows[:-1]
        if rows.shape[2] == 1:
            rows = np.where(np.arange(num_tokens - 1)[:, None, None] < num_filled, rows, np.int64(-1))
    return Recording(name=name, rows=rows, num_tokens=num_tokens, tokens=tokens)


FORMATS = (
    Format(
        name="verl",
        summary="verl batch: routed_experts [bsz, prompt + response, layers, K] with attention_mask",
        suffixes=(".npz", ".pt"),
        matches=_matches_padded,
        read=_read_padded,
    ),
    Format(
        name="verl-jagged",
        summary="verl batch without padding: jagged routed_experts, or its values and offsets",
        suffixes=(".npz", ".pt"),
        matches=_matches_jagged,
        read=_read_jagged,
    ),
)

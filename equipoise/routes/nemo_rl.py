"""NeMo-RL's recorded routes: the text envelope (`nemo-rl`) and the padded training batch (`nemo-rl-batch`).

Checked against NeMo-RL 7ea279ab and 0cbe0ac1: `utils/routed_experts_codec.py`, `models/generation/vllm/utils.py`,
`models/generation/interfaces.py`.

Rows, in both formats: one per token, in a signed dtype. A row of -1 means that no route was captured for that token.
The row of a sample's last token, and every row beyond its length, is the filler `0, 1, .., K-1` in all layers: that
token was never forwarded by the engine. The layer axis is the MoE layers or all hidden layers, as its length says.

Format `nemo-rl`: text `nrlre1:<dtype>:<S>x<L>x<K>:<base64>`
    nrlre1          magic and version
    dtype           "int8" up to 128 experts, "int16" up to 32768, else "int32"
    S, L, K         decimal rows, layers, top-k
    base64          standard base64 of the raw array bytes, C order, little-endian
    `.txt`          one envelope per line, samples named "line 1", ...
    JSON(L)         `routed_experts` holds the envelope; `id` or `request_id` names the sample, `prompt_token_ids` and
                    `generation_token_ids` are its tokens

Format `nemo-rl-batch`: a dict of arrays, as `.npz`, `.pt` or in memory
    routed_experts  [B, S, L, K] signed integers, samples right-padded to S
    input_lengths   [B] tokens of each sample
    input_ids       [B, S] token ids, optional
    names           [B] text, ours, optional; samples are "row 0", ... without it

-1 stays -1. The last token's row is dropped where it is the filler or -1, because it is not a recorded row; rows beyond
the length are kept and marked as padding. Bytes, shape and dtype must agree exactly. There is no field for weight
versions or turns. A batch with an `attention_mask` and no `input_lengths` is verl's.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from equipoise.core import ModelShape, RoutesError
from equipoise.routes.interpret import Format, Recording
from equipoise.routes.source import Source, integer_array, plain_array
from equipoise.routes.wire import (
    Response,
    decode_base64,
    field,
    find_dtype,
    given_name,
    join_ids,
    recordings,
    shape_bytes,
    token_array,
)

MAGIC = "nrlre1:"
DTYPES = ("int8", "int16", "int32")
_ENVELOPE = re.compile(
    MAGIC + r"(?P<dtype>[^:]*):(?P<shape>[0-9]{1,18}x[0-9]{1,18}x[0-9]{1,18}):(?P<data>.*)", re.DOTALL
)


def matches_text(source: Source) -> bool:
    """Whether the first record is an envelope or carries one under `routed_experts`."""
    record = source.first()
    payload = record if isinstance(record, str) else field(record, "routed_experts")
    return isinstance(payload, str) and payload.startswith(MAGIC)


def read_text(source: Source, model: ModelShape) -> Iterator[Recording]:
    """Decode every envelope."""
    for place, record in source.nonempty_records():
        name, tokens = place, None
        if isinstance(record, str):
            rows = _decode_envelope(record, place=place)
        else:
            rows = _decode_envelope(field(record, "routed_experts"), place=place)
            prompt = token_array(field(record, "prompt_token_ids"), "prompt_token_ids", place=place)
            generated = token_array(field(record, "generation_token_ids"), "generation_token_ids", place=place)
            tokens = join_ids(prompt, generated)
            if tokens is not None and len(tokens) != len(rows):
                raise RoutesError(
                    f"{place}: the envelope has {len(rows)} rows for {len(tokens)} tokens; it must have one each"
                )
            name = given_name(field(record, "id"), field(record, "request_id"), place=place)
        response = Response(name=name, num_tokens=len(rows), tokens=tokens)
        yield from recordings(_without_last(rows), response)


def matches_batch(source: Source) -> bool:
    """Whether the first record has four-axis signed `routed_experts`, and `input_lengths` or no attention mask."""
    record = source.first()
    if not isinstance(record, Mapping):
        return False
    if record.get("attention_mask") is not None and record.get("input_lengths") is None:
        return False
    payload = record.get("routed_experts")
    array = None if isinstance(payload, list | tuple) else plain_array(payload)
    return array is not None and array.dtype.kind == "i" and array.ndim == 4


def read_batch(source: Source, model: ModelShape) -> Iterator[Recording]:
    """Decode every sample of every batch."""
    for place, record in source.nonempty_records():
        batch = integer_array(f"{place}: routed_experts", field(record, "routed_experts"), ndim=4)
        if field(record, "input_lengths") is None:
            raise RoutesError(f"{place} has no input_lengths, which separate rows from padding; add them")
        lengths = integer_array(f"{place}: input_lengths", field(record, "input_lengths"), ndim=1)
        samples, width = batch.shape[:2]
        if len(lengths) != samples:
            raise RoutesError(f"{place}: {len(lengths)} input_lengths for {samples} samples")
        if lengths.size and (int(lengths.min()) < 0 or int(lengths.max()) > width):
            raise RoutesError(
                f"{place}: input_lengths go from {int(lengths.min())} to {int(lengths.max())}; "
                f"routed_experts has {width} rows per sample"
            )
        tokens = field(record, "input_ids")
        tokens = None if tokens is None else integer_array(f"{place}: input_ids", tokens, ndim=2)
        if tokens is not None and tokens.shape != batch.shape[:2]:
            raise RoutesError(f"{place}: input_ids has shape {tokens.shape}, routed_experts {batch.shape}")
        given, names = field(record, "names"), [f"row {b}" for b in range(samples)]
        if given is not None:
            names = [str(name) for name in given] if isinstance(given, np.ndarray | list | tuple) else []
        elif place != "record 0":
            names = [f"{name} of {place}" for name in names]
        if len(names) != samples:
            raise RoutesError(f"{place}: {len(names)} names for {samples} samples")
        for b, rows in enumerate(batch):
            length = int(lengths[b])
            own = _without_last(rows[:length])
            padding = np.arange(len(own) + width - length) >= len(own)
            yield Recording(
                name=names[b],
                rows=own if length == width else np.concatenate([own, rows[length:]]),
                num_tokens=length,
                tokens=None if tokens is None else tokens[b, :length].astype(np.int64),
                padding=padding if padding.any() else None,
            )


def _decode_envelope(text: Any, *, place: str) -> np.ndarray:
    if not isinstance(text, str) or not text.startswith(MAGIC):
        raise RoutesError(f"{place}: routed_experts is not a {MAGIC}<dtype>:<S>x<L>x<K>:<base64> envelope")
    parts = _ENVELOPE.fullmatch(text)
    if parts is None:
        raise RoutesError(f"{place}: envelope {text[:40]!r} lacks a shape <S>x<L>x<K>; was it cut?")
    dtype = find_dtype(parts["dtype"], DTYPES, place=place)
    shape = [int(size) for size in parts["shape"].split("x")]
    return shape_bytes(decode_base64(parts["data"], place=place), dtype=dtype, shape=shape, place=place)


def _without_last(rows: np.ndarray) -> np.ndarray:
    """Return the rows of a sample without the last token's, if that is the filler or -1."""
    is_filler = len(rows) and ((rows[-1] == -1).all() or (rows[-1] == np.arange(rows.shape[2])).all())
    return rows[:-1] if is_filler else rows


FORMATS = (
    Format(
        name="nemo-rl",
        summary="NeMo-RL text: nrlre1:<dtype>:<S>x<L>x<K>:<base64>, in .txt lines or JSON records",
        suffixes=(".jsonl", ".txt"),
        matches=matches_text,
        read=read_text,
    ),
    Format(
        name="nemo-rl-batch",
        summary="NeMo-RL batch: routed_experts [B, S, L, K] with -1 rows, and input_lengths",
        suffixes=(".npz", ".pt"),
        matches=matches_batch,
        read=read_batch,
    ),
)

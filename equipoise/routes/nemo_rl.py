"""NeMo-RL's recorded routes: the text envelope (`nemo-rl`) and the padded training batch (`nemo-rl-batch`).

Checked against NeMo-RL 7ea279ab and 0cbe0ac1: `utils/routed_experts_codec.py`, `models/generation/vllm/utils.py`,
`models/generation/interfaces.py`.

Rows, in both forms: one per token, in a signed dtype. A row of -1 means that no route was captured for that token. The
row of a sample's last token, and every row beyond its length, is the filler `0, 1, .., K-1` in all layers: that token
was never forwarded by the engine. The layer axis is the MoE layers or all hidden layers; its length tells.

Form `nemo-rl`: text `nrlre1:<dtype>:<S>x<L>x<K>:<base64>`
    nrlre1          magic and version
    dtype           "int8" up to 128 experts, "int16" up to 32768, else "int32"
    S, L, K         decimal rows, layers, top-k
    base64          standard base64 of the raw array bytes, C order, little-endian
    `.txt`          one envelope per line, samples named "line 1", ...
    JSON(L)         `routed_experts` holds the envelope; `id` or `request_id` names the sample, `prompt_token_ids` and
                    `generation_token_ids` are its tokens
    written         `.jsonl`, or `.txt` for envelopes without names and token ids

Form `nemo-rl-batch`: a dict of arrays, as `.npz`, `.pt` or in memory
    routed_experts  [B, S, L, K] signed integers, samples right-padded to S
    input_lengths   [B] tokens of each sample
    input_ids       [B, S] token ids, optional
    names           [B] text, ours, optional; samples are "row 0", ... without it
    written         `.npz`, or `.pt`; a shorter sample reads back with padding rows behind its own

There is no place for weight versions or turns. Does not know missing rows or layers: `interpret.py` judges them; the
one thing dropped here is the last token's row where it is the filler or -1, because it is not a recorded row.

Invariants (asserted by the tests):
1. -1 stays -1; the last token's filler is not a row; rows beyond the length are padding, kept and marked.
2. Bytes, shape and dtype must agree exactly; other dtypes are refused.
3. Write, read, interpret gives equal routes wherever the form has room; else writing is refused.
4. `matches` claims the magic; and four signed axes, unless an `attention_mask` without `input_lengths` says otherwise.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from equipoise.core import ModelShape, Routes, RoutesError, SampleRoutes
from equipoise.routes._layout import check_names, encode_base64, refuse_versions, wire_rows, write_jsonl, write_npz
from equipoise.routes.interpret import Format, Recording
from equipoise.routes.source import Source, integer_array, plain_array, write_torch
from equipoise.routes.wire import (
    Response,
    decode_base64,
    field,
    given_name,
    parse_shape,
    recordings,
    shape_bytes,
    token_array,
)

MAGIC = "nrlre1:"
DTYPES = {"int8": "|i1", "int16": "<i2", "int32": "<i4"}


def matches_text(source: Source) -> bool:
    """Whether the first record is an envelope or carries one under `routed_experts`."""
    record = source.first()
    payload = record if isinstance(record, str) else field(record, "routed_experts")
    return isinstance(payload, str) and payload.startswith(MAGIC)


def read_text(source: Source, model: ModelShape) -> Iterator[Recording]:
    """Decode every envelope."""
    for place, record in source.nonempty_records():
        if isinstance(record, str):
            rows = _decode_envelope(record, place=place)
            response = Response(name=place, num_tokens=len(rows))
        else:
            rows = _decode_envelope(field(record, "routed_experts"), place=place)
            response = _record_response(record, num_rows=len(rows), place=place)
        yield from recordings(_without_last(rows, response.num_tokens), response)


def write_text(routes: Routes, path: Path) -> None:
    """Write one envelope per sample: records in a `.jsonl`, bare lines in a `.txt`."""
    check_names(routes, form="nemo-rl")
    if path.suffix.lower() != ".txt":
        write_jsonl((_text_record(sample, routes) for sample in routes), path)
        return
    with path.open("w", encoding="ascii") as file:
        file.writelines(_envelope(_token_rows(sample, routes, form="nemo-rl")) + "\n" for sample in routes)


def matches_batch(source: Source) -> bool:
    """Whether the first record has four-axis signed `routed_experts` and is not told apart by an attention mask."""
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
            raise RoutesError(f"{place} has no input_lengths; without it rows and padding cannot be told apart: add it")
        lengths = integer_array(f"{place}: input_lengths", field(record, "input_lengths"), ndim=1)
        _check_lengths(lengths, batch.shape, place=place)
        tokens = field(record, "input_ids")
        tokens = None if tokens is None else integer_array(f"{place}: input_ids", tokens, ndim=2)
        if tokens is not None and tokens.shape != batch.shape[:2]:
            raise RoutesError(f"{place}: input_ids has shape {tokens.shape}, routed_experts {batch.shape}")
        names = _names(record, len(batch), place=place)
        for b, rows in enumerate(batch):
            length = int(lengths[b])
            yield _batch_recording(rows, names[b], length=length, tokens=None if tokens is None else tokens[b, :length])


def write_batch(routes: Routes, path: Path) -> None:
    """Write all samples as one batch."""
    check_names(routes, form="nemo-rl-batch")
    if not len(routes):
        raise RoutesError("there is no sample to write; form 'nemo-rl-batch' holds at least one")
    names = [sample.name for sample in routes]
    if path.suffix.lower() == ".pt":
        write_torch({**_batch_arrays(routes), "names": names}, path)
    else:
        write_npz({**_batch_arrays(routes), "names": np.array(names)}, path)


def carry_dtype(experts: int) -> np.dtype:
    """The smallest signed dtype NeMo-RL uses for `experts` experts."""
    return np.dtype(np.int8 if experts <= 2**7 else np.int16 if experts <= 2**15 else np.int32)


def _decode_envelope(text: Any, *, place: str) -> np.ndarray:
    if not isinstance(text, str) or not text.startswith(MAGIC):
        raise RoutesError(f"{place}: routed_experts is not a {MAGIC}<dtype>:<S>x<L>x<K>:<base64> envelope")
    parts = text.split(":", 3)
    shape = parse_shape(parts[2]) if len(parts) == 4 else None
    if shape is None:
        raise RoutesError(f"{place}: envelope {text[:40]!r} lacks a shape <S>x<L>x<K>; was it cut?")
    if parts[1] not in DTYPES:
        raise RoutesError(f"{place}: envelope has dtype {parts[1]!r}; known: {', '.join(DTYPES)}")
    raw = decode_base64(parts[3], place=place)
    return shape_bytes(raw, dtype=np.dtype(DTYPES[parts[1]]), shape=shape, place=place)


def _record_response(record: Any, *, num_rows: int, place: str) -> Response:
    prompt = token_array(field(record, "prompt_token_ids"), "prompt_token_ids", place=place)
    generated = token_array(field(record, "generation_token_ids"), "generation_token_ids", place=place)
    tokens = None if prompt is None or generated is None else np.concatenate([prompt, generated])
    if tokens is not None and len(tokens) != num_rows:
        raise RoutesError(f"{place}: the envelope has {num_rows} rows for {len(tokens)} tokens; it must have one each")
    name = given_name(field(record, "id"), field(record, "request_id"), place=place)
    return Response(name=name, num_tokens=num_rows, tokens=tokens)


def _without_last(rows: np.ndarray, num_tokens: int | None) -> np.ndarray:
    """Rows without the last token's, where it holds the filler or -1."""
    if not len(rows) or len(rows) != num_tokens:
        return rows
    return rows[:-1] if _is_filler(rows[-1]) else rows


def _is_filler(row_LK: np.ndarray) -> bool:
    return bool((row_LK == -1).all() or (row_LK == np.arange(row_LK.shape[1])).all())


def _batch_recording(rows: np.ndarray, name: str, *, length: int, tokens: np.ndarray | None) -> Recording:
    own = _without_last(rows[:length], length)
    padding = np.arange(len(own) + len(rows) - length) >= len(own)
    return Recording(
        name=name,
        rows=own if length == len(rows) else np.concatenate([own, rows[length:]]),
        num_tokens=length,
        tokens=None if tokens is None else tokens.astype(np.int64),
        padding=padding if padding.any() else None,
    )


def _check_lengths(lengths: np.ndarray, shape: tuple[int, ...], *, place: str) -> None:
    if len(lengths) != shape[0]:
        raise RoutesError(f"{place}: {len(lengths)} input_lengths for {shape[0]} samples")
    if lengths.size and (int(lengths.min()) < 0 or int(lengths.max()) > shape[1]):
        raise RoutesError(
            f"{place}: input_lengths go from {int(lengths.min())} to {int(lengths.max())}; "
            f"routed_experts has {shape[1]} rows per sample"
        )


def _names(record: Any, count: int, *, place: str) -> list[str]:
    names = field(record, "names")
    if names is None:
        return [f"row {b}" if place == "record 0" else f"row {b} of {place}" for b in range(count)]
    texts = [str(name) for name in names] if isinstance(names, np.ndarray | list | tuple) else []
    if len(texts) != count:
        raise RoutesError(f"{place}: {len(texts)} names for {count} samples")
    return texts


def _token_rows(sample: SampleRoutes, routes: Routes, *, form: str) -> np.ndarray:
    """[tokens, L, K]: the sample's rows, -1 where none was captured, the filler for the last token."""
    refuse_versions(sample, form=form, instead="vllm-http, sglang or the native store")
    if routes.layer_numbers != routes.model.layer_numbers:
        raise RoutesError(
            f"form {form!r} holds all {routes.model.layers} MoE layers of {routes.model.name!r}; these routes have "
            f"{len(routes.layer_numbers)} of them, write the native store"
        )
    rows = wire_rows(sample, routes, dtype=carry_dtype(routes.model.experts), all_layers=False)
    missing = sample.num_tokens - sample.num_rows
    if missing <= 0:
        return rows
    tail = np.full((missing, *rows.shape[1:]), -1, dtype=rows.dtype)
    tail[-1] = np.arange(rows.shape[2])
    return np.concatenate([rows, tail])


def _envelope(rows: np.ndarray) -> str:
    name = rows.dtype.name
    shape = "x".join(str(n) for n in rows.shape)
    return f"{MAGIC}{name}:{shape}:{encode_base64(rows.astype(DTYPES[name]).tobytes())}"


def _text_record(sample: SampleRoutes, routes: Routes) -> dict[str, Any]:
    record: dict[str, Any] = {"id": sample.name}
    if sample.tokens_T is not None:
        record["prompt_token_ids"] = sample.tokens_T[:1].tolist()
        record["generation_token_ids"] = sample.tokens_T[1:].tolist()
    return {**record, "routed_experts": _envelope(_token_rows(sample, routes, form="nemo-rl"))}


def _batch_rows(sample: SampleRoutes, routes: Routes) -> np.ndarray:
    """[tokens + padding rows, L, K]: padding that stands behind the sample's own rows is written behind its tokens."""
    num_padding = 0 if sample.padding_T is None else int(sample.padding_T.sum())
    own = sample.num_rows - num_padding
    if num_padding == 0 or sample.padding_T is None or not sample.padding_T[own:].all():
        return _token_rows(sample, routes, form="nemo-rl-batch")
    refuse_versions(sample, form="nemo-rl-batch", instead="the native store")
    known_TL = None if sample.known_TL is None else sample.known_TL[:own]
    unpadded = replace(sample, ids_TLK=sample.ids_TLK[:own], known_TL=known_TL, padding_T=None, segments=())
    rows = _token_rows(unpadded, routes, form="nemo-rl-batch")
    return np.concatenate([rows, sample.ids_TLK[own:].astype(rows.dtype)])


def _batch_arrays(routes: Routes) -> dict[str, np.ndarray]:
    parts = [_batch_rows(sample, routes) for sample in routes]
    longest = max(len(rows) for rows in parts)
    shape = (len(parts), longest, routes.model.layers, routes.model.top_k)
    batch = np.empty(shape, dtype=carry_dtype(routes.model.experts))
    batch[:] = np.arange(routes.model.top_k)
    for b, rows in enumerate(parts):
        batch[b, : len(rows)] = rows
    arrays = {"routed_experts": batch, "input_lengths": np.array([s.num_tokens for s in routes], dtype=np.int64)}
    tokens = [sample.tokens_T for sample in routes]
    if any(t is not None for t in tokens):
        arrays["input_ids"] = _padded_tokens(routes, longest)
    return arrays


def _padded_tokens(routes: Routes, longest: int) -> np.ndarray:
    padded = np.zeros((len(routes), longest), dtype=np.int64)
    for b, sample in enumerate(routes):
        if sample.tokens_T is None:
            raise RoutesError(
                f"sample {sample.name!r} has no token ids, others have; form 'nemo-rl-batch' needs all or none"
            )
        padded[b, : sample.num_tokens] = sample.tokens_T
    return padded


FORMATS = (
    Format(
        name="nemo-rl",
        summary="NeMo-RL text: nrlre1:<dtype>:<S>x<L>x<K>:<base64>, in .txt lines or JSON records",
        suffixes=(".jsonl", ".txt"),
        matches=matches_text,
        read=read_text,
        write=write_text,
    ),
    Format(
        name="nemo-rl-batch",
        summary="NeMo-RL batch: routed_experts [B, S, L, K] with -1 rows, and input_lengths",
        suffixes=(".npz", ".pt"),
        matches=matches_batch,
        read=read_batch,
        write=write_batch,
    ),
)

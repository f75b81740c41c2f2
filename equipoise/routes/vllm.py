"""vLLM's recorded routes: offline arrays (`vllm`) and HTTP responses (`vllm-http`, also written).

Checked against vLLM a014e35f (0.28) and 006ebac2 (later): `vllm/outputs.py`, `entrypoints/openai/*/protocol.py`,
`entrypoints/scale_out/token_in_token_out/protocol.py`. Ids are logical, captured before the engine's own balancing.

Format `vllm`: `CompletionOutput.routed_experts`, an array `[prompt + generated - 1, hidden layers, K]`.
    dtype           uint8 up to 256 experts, else uint16; int32 before 0.22
    last token      has no row: it was sampled, never forwarded; without token ids there is one token more than rows
    dense layers    zeros
    `.npy`          one sample; a folder of them: one sample per file, named after the file
    `.npz`          one array per sample, named by its key; `<name>_tokens` holds the token ids of `<name>`
                    or `routed_experts` of several samples one behind the other, with `lengths` (rows of each, or its
                    tokens, one more than rows) or `offsets`, `cu_seqlens` (where each begins, and the end)
    object          an array, a list of arrays, or `RequestOutput`s (objects or dicts): `request_id`,
                    `prompt_token_ids`, `outputs[i].index`, `.token_ids`, `.routed_experts`, `.weight_versions`;
                    or its outputs alone, whose `token_ids` lack the prompt's and are not used
    own records     dicts with `routed_experts` as an array or as nested lists, in `.jsonl` or a table; `id`, and tokens
                    as `prompt_token_ids` and `token_ids`, or whole as `tokens` or `input_ids`

Format `vllm-http`: JSON responses of chat, completions and `/generate`, one per line, as a list, or one object.
    id, request_id                      name of the sample; turns of one sample share it
    choices[i].routed_experts           base64 of the bytes of a `.npy` file (magic, header, data) of the array above
    choices[i].index                    int; several choices are named "choice 1 of <id>"
    choices[i].token_ids                generated token ids, where requested
    prompt_token_ids                    of the response, its choice, or `token_ids` of a kept `request`
    usage.prompt_tokens, .completion_tokens     token counts; the latter sums all choices, so it is used for one only
    choices[i].weight_versions          spans {version, start, end} over generated tokens (see `wire.py`)
    routed_experts_prompt_start         request field: first token with a row; kept in the record, its `request`, or
                                        the `sampling_params` of either
    written         `.jsonl` of `/generate` responses, one per segment. Routes do not say where the prompt ends: all
                    tokens before a segment and its first token count as prompt, which is where its rows start.
"""

import base64
import io
import json
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from equipoise.core import ModelShape, Routes, RoutesError, SampleRoutes, Segment
from equipoise.routes.interpret import Format, Recording
from equipoise.routes.source import Source, integer_array, plain_array
from equipoise.routes.wire import (
    NPY_MAGIC_BASE64,
    LeftOut,
    Response,
    choice_name,
    decode_base64,
    decode_npy,
    field,
    find_field,
    given_name,
    is_int_array,
    items,
    join_ids,
    optional_count,
    recordings,
    token_array,
)

TOKENS_SUFFIX = "_tokens"
_WITHOUT_ROUTES = "requests were aborted, or the server runs without --enable-return-routed-experts"


def matches_offline(source: Source) -> bool:
    """Whether the first record is a three-axis integer array, an archive of them, or a `RequestOutput`."""
    record = source.first()
    if is_int_array(record, ndim=3) or is_int_array(field(record, "routed_experts"), ndim=3):
        return True
    if isinstance(record, Mapping) and isinstance(rows := record.get("routed_experts"), list):
        array = plain_array(rows)
        return array is not None and array.dtype.kind in "iu" and array.ndim == 3
    for other in source.firsts():
        outputs = field(other, "outputs")
        if isinstance(outputs, list | tuple) and outputs and is_int_array(field(outputs[0], "routed_experts"), ndim=3):
            return True
    return isinstance(record, Mapping) and _is_archive(record)


def read_offline(source: Source, model: ModelShape) -> Iterator[Recording]:
    """Decode arrays, archives and `RequestOutput`s."""
    left_out = LeftOut()
    for place, record in source.nonempty_records():
        if isinstance(field(record, "outputs"), list | tuple):
            yield from _read_request_output(record, place=place, left_out=left_out)
        elif isinstance(record, Mapping) and _is_archive(record):
            yield from _read_archive(record, place=place)
        elif field(record, "routed_experts") is not None:
            rows = integer_array(f"{place}: routed_experts", field(record, "routed_experts"), ndim=3)
            parts = _parts(record, len(rows), place=place)
            if parts is None:
                yield from recordings(rows, _own_response(record, len(rows), place=place))
            for at, part in enumerate(parts or ()):
                yield from recordings(rows[part], Response(name=f"sample {at} of {place}"))
        else:
            name = place.removesuffix(" record 0").removesuffix(".npy")
            yield from recordings(integer_array(place, record, ndim=3), Response(name=name))
    left_out.finish(source.name, why=f"{_WITHOUT_ROUTES}; generate again")


def _own_response(record: Any, num_rows: int, *, place: str) -> Response:
    """Return what a record of one's own says besides its rows; of a `CompletionOutput`, tokens lack the prompt's."""
    versions = field(record, "weight_versions")
    if not isinstance(record, Mapping):
        return Response(name=place, versions=versions)
    prompt = token_array(record.get("prompt_token_ids"), "prompt_token_ids", place=place)
    tokens = join_ids(prompt, token_array(record.get("token_ids"), "token_ids", place=place))
    for name in ("tokens", "input_ids", "token_ids"):
        if tokens is None and name in record:
            found = token_array(record[name], name, place=place)
            tokens = found if found is not None and len(found) in (num_rows, num_rows + 1) else None
    return Response(
        name=given_name(record.get("id"), record.get("request_id"), place=place),
        num_prompt=None if prompt is None else len(prompt),
        num_tokens=None if tokens is None else len(tokens),
        tokens=tokens,
        versions=versions,
    )


def _parts(record: Any, num_rows: int, *, place: str) -> list[slice] | None:
    """Return the rows of each sample where a record says how several lie one behind the other; None for one sample."""
    ends = field(record, "offsets") if field(record, "offsets") is not None else field(record, "cu_seqlens")
    if ends is not None:
        bounds = integer_array(f"{place}: offsets", ends, ndim=1).astype(np.int64)
    elif field(record, "lengths") is not None:
        lengths = integer_array(f"{place}: lengths", field(record, "lengths"), ndim=1).astype(np.int64)
        # The last token of a sample has no row, so lengths in tokens are one more each.
        if lengths.sum() == num_rows + len(lengths):
            lengths = lengths - 1
        bounds = np.concatenate([[0], lengths.cumsum()])
    else:
        return None
    if not len(bounds) or bounds[0] != 0 or bounds[-1] != num_rows or (np.diff(bounds) < 0).any():
        raise RoutesError(
            f"{place}: lengths or offsets cut routed_experts into {max(0, len(bounds) - 1)} samples that end at "
            f"{bounds[-1:].tolist()}, but it has {num_rows} rows; give the rows of each sample, or its tokens"
        )
    return [slice(a, b) for a, b in pairwise(bounds.tolist())]


def _is_archive(record: Mapping[Any, Any]) -> bool:
    samples = [name for name in record if not _is_tokens(name, record)]
    return bool(samples) and all(isinstance(n, str) and is_int_array(record[n], ndim=3) for n in samples)


def _is_tokens(name: Any, record: Mapping[Any, Any]) -> bool:
    return isinstance(name, str) and name.endswith(TOKENS_SUFFIX) and name.removesuffix(TOKENS_SUFFIX) in record


def _read_archive(record: Mapping[Any, Any], *, place: str) -> Iterator[Recording]:
    for name in record:
        if _is_tokens(name, record):
            continue
        where = f"{place}: array {name!r}"
        # Files of a folder may use the same keys, and equal names would make them turns of one sample.
        owner = str(name) if place == "record 0" else f"{name} of {place.removesuffix(' record 0')}"
        tokens = token_array(record.get(f"{name}{TOKENS_SUFFIX}"), f"{name}{TOKENS_SUFFIX}", place=where)
        rows = integer_array(where, record[name], ndim=3)
        num_tokens = None if tokens is None else len(tokens)
        yield from recordings(rows, Response(name=owner, num_tokens=num_tokens, tokens=tokens))


def _read_request_output(record: Any, *, place: str, left_out: LeftOut) -> Iterator[Recording]:
    outputs = items(record, "outputs", place=place)
    owner = given_name(field(record, "request_id"), place=place)
    prompt = token_array(field(record, "prompt_token_ids"), "prompt_token_ids", place=place)
    for position, output in enumerate(outputs):
        where = choice_name(place, output, position=position, count=len(outputs))
        if left_out.lacks(field(output, "routed_experts"), where, output):
            continue
        generated = token_array(field(output, "token_ids"), "token_ids", place=place)
        tokens = join_ids(prompt, generated)
        response = Response(
            name=choice_name(owner, output, position=position, count=len(outputs)),
            start=_prompt_start(record, None, place=place),
            num_prompt=None if prompt is None else len(prompt),
            num_tokens=None if tokens is None else len(tokens),
            tokens=tokens,
            versions=field(output, "weight_versions"),
        )
        rows = integer_array(f"{response.name}: routed_experts", field(output, "routed_experts"), ndim=3)
        yield from recordings(rows, response)


def matches_http(source: Source) -> bool:
    """Whether a response's first choice carries a base64 `.npy` payload; those of aborted requests may come before."""
    choices = [field(record, "choices") for record in source.firsts()]
    payloads = [field(found[0], "routed_experts") for found in choices if isinstance(found, list | tuple) and found]
    return any(isinstance(payload, str) and payload.startswith(NPY_MAGIC_BASE64) for payload in payloads)


def read_http(source: Source, model: ModelShape) -> Iterator[Recording]:
    """Decode every choice of every response; those without routes are left out where most have some."""
    left_out = LeftOut()
    for place, record in source.nonempty_records():
        if field(record, "choices") is None:  # an error, or the log of a request without a response
            left_out.lacks(None, place, record)
            continue
        choices = items(record, "choices", place=place)
        for position, choice in enumerate(choices):
            where = choice_name(place, choice, position=position, count=len(choices))
            payload = field(choice, "routed_experts")
            if left_out.lacks(payload, where, choice):
                continue
            rows = decode_npy(decode_base64(payload, place=where), place=where)
            yield from recordings(rows, http_response(record, choice, position=position, place=place))
    left_out.finish(source.name, why=f"{_WITHOUT_ROUTES}; record again")


def http_response(record: Any, choice: Any, *, position: int, place: str) -> Response:
    """Return what a response says about one of its choices, besides the rows."""
    count = len(field(record, "choices"))
    request = field(record, "request")
    prompt = find_field("prompt_token_ids", record, choice)
    prompt = token_array(field(request, "token_ids") if prompt is None else prompt, "prompt_token_ids", place=place)
    generated = token_array(field(choice, "token_ids"), "token_ids", place=place)
    usage = field(record, "usage")
    num_prompt = optional_count(field(usage, "prompt_tokens"), "usage.prompt_tokens", place=place)
    num_generated = optional_count(field(usage, "completion_tokens"), "usage.completion_tokens", place=place)
    num_prompt = num_prompt if prompt is None else len(prompt)
    num_generated = (num_generated if count == 1 else None) if generated is None else len(generated)
    owner = given_name(field(record, "id"), field(record, "request_id"), place=place)
    return Response(
        name=choice_name(owner, choice, position=position, count=count),
        start=_prompt_start(record, request, place=place),
        num_prompt=num_prompt,
        num_tokens=None if num_prompt is None or num_generated is None else num_prompt + num_generated,
        tokens=join_ids(prompt, generated),
        versions=field(choice, "weight_versions"),
    )


def _prompt_start(record: Any, request: Any, *, place: str) -> int:
    holders = (record, request, field(record, "sampling_params"), field(request, "sampling_params"))
    start = find_field("routed_experts_prompt_start", *holders)
    return optional_count(start, "routed_experts_prompt_start", place=place) or 0


def write_http(routes: Routes, path: Path) -> None:
    """Write `/generate` responses, one line per segment: how a training run keeps its own rollouts."""
    names = [sample.name for sample in routes]
    if len(set(names)) < len(names):
        twice = next(name for i, name in enumerate(names) if name in names[:i])
        # Read back, they would be turns of one sample.
        raise RoutesError(f"two samples are named {twice!r}; format 'vllm-http' identifies them by name: rename one")
    with path.open("w", encoding="utf-8") as file:
        for sample in routes:
            rows = engine_rows(sample, routes, form="vllm-http", dtype=engine_dtype(routes.model.experts))
            for segment in sample.segments or (Segment(start=0, stop=sample.num_rows),):
                npy = io.BytesIO()
                np.lib.format.write_array(npy, rows[segment.start : segment.stop], version=(1, 0), allow_pickle=False)
                record = generate_record(sample, segment, base64.b64encode(npy.getvalue()).decode("ascii"))
                if segment.start:
                    record["routed_experts_prompt_start"] = segment.start
                if segment.weight_version:
                    span = {"version": segment.weight_version, "start": 0, "end": record["usage"]["completion_tokens"]}
                    record["choices"][0]["weight_versions"] = [span]
                file.write(json.dumps(record) + "\n")


def engine_dtype(experts: int) -> np.dtype:
    """Return the dtype vLLM returns since 0.22: uint8 up to 256 experts, then uint16; int32 beyond what that holds."""
    if experts > 2**16:
        return np.dtype(np.int32)
    return np.dtype(np.uint8 if experts <= 2**8 else np.uint16)


def engine_rows(sample: SampleRoutes, routes: Routes, *, form: str, dtype: np.dtype) -> np.ndarray:
    """Lay out a sample's rows as engines do: all hidden layers, dense layers and unknown rows as zeros.

    Args:
        sample: one of `routes`
        routes: whose layers and model they are
        form: name of the format, for messages
        dtype: an integer dtype that holds every expert id

    Returns:
        [rows, hidden layers, K]
    """
    model, known_TL = routes.model, sample.known_TL
    if routes.layer_numbers != model.layer_numbers:
        raise RoutesError(
            f"routes hold {len(routes.layer_numbers)} of {model.layers} MoE layers; format {form!r} cannot name them: "
            "write the native store"
        )
    if sample.padding_T is not None and sample.padding_T.any():
        raise RoutesError(
            f"sample {sample.name!r}: {int(sample.padding_T.sum())} padding rows, which format {form!r} cannot mark: "
            "write the native store"
        )
    if known_TL is not None and not known_TL.all() and model.top_k == 1:
        raise RoutesError(
            f"sample {sample.name!r} has unknown rows; format {form!r} marks them by equal ids, which every row of a "
            "top-1 model has: write the native store"
        )
    rows = np.zeros((sample.num_rows, model.hidden_layers, model.top_k), dtype=dtype)
    rows[:, list(routes.layer_numbers)] = (
        sample.ids_TLK if known_TL is None else np.where(known_TL[:, :, None], sample.ids_TLK, 0)
    )
    return rows


def generate_record(sample: SampleRoutes, segment: Segment, payload: Any) -> dict[str, Any]:
    """Return a `/generate` response of one choice for one segment, with `payload` as its routes."""
    # When the segment's last row was made there was one sampled token more than rows; at the end, all tokens.
    is_last = segment.stop == sample.num_rows
    total = sample.num_tokens if is_last else min(segment.stop + 1, sample.num_tokens)
    num_prompt = min(segment.start + 1, total)
    choice: dict[str, Any] = {"index": 0, "routed_experts": payload}
    record: dict[str, Any] = {"request_id": sample.name, "choices": [choice]}
    record["usage"] = {"prompt_tokens": num_prompt, "completion_tokens": total - num_prompt, "total_tokens": total}
    if sample.tokens_T is not None:
        record["prompt_token_ids"] = sample.tokens_T[:num_prompt].tolist()
        choice["token_ids"] = sample.tokens_T[num_prompt:total].tolist()
    return record


FORMATS = (
    Format(
        name="vllm",
        summary="vLLM offline: arrays [tokens - 1, hidden layers, K] in .npy, .npz, a folder, or RequestOutput objects",
        suffixes=(".npz", ".npy"),
        matches=matches_offline,
        read=read_offline,
    ),
    Format(
        name="vllm-http",
        summary="vLLM HTTP: JSON responses with base64 .npy in choices[i].routed_experts",
        suffixes=(".jsonl", ".json"),
        matches=matches_http,
        read=read_http,
        write=write_http,
    ),
)

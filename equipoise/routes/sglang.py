"""SGLang's recorded routes: native `/generate` responses (`sglang`) and OpenAI responses (`sglang-openai`).

Checked against SGLang 0.5.18 (cce0a124) and 0.5.23: `srt/state_capturer/routed_experts.py`,
`srt/managers/io_struct.py`, `srt/utils/weight_versions.py`, `srt/entrypoints/openai/{protocol,serving_chat}.py`.

The payload, in both formats: base64 of raw little-endian int32 bytes, C order, **no header**, to be reshaped by
`(-1, hidden layers, K)` of the model: nothing on the wire says how many layers there are. Rows cover tokens
`[routed_experts_start_len, tokens - 1)`: the last token was sampled, never forwarded. Dense layers are zeros, ids
logical. Older servers with `skip_tokenizer_init` return a tensor instead of text; arrays and tensors of one axis (to
be reshaped) or three are read as well.

Format `sglang`: JSON objects, one per line, as a list, or one alone; or Python dicts.
    meta_info.routed_experts        the payload
    meta_info.id                    name of the sample; turns of one sample share it
    meta_info.prompt_tokens, .completion_tokens     token counts
    meta_info.weight_versions       spans over generated tokens (see `wire.py`); else
    meta_info.weight_version        name of the weights when the response ended
    output_ids                      generated token ids
    input_ids                       prompt token ids, of the record or of a kept `request`
    routed_experts_start_len        request field, 0 to the prompt's tokens: kept in the record, its `request` or its
                                    `meta_info`
    meta_info.indexer_topk          (0.5.23) the choices of sparse attention: not routes, never read

Format `sglang-openai`: chat and completions responses, the same containers.
    sglext.routed_experts           the payload of the *first* choice; the other choices have none
    choices[i].meta_info            as in format `sglang`, for servers asked with `return_meta_info`
    id; usage; metadata.weight_version      name, token counts (for one choice), name of the weights
    metadata.weight_versions        spans of the first choice (0.5.23)
    prompt_token_ids, choices[i].token_ids      token ids, for servers asked with `return_token_ids`
    routed_experts_start_len        as in format `sglang`

Bytes that do not divide by hidden layers x K x 4 are refused: nothing guesses the number of layers.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from equipoise.core import ModelShape, RoutesError
from equipoise.routes.interpret import Format, Recording
from equipoise.routes.source import Source, integer_array
from equipoise.routes.wire import (
    LeftOut,
    Response,
    choice_name,
    decode_base64,
    field,
    find_field,
    given_name,
    is_int_array,
    items,
    join_ids,
    optional_count,
    recordings,
    shape_bytes,
    token_array,
)

WIRE_DTYPE = np.dtype("<i4")
_WITHOUT_ROUTES = (
    "was the request sent with return_routed_experts to a server with --enable-return-routed-experts? Drop the record "
    "or record again"
)


def matches_native(source: Source) -> bool:
    """Whether a record has a payload in its `meta_info` and no choices; aborted requests may come before."""
    return any(
        field(record, "choices") is None and _is_payload(field(field(record, "meta_info"), "routed_experts"))
        for record in source.firsts()
    )


def read_native(source: Source, model: ModelShape) -> Iterator[Recording]:
    """Decode native responses; those without routes are left out where most have some."""
    left_out = LeftOut()
    for place, record in source.nonempty_records():
        meta = field(record, "meta_info")
        if left_out.lacks(field(meta, "routed_experts"), place, record if meta is None else meta):
            continue
        rows = _decode_payload(field(meta, "routed_experts"), model, place=place)
        prompt, generated = find_field("input_ids", record, field(record, "request")), field(record, "output_ids")
        name = given_name(field(meta, "id"), place=place)
        response = _response(record, meta, name=name, counts=meta, prompt=prompt, generated=generated, place=place)
        yield from recordings(rows, response)
    left_out.finish(source.name, why=_WITHOUT_ROUTES)


def matches_openai(source: Source) -> bool:
    """Whether a record has choices and a payload in `sglext` or in its first choice's `meta_info`."""
    for record in source.firsts():
        choices = field(record, "choices")
        if isinstance(choices, list | tuple) and choices:
            holders = (field(record, "sglext"), field(choices[0], "meta_info"))
            if any(_is_payload(field(holder, "routed_experts")) for holder in holders):
                return True
    return False


def read_openai(source: Source, model: ModelShape) -> Iterator[Recording]:
    """Decode OpenAI responses: every choice with its own `meta_info`, else the first one by `sglext`."""
    left_out = LeftOut()
    for place, record in source.nonempty_records():
        if field(record, "choices") is None:
            left_out.lacks(None, place, record)
            continue
        choices = items(record, "choices", place=place)
        has_own = any(field(field(c, "meta_info"), "routed_experts") is not None for c in choices)
        shared = field(record, "sglext")
        for position, choice in enumerate(choices if has_own else choices[:1]):
            where = choice_name(place, choice, position=position, count=len(choices))
            meta = field(choice, "meta_info")
            payload = field(meta if has_own else shared, "routed_experts")
            if left_out.lacks(payload, where, choice):
                continue
            rows = _decode_payload(payload, model, place=where)
            yield from recordings(rows, _openai_response(record, choice, position=position, place=place))
    left_out.finish(source.name, why=_WITHOUT_ROUTES)


def _is_payload(value: Any) -> bool:
    return isinstance(value, str) or is_int_array(value, ndim=1) or is_int_array(value, ndim=3)


def _decode_payload(payload: Any, model: ModelShape, *, place: str) -> np.ndarray:
    if is_int_array(payload, ndim=3):
        return integer_array(f"{place}: routed_experts", payload, ndim=3)
    row = (model.hidden_layers, model.top_k)
    if not isinstance(payload, str):
        flat = integer_array(f"{place}: routed_experts", payload, ndim=1)
        _check_divides(flat.size, row, what="ids", place=place)
        return flat.reshape(-1, *row)
    raw = decode_base64(payload, place=place)
    _check_divides(len(raw), (*row, WIRE_DTYPE.itemsize), what="bytes", place=place)
    rows = len(raw) // (row[0] * row[1] * WIRE_DTYPE.itemsize)
    return shape_bytes(raw, dtype=WIRE_DTYPE, shape=(rows, *row), place=place)


def _check_divides(count: int, row: tuple[int, ...], *, what: str, place: str) -> None:
    unit = int(np.prod(row))
    if count % unit:
        figures = f"{row[0]} hidden layers x top-{row[1]}" + (f" x {row[2]} bytes" if len(row) == 3 else "")
        raise RoutesError(
            f"{place}: routed_experts has {count} {what}, which do not divide by {unit} ({figures}); "
            "is it another model's recording, or was it cut?"
        )


def _openai_response(record: Any, choice: Any, *, position: int, place: str) -> Response:
    count = len(field(record, "choices"))
    meta = field(choice, "meta_info")
    has_own = field(meta, "prompt_tokens") is not None
    # usage sums the completion tokens of all choices.
    usage = field(record, "usage")
    counts = meta if has_own else (usage if count == 1 else {"prompt_tokens": field(usage, "prompt_tokens")})
    prompt = find_field("prompt_token_ids", record, choice)
    prompt = find_field("input_ids", field(record, "request")) if prompt is None else prompt
    owner = given_name(field(record, "id"), field(meta, "id"), place=place)
    name, generated = choice_name(owner, choice, position=position, count=count), field(choice, "token_ids")
    return _response(record, meta, name=name, counts=counts, prompt=prompt, generated=generated, place=place)


def _response(record: Any, meta: Any, *, name: str, counts: Any, prompt: Any, generated: Any, place: str) -> Response:
    """Return what a response says besides its rows: token counts as recorded, else the lengths of the id lists."""
    num_prompt = optional_count(field(counts, "prompt_tokens"), "prompt_tokens", place=place)
    num_generated = optional_count(field(counts, "completion_tokens"), "completion_tokens", place=place)
    prompt_ids = token_array(prompt, "prompt token ids", place=place)
    generated_ids = token_array(generated, "generated token ids", place=place)
    num_prompt = len(prompt_ids) if num_prompt is None and prompt_ids is not None else num_prompt
    num_generated = len(generated_ids) if num_generated is None and generated_ids is not None else num_generated
    num_tokens = None if num_prompt is None or num_generated is None else num_prompt + num_generated
    tokens = join_ids(prompt_ids, generated_ids)
    start = find_field("routed_experts_start_len", record, field(record, "request"), meta)
    # OpenAI responses have them in `metadata`, for the first choice, as their routes are.
    versions = find_field("weight_versions", meta, field(record, "metadata"))
    if versions is None:
        version = find_field("weight_version", meta, field(record, "metadata"))
        versions = None if version is None else str(version)
    return Response(
        name=name,
        start=optional_count(start, "routed_experts_start_len", place=place) or 0,
        num_prompt=num_prompt,
        num_tokens=num_tokens,
        # Ids that do not cover all tokens (images, a rewritten prompt) would be paired with the wrong rows.
        tokens=tokens if tokens is not None and len(tokens) == num_tokens else None,
        versions=versions,
    )


FORMATS = (
    Format(
        name="sglang",
        summary="SGLang native: JSON responses with base64 raw int32 in meta_info.routed_experts",
        suffixes=(".jsonl", ".json"),
        matches=matches_native,
        read=read_native,
    ),
    Format(
        name="sglang-openai",
        summary="SGLang OpenAI: JSON responses with base64 raw int32 in sglext or choices[i].meta_info",
        suffixes=(".jsonl", ".json"),
        matches=matches_openai,
        read=read_openai,
    ),
)

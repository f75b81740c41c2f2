"""prime-rl's recorded routes: the wire object of its `/generate` route, and its transport object (`prime-rl`).

Checked against prime-rl 13e411d6 and a608ad93: `inference/vllm/routed_experts.py`, `transports/rollouts/types.py`.

The wire object, a JSON object:
    data        base64 of the raw bytes of the array, C order, little-endian, no header
    shape       [rows, hidden layers, K]; tokens - 1 rows as vLLM gives them; dense layers are zeros
    start       first token with a row (`routed_experts_prompt_start` of the request); absent: 0
    dtype       "uint8" up to 256 experts, else "uint16"; "int16" and "int32" for captures of other widths
The transport object (msgspec `RoutedExperts`) is the same without `start`, with raw bytes as `data`; it has one row per
token of `token_ids`, filled up with zeros.

A wire object is alone; in a list; under `routed_experts` of a record with `token_ids` (a training sample); or under
`choices[i].routed_experts` of a `/generate` response, whose other fields are vLLM's (`vllm.py`). `data`, `shape` and
`dtype` identify it. Bytes, shape and dtype must agree exactly. There is no field for a weight version.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from equipoise.core import ModelShape, RoutesError
from equipoise.routes.interpret import Format, Recording
from equipoise.routes.source import Source
from equipoise.routes.vllm import http_response
from equipoise.routes.wire import (
    LeftOut,
    Response,
    choice_name,
    decode_base64,
    field,
    find_dtype,
    items,
    optional_count,
    recordings,
    shape_bytes,
    token_array,
)

DTYPES = ("uint8", "uint16", "int16", "int32")


def matches(source: Source) -> bool:
    """Whether a record is or carries a wire object; those of aborted requests may come before."""
    for record in source.firsts():
        choices = field(record, "choices")
        carrier = choices[0] if isinstance(choices, list | tuple) and choices else record
        if _is_wire_object(record) or _is_wire_object(field(carrier, "routed_experts")):
            return True
    return False


def read(source: Source, model: ModelShape) -> Iterator[Recording]:
    """Decode every wire object; answers without one are left out where most have one."""
    left_out = LeftOut()
    for place, record in source.nonempty_records():
        if field(record, "choices") is not None:
            choices = items(record, "choices", place=place)
            for position, choice in enumerate(choices):
                where = choice_name(place, choice, position=position, count=len(choices))
                if left_out.lacks(field(choice, "routed_experts"), where, choice):
                    continue
                response = http_response(record, choice, position=position, place=place)
                yield from recordings(*_decode(field(choice, "routed_experts"), response, place=where))
        elif _is_wire_object(record):
            left_out.read += 1
            yield from recordings(*_decode(record, Response(name=place), place=place))
        else:
            # Of a training sample the routes may be missing; any other record without them is refused below.
            held = record if field(record, "token_ids") is None else field(record, "routed_experts")
            if left_out.lacks(held, place, {"id": place}):
                continue
            tokens = token_array(field(record, "token_ids"), "token_ids", place=place)
            response = Response(name=place, num_tokens=None if tokens is None else len(tokens), tokens=tokens)
            yield from recordings(*_decode(field(record, "routed_experts"), response, place=place))
    left_out.finish(source.name, why="were requests aborted, or is enable_return_routed_experts off? Record again")


def _is_wire_object(value: Any) -> bool:
    return (
        isinstance(field(value, "data"), str | bytes)
        and isinstance(field(value, "shape"), list | tuple)
        and isinstance(field(value, "dtype"), str)
    )


def _decode(value: Any, response: Response, *, place: str) -> tuple[np.ndarray, Response]:
    """Return the rows of a wire object, and `response` with its start."""
    if not _is_wire_object(value):
        raise RoutesError(f"{place} has no routed_experts with data, shape and dtype; drop the record or record again")
    dtype, data = find_dtype(field(value, "dtype"), DTYPES, place=place), field(value, "data")
    raw = data if isinstance(data, bytes) else decode_base64(data, place=place)
    rows = shape_bytes(raw, dtype=dtype, shape=field(value, "shape"), place=place)
    given = field(value, "start")
    start = optional_count(given, "start", place=place) or 0
    num_tokens = response.num_tokens
    if num_tokens is None and given is None:
        # The transport object has a row for every token.
        num_tokens = len(rows)
    return rows, replace(response, start=start, num_tokens=num_tokens)


FORMATS = (
    Format(
        name="prime-rl",
        summary="prime-rl: wire objects {data, shape, start, dtype}, alone or in /generate responses",
        suffixes=(".jsonl", ".json"),
        matches=matches,
        read=read,
    ),
)

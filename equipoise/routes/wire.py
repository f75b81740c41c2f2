"""What the readers of engine formats share: decoding payloads, and the weight versions of their rows.

A payload becomes an array only if its bytes are exactly what its shape and dtype need; nothing is cut, padded or
unpickled, and only integers are accepted.

Weight-version spans, as vLLM (`choices[i].weight_versions`) and SGLang (`meta_info.weight_versions`) write them: a list
of `{"version": str, "start": int, "end": int}` over the *generated* tokens, half-open, in order, without gaps. The row
of token t computes token t + 1, so generated token g of a prompt of P tokens belongs to row P + g - 1, and every row
before the prompt's last one to the first span.
"""

import base64
import binascii
import io
import logging
import math
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from equipoise.core import RoutesError
from equipoise.core.value import int64_array, require_int
from equipoise.routes.interpret import Recording
from equipoise.routes.source import integer_array, plain_array

NPY_MAGIC_BASE64 = "k05VTVBZ"
"""Base64 of the first six bytes of every `.npy` file."""

_log = logging.getLogger(__name__)

MAX_TOKENS = 2**31 - 1
"""Most tokens of a sample; a larger count is damage, and must not become the size of an array."""

# What numpy's header parser raises on damaged bytes.
_HEADER_ERRORS = (
    ValueError,
    TypeError,
    SyntaxError,
    OverflowError,
    RecursionError,
    MemoryError,
    tokenize.TokenError,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """What one engine response says besides its rows."""

    name: str
    start: int = 0
    """Token that the first row belongs to."""
    num_prompt: int | None = None
    num_tokens: int | None = None
    """Prompt and generated tokens together; None: one more than the rows reach, as every engine leaves out the last."""
    tokens: np.ndarray | None = None
    versions: Any = None
    """Weight-version spans as decoded from JSON, one version name, or None."""


def field(record: Any, name: str) -> Any:
    """Return entry `name` of a mapping, attribute `name` of an object, or None."""
    return record.get(name) if isinstance(record, Mapping) else getattr(record, name, None)


def find_field(name: str, *records: Any) -> Any:
    """Return field `name` of the first of `records` that has it."""
    return next((value for record in records if (value := field(record, name)) is not None), None)


def items(record: Any, name: str, *, place: str) -> Sequence[Any]:
    """Return entry `name` of a record, which must be a non-empty list."""
    value = field(record, name)
    if not isinstance(value, list | tuple) or not value:
        raise RoutesError(f"{place}: {name!r} must be a list with at least one entry, got {_describe(value)}")
    return value


def choice_name(owner: str, choice: Any, *, position: int, count: int) -> str:
    """Name one choice: as its owner if it is the only one, else "choice 1 of <owner>"."""
    index = field(choice, "index")
    return owner if count == 1 else f"choice {position if index is None else index} of {owner}"


def given_name(*names: Any, place: str) -> str:
    """Return the first id among `names`, text or a number, else the record's place."""
    return next((str(name) for name in names if type(name) is int or (isinstance(name, str) and name)), place)


def optional_count(value: Any, what: str, *, place: str) -> int | None:
    """Return a number of tokens, None if the record has none."""
    if value is None:
        return None
    return require_int(f"{place}: {what}", value, low=0, high=MAX_TOKENS, error=RoutesError)


def token_array(value: Any, what: str, *, place: str) -> np.ndarray | None:
    """Return token ids as an int64 array, None if the record has none."""
    if value is None:
        return None
    array = integer_array(f"{place}: {what}", value, ndim=1)
    return int64_array(f"{place}: {what}", array, ndim=1, error=RoutesError)


def join_ids(prompt: np.ndarray | None, generated: np.ndarray | None) -> np.ndarray | None:
    """Return the token ids of a sample, None unless those of both its parts are known."""
    return None if prompt is None or generated is None else np.concatenate([prompt, generated])


def is_int_array(value: Any, *, ndim: int) -> bool:
    """Whether `value` is an integer array or tensor, not a list, of `ndim` axes."""
    array = None if isinstance(value, list | tuple) else plain_array(value)
    return array is not None and array.dtype.kind in "iu" and array.ndim == ndim


def decode_base64(text: Any, *, place: str) -> bytes:
    """Decode strict standard base64."""
    if not isinstance(text, str):
        raise RoutesError(f"{place}: routed_experts must be base64 text, got {_describe(text)}")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RoutesError(f"{place}: routed_experts is not base64: {error}; was the text cut or re-encoded?") from error


def find_dtype(name: Any, known: Sequence[str], *, place: str) -> np.dtype:
    """Return the little-endian dtype that a record names."""
    if name not in known:
        raise RoutesError(f"{place}: routed_experts has dtype {name!r}; known: {', '.join(known)}")
    return np.dtype(name).newbyteorder("<")


def decode_npy(raw: bytes, *, place: str) -> np.ndarray:
    """Decode the bytes of one `.npy` file of three integer axes."""
    stream = io.BytesIO(raw)
    try:
        version = np.lib.format.read_magic(stream)
        if version not in ((1, 0), (2, 0)):
            raise RoutesError(f"{place}: .npy version {version[0]}.{version[1]} is not one of 1.0 and 2.0")
        read_header = np.lib.format.read_array_header_1_0 if version[0] == 1 else np.lib.format.read_array_header_2_0
        shape, is_fortran, dtype = read_header(stream)
    except RoutesError:
        raise
    except _HEADER_ERRORS as error:
        raise RoutesError(f"{place}: routed_experts is not a .npy file: {error}") from error
    return shape_bytes(raw[stream.tell() :], dtype=dtype, shape=shape, order="F" if is_fortran else "C", place=place)


def shape_bytes(raw: bytes, *, dtype: np.dtype, shape: Any, place: str, order: str = "C") -> np.ndarray:
    """Return raw bytes as `[rows, layers, K]` integers; bytes, dtype and shape must agree exactly."""
    if dtype.kind not in "iu":
        raise RoutesError(f"{place}: routed_experts has dtype {dtype}; expert ids are integers")
    if not isinstance(shape, list | tuple) or len(shape) != 3:
        raise RoutesError(f"{place}: routed_experts must have shape [rows, layers, top-k], got {shape!r}")
    axes = tuple(require_int(f"{place}: routed_experts shape entry", n, low=0, error=RoutesError) for n in shape)
    wanted = math.prod(axes) * dtype.itemsize
    if len(raw) != wanted:
        raise RoutesError(
            f"{place}: routed_experts has {len(raw)} bytes, shape {list(axes)} of {dtype} needs {wanted}; "
            "was the dump cut?"
        )
    try:
        array: np.ndarray = np.ndarray(axes, dtype=dtype, buffer=raw, order="F" if order == "F" else "C")
    except (ValueError, TypeError) as error:
        # Only a shape with an axis of length 0 fails here: its other axes may be anything.
        raise RoutesError(f"{place}: routed_experts cannot have shape {list(axes)}: {error}") from error
    return array.astype(dtype.newbyteorder("="), copy=False)


def recordings(rows: np.ndarray, response: Response) -> Iterator[Recording]:
    """Yield the rows of one response, one recording per weight version.

    Args:
        rows: [rows, layers on the wire, K] as decoded
        response: what the response says about them
    """
    if response.num_tokens is not None and response.start > response.num_tokens:
        raise RoutesError(
            f"{response.name}: its rows start at token {response.start} of {response.num_tokens}; "
            "is the start offset another request's?"
        )
    end = response.start + len(rows)
    total = end + 1 if response.num_tokens is None else response.num_tokens
    for start, stop, version in _row_spans(response, end):
        known = total if stop == end else min(stop + 1, total)
        yield Recording(
            name=response.name,
            rows=rows[start - response.start : stop - response.start],
            start=start,
            num_tokens=known,
            tokens=None if response.tokens is None else response.tokens[:known],
            num_prompt=response.num_prompt,
            weight_version=version,
        )


def _row_spans(response: Response, end: int) -> list[tuple[int, int, str]]:
    """Return (first row, row after the last, version) of each run of rows of one weight version."""
    spans = _checked_spans(response)
    if len(spans) <= 1:
        return [(response.start, end, spans[0][1] if spans else "")]
    if response.num_prompt is None:
        raise RoutesError(
            f"{response.name}: {len(spans)} weight versions, but the number of prompt tokens is not recorded; "
            "keep prompt_token_ids or usage.prompt_tokens in the dump"
        )
    edges = [response.start]
    for stop, _ in spans[:-1]:
        edges.append(min(max(response.num_prompt + stop - 1, edges[-1]), end))
    edges.append(end)
    runs = [(a, b, version) for a, b, (_, version) in zip(edges, edges[1:], spans, strict=False)]
    return [run for run in runs if run[0] < run[1]] or runs[-1:]


def _checked_spans(response: Response) -> list[tuple[int, str]]:
    """Return (end, version) of each span."""
    versions = response.versions
    if versions is None or isinstance(versions, str):
        return [(0, versions)] if versions else []
    if not isinstance(versions, list | tuple):
        raise RoutesError(
            f"{response.name}: weight versions must be a name or a list of spans, got {_describe(versions)}"
        )
    spans: list[tuple[int, str]] = []
    for span in versions:
        start = require_int(f"{response.name}: span start", field(span, "start"), low=0, error=RoutesError)
        end = require_int(f"{response.name}: span end", field(span, "end"), low=0, error=RoutesError)
        if start != (spans[-1][0] if spans else 0) or end < start:
            raise RoutesError(f"{response.name}: weight version span {start}..{end} does not follow the one before it")
        version = field(span, "version")
        spans.append((end, "" if version is None else str(version)))
    # A span without a token computed no row, unless no span has one: then the last version made the prompt's rows.
    starts = [0, *(end for end, _ in spans[:-1])]
    return [span for start, span in zip(starts, spans, strict=False) if span[0] > start] or spans[-1:]


def _describe(value: Any) -> str:
    """Describe a value for an error message, in short."""
    text = repr(value) if isinstance(value, str | int | float | bool | None) else ""
    return f"{type(value).__name__} {text[:40]}".strip()


@dataclass(slots=True)
class LeftOut:
    """Records without routes, such as aborted requests: counted, named and left out, where most have some."""

    read: int = 0
    count: int = 0
    first: str = ""

    def lacks(self, payload: Any, place: str, answer: Any) -> bool:
        """Count one answer of an engine, and return whether it has no routes.

        One without routes is left out, or raises if it is no answer: a damaged record must not go unnoticed.
        """
        if payload is not None:
            self.read += 1
            return False
        known = ("id", "index", "finish_reason", "error", "request")
        # A list has a method called index.
        if isinstance(answer, str | list | tuple) or all(field(answer, name) is None for name in known):
            raise RoutesError(f"{place} has no routed_experts, and is no answer of an engine; is the file damaged?")
        self.first = self.first or place
        self.count += 1
        return True

    def finish(self, name: str, *, why: str) -> None:
        """Warn of those left out, or raise if they are not the smaller part."""
        if self.count and self.count >= self.read:
            raise RoutesError(
                f"{self.first} has no routed_experts, as {self.count} of {self.count + self.read} records: {why}"
            )
        if self.count:
            total = self.count + self.read
            _log.warning("%s: %d of %d have no routes and are left out, first %s", name, self.count, total, self.first)

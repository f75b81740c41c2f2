"""Megatron-Core: `megatron-trace` and `megatron-replay`. Checked with Megatron-LM d98e8a64 (2026-08-22).

`megatron-trace`, written by `--moe-routing-trace-path`: a folder of `router_trace_rank<r>.jsonl`, or one such file. One
record per line and (step, block, layer) in the order the routers ran, with
    step          int: iteration, or decode step
    stage         "pre_dispatch"
    block         "decoder" or "mtp"; records of MTP blocks (which also have `mtp_idx`) are skipped
    layer         int, from 0: the index in `decoder.layers`
    rank          int
    num_tokens    int, T
    topk          int, K
    top_indices   [T][K] int: the ids
    hs_*, logit_* offsets in side files; ignored
A step holds one micro-batch after another: a layer that appears again begins the next. Each becomes a recording named
"rank r step s micro-batch m", whose tokens are the T rows this rank forwarded. Traps of this format:
- `layer` counts within a pipeline stage. The layer axis is named only if the layers are exactly the model's MoE layers;
  else it stays unnamed and is mapped by its length, so a single stage's trace is refused, not misread.
- Under activation recomputation the routers run twice: a micro-batch is then recorded twice, which the doctor reports.

`megatron-replay`, what `RouterReplay.get_recorded_data()` returns: a list over this rank's routers of [T, K] integer
tensors, in model order, None for a router that did not run; or a list of such lists, one per micro-batch. As an object,
`.pt`, or, with the layers named by global number from 0 (Megatron's own `layer_number` counts from 1):
    a dict {layer: [T, K]} or a list of them        (object, `.pt`)
    arrays named micro_<m>.layer_<n>, or layer_<n>  (`.npz`)
A micro-batch is named "micro-batch m". Named layers may be some of the model's, such as one pipeline stage's.
Records are matched by their layer number, never by their order; every layer of a micro-batch has as many rows.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from equipoise.core import ModelShape, RoutesError
from equipoise.core.value import require_int
from equipoise.routes.interpret import Format, Recording
from equipoise.routes.source import Source, integer_array, is_tensor

_TRACE_KEYS = ("step", "layer", "top_indices")
_NPZ_KEY = re.compile(r"(?:micro_(\d{1,9})\.)?layer_(\d{1,9})")

Layers = dict[int, np.ndarray]
"""[T, K] ids by layer."""


def _matches_trace(source: Source) -> bool:
    parts = _trace_files(source)
    record = parts[0].first() if parts else None
    return isinstance(record, Mapping) and all(key in record for key in _TRACE_KEYS)


def _trace_files(source: Source) -> list[Source]:
    """Return the trace files of a folder, in the order of their names; any other source as it is."""
    if source.path is None or not source.path.is_dir():
        return [source]
    return [Source.of(file) for file in sorted(source.path.glob("*.jsonl"))]


def _read_trace(source: Source, model: ModelShape) -> Iterator[Recording]:
    files = _trace_files(source)
    if not files:
        raise RoutesError(f"{source.name} holds no .jsonl file")
    for file in files:
        records = (_trace_record(f"{file.name} {place}", record) for place, record in file.nonempty_records())
        decoder = (record for record in records if record[0] is not None)
        for (rank, step), group in groupby(decoder, key=lambda record: record[0]):
            for m, layers in enumerate(_micro_batches((layer, ids) for _, layer, ids in group)):
                name = f"rank {rank} step {step} micro-batch {m}"
                # A stage of a pipeline counts its layers from 0, so only a full set of numbers can be trusted.
                is_full = tuple(sorted(layers)) == model.layer_numbers
                yield _stack(name, layers, source=file, is_named=is_full)


def _trace_record(title: str, record: Any) -> tuple[tuple[int, int] | None, int, np.ndarray]:
    """Return ((rank, step), layer, ids) of one line; no rank and step for an MTP block."""
    if not isinstance(record, Mapping):
        raise RoutesError(f"{title} holds a {type(record).__name__}; a trace record is an object")
    missing = [key for key in _TRACE_KEYS if key not in record]
    if missing:
        raise RoutesError(f"{title}: no {missing[0]!r} in the trace record")
    step, layer, rank = (
        require_int(f"{title}: {key}", value, low=0, error=RoutesError)
        for key, value in (("step", record["step"]), ("layer", record["layer"]), ("rank", record.get("rank", 0)))
    )
    if record["top_indices"] == [] and isinstance(record.get("topk"), int):
        ids = np.zeros((0, max(int(record["topk"]), 0)), dtype=np.int64)
    else:
        ids = integer_array(f"{title}: top_indices", record["top_indices"], ndim=2)
        for key, size in (("num_tokens", ids.shape[0]), ("topk", ids.shape[1])):
            if record.get(key, size) != size:
                raise RoutesError(f"{title}: {key} is {record[key]!r}, top_indices has {size}; was the line cut?")
    if record.get("block", "decoder") != "decoder" or "mtp_idx" in record:
        return None, layer, ids
    return (rank, step), layer, ids


def _micro_batches(records: Iterable[tuple[int, np.ndarray]]) -> Iterator[Layers]:
    """Split the records of a step where a layer appears again."""
    layers: Layers = {}
    for layer, ids in records:
        if layer in layers:
            yield layers
            layers = {}
        layers[layer] = ids
    if layers:
        yield layers


def _stack(name: str, layers: Layers, *, source: Source, is_named: bool) -> Recording:
    """Make one recording of the layers, in ascending order."""
    numbers = tuple(sorted(layers))
    shapes = {layer: layers[layer].shape for layer in numbers}
    for layer, shape in shapes.items():
        if shape != shapes[numbers[0]]:
            raise RoutesError(
                f"{source.name}: {name}: layer {layer} has {shape[0]} rows of {shape[1]} ids, "
                f"layer {numbers[0]} has {shapes[numbers[0]][0]} of {shapes[numbers[0]][1]}"
            )
    rows = np.stack([layers[layer] for layer in numbers], axis=1)
    if rows.dtype.kind not in "iu":
        raise RoutesError(f"{source.name}: {name}: layers mix dtypes that no integer holds")
    return Recording(name=name, rows=rows, num_tokens=len(rows), layer_numbers=numbers if is_named else None)


def _matches_replay(source: Source) -> bool:
    record = source.first()
    if isinstance(record, Mapping):
        return len(record) > 0 and all(_is_layer(v) and _named(k) is not None for k, v in record.items())
    if isinstance(record, list | tuple):
        return _are_layers(record)
    if record is None and source.content is None:
        return False
    # A bare [T, K] array is a layer of a list, not a whole dump.
    content = source.opened().content
    return isinstance(content, list | tuple) and _are_layers(content)


def _are_layers(values: Sequence[Any]) -> bool:
    return all(_is_layer(value) for value in values) and any(value is not None for value in values)


def _is_layer(value: Any) -> bool:
    if value is None:
        return True
    is_array = isinstance(value, np.ndarray) or (is_tensor(value) and not getattr(value, "is_nested", False))
    return is_array and value.ndim == 2


def _named(key: Any) -> tuple[int, int] | None:
    """Return (micro-batch, layer) of a key, None if it is not a layer's."""
    if isinstance(key, int) and not isinstance(key, bool):
        return 0, key
    match = _NPZ_KEY.fullmatch(key) if isinstance(key, str) else None
    return (int(match[1] or 0), int(match[2])) if match else None


def _read_replay(source: Source, model: ModelShape) -> Iterator[Recording]:
    for m, (layers, is_named) in enumerate(_replay_batches(source)):
        name, title = f"micro-batch {m}", f"{source.name}: micro-batch {m}"
        found = {n: integer_array(f"{title}: layer {n}", v, ndim=2) for n, v in layers.items() if v is not None}
        if not found:
            raise RoutesError(f"{title}: no router recorded anything; was the action set to RECORD?")
        # A router that did not run gets rows of -1.
        missing = np.full(next(iter(found.values())).shape, -1, dtype=np.int64)
        yield _stack(name, {n: found.get(n, missing) for n in layers}, source=source, is_named=is_named)


def _replay_batches(source: Source) -> Iterator[tuple[dict[int, Any], bool]]:
    """Yield (layers, whether they are named) of each micro-batch."""
    bare: dict[int, Any] = {}
    for place, record in source.nonempty_records():
        if isinstance(record, Mapping):
            for batch in _named_batches(f"{source.name} {place}", record):
                yield batch, True
        elif isinstance(record, list | tuple):
            yield dict(enumerate(record)), False
        else:
            bare[len(bare)] = record
    if bare:
        yield bare, False


def _named_batches(title: str, record: Mapping[Any, Any]) -> list[dict[int, Any]]:
    batches: dict[int, dict[int, Any]] = {}
    for key, value in record.items():
        named = _named(key)
        if named is None:
            raise RoutesError(
                f"{title}: {key!r} names no layer; expected a layer number, layer_<n> or micro_<m>.layer_<n>"
            )
        batches.setdefault(named[0], {})[named[1]] = value
    if sorted(batches) != list(range(len(batches))):
        raise RoutesError(f"{title}: micro-batches must be numbered from 0 without gaps, got {sorted(batches)[:8]}")
    return [batches[m] for m in range(len(batches))]


FORMATS = (
    Format(
        name="megatron-trace",
        summary="Megatron-Core RouterTracer: JSONL records of step, layer, top_indices, one file per rank",
        suffixes=(".jsonl",),
        matches=_matches_trace,
        read=_read_trace,
    ),
    Format(
        name="megatron-replay",
        summary="Megatron-Core RouterReplay.get_recorded_data(): [T, K] per layer, for each micro-batch",
        suffixes=(".pt", ".npz"),
        matches=_matches_replay,
        read=_read_replay,
    ),
)

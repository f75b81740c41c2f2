"""Count routes of samples, or of token ranges of them, into histograms of rows; histograms on disk.

How rows are counted:
1. A known route of a token adds one row to each of its K ids. A duplicate id adds a row each time, as a dispatcher
   sees it; one that collapses duplicates receives fewer.
2. A known route of a padding row adds to the padding counts instead: it is dispatched, but belongs to no token.
3. An unknown route adds no row. A token is unknown in a layer where its row is masked, or where it has no row.
4. Token t owns the t-th row that is not padding. Padding rows go with the token before them, or with the first.

File of histograms: a compressed `.npz` without pickled objects, holding
    format        "equipoise-counts-1"
    head          JSON text: model (every figure of the ModelShape, by field name), layer_numbers, names of the samples
    count_BLE, tokens_B                 any unsigned integer dtype
    padding_BLE, unknown_BL, pair_LEE   likewise, if the counts have them
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from equipoise.core import ModelShape, RouteCounts, Routes, RoutesError, SampleRoutes, ScheduleError, TopologyError
from equipoise.core.files import narrow, read_npz, whole_file
from equipoise.core.value import Value, frozen_array, require_int, require_kind

FORMAT = "equipoise-counts-1"
_OPTIONAL = ("padding_BLE", "unknown_BL", "pair_LEE")
_ARRAYS = ("count_BLE", "tokens_B", *_OPTIONAL)

Progress = Callable[[int, int], None]
"""Called after each sample with (samples done, samples in all, or 0 if that is not known)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RangeCount(Value):
    """Histograms of a range of tokens of one sample."""

    count_LE: np.ndarray
    """[L, E] int64 rows of each layer and expert; padding rows not included."""
    padding_LE: np.ndarray
    """[L, E] int64 padding rows."""
    unknown_L: np.ndarray
    """[L] int64 tokens whose route is unknown, those without a row included."""


def count_range(sample: SampleRoutes, start: int, stop: int, experts: int) -> RangeCount:
    """Count tokens `[start, stop)` of one sample.

    Args:
        sample: whose routes
        start: first token
        stop: token after the last one, at most `sample.num_tokens`
        experts: routed experts of the model, E
    """
    if not 0 <= start <= stop <= sample.num_tokens:
        raise ScheduleError(
            f"sample {sample.name!r}: tokens {start}..{stop} requested; it has tokens 0..{sample.num_tokens}"
        )
    first, last = _row_range(sample, start, stop)
    return _count_rows(sample, first, last, tokens=stop - start, experts=experts)


def count_sample(sample: SampleRoutes, experts: int) -> RangeCount:
    """Count all tokens and all padding rows of one sample."""
    return _count_rows(sample, 0, sample.num_rows, tokens=sample.num_tokens, experts=experts)


def count_routes(
    routes: Routes | Iterable[SampleRoutes],
    *,
    model: ModelShape | None = None,
    layer_numbers: Sequence[int] | None = None,
    pairs: bool = False,
    progress: Progress | None = None,
) -> RouteCounts:
    """Count every sample, one after another, so that the routes need not be kept.

    Args:
        routes: `Routes`, or any iterable of samples straight from a reader
        model: whose experts the ids are; needed for bare samples
        layer_numbers: global number of each entry of the L axis; those of `routes`, or all MoE layers of `model`
        pairs: count co-activations `pair_LEE` in the same pass
        progress: called after each sample
    """
    model, numbers = _shape_of(routes, model, layer_numbers)
    total = len(routes) if isinstance(routes, Routes | Sequence) else 0
    layers, experts = len(numbers), model.experts
    count_BLE = np.zeros((total, layers, experts), dtype=np.int64)
    pair_LEE = np.zeros((layers, experts, experts), dtype=np.int64) if pairs else None
    names: list[str] = []
    tokens: list[int] = []
    unknown: list[np.ndarray] = []
    padding: dict[int, np.ndarray] = {}
    for b, sample in enumerate(routes):
        require_kind("a sample of routes", sample, SampleRoutes, error=RoutesError)
        if sample.ids_TLK.shape[1:] != (layers, model.top_k):
            raise RoutesError(
                f"sample {sample.name!r}: routes have {sample.ids_TLK.shape[1]} layers and "
                f"top-{sample.ids_TLK.shape[2]}; {model.name!r} here needs {layers} layers and top-{model.top_k}"
            )
        found = count_sample(sample, experts)
        if b == len(count_BLE):
            # The number of samples is not known ahead: add room for half as many again.
            count_BLE = np.concatenate([count_BLE, np.zeros((max(8, b // 2), layers, experts), dtype=np.int64)])
        count_BLE[b] = found.count_LE
        if found.padding_LE.any():
            padding[b] = found.padding_LE
        if pair_LEE is not None:
            _add_pairs(sample, pair_LEE)
        names.append(sample.name)
        tokens.append(sample.num_tokens)
        unknown.append(found.unknown_L)
        if progress is not None:
            progress(b + 1, total)
    count_BLE = count_BLE[: len(names)]
    padding_BLE = np.zeros_like(count_BLE)
    for b, padding_LE in padding.items():
        padding_BLE[b] = padding_LE
    return RouteCounts(
        model=model,
        count_BLE=count_BLE,
        padding_BLE=padding_BLE if padding else None,
        unknown_BL=np.array(unknown, dtype=np.int64).reshape(-1, layers),
        tokens_B=np.array(tokens, dtype=np.int64),
        names=tuple(names),
        layer_numbers=numbers,
        pair_LEE=pair_LEE,
    )


def _shape_of(
    routes: Routes | Iterable[SampleRoutes], model: ModelShape | None, layer_numbers: Sequence[int] | None
) -> tuple[ModelShape, tuple[int, ...]]:
    require_kind("routes", routes, Routes, Iterable, error=RoutesError)
    if model is not None:
        require_kind("model", model, ModelShape, error=RoutesError)
    if isinstance(routes, Routes):
        if model is not None and (model.experts, model.top_k) != (routes.model.experts, routes.model.top_k):
            raise RoutesError(
                f"routes of {routes.model.name!r} ({routes.model.experts} experts, top-{routes.model.top_k}) cannot be "
                f"counted as {model.name!r} ({model.experts} experts, top-{model.top_k}); leave model= out"
            )
        return model or routes.model, tuple(layer_numbers or routes.layer_numbers)
    if model is None:
        raise RoutesError("counting bare samples needs model=, the shape whose experts their ids are")
    return model, tuple(layer_numbers or model.layer_numbers)


def _row_range(sample: SampleRoutes, start: int, stop: int) -> tuple[int, int]:
    """Return the rows of tokens `[start, stop)`: the t-th row that is not padding belongs to token t."""
    rows = sample.num_rows
    if sample.padding_T is None or start == stop:
        return min(start, rows), min(stop, rows)
    token_rows = np.flatnonzero(~sample.padding_T)
    edges = [int(token_rows[t]) if t < len(token_rows) else rows for t in (start, stop)]
    return (0 if start == 0 else edges[0]), edges[1]


def _count_rows(sample: SampleRoutes, first: int, last: int, *, tokens: int, experts: int) -> RangeCount:
    """Count rows `[first, last)`, which hold the routes of `tokens` tokens."""
    ids_TLK = _unsigned(sample.ids_TLK[first:last])
    known_TL = None if sample.known_TL is None else sample.known_TL[first:last]
    padding_T = None if sample.padding_T is None else sample.padding_T[first:last]
    histogram = _Histogram(ids_TLK.shape[1], require_int("experts", experts, low=1, error=RoutesError))
    if padding_T is not None and padding_T.any():
        known_TL = np.ones(ids_TLK.shape[:2], dtype=np.bool_) if known_TL is None else known_TL
        padding = _Histogram(ids_TLK.shape[1], experts)
        padding.add(ids_TLK, known_TL & padding_T[:, None])
        histogram.add(ids_TLK, known_TL & ~padding_T[:, None])
        padding_LE = padding.rows(sample)
    else:
        padding_LE = np.zeros((ids_TLK.shape[1], experts), dtype=np.int64)
        histogram.add(ids_TLK, known_TL)
    count_LE = histogram.rows(sample)
    unknown_L = tokens - histogram.known_L
    if unknown_L.min(initial=0) < 0:
        raise RoutesError(
            f"sample {sample.name!r}: {int(histogram.known_L.max())} rows for {tokens} tokens; at most one per token, "
            "padding rows marked in padding_T"
        )
    return RangeCount(
        count_LE=frozen_array(count_LE), padding_LE=frozen_array(padding_LE), unknown_L=frozen_array(unknown_L)
    )


class _Histogram:
    """Rows of each layer and expert, counted by the compiled kernels."""

    def __init__(self, layers: int, experts: int) -> None:
        self.experts = experts
        width = 1 << (experts - 1).bit_length()
        self.mask = np.uint64(width - 1)
        self.seen = 0
        # 32 bits keep the histogram of 48 layers x 128 experts in the first-level cache.
        self.count_LW = np.zeros((layers, width), dtype=np.uint32)
        self.known_L = np.zeros(layers, dtype=np.int64)

    def add(self, ids_TLK: np.ndarray, known_TL: np.ndarray | None) -> None:
        from equipoise.loads import count_kernels

        if known_TL is not None and not known_TL.all():
            known_TL = frozen_array(np.ascontiguousarray(known_TL))
            self.seen |= int(count_kernels.add_masked(ids_TLK, known_TL, self.mask, self.count_LW, self.known_L))
            return
        self.known_L += len(ids_TLK)
        tokens, layers, top_k = ids_TLK.shape
        base_L = np.arange(layers, dtype=np.uint32) * np.uint32(self.count_LW.shape[1])
        count = self.count_LW.reshape(-1)
        if ids_TLK.dtype == np.uint8 and top_k == 8:
            word_TL = np.require(ids_TLK.view(np.uint64)[:, :, 0], requirements=["C", "A"])
            words = count_kernels.add_bytes(frozen_array(word_TL), base_L, self.mask, count)
            self.seen |= int(np.bitwise_or.reduce(np.array([words], dtype=np.uint64).view(np.uint8)))
        else:
            ids_TC = ids_TLK.reshape(tokens, layers * top_k)
            self.seen |= int(count_kernels.add_ids(ids_TC, np.repeat(base_L, top_k), self.mask, count))

    def rows(self, sample: SampleRoutes) -> np.ndarray:
        """Return [L, E] int64 rows, or raise if an id was outside the experts."""
        if self.seen > int(self.mask) or self.count_LW[:, self.experts :].any():
            sample.check_ids(self.experts)
            raise AssertionError(f"sample {sample.name!r}: an id is out of range, but check_ids found none")
        return self.count_LW[:, : self.experts].astype(np.int64)


def _unsigned(ids: np.ndarray) -> np.ndarray:
    """Return contiguous, aligned, native, read-only unsigned ids, so that there is one compiled kernel per width."""
    native = np.require(ids, dtype=ids.dtype.newbyteorder("="), requirements=["C", "A"])
    return frozen_array(native.view(np.dtype(f"u{native.dtype.itemsize}")))


def _add_pairs(sample: SampleRoutes, pair_LEE: np.ndarray) -> None:
    """Add the pairs of one sample whose ids were checked."""
    from equipoise.loads import count_kernels

    ids_TLK = _unsigned(sample.ids_TLK)
    known_TL = np.ones(ids_TLK.shape[:2], dtype=np.bool_) if sample.known_TL is None else sample.known_TL
    if sample.padding_T is not None:
        known_TL = known_TL & ~sample.padding_T[:, None]
    count_kernels.add_pairs(ids_TLK, frozen_array(np.ascontiguousarray(known_TL)), pair_LEE)


def save_counts(counts: RouteCounts, path: str | Path) -> None:
    """Write counts to a file of any suffix."""
    head = {"model": counts.model.figures(), "layer_numbers": counts.layer_numbers, "names": counts.names}
    arrays = {name: getattr(counts, name) for name in _ARRAYS}
    content: dict[str, Any] = {name: narrow(array) for name, array in arrays.items() if array is not None}
    content.update(format=np.array(FORMAT), head=np.array(json.dumps(head)))
    with whole_file(path, error=RoutesError) as draft, draft.open("wb") as file:
        np.savez_compressed(file, **content)


def load_counts(path: str | Path) -> RouteCounts:
    """Read a file written by `save_counts`."""
    arrays = read_npz(path, wanted=FORMAT, error=RoutesError)
    wrong = set(arrays) ^ {"format", "head", *_ARRAYS}
    if wrong - set(_OPTIONAL):
        raise RoutesError(f"{path}: expected arrays {', '.join(('head', *_ARRAYS))}, found {', '.join(sorted(arrays))}")
    try:
        head = json.loads(str(arrays["head"]))
    except (ValueError, RecursionError) as error:
        raise RoutesError(f"{path}: its head is not JSON: {error}") from error
    if not isinstance(head, dict):
        raise RoutesError(f"{path}: its head must hold an object, got {type(head).__name__}")
    try:
        for name in _ARRAYS:
            if name in arrays and arrays[name].dtype.kind != "u":
                raise RoutesError(f"{name} has dtype {arrays[name].dtype}; counts are unsigned integers")
        return RouteCounts(
            model=ModelShape.from_figures(head["model"]),
            names=tuple(str(name) for name in head["names"]),
            layer_numbers=tuple(int(n) for n in head["layer_numbers"]),
            **{name: arrays[name] for name in _ARRAYS if name in arrays},
        )
    except (KeyError, TypeError, ValueError, TopologyError) as error:
        raise RoutesError(f"{path} does not make sense: {error}") from error

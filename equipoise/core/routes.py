"""Recorded routes: which experts each token chose in each MoE layer, for many samples; and their histograms.

A sample has `num_tokens` tokens. Its route rows `ids_TLK` cover tokens `[0, T)`, where T is `num_tokens` or
`num_tokens - 1` (engines never forward the last sampled token), or fewer where a recording stops early.
Rows whose routes are unknown are masked by `known_TL`, never given a default expert: 0 is a valid expert id.
Padding rows (`padding_T`) were forwarded and dispatched but belong to no token of the sample. Every known id is in
0..experts-1, in the smallest unsigned dtype; duplicate ids in a row are for the doctor to report, since engines do emit
them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from equipoise.core.errors import RoutesError
from equipoise.core.model import ModelShape
from equipoise.core.value import Value, frozen_array, int64_array, require_int


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Rows `[start, stop)` made by one version of the weights, such as one turn of a conversation."""

    start: int
    stop: int
    weight_version: str = ""
    """The engine's name for the weights; empty if it was not recorded."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampleRoutes(Value):
    """The routes of one sample."""

    name: str
    """Name of the sample in the recording; errors and findings use it."""
    ids_TLK: np.ndarray
    """[T, L, K] logical expert ids; entries of unknown rows mean nothing."""
    num_tokens: int
    """Tokens of the sample, prompt and response together."""
    known_TL: np.ndarray | None = None
    """[T, L] bool, False if the route of a row is unknown; None: every row is known."""
    padding_T: np.ndarray | None = None
    """[T] bool, True if a row is padding; None: no row is."""
    segments: tuple[Segment, ...] = ()
    """Rows by weight version, in order and without gaps; empty: one segment of unnamed version."""
    tokens_T: np.ndarray | None = None
    """[num_tokens] token ids if the recording has them; the doctor proves alignment with them."""

    def __post_init__(self) -> None:
        ids = np.asarray(self.ids_TLK)
        if ids.ndim != 3 or ids.dtype.kind not in "iu":
            raise RoutesError(
                f"sample {self.name!r}: routes must be integers of shape [T, L, K], "
                f"got {ids.dtype} of shape {ids.shape}"
            )
        object.__setattr__(self, "ids_TLK", frozen_array(ids))
        tokens = require_int(f"sample {self.name!r}: num_tokens", self.num_tokens, low=0, error=RoutesError)
        object.__setattr__(self, "num_tokens", tokens)
        object.__setattr__(self, "known_TL", self._mask("known_TL", self.known_TL, ids.shape[:2]))
        object.__setattr__(self, "padding_T", self._mask("padding_T", self.padding_T, ids.shape[:1]))
        if self.tokens_T is not None:
            array = int64_array(f"sample {self.name!r}: tokens_T", self.tokens_T, ndim=1, error=RoutesError)
            if len(array) != tokens:
                raise RoutesError(f"sample {self.name!r}: {len(array)} token ids for {tokens} tokens")
            object.__setattr__(self, "tokens_T", array)
        edges = [0, *(s.stop for s in self.segments)]
        starts, is_backward = [s.start for s in self.segments], any(s.stop < s.start for s in self.segments)
        if self.segments and (starts != edges[:-1] or edges[-1] != self.num_rows or is_backward):
            raise RoutesError(
                f"sample {self.name!r}: segments must tile rows 0..{self.num_rows} in order, got "
                f"{[(s.start, s.stop) for s in self.segments]}"
            )

    def _mask(self, name: str, mask: Any, shape: tuple[int, ...]) -> np.ndarray | None:
        if mask is None:
            return None
        array = np.asarray(mask)
        if array.dtype != np.bool_ or array.shape != shape:
            raise RoutesError(
                f"sample {self.name!r}: {name} must be bool of shape {shape}, got {array.dtype} of shape {array.shape}"
            )
        return frozen_array(array)

    @property
    def num_rows(self) -> int:
        """Recorded rows, T."""
        return int(self.ids_TLK.shape[0])

    def token_ids(self, start: int, stop: int) -> np.ndarray:
        """Return [stop - start, L, K] int64 ids of a range of tokens, -1 where a route is unknown or has no row."""
        ids_TLK = np.full((stop - start, *self.ids_TLK.shape[1:]), -1, dtype=np.int64)
        recorded_TLK = ids_TLK[: max(0, self.num_rows - start)]
        recorded_TLK[:] = self.ids_TLK[start:stop]
        if self.known_TL is not None:
            recorded_TLK[~self.known_TL[start:stop]] = -1
        return ids_TLK

    def check_ids(self, experts: int) -> None:
        """Raise unless every known id is in 0..experts-1."""
        ids = self.ids_TLK
        if not ids.size:
            return
        if self.known_TL is None and int(ids.max()) < experts and int(ids.min()) >= 0:
            return
        bad = (ids < 0) | (ids >= experts)
        if self.known_TL is not None:
            bad &= self.known_TL[:, :, None]
        if bad.any():
            row, layer, column = (int(i) for i in np.argwhere(bad)[0])
            raise RoutesError(
                f"sample {self.name!r}: row {row}, layer index {layer}, column {column} holds expert "
                f"{int(ids[row, layer, column])}; the model has experts 0..{experts - 1}. "
                "Are these physical ids, or another model's?"
            )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Routes(Value):
    """Routes of many samples of one model.

    `samples` may be any sequence, also a memory-mapped store, which makes samples when they are accessed.
    """

    model: ModelShape
    samples: Sequence[SampleRoutes]
    layer_numbers: tuple[int, ...]
    """Global layer number of each entry of the L axis."""

    def __post_init__(self) -> None:
        numbers = _layer_numbers(self.layer_numbers)
        object.__setattr__(self, "layer_numbers", numbers)
        strangers = sorted(set(numbers) - set(self.model.layer_numbers))
        if strangers or list(numbers) != sorted(set(numbers)):
            raise RoutesError(
                f"layer_numbers must ascend and be MoE layers of {self.model.name!r} "
                f"({_spans(self.model.layer_numbers)}), got {_spans(numbers)}"
            )

    @classmethod
    def of(
        cls,
        samples: Sequence[SampleRoutes],
        *,
        model: ModelShape,
        layer_numbers: Sequence[int] | None = None,
    ) -> "Routes":
        """Check samples against `model` and hold them in memory, ids in the smallest dtype.

        Args:
            samples: the samples
            model: whose experts and layers the ids are
            layer_numbers: global number of each entry of the L axis; all MoE layers of the model by default
        """
        numbers = tuple(model.layer_numbers if layer_numbers is None else layer_numbers)
        checked = tuple(_fit(sample, model=model, num_layers=len(numbers)) for sample in samples)
        return cls(model=model, samples=checked, layer_numbers=numbers)

    @property
    def num_tokens(self) -> int:
        """Tokens of all samples together."""
        return sum(sample.num_tokens for sample in self.samples)

    def __len__(self) -> int:
        return len(self.samples)

    def __iter__(self) -> Iterator[SampleRoutes]:
        return iter(self.samples)


def id_dtype(experts: int) -> np.dtype:
    """Return the smallest unsigned dtype that holds every id of `experts` experts."""
    return np.dtype(np.min_scalar_type(max(experts - 1, 0)))


def _fit(sample: SampleRoutes, *, model: ModelShape, num_layers: int) -> SampleRoutes:
    rows, layers, top_k = sample.ids_TLK.shape
    if layers != num_layers or top_k != model.top_k:
        raise RoutesError(
            f"sample {sample.name!r}: routes have {layers} layers and top-{top_k}; "
            f"{model.name!r} here needs {num_layers} layers and top-{model.top_k}"
        )
    # Padding rows belong to no token, so they do not count.
    padding = 0 if sample.padding_T is None else int(sample.padding_T.sum())
    if rows - padding > sample.num_tokens:
        raise RoutesError(
            f"sample {sample.name!r}: {rows - padding} rows for {sample.num_tokens} tokens; at most one per token"
        )
    sample.check_ids(model.experts)
    dtype = id_dtype(model.experts)
    if sample.ids_TLK.dtype == dtype:
        return sample
    ids = sample.ids_TLK
    if sample.known_TL is not None:
        ids = np.where(sample.known_TL[:, :, None], ids, 0)
    return replace(sample, ids_TLK=ids.astype(dtype))


def _layer_numbers(numbers: Sequence[int]) -> tuple[int, ...]:
    return tuple(require_int("an entry of layer_numbers", n, low=0, error=RoutesError) for n in numbers)


def _spans(numbers: Sequence[int]) -> str:
    """Format numbers as runs: '0-3, 7' for (0, 1, 2, 3, 7)."""
    spans: list[list[int]] = []
    for n in numbers:
        if spans and n == spans[-1][1] + 1:
            spans[-1][1] = n
        else:
            spans.append([n, n])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in spans) or "none"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RouteCounts(Value):
    """Histograms of routes, additive over samples: enough to plan, thousands of times smaller than the routes."""

    model: ModelShape
    count_BLE: np.ndarray
    """[B, L, E] rows of each sample, layer and expert; padding rows not included."""
    padding_BLE: np.ndarray | None = None
    """[B, L, E] padding rows; None: there are none."""
    unknown_BL: np.ndarray | None = None
    """[B, L] tokens whose route is unknown, the last token of a sample included if it has no row."""
    tokens_B: np.ndarray
    """[B] tokens of each sample."""
    names: tuple[str, ...]
    layer_numbers: tuple[int, ...]
    pair_LEE: np.ndarray | None = None
    """[L, E, E] tokens that chose both experts, symmetric, the diagonal being the expert's tokens; optional."""

    def __post_init__(self) -> None:
        counts = int64_array("count_BLE", self.count_BLE, ndim=3, error=RoutesError)
        samples, layers, experts = counts.shape
        object.__setattr__(self, "count_BLE", counts)
        object.__setattr__(self, "tokens_B", int64_array("tokens_B", self.tokens_B, ndim=1, error=RoutesError))
        object.__setattr__(self, "names", tuple(self.names))
        object.__setattr__(self, "layer_numbers", _layer_numbers(self.layer_numbers))
        wanted = {
            "padding_BLE": counts.shape,
            "unknown_BL": (samples, layers),
            "pair_LEE": (layers, experts, experts),
        }
        for name, shape in wanted.items():
            value = getattr(self, name)
            if value is None:
                continue
            array = int64_array(name, value, ndim=len(shape), error=RoutesError)
            if array.shape != shape:
                raise RoutesError(f"{name} must have shape {shape}, got {array.shape}")
            object.__setattr__(self, name, array)
        for name in ("count_BLE", "tokens_B", *wanted):
            array = getattr(self, name)
            if array is not None and array.size and array.min() < 0:
                raise RoutesError(f"{name} holds {int(array.min())}; counts cannot be negative")
        if experts != self.model.experts or layers != len(self.layer_numbers):
            raise RoutesError(
                f"count_BLE has {layers} layers and {experts} experts; expected {len(self.layer_numbers)} "
                f"layers and the {self.model.experts} experts of {self.model.name!r}"
            )
        if len(self.tokens_B) != samples or len(self.names) != samples:
            raise RoutesError(
                f"{samples} samples counted, {len(self.tokens_B)} lengths and {len(self.names)} names given"
            )

    def __len__(self) -> int:
        return int(self.count_BLE.shape[0])

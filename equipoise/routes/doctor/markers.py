"""Planted markers: known rows that prove that each token's route arrives with its token, through any slicing.

The ids of a marker row encode its token and its layer. A trainer's own packing and slicing can therefore run on markers
instead of routes, and every delivered row can be compared with the token it was delivered with.

The code. Tokens of all samples are numbered 0, 1, 2, ... in order. With `base = experts // top_k`, column k of a route
takes its id from the band `[k * base, (k + 1) * base)`, so ids are distinct and may be sorted or kept as a set.
The token number is written in D digits of that base; position `p = layer * top_k + k` holds digit `p mod D`, shifted by
digit k of the layer's index (modulo base), so that rows of two layers differ, too.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from equipoise.core import ModelShape, Routes, RoutesError, SampleRoutes, Schedule
from equipoise.routes.doctor.reading import CheckCounts, Finding, judge
from equipoise.routes.interpret import Recording

PADDING = -1
"""Token number of padding; its row may hold any ids."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Delivery:
    """What one rank holds of one pipeline stage: token numbers, and the rows delivered with them."""

    name: str
    """Who holds it, for messages: "cp 1, sp 0, pp 2"."""
    tokens_T: np.ndarray
    """[T] token numbers, `PADDING` for padding."""
    ids_TLK: np.ndarray
    """[T, layers of the stage, K] the rows."""
    layers: Sequence[int]
    """Index of each of these layers among the model's MoE layers."""


Slicer = Callable[[np.ndarray, np.ndarray], Iterable[Delivery]]
"""Cuts packed (tokens_T, ids_TLK) the way a trainer does, tokens by its token path, rows by its route path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Markers:
    """Marker rows for samples of given lengths."""

    model: ModelShape
    lengths: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.base < 2:
            raise RoutesError(
                f"model {self.model.name!r}: {self.model.experts} experts are too few to mark top-{self.model.top_k} "
                f"routes; use a shape of at least {2 * self.model.top_k} experts"
            )
        if not self.lengths or min(self.lengths) < 1:
            raise RoutesError(f"lengths is {self.lengths}; give at least one sample of at least one token")
        if self.num_digits > self.model.layers * self.model.top_k:
            most = self.base ** (self.model.layers * self.model.top_k)
            raise RoutesError(f"{self.num_tokens} tokens cannot be marked; {self.model.name!r} has room for {most}")

    @property
    def base(self) -> int:
        """Ids per column."""
        return self.model.experts // self.model.top_k

    @property
    def num_tokens(self) -> int:
        """Tokens of all samples."""
        return sum(self.lengths)

    @property
    def num_digits(self) -> int:
        """Digits of a token number, D."""
        digits, room = 1, self.base
        while room < self.num_tokens:
            digits, room = digits + 1, room * self.base
        return digits

    def rows(self, tokens_T: np.ndarray) -> np.ndarray:
        """Return the [T, L, K] marker rows of these token numbers."""
        digit_TD = tokens_T[:, None] // self.base ** np.arange(self.num_digits) % self.base
        digit_TLK = digit_TD[:, self._digit_LK()] + self._turn_LK()
        return digit_TLK % self.base + self.base * np.arange(self.model.top_k)

    def read(self, ids_TLK: np.ndarray) -> np.ndarray:
        """Return [T] token numbers of rows with all layers, ids in any order; -1 if the row is no marker."""
        ids = np.sort(ids_TLK.astype(np.int64), axis=2) - self.base * np.arange(self.model.top_k)
        digit_TLK = (ids - self._turn_LK()) % self.base
        place_LK = self._digit_LK()
        token_T = np.zeros(len(ids), dtype=np.int64)
        for d in range(self.num_digits):
            token_T += digit_TLK[:, place_LK == d][:, 0] * self.base**d
        same_T = (np.sort(ids_TLK, axis=2) == self.rows(token_T)).all(axis=(1, 2))
        return np.where(same_T & (token_T < self.num_tokens), token_T, -1)

    def name(self, token: int) -> str:
        """Describe a token number: 'token 3 of sample 1'."""
        if not 0 <= token < self.num_tokens:
            return "padding" if token == PADDING else "no marker"
        ends = np.cumsum(self.lengths)
        sample = int(np.searchsorted(ends, token, side="right"))
        return f"token {token - int(ends[sample]) + self.lengths[sample]} of sample {sample}"

    def sample_tokens(self) -> list[np.ndarray]:
        """Return the token numbers of each sample."""
        return np.split(np.arange(self.num_tokens), np.cumsum(self.lengths)[:-1])

    def recordings(self) -> list[Recording]:
        """Return one recording per sample: MoE layers only, a row for every token, token numbers as token ids."""
        return [
            Recording(name=f"sample {i}", rows=self.rows(tokens), num_tokens=len(tokens), tokens=tokens)
            for i, tokens in enumerate(self.sample_tokens())
        ]

    def routes(self) -> Routes:
        """Return the same as routes."""
        samples = [
            SampleRoutes(name=f"sample {i}", ids_TLK=self.rows(tokens), num_tokens=len(tokens), tokens_T=tokens)
            for i, tokens in enumerate(self.sample_tokens())
        ]
        return Routes.of(samples, model=self.model)

    def _digit_LK(self) -> np.ndarray:
        """[L, K] index of the digit of the token number."""
        return np.arange(self.model.layers * self.model.top_k).reshape(-1, self.model.top_k) % self.num_digits

    def _turn_LK(self) -> np.ndarray:
        """[L, K] digits of the layer index, column 0 the lowest."""
        turn_LK = np.zeros((self.model.layers, self.model.top_k), dtype=np.int64)
        left_L = np.arange(self.model.layers)
        for k in range(self.model.top_k):
            left_L, turn_LK[:, k] = np.divmod(left_L, self.base)
        return turn_LK


def plant_markers(lengths: Sequence[int], *, model: ModelShape) -> Markers:
    """Make markers for samples of these lengths."""
    return Markers(model=model, lengths=tuple(int(n) for n in lengths))


def check_arrival(markers: Markers, deliveries: Iterable[Delivery], *, check: str = "markers") -> Finding:
    """Compare each delivered row with the token it was delivered with.

    Args:
        markers: what was planted
        deliveries: what arrived, from all ranks and stages
        check: name of the finding

    Returns:
        a finding in routes; a token that is not delivered exactly once in some layer counts, too
    """
    counts = CheckCounts()
    seen_TL = np.zeros((markers.num_tokens, markers.model.layers), dtype=np.int64)
    for delivery in deliveries:
        _check_delivery(markers, delivery, counts, seen_TL)
    wrong_TL = seen_TL != 1

    def place() -> str:
        token, layer = (int(i) for i in np.argwhere(wrong_TL)[0])
        return f"{markers.name(token)}, layer index {layer}: delivered {int(seen_TL[token, layer])} times"

    counts.add(int(wrong_TL.sum()), int(wrong_TL.sum()), place)
    advice = "routes and tokens are cut differently: make both go through one slicing function, then run this again"
    return judge(check, counts, unit="routes", advice=advice)


def _check_delivery(markers: Markers, delivery: Delivery, counts: CheckCounts, seen_TL: np.ndarray) -> None:
    real_T = delivery.tokens_T != PADDING
    tokens_T, layers = delivery.tokens_T[real_T], list(delivery.layers)
    got_TLK = np.sort(delivery.ids_TLK[real_T], axis=2)
    wrong_TL = (got_TLK != markers.rows(tokens_T)[:, layers]).any(axis=2)
    np.add.at(seen_TL, (tokens_T[:, None], np.array(layers)[None, :]), 1)

    def place() -> str:
        row, layer = (int(i) for i in np.argwhere(wrong_TL)[0])
        found = f"{delivery.name}: {markers.name(int(tokens_T[row]))}, layer index {layers[layer]}"
        if layers == list(range(markers.model.layers)):
            found += f", delivered with the route of {markers.name(int(markers.read(got_TLK[row : row + 1])[0]))}"
        return found

    counts.add(int(wrong_TL.sum()), wrong_TL.size, place)


def prove_slicing(slicer: Slicer, *, markers: Markers, multiple: int = 1) -> Finding:
    """Run a trainer's own slicing on packed markers and prove that every route arrives with its token.

    Args:
        slicer: takes tokens_T and ids_TLK, yields what each rank and stage holds
        markers: what to plant
        multiple: pad each sample to a multiple of this many tokens
    """
    tokens_T = pack_tokens(markers, multiple=multiple)
    return check_arrival(markers, slicer(tokens_T, pack_rows(markers, multiple=multiple)))


def pack_tokens(markers: Markers, *, multiple: int = 1) -> np.ndarray:
    """Concatenate the token numbers of all samples, each padded to a multiple."""
    parts = [np.pad(t, (0, -len(t) % multiple), constant_values=PADDING) for t in markers.sample_tokens()]
    return np.concatenate(parts)


def pack_rows(markers: Markers, *, multiple: int = 1) -> np.ndarray:
    """Concatenate the marker rows of all samples; padding rows hold 0..k-1."""
    tokens_T = pack_tokens(markers, multiple=multiple)
    rows_TLK = markers.rows(tokens_T)
    rows_TLK[tokens_T == PADDING] = np.arange(markers.model.top_k)
    return rows_TLK


# The self-check slices markers twice: `slice_arrays` cuts arrays step by step, as a trainer does; `slice_numbers`
# computes from a rank's coordinates which token is at each of its positions. Rows of the first are delivered with the
# tokens of the second.
# 1. Pack: samples follow each other, each padded to a multiple of 2 * cp.
# 2. Context parallel: zig-zag, rank c holds chunks c and 2 * cp - 1 - c of each padded sample.
# 3. Sequence parallel: a rank's tokens, padded to a multiple of sp, cut into sp equal runs.
# 4. Pipeline: layers cut into pp runs, as level as possible, earlier stages longer.

WIDTHS = ((1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 2), (4, 2, 3), (3, 4, 1))
"""(cp, sp, pp) that the self-check runs: each alone, all together, and sizes that do not divide."""


def self_check(markers: Markers) -> tuple[Finding, ...]:
    """Prove the built-in slicing for every width: one finding each."""
    return tuple(
        check_arrival(markers, slice_markers(markers, cp=cp, sp=sp, pp=pp), check=f"slicing cp{cp} sp{sp} pp{pp}")
        for cp, sp, pp in WIDTHS
    )


def slice_markers(markers: Markers, *, cp: int, sp: int, pp: int) -> Iterator[Delivery]:
    """Yield what each rank and stage holds: rows cut as arrays, tokens computed from the rank's coordinates."""
    rows_CP = slice_arrays(markers, cp=cp, sp=sp)
    layers = np.array_split(np.arange(markers.model.layers), pp)
    for c, s, p in product(range(cp), range(sp), range(pp)):
        yield Delivery(
            name=f"cp {c}, sp {s}, pp {p}",
            tokens_T=slice_numbers(markers, cp=(c, cp), sp=(s, sp)),
            ids_TLK=rows_CP[c][s][:, layers[p]],
            layers=layers[p].tolist(),
        )


def slice_arrays(markers: Markers, *, cp: int, sp: int) -> list[list[np.ndarray]]:
    """Cut the packed rows step by step, for each (context rank, sequence rank)."""
    rows_TLK = pack_rows(markers, multiple=2 * cp)
    lengths = [-(-n // (2 * cp)) * 2 * cp for n in markers.lengths]
    samples = np.split(rows_TLK, np.cumsum(lengths)[:-1])
    parts: list[list[np.ndarray]] = []
    for c in range(cp):
        own = [np.split(sample, 2 * cp)[chunk] for sample in samples for chunk in (c, 2 * cp - 1 - c)]
        joined = np.concatenate(own)
        filler = np.broadcast_to(np.arange(markers.model.top_k), (-len(joined) % sp, *joined.shape[1:]))
        parts.append(np.split(np.concatenate([joined, filler]), sp))
    return parts


def slice_numbers(markers: Markers, *, cp: tuple[int, int], sp: tuple[int, int]) -> np.ndarray:
    """Compute the token number at each position of one rank, from its coordinates.

    Args:
        markers: what was planted
        cp: (context rank, context ranks)
        sp: (sequence rank, sequence ranks)
    """
    (c, num_c), (s, num_s) = cp, sp
    numbers: list[int] = []
    first = 0
    for length in markers.lengths:
        chunk = -(-length // (2 * num_c))
        for place in range(2 * chunk):
            # The first chunk counts from the start of the sample, the second mirrors it from the end.
            token = c * chunk + place if place < chunk else (2 * num_c - 2 - c) * chunk + place
            numbers.append(first + token if token < length else PADDING)
        first += length
    numbers += [PADDING] * (-len(numbers) % num_s)
    width = len(numbers) // num_s
    return np.array(numbers[s * width : (s + 1) * width], dtype=np.int64)


def check_schedule(schedule: Schedule, markers: Markers, *, cp: int, sp: int) -> Finding:
    """Hold a schedule against the array slicing: the tokens it gives each rank must meet their own rows.

    Args:
        schedule: one micro-step of all samples on one rank, cut by `cp` and `sp` (rank = context rank * sp + sequence
            rank). With sp > 1 lengths must be multiples of 2 * cp * sp: a schedule keeps padding at the end.
        markers: what was planted
        cp: context ranks
        sp: sequence ranks
    """
    check = f"schedule cp{cp} sp{sp}"
    return check_arrival(markers, _scheduled(schedule, markers, cp=cp, sp=sp), check=check)


def _scheduled(schedule: Schedule, markers: Markers, *, cp: int, sp: int) -> Iterator[Delivery]:
    rows_CP = slice_arrays(markers, cp=cp, sp=sp)
    first_B = np.concatenate([[0], np.cumsum(markers.lengths)[:-1]])
    for c, s in product(range(cp), range(sp)):
        own = schedule.pieces[schedule.pieces[:, 4] == c * sp + s].tolist()
        tokens_T = np.concatenate(
            [first_B[b] + np.arange(start, stop) for b, start, stop, _, _ in own] or [first_B[:0]]
        )
        rows_TLK = rows_CP[c][s][slice_numbers(markers, cp=(c, cp), sp=(s, sp)) != PADDING]
        # A place too many or too few shows as a token that was not delivered once.
        common = min(len(tokens_T), len(rows_TLK))
        yield Delivery(
            name=f"schedule rank {c * sp + s}",
            tokens_T=tokens_T[:common],
            ids_TLK=rows_TLK[:common],
            layers=range(markers.model.layers),
        )

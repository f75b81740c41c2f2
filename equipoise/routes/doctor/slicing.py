"""Packing, context-, sequence- and pipeline-parallel slicing of markers, done twice and held against each other.

`slice_arrays` cuts arrays step by step, as a trainer does; `slice_numbers` computes from a rank's coordinates which
token stands at each of its places. The self-check delivers the rows of the first with the tokens of the second.
1. Pack: samples follow each other, each padded to a multiple of 2 * cp.
2. Context parallel: zig-zag, rank c holds chunks c and 2 * cp - 1 - c of each padded sample.
3. Sequence parallel: a rank's tokens, padded to a multiple of sp, cut into sp equal runs.
4. Pipeline: layers cut into pp runs, as level as possible, earlier stages longer.

Knows markers and arrays. Does not know schedules' builders: a `Schedule` comes in finished.

Invariants (asserted by the tests):
1. Both ways hold the same tokens at the same places, for every cp, sp and pp.
2. Every token is delivered exactly once per layer.
"""

from collections.abc import Iterator
from itertools import product

import numpy as np

from equipoise.core import Schedule
from equipoise.routes.doctor.finding import Finding
from equipoise.routes.doctor.markers import PADDING, Delivery, Markers, check_arrival, pack_rows

WIDTHS = ((1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 2), (4, 2, 3), (3, 4, 1))
"""(cp, sp, pp) that the self-check runs: each alone, all together, and sizes that do not divide."""


def self_check(markers: Markers) -> tuple[Finding, ...]:
    """Prove the built-in slicing for every width: one finding each."""
    return tuple(
        check_arrival(markers, slice_markers(markers, cp=cp, sp=sp, pp=pp), check=f"slicing cp{cp} sp{sp} pp{pp}")
        for cp, sp, pp in WIDTHS
    )


def slice_markers(markers: Markers, *, cp: int, sp: int, pp: int) -> Iterator[Delivery]:
    """What each rank and stage holds: rows cut as arrays, tokens computed from the rank's coordinates."""
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
    """Rows of each (context rank, sequence rank), cut step by step from the packed array."""
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
    """[T] the token number at each place of one rank, from its coordinates.

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
            # The first chunk counts from the sample's front, the second mirrors it from the back.
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

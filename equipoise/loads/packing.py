"""Build schedules from sample lengths: which rank forwards which sample in which micro-step, as trainers pack them.

`Schedule.of` in core takes a trainer's own micro-batches instead. Steps, each a function that can be used alone:
1. Samples go to mini-batches as consecutive runs, and within one to ranks as consecutive runs, as level as possible.
2. A rank's samples go to micro-steps: a fixed number each (`schedule_samples`), or by a token budget
   (`schedule_tokens`, dynamic batch size: longest sample first into the emptiest, as few micro-steps as fit).
3. Padding is added by `TokenPolicy`.
4. Context parallelism cuts every sample (`slice_context`), sequence parallelism cuts the packed micro-batch
   (`slice_sequence`). Both turn rank r into ranks r * n .. r * n + n - 1; context parallelism first, as in Megatron.
   The ranks cut from one rank forward equally many tokens, padding included.
5. Micro-steps keep the packer's order, or run the longest first (`longest_first`), which hides a window's edges.
Every rank has the same number of micro-steps; a rank may have nothing to forward in some of them.

File of schedules, a trainer's own micro-batches: one JSON object
    format     "equipoise-schedule-1"
    windows    one object per window, in order:
        stage            "recompute" or "update"
        ranks            source ranks
        pieces           [sample, start, stop, micro_step, rank] each, in the order the trainer packs them
        micro_steps      optional: by default the last one named plus one
        padding          optional: padding tokens, one list of `ranks` numbers per micro-step
        padding_policy   optional: "spread", "arange", "first" or "unknown"
        last_token       optional: "drop", "spread" or "unknown"
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from equipoise.core import LastTokenPolicy, PaddingPolicy, Piece, Schedule, ScheduleError, Stage
from equipoise.core.files import whole_file
from equipoise.core.value import int64_array, require_int

FORMAT = "equipoise-schedule-1"
_NEEDED = ("stage", "ranks", "pieces")
_OPTIONAL = ("micro_steps", "padding", "padding_policy", "last_token")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPolicy:
    """What is forwarded besides the tokens that have a route."""

    last_token: LastTokenPolicy = "drop"
    """What happens to the last token of a sample, which has no route."""
    padding: PaddingPolicy = "spread"
    """Which experts padding rows choose."""
    pad_to_multiple: int = 1
    """Packed micro-batches are padded to a multiple of this many tokens."""
    pad_to_longest: bool = False
    """Whether every sample is padded to the longest of its micro-batch (BSHD) instead of packed (THD)."""


PLAIN = TokenPolicy()


def schedule_samples(
    tokens_B: np.ndarray,
    *,
    ranks: int,
    samples_per_micro_step: int,
    samples: Sequence[int] | np.ndarray | None = None,
    stage: Stage = "update",
    policy: TokenPolicy = PLAIN,
) -> Schedule:
    """Pack a fixed number of samples into each micro-step of each rank.

    Args:
        tokens_B: [B] tokens of each sample
        ranks: source ranks
        samples_per_micro_step: samples of one rank in one micro-step
        samples: sample numbers of this window, in order; all by default
        stage: "recompute" or "update"
        policy: last token and padding
    """
    size = require_int("samples_per_micro_step", samples_per_micro_step, low=1, error=ScheduleError)
    chosen, length_B = _window(tokens_B, samples, policy)
    runs = np.array_split(chosen, require_int("ranks", ranks, low=1, error=ScheduleError))
    bins_R = [[run[i : i + size] for i in range(0, len(run), size)] for run in runs]
    return build_schedule(bins_R, length_B, stage=stage, policy=policy)


def schedule_tokens(
    tokens_B: np.ndarray,
    *,
    ranks: int,
    token_budget: int,
    samples: Sequence[int] | np.ndarray | None = None,
    stage: Stage = "update",
    policy: TokenPolicy = PLAIN,
) -> Schedule:
    """Pack samples into as few micro-steps as keep every rank within a token budget.

    Args:
        tokens_B: [B] tokens of each sample
        ranks: source ranks
        token_budget: most tokens one rank forwards in one micro-step
        samples, stage, policy: as in `schedule_samples`
    """
    budget = require_int("token_budget", token_budget, low=1, error=ScheduleError)
    chosen, length_B = _window(tokens_B, samples, policy)
    too_long = [b for b in chosen if length_B[b] > budget]
    if too_long:
        raise ScheduleError(
            f"sample {too_long[0]} forwards {int(length_B[too_long[0]])} tokens; the token budget is {budget}; raise "
            f"it to {int(length_B[chosen].max())}, the longest sample's, or cut long samples with context parallelism"
        )
    runs = np.array_split(chosen, require_int("ranks", ranks, low=1, error=ScheduleError))
    count = max(1, *(-(-int(length_B[run].sum()) // budget) for run in runs))
    while True:
        bins_R = [_level(run, length_B, count) for run in runs]
        if all(int(length_B[b].sum()) <= budget for bins in bins_R for b in bins):
            return build_schedule(bins_R, length_B, stage=stage, policy=policy)
        count += 1


def step_schedules(
    tokens_B: np.ndarray,
    *,
    ranks: int,
    mini_batches: int = 1,
    samples_per_micro_step: int | None = None,
    token_budget: int | None = None,
    recompute: bool = True,
    policy: TokenPolicy = PLAIN,
) -> tuple[Schedule, ...]:
    """Schedule one RL step: the recompute stage over all samples, then one window per mini-batch of the update.

    Args:
        tokens_B: [B] tokens of each sample
        ranks: source ranks
        mini_batches: optimizer steps; samples are given to them as consecutive runs
        samples_per_micro_step, token_budget: give exactly one of the two
        recompute: whether a separate forward pass computes the old log-probs
        policy: last token and padding
    """
    if (samples_per_micro_step is None) == (token_budget is None):
        raise ScheduleError("give exactly one of samples_per_micro_step and token_budget")
    pack: Callable[..., Schedule]
    if token_budget is not None:
        pack = partial(schedule_tokens, tokens_B, ranks=ranks, token_budget=token_budget, policy=policy)
    else:
        size = require_int("samples_per_micro_step", samples_per_micro_step, low=1, error=ScheduleError)
        pack = partial(schedule_samples, tokens_B, ranks=ranks, samples_per_micro_step=size, policy=policy)
    everything = np.arange(len(tokens_B))
    count = require_int("mini_batches", mini_batches, low=1, high=max(1, len(everything)), error=ScheduleError)
    updates = tuple(pack(samples=run, stage="update") for run in np.array_split(everything, count))
    return (pack(samples=everything, stage="recompute"), *updates) if recompute else updates


def slice_context(schedule: Schedule, cp: int) -> Schedule:
    """Cut every piece over `cp` ranks in zig-zag: rank i takes chunks i and 2 * cp - 1 - i of 2 * cp equal chunks.

    Pieces are padded to a multiple of 2 * cp tokens; chunks, or parts of chunks, beyond a piece's end are padding.
    """
    require_int("cp", cp, low=1, error=ScheduleError)
    if cp == 1:
        return schedule
    parts: list[Piece] = []
    # The padding that the schedule already has is one more sequence at the end of the micro-batch.
    padding_MR = np.repeat(-(-schedule.padding_MR // (2 * cp)) * 2, cp, axis=1)
    for piece in map(Piece._make, schedule.pieces.tolist()):
        chunk = -(-(piece.stop - piece.start) // (2 * cp))
        for i in range(cp):
            rank = piece.rank * cp + i
            padding_MR[piece.micro_step, rank] += 2 * chunk
            for c in (i, 2 * cp - 1 - i):
                start = piece.start + c * chunk
                stop = min(start + chunk, piece.stop)
                if stop > start:
                    parts.append(piece._replace(start=start, stop=stop, rank=rank))
                    padding_MR[piece.micro_step, rank] -= stop - start
    return _with(schedule, parts, padding_MR)


def slice_sequence(schedule: Schedule, sp: int) -> Schedule:
    """Cut every packed micro-batch, its padding last, into `sp` equal contiguous parts.

    The micro-batch is padded to a multiple of `sp` tokens.
    """
    require_int("sp", sp, low=1, error=ScheduleError)
    if sp == 1:
        return schedule
    tokens_MR = schedule.num_tokens_MR
    width_MR = -(-(tokens_MR + schedule.padding_MR) // sp)
    parts: list[Piece] = []
    place_MR = np.zeros_like(tokens_MR)
    for piece in map(Piece._make, schedule.pieces.tolist()):
        at = int(place_MR[piece.micro_step, piece.rank])
        width = int(width_MR[piece.micro_step, piece.rank])
        place_MR[piece.micro_step, piece.rank] += piece.stop - piece.start
        start = piece.start
        while start < piece.stop:
            part = at // width
            stop = min(piece.stop, start + (part + 1) * width - at)
            parts.append(piece._replace(start=start, stop=stop, rank=piece.rank * sp + part))
            at, start = at + stop - start, stop
    # Real tokens fill the parts from the front; the rest of each part is padding.
    begin_MRP = width_MR[:, :, None] * np.arange(sp)
    real_MRP = np.clip(tokens_MR[:, :, None] - begin_MRP, 0, width_MR[:, :, None])
    return _with(schedule, parts, (width_MR[:, :, None] - real_MRP).reshape(len(tokens_MR), -1))


def longest_first(schedule: Schedule) -> Schedule:
    """Run the longest micro-step first and the next longest last; the others keep their order.

    Displaced experts are published during a window's first micro-step and collected during its last, so short ones hide
    little. Gradients are added in another order; nothing else changes. Pipelines lose time: they need short micro-steps
    at both ends.
    """
    order_M = longest_first_order((schedule.num_tokens_MR + schedule.padding_MR).sum(axis=1))
    place_M = np.argsort(order_M)
    parts = [piece._replace(micro_step=int(place_M[piece.micro_step])) for piece in map(Piece._make, schedule.pieces)]
    return _with(schedule, parts, schedule.padding_MR[order_M])


def longest_first_order(length_M: np.ndarray) -> np.ndarray:
    """Return [M] the order of micro-steps of these lengths; the earlier of two equally long ones runs first."""
    longest, *rest = np.argsort(-length_M, kind="stable").tolist()
    return np.array([longest, *sorted(rest[1:]), *rest[:1]], dtype=np.int64)


def _with(schedule: Schedule, parts: list[Piece], padding_MR: np.ndarray) -> Schedule:
    pieces = np.array(parts, dtype=np.int64).reshape(-1, len(Piece._fields))
    return replace(schedule, pieces=pieces, ranks=padding_MR.shape[1], padding_MR=padding_MR)


def _window(
    tokens_B: np.ndarray, samples: Sequence[int] | np.ndarray | None, policy: TokenPolicy
) -> tuple[np.ndarray, np.ndarray]:
    """Return the window's sample numbers that forward anything, and the forwarded tokens of every sample."""
    lengths = int64_array("tokens_B", tokens_B, ndim=1, error=ScheduleError)
    if len(lengths) and int(lengths.min()) < 0:
        raise ScheduleError(f"tokens_B[{int(lengths.argmin())}] is {int(lengths.min())}; lengths cannot be negative")
    require_int("pad_to_multiple", policy.pad_to_multiple, low=1, error=ScheduleError)
    chosen = np.arange(len(lengths)) if samples is None else np.array(samples, dtype=np.int64).reshape(-1)
    strangers = chosen[(chosen < 0) | (chosen >= len(lengths))]
    if len(strangers):
        raise ScheduleError(f"sample {int(strangers[0])} does not exist; there are samples 0..{len(lengths) - 1}")
    forwarded = np.maximum(lengths - 1, 0) if policy.last_token == "drop" else lengths
    return chosen[forwarded[chosen] > 0], forwarded


def _level(samples: np.ndarray, length_B: np.ndarray, count: int) -> list[np.ndarray]:
    """Put samples, the longest first, into the emptiest of `count` bins; bins keep the order of samples."""
    total = [0] * count
    bins: list[list[int]] = [[] for _ in range(count)]
    for b in sorted(samples.tolist(), key=lambda b: (-int(length_B[b]), b)):
        emptiest = total.index(min(total))
        bins[emptiest].append(b)
        total[emptiest] += int(length_B[b])
    return [np.array(sorted(group), dtype=np.int64) for group in bins]


def build_schedule(
    bins_R: list[list[np.ndarray]], length_B: np.ndarray, *, stage: Stage, policy: TokenPolicy
) -> Schedule:
    micro_steps = max(1, *(len(bins) for bins in bins_R))
    padding_MR = np.zeros((micro_steps, len(bins_R)), dtype=np.int64)
    places = [(m, rank) for rank, bins in enumerate(bins_R) for m in range(len(bins))]
    for m, rank in places:
        padding_MR[m, rank] = count_padding(length_B[bins_R[rank][m]], policy)
    counts = np.array([len(bins_R[rank][m]) for m, rank in places], dtype=np.int64)
    step_P, rank_P = np.repeat(np.array(places, dtype=np.int64).reshape(-1, 2), counts, axis=0).T
    sample_P = np.concatenate([np.empty(0, dtype=np.int64), *(group for bins in bins_R for group in bins)])
    pieces = np.stack([sample_P, np.zeros_like(sample_P), length_B[sample_P], step_P, rank_P], axis=1)
    return Schedule(
        pieces=pieces,
        ranks=len(bins_R),
        stage=stage,
        micro_steps=micro_steps,
        padding_MR=padding_MR,
        padding_policy=policy.padding,
        last_token=policy.last_token,
    )


def count_padding(lengths: np.ndarray, policy: TokenPolicy) -> int:
    """Count the padding tokens of one micro-batch of these lengths."""
    if not len(lengths):
        return 0
    rows, total = (len(lengths), int(lengths.max())) if policy.pad_to_longest else (1, int(lengths.sum()))
    padded = -(-total // policy.pad_to_multiple) * policy.pad_to_multiple
    return rows * padded - int(lengths.sum())


def write_schedules(schedules: Sequence[Schedule], path: str | Path) -> None:
    """Write the windows of one step."""
    windows = [
        {
            "stage": s.stage,
            "ranks": s.ranks,
            "micro_steps": s.micro_steps,
            "pieces": s.pieces.tolist(),
            "padding": s.padding_MR.tolist(),
            "padding_policy": s.padding_policy,
            "last_token": s.last_token,
        }
        for s in schedules
    ]
    with whole_file(path, error=ScheduleError) as draft:
        draft.write_text(json.dumps({"format": FORMAT, "windows": windows}) + "\n", encoding="utf-8")


def read_schedules(path: str | Path) -> tuple[Schedule, ...]:
    """Read the windows of one step."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ScheduleError(f"no schedule at {path}; give samples:N, tokens:N or a schedule file") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ScheduleError(f"{path} is not a readable JSON file: {error}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT or not isinstance(content.get("windows"), list):
        raise ScheduleError(f"{path} is not a schedule file: expected an object with format {FORMAT!r} and windows")
    if not content["windows"]:
        raise ScheduleError(f"{path} holds no windows; a step has at least one")
    return tuple(_read_window(w, f"{path}: window {i}") for i, w in enumerate(content["windows"]))


def _read_window(window: Any, place: str) -> Schedule:
    if not isinstance(window, Mapping):
        raise ScheduleError(f"{place} is a {type(window).__name__}; it must be an object")
    wrong = [key for key in window if key not in _NEEDED + _OPTIONAL] + [key for key in _NEEDED if key not in window]
    if wrong:
        known = ", ".join(_NEEDED + _OPTIONAL)
        raise ScheduleError(f"{place}: key {wrong[0]!r} is unknown or missing; known: {known}")
    options = {key: window[key] for key in ("padding_policy", "last_token") if key in window}
    try:
        if "padding" in window:
            options["padding_MR"] = np.array(window["padding"])
        if "micro_steps" in window:
            options["micro_steps"] = require_int("micro_steps", window["micro_steps"], low=1, error=ScheduleError)
        return Schedule.of(window["pieces"], ranks=window["ranks"], stage=window["stage"], **options)
    except (ScheduleError, TypeError, ValueError, OverflowError) as error:
        raise ScheduleError(f"{place}: {error}") from error

"""Choose experts for rows that have no route: last tokens and padding. They are dispatched, so they are load.

Policies, all deterministic (the names are those of `PaddingPolicy`):
    spread   the least loaded experts of the (micro-step, layer): the lowest loads are raised to a common level
    arange   ids running through all layers and experts: column k of layer n of the p-th padding token of a rank gets
             ((p * hidden_layers + n) * top_k + k) mod experts, as slime's `fill_routing_replay` pads
    first    ids 0..k-1 for every token, as NeMo-RL pads

Spreading n tokens of top_k rows each, of all ranks, in one layer:
1. Find the level to which n * top_k rows raise the lowest loads, no expert taking more than n (ids of a token differ).
2. The remaining rows go to the lowest expert numbers that can still take one.
3. The rows, sorted by expert, go to tokens round-robin. An expert has at most n rows, so a token never
   gets it twice; tokens are numbered rank by rank, which gives each rank's share in closed form.
The result has the lowest possible maximum over experts, given that ids of one token differ.
"""

import math
from collections.abc import Sequence

import numpy as np

from equipoise.core import ModelShape


def spread_rows(load_LE: np.ndarray, tokens_R: np.ndarray, top_k: int) -> np.ndarray:
    """Assign tokens without a route to the least loaded experts.

    Args:
        load_LE: [L, E] rows each expert already has, over all ranks of the EP group
        tokens_R: [R] tokens without a route on each rank
        top_k: distinct experts per token

    Returns:
        [L, R, E] rows to add
    """
    layers, experts = load_LE.shape
    count = int(tokens_R.sum())
    if count == 0:
        return np.zeros((layers, len(tokens_R), experts), dtype=np.int64)
    end_LE = np.cumsum(_raise_lowest(load_LE, cap=count, rows=count * top_k), axis=1)
    last_R = np.cumsum(tokens_R)
    first_R = last_R - tokens_R
    # Rows before position x whose token (x mod count) belongs to rank r.
    before_LRE = (end_LE // count)[:, None, :] * tokens_R[:, None] + np.clip(
        (end_LE % count)[:, None, :] - first_R[:, None], 0, tokens_R[:, None]
    )
    return np.diff(before_LRE, axis=2, prepend=0)


def arange_rows(model: ModelShape, layer_numbers: Sequence[int], tokens_R: np.ndarray) -> np.ndarray:
    """Assign to padding tokens ids that run through all layers and experts, from 0 on each rank.

    Args:
        model: experts, top-k and number of decoder layers
        layer_numbers: [L] global number of each layer
        tokens_R: [R] padding tokens of each rank

    Returns:
        [L, R, E] rows to add.
    """
    stride = model.hidden_layers * model.top_k
    # The ids repeat after this many tokens.
    period = model.experts // math.gcd(stride, model.experts)
    whole_LE = _running_rows(model, layer_numbers, period)
    parts = [n // period * whole_LE + _running_rows(model, layer_numbers, n % period) for n in tokens_R.tolist()]
    return np.stack(parts, axis=1)


def first_rows(experts: int, tokens_R: np.ndarray, top_k: int) -> np.ndarray:
    """Return [R, E] rows of ids 0..top_k-1 for every token."""
    return np.asarray(tokens_R, dtype=np.int64)[:, None] * (np.arange(experts) < top_k)


def _running_rows(model: ModelShape, layer_numbers: Sequence[int], tokens: int) -> np.ndarray:
    """Count the [L, E] rows of the first `tokens` padding tokens."""
    place_LP = np.arange(tokens) * model.hidden_layers + np.array(layer_numbers)[:, None]
    ids_LPK = (place_LP[:, :, None] * model.top_k + np.arange(model.top_k)) % model.experts
    layer_L = np.arange(len(layer_numbers))[:, None, None]
    flat = np.bincount((ids_LPK + layer_L * model.experts).ravel(), minlength=len(layer_numbers) * model.experts)
    return flat.reshape(len(layer_numbers), model.experts)


def _raise_lowest(load_LE: np.ndarray, *, cap: int, rows: int) -> np.ndarray:
    """Return [L, E], how many of `rows` each expert takes, at most `cap`, so that the lowest loads reach one level."""
    low_L = load_LE.min(axis=1)
    high_L = low_L + rows + load_LE.max(axis=1) - low_L
    # Step 1: the highest level that needs no more than the given rows, by bisection in integers.
    while (high_L - low_L > 1).any():
        middle_L = (low_L + high_L) // 2
        fits_L = _taken(load_LE, middle_L, cap).sum(axis=1) <= rows
        low_L = np.where(fits_L, middle_L, low_L)
        high_L = np.where(fits_L, high_L, middle_L)
    taken_LE = _taken(load_LE, low_L, cap)
    # Step 2: one more row each for the first experts that are at the level and not full.
    open_LE = _taken(load_LE, low_L + 1, cap) > taken_LE
    left_L = rows - taken_LE.sum(axis=1)
    extra_LE = open_LE & (np.cumsum(open_LE, axis=1) <= left_L[:, None])
    return np.asarray(taken_LE + extra_LE)


def _taken(load_LE: np.ndarray, level_L: np.ndarray, cap: int) -> np.ndarray:
    return np.asarray(np.clip(level_L[:, None] - load_LE, 0, cap))

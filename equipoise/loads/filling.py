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
The result has the lowest possible maximum over experts, given that ids of one token differ. `spread_rows` counts the
rows of all ranks, which plan; `spread_ids` writes out the same ids for one rank, which dispatches them.
"""

import math
from collections.abc import Sequence

import numpy as np

from equipoise.core import ModelShape


def spread_rows(load_LE: np.ndarray, tokens_LR: np.ndarray, top_k: int) -> np.ndarray:
    """Assign tokens without a route to the least loaded experts.

    Args:
        load_LE: [L, E] rows each expert already has, over all ranks of the EP group
        tokens_LR: [L, R] tokens without a route in each layer on each rank; or [R], the same in every layer
        top_k: distinct experts per token

    Returns:
        [L, R, E] rows to add
    """
    tokens_LR1 = np.broadcast_to(tokens_LR, (len(load_LE), np.shape(tokens_LR)[-1]))[:, :, None]
    first_LR1 = np.cumsum(tokens_LR1, axis=1) - tokens_LR1
    end_L1E = _spread_ends(load_LE, tokens_LR1.sum(axis=(1, 2)), top_k)[:, None]
    # Where a layer has no token all ends are 0, whatever they are divided by.
    count_L11 = np.maximum(tokens_LR1.sum(axis=1, keepdims=True), 1)
    # Rows before position x whose token (x mod count) belongs to rank r.
    before_LRE = end_L1E // count_L11 * tokens_LR1 + np.clip(end_L1E % count_L11 - first_LR1, 0, tokens_LR1)
    return np.diff(before_LRE, axis=2, prepend=0)


def spread_ids(load_LE: np.ndarray, tokens_LR: np.ndarray, top_k: int, *, rank: int) -> list[np.ndarray]:
    """Write out the ids that `spread_rows` counts for one rank; arguments as there.

    Returns:
        by layer [tokens of the rank, K] ids, ascending and distinct in each token
    """
    tokens_LR = np.broadcast_to(tokens_LR, (len(load_LE), np.shape(tokens_LR)[-1]))
    count_L = tokens_LR.sum(axis=1)
    end_LE = _spread_ends(load_LE, count_L, top_k)
    found = []
    for end_E, tokens_R, count in zip(end_LE, tokens_LR, count_L.tolist(), strict=True):
        first = int(tokens_R[:rank].sum())
        # Row x belongs to token x mod count, so a token's rows are `count` apart.
        token_T1 = np.arange(first, first + int(tokens_R[rank]))[:, None]
        found.append(np.searchsorted(end_E, token_T1 + count * np.arange(top_k), side="right"))
    return found


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


def _spread_ends(load_LE: np.ndarray, count_L: np.ndarray, top_k: int) -> np.ndarray:
    """[L, E] where each expert's rows of `count_L` tokens end, in the order in which tokens take them."""
    low_L, rows_L = load_LE.min(axis=1), count_L * top_k
    high_L = load_LE.max(axis=1) + rows_L
    # Step 1: the highest level that needs no more than the given rows, by bisection in integers.
    while (high_L - low_L > 1).any():
        middle_L = (low_L + high_L) // 2
        fits_L = _taken(load_LE, middle_L, count_L).sum(axis=1) <= rows_L
        low_L = np.where(fits_L, middle_L, low_L)
        high_L = np.where(fits_L, high_L, middle_L)
    taken_LE = _taken(load_LE, low_L, count_L)
    # Step 2: one more row each for the first experts that are at the level and not full.
    open_LE = _taken(load_LE, low_L + 1, count_L) > taken_LE
    left_L = rows_L - taken_LE.sum(axis=1)
    extra_LE = open_LE & (np.cumsum(open_LE, axis=1) <= left_L[:, None])
    return np.cumsum(taken_LE + extra_LE, axis=1)


def _taken(load_LE: np.ndarray, level_L: np.ndarray, count_L: np.ndarray) -> np.ndarray:
    return np.asarray(np.clip(level_L[:, None] - load_LE, 0, count_L[:, None]))

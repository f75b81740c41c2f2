"""The compiled inner loops of `count.py`; separate, because importing this module imports numba.

Every kernel masks an id by `width - 1`, where `width` is the power of two that holds all experts, so that no id can
write outside its histogram, and returns the bitwise or of all ids, so that the caller notices an id that was masked.
"""

import numpy as np

from equipoise.core.compiled import compiled


@compiled
def add_ids(ids_TC: np.ndarray, base_C: np.ndarray, mask: np.uint64, count: np.ndarray) -> np.uint64:
    """Count flat routes: column c of every token adds to the histogram at `base_C[c]`; return the or of all ids.

    One flat loop over C = L x K columns is as fast for top-1 as for top-8; a loop over K inside is 3x slower at top-2.
    """
    tokens, columns = ids_TC.shape
    seen = np.uint64(0)
    for t in range(tokens):
        for c in range(columns):
            expert = np.uint64(ids_TC[t, c])
            seen |= expert
            count[base_C[c] + (expert & mask)] += np.uint32(1)
    return seen


@compiled
def add_bytes(word_TL: np.ndarray, base_L: np.ndarray, mask: np.uint64, count: np.ndarray) -> np.uint64:
    """Count routes of eight one-byte ids, each route read as one 64-bit word; return the or of all words.

    The commonest case (Qwen3, DeepSeek-V3, GLM-4.5, OLMoE), a third faster than `add_ids`.
    """
    tokens, layers = word_TL.shape
    seen = np.uint64(0)
    for t in range(tokens):
        for layer in range(layers):
            word = word_TL[t, layer]
            base = base_L[layer]
            seen |= word
            # A constant number of iterations, so that the compiler emits eight independent adds.
            for k in range(8):
                count[base + ((word >> np.uint64(8 * k)) & mask)] += np.uint32(1)
    return seen


@compiled
def add_masked(
    ids_TLK: np.ndarray, known_TL: np.ndarray, mask: np.uint64, count_LW: np.ndarray, known_L: np.ndarray
) -> np.uint64:
    """Count the known routes alone and add their number to `known_L`; return the or of their ids."""
    tokens, layers, top_k = ids_TLK.shape
    seen = np.uint64(0)
    for t in range(tokens):
        for layer in range(layers):
            if not known_TL[t, layer]:
                continue
            known_L[layer] += 1
            for k in range(top_k):
                expert = np.uint64(ids_TLK[t, layer, k])
                seen |= expert
                count_LW[layer, expert & mask] += np.uint32(1)
    return seen


@compiled
def add_pairs(ids_TLK: np.ndarray, known_TL: np.ndarray, pair_LEE: np.ndarray) -> None:
    """Add each token's pairs of distinct experts, diagonal included; every known id must be in range."""
    tokens, layers, top_k = ids_TLK.shape
    chosen_K = np.empty(top_k, dtype=np.int64)
    for t in range(tokens):
        for layer in range(layers):
            if not known_TL[t, layer]:
                continue
            distinct = 0
            for k in range(top_k):
                expert = np.int64(ids_TLK[t, layer, k])
                is_new = True
                for j in range(distinct):
                    if chosen_K[j] == expert:
                        is_new = False
                if not is_new:
                    continue
                for j in range(distinct):
                    pair_LEE[layer, chosen_K[j], expert] += 1
                    pair_LEE[layer, expert, chosen_K[j]] += 1
                pair_LEE[layer, expert, expert] += 1
                chosen_K[distinct] = expert
                distinct += 1

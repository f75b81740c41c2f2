"""What `count.py` must compute, in the shortest obvious numpy; the tests compare the two. Never optimised.

Knows the words of `core` and nothing of numba, files or speed.
"""

import numpy as np

from equipoise.core import SampleRoutes


def count_LE(sample: SampleRoutes, experts: int, *, padding: bool = False) -> np.ndarray:
    """[L, E] known rows of real tokens, or of padding rows alone."""
    known_TL, padding_T = _masks(sample)
    wanted_TL = known_TL & (padding_T == padding)[:, None]
    layers = sample.ids_TLK.shape[1]
    count = np.zeros((layers, experts), dtype=np.int64)
    for layer in range(layers):
        chosen = sample.ids_TLK[wanted_TL[:, layer], layer].astype(np.int64)
        np.add.at(count[layer], chosen.ravel(), 1)
    return count


def unknown_L(sample: SampleRoutes) -> np.ndarray:
    """[L] tokens of the sample whose route is unknown, those without a row included."""
    known_TL, padding_T = _masks(sample)
    known_L: np.ndarray = (known_TL & ~padding_T[:, None]).sum(axis=0, dtype=np.int64)
    return np.asarray(sample.num_tokens - known_L)


def pair_LEE(sample: SampleRoutes, experts: int) -> np.ndarray:
    """[L, E, E] tokens that chose both experts, the diagonal being the expert's tokens."""
    known_TL, padding_T = _masks(sample)
    layers = sample.ids_TLK.shape[1]
    pair = np.zeros((layers, experts, experts), dtype=np.int64)
    for t, layer in np.argwhere(known_TL & ~padding_T[:, None]):
        chosen = sorted({int(e) for e in sample.ids_TLK[t, layer]})
        pair[layer][np.ix_(chosen, chosen)] += 1
    return pair


def cut(sample: SampleRoutes, start: int, stop: int) -> SampleRoutes:
    """The tokens `[start, stop)` of a sample as a sample of their own, padding rows staying with the token before."""
    _, padding_T = _masks(sample)
    # Padding rows ahead of the first token go with it.
    token_T = np.maximum(np.cumsum(~padding_T) - 1, 0)
    rows_T = (token_T >= start) & (token_T < stop)
    return SampleRoutes(
        name=sample.name,
        ids_TLK=sample.ids_TLK[rows_T],
        num_tokens=stop - start,
        known_TL=None if sample.known_TL is None else sample.known_TL[rows_T],
        padding_T=None if sample.padding_T is None else sample.padding_T[rows_T],
    )


def _masks(sample: SampleRoutes) -> tuple[np.ndarray, np.ndarray]:
    """Known rows [T, L] and padding rows [T] of a sample, written out."""
    shape = sample.ids_TLK.shape[:2]
    known_TL = np.ones(shape, dtype=bool) if sample.known_TL is None else sample.known_TL
    padding_T = np.zeros(shape[0], dtype=bool) if sample.padding_T is None else sample.padding_T
    return known_TL, padding_T

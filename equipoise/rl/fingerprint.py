"""Fingerprints: 64 bits per entry of a tensor's first axis, computed on the device that holds the tensor.

An entry's bytes are read as words of 8 bytes, or of the largest of 4, 2 and 1 that divides their number. Each word is
added to a number made of its place and mixed by the finalizer of SplitMix64, which is one to one; the mixed words are
summed modulo 2**64.

Knows bytes. Does not know what they mean. Guards against accidents, not against someone who wants two tensors to look
alike: whoever could do that could change the weights themselves.

Invariants (asserted by the tests):
1. `fingerprints` gives what `reference_fingerprint` gives, for every dtype, size and layout in memory.
2. One changed word always changes a fingerprint; a flipped bit, two swapped entries or rows, a shifted row are seen.
"""

from math import gcd

import torch
from torch import Tensor

_BITS = 64
_PLACE = 0x9E3779B97F4A7C15
_ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))
"""Of the finalizer: shift to the right, exclusive or, multiply. All factors are odd, so that nothing is lost."""
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
_CHUNK = 1 << 24
"""Words that are mixed at once: what a fingerprint needs beside the tensor is a few times this."""


def fingerprints(entries_NX: Tensor) -> Tensor:
    """[N] int64 of the entries of the first axis, each over its bytes in row-major order."""
    words_NW = _words(entries_NX)
    count, width = words_NW.shape
    sum_N = torch.full((count,), width * words_NW.element_size(), dtype=torch.int64, device=words_NW.device)
    size = max(1, _CHUNK // max(1, count))
    for start in range(0, width, size):
        part_NW = words_NW[:, start : start + size].to(torch.int64)
        place_W = torch.arange(start + 1, start + 1 + part_NW.shape[1], device=words_NW.device) * _signed(_PLACE)
        mixed_NW = part_NW + place_W
        for shift, factor in _ROUNDS:
            # Masked, because shifting an int64 to the right copies its sign.
            mixed_NW ^= (mixed_NW >> shift).bitwise_and_((1 << (_BITS - shift)) - 1)
            mixed_NW *= _signed(factor)
        sum_N += mixed_NW.sum(dim=1)
    return sum_N


def reference_fingerprint(content: bytes) -> int:
    """The same of one entry's bytes, word by word."""
    size = gcd(len(content), 8)
    total = len(content)
    for place, start in enumerate(range(0, len(content), size), start=1):
        word = int.from_bytes(content[start : start + size], "little", signed=size > 1)
        mixed = (word + place * _PLACE) % 2**_BITS
        for shift, factor in _ROUNDS:
            mixed = (mixed ^ mixed >> shift) * factor % 2**_BITS
        total += mixed
    return _signed(total % 2**_BITS)


def _words(entries_NX: Tensor) -> Tensor:
    """[N, W] the words of every entry."""
    flat_NX = entries_NX.detach().reshape(len(entries_NX), entries_NX.numel() // len(entries_NX)).contiguous()
    num_bytes = flat_NX.shape[1] * flat_NX.element_size()
    return flat_NX.view(torch.uint8).view(_WORDS[gcd(num_bytes or 1, 8)])


def _signed(value: int) -> int:
    """The int64 that has these bits."""
    return value - 2**_BITS if value >> (_BITS - 1) else value

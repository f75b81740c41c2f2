"""Fingerprints: those of the reference, and no accident goes unseen."""

from math import gcd

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.rl import learner
from equipoise.rl.learner import fingerprints

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.uint8)


def drawn(dtype, *shape, seed=0):
    width = torch.empty(0, dtype=dtype).element_size()
    content = np.random.default_rng(seed).integers(0, 256, size=(*shape[:-1], shape[-1] * width), dtype=np.uint8)
    return torch.from_numpy(content).view(dtype)


def reference_fingerprint(content):
    """The fingerprint of one entry's bytes, word by word."""
    size, total = gcd(len(content), 8), len(content)
    for place, start in enumerate(range(0, len(content), size), start=1):
        word = int.from_bytes(content[start : start + size], "little", signed=size > 1)
        mixed = (word + place * learner._PLACE) % 2**64
        for shift, factor in learner._ROUNDS:
            mixed = (mixed ^ mixed >> shift) * factor % 2**64
        total += mixed
    total %= 2**64
    return total - 2**64 if total >> 63 else total


def reference(entries):
    return [
        reference_fingerprint(entry.contiguous().flatten().view(torch.uint8).numpy().tobytes()) for entry in entries
    ]


@settings(max_examples=60, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    shape=st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(1, 9)),
    seed=st.integers(0, 99),
)
def test_they_are_those_of_the_reference(dtype, shape, seed):
    entries = drawn(dtype, *shape, seed=seed)
    assert fingerprints(entries).tolist() == reference(entries)
    turned = entries.transpose(1, 2)
    assert fingerprints(turned).tolist() == reference(turned)


def test_large_entries_are_mixed_in_parts(monkeypatch):
    entries = drawn(torch.float32, 3, 11, 14)
    whole = fingerprints(entries).tolist()
    monkeypatch.setattr(learner, "_CHUNK", 16)
    assert fingerprints(entries).tolist() == whole == reference(entries)


def test_no_bytes_have_a_fingerprint_too():
    assert fingerprints(torch.zeros(2, 0)).tolist() == [0, 0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_zero", [False, True], ids=["random", "zeros"])
def test_every_flipped_bit_is_seen(dtype, is_zero):
    entries = drawn(dtype, 1, 6) * (0 if is_zero else 1)
    seen = {fingerprints(entries).item()}
    content = entries.view(torch.uint8)
    for at in range(content.shape[1]):
        for bit in range(8):
            content[0, at] ^= 1 << bit
            seen.add(fingerprints(entries).item())
            content[0, at] ^= 1 << bit
    assert len(seen) == 1 + 8 * content.shape[1]


@pytest.mark.parametrize("dtype", DTYPES)
def test_swapped_experts_swapped_rows_and_a_shifted_row_are_seen(dtype):
    experts = drawn(dtype, 4, 6, 8)
    plain = fingerprints(experts).tolist()
    assert len(set(plain)) == 4
    assert fingerprints(experts[[0, 2, 1, 3]]).tolist() == [plain[0], plain[2], plain[1], plain[3]]
    whole = fingerprints(experts[None]).item()
    assert fingerprints(experts[[0, 2, 1, 3]][None]).item() != whole
    rows, shifted = experts.clone(), experts.clone()
    rows[1, [2, 3]] = experts[1, [3, 2]]
    shifted[1, 2] = experts[1, 2].roll(1)
    for changed in (rows, shifted):
        found = fingerprints(changed).tolist()
        assert [i for i in range(4) if found[i] != plain[i]] == [1]

"""Small integers in ascending order: the radix sort is torch's stable sort, on both sides of its limit."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.layer.dispatch import stable_order


@given(
    seed=st.integers(0, 10**6),
    count=st.integers(0, 200),
    below=st.sampled_from([1, 3, 160, 65_535, 65_536, 65_537, 10**6]),
    has_top=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_it_is_torchs_stable_sort(seed, count, below, has_top):
    keys_N = torch.randint(below, (count,), generator=torch.Generator().manual_seed(seed))
    if has_top and count:
        keys_N[seed % count] = below - 1
    assert torch.equal(stable_order(keys_N, below=below), torch.argsort(keys_N, stable=True))

"""Reordering rows against plain indexing: values, gradients, padding."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.layer.ops import reorder_rows


def random_order(seed, *, rows, padding):
    """The place of each row among more places than rows, and the row at each place."""
    back_N = torch.randperm(rows + padding, generator=torch.Generator().manual_seed(seed))[:rows]
    there_P = torch.full((rows + padding,), rows)
    there_P[back_N] = torch.arange(rows)
    return there_P, back_N


@given(seed=st.integers(0, 10**6), rows=st.integers(0, 9), padding=st.integers(0, 4))
@settings(max_examples=60, deadline=None)
def test_there_and_back_equal_plain_indexing(seed, rows, padding):
    there_P, back_N = random_order(seed, rows=rows, padding=padding)
    make = torch.Generator().manual_seed(seed)
    grad_PD, seen = torch.randn((rows + padding, 3), generator=make), []
    start_ND = torch.randn((rows, 3), generator=make)
    for is_plain in (False, True):
        rows_ND = start_ND.clone().requires_grad_()
        if is_plain:
            out_PD = torch.zeros((rows + padding, 3)).index_copy(0, back_N, rows_ND)
            again_ND = (out_PD * grad_PD).index_select(0, back_N)
        else:
            out_PD = reorder_rows(rows_ND, there_P=there_P, back_N=back_N)
            again_ND = reorder_rows(out_PD * grad_PD, there_P=back_N, back_N=there_P)
        (again_ND * start_ND).sum().backward()
        seen.append((out_PD, again_ND, rows_ND.grad))
    assert all(map(torch.equal, *seen))


@pytest.mark.parametrize("padding", [0, 2], ids=["no padding", "padding"])
def test_gradients_by_finite_differences(padding):
    there_P, back_N = random_order(1, rows=4, padding=padding)
    rows_ND = torch.randn((4, 3), dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda rows: reorder_rows(rows, there_P=there_P, back_N=back_N).sin(), rows_ND)

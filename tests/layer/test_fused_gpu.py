"""Fused kernels on a CUDA device beside the plain versions of the same functions in float64."""

import pytest
import torch

from equipoise.layer.expert_block import activate, activate_backward
from equipoise.layer.ops import add_columns, combine_rows, fused_for

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
ROUNDING = {torch.bfloat16: 8e-3, torch.float16: 1e-3, torch.float32: 1e-5}


def random(*shape, dtype):
    return torch.randn(shape, device="cuda").to(dtype)


def close(got, wanted, dtype):
    error = (got.double() - wanted.double()).abs().max() / wanted.double().abs().max().clamp(min=1e-30)
    return bool(error < ROUNDING[dtype])


def test_float64_and_the_cpu_keep_the_plain_versions():
    assert fused_for(torch.zeros(1)) is None
    assert fused_for(torch.zeros(1, device="cuda", dtype=torch.float64)) is None
    assert fused_for(torch.zeros(1, device="cuda")) is not None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("tokens", "top_k", "width"), [(0, 2, 8), (1, 1, 8), (57, 8, 2048), (9, 3, 1000), (5, 6, 7168)]
)
@pytest.mark.parametrize("gate_dtype", [torch.float32, None], ids=["float32 gates", "gates as rows"])
def test_combining(dtype, tokens, top_k, width, gate_dtype):
    index_TK = torch.randperm(tokens * top_k, device="cuda").view(tokens, top_k)
    rows_ND, grad_TD = random(tokens * top_k, width, dtype=dtype), random(tokens, width, dtype=dtype)
    gates_TK = torch.rand((tokens, top_k), device="cuda").to(gate_dtype or dtype)
    seen = []
    for wide in (False, True):
        leaves = [(t.double() if wide else t.clone()).requires_grad_() for t in (rows_ND, gates_TK)]
        out_TD = combine_rows(leaves[0], leaves[1], index_TK=index_TK)
        out_TD.backward(grad_TD.to(out_TD.dtype))
        plain_TD = add_columns(leaves[0].detach(), index_TK)
        seen.append((out_TD, leaves[0].grad, leaves[1].grad, plain_TD))
    assert seen[0][0].dtype == dtype and seen[0][2].dtype == gates_TK.dtype
    if tokens:
        assert all(close(got, wanted, dtype) for got, wanted in zip(*seen, strict=True))


def test_columns_are_added_first_to_last():
    rows_ND = torch.tensor([[2.0**24], [1.0], [-(2.0**24)]], device="cuda")
    for order, wanted in (([[0, 1, 2]], 0.0), ([[0, 2, 1]], 1.0)):
        index_TK = torch.tensor(order, device="cuda")
        assert add_columns(rows_ND, index_TK).item() == wanted
        assert combine_rows(rows_ND, torch.ones((1, 3), device="cuda"), index_TK=index_TK).item() == wanted


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "width"), [(0, 8), (1, 8), (33, 768), (7, 1536), (5, 1000), (3, 37)])
def test_swiglu(dtype, rows, width):
    pre_NF, grad_NF = random(rows, 2 * width, dtype=dtype) * 3, random(rows, width, dtype=dtype)
    pairs = [
        (activate(pre_NF, "swiglu"), activate(pre_NF.double(), "swiglu")),
        (activate_backward(grad_NF, pre_NF, "swiglu"), activate_backward(grad_NF.double(), pre_NF.double(), "swiglu")),
    ]
    for got, wanted in pairs:
        assert got.shape == wanted.shape and got.dtype == dtype
        assert not rows or close(got, wanted, dtype)

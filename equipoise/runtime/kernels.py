"""Which kernels stand between the products: fused ones where Triton can compile them, plain torch elsewhere.

The one place of that choice. Does not know what the kernels compute.
"""

from functools import cache
from importlib.util import find_spec
from types import ModuleType

import torch
from torch import Tensor

FUSED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Float32 sums would be a loss for float64."""


def fused_for(*tensors: Tensor) -> ModuleType | None:
    """Return `equipoise.runtime.fused` where it serves all these tensors, else None."""
    if not all(tensor.is_cuda and tensor.dtype in FUSED_DTYPES for tensor in tensors):
        return None
    return _fused()


@cache
def _fused() -> ModuleType | None:
    if find_spec("triton") is None:
        return None
    from equipoise.runtime import fused

    return fused

"""`stable_order`: small integers in ascending order, equal ones as they came. Sorting is what preparing rows costs.

Knows nothing of what the integers mean. On CPU numbers below 65,536 are sorted by their digits (numpy's radix sort),
several times as fast as a comparison sort of int64; on a device torch sorts.

Invariant (asserted by the tests): it is `torch.argsort(keys_N, stable=True)` for every bound.
"""

import numpy as np
import torch
from torch import Tensor

_DIGITS = 1 << 16


def stable_order(keys_N: Tensor, *, below: int) -> Tensor:
    """[N] positions of the keys in ascending order.

    Args:
        below: every key is at least 0 and below this
    """
    if keys_N.device.type != "cpu" or below > _DIGITS:
        return torch.argsort(keys_N, stable=True)
    return torch.from_numpy(np.argsort(keys_N.numpy().astype(np.uint16), kind="stable"))

"""The start-up check of the deterministic mode: does this machine give a row the same bits in every group?

The mode promises that replicas do not change an output. That holds where a padded group's size and place do not change
a row's products. This file tries it on the model's own shapes and refuses the mode where it fails. It proves nothing
about sizes it did not try.

Invariant (asserted by the tests): a backend whose bits depend on the group's size is refused.
"""

import torch
from torch import Tensor

from equipoise.core.errors import TopologyError
from equipoise.runtime.bank import ExpertWeights
from equipoise.runtime.expert_block import BlockOptions, apply_experts

SIZES = (1, 2, 3, 5, 9, 17, 33)
"""Group sizes tried, in multiples of the padding."""


def check_row_bits(weights: ExpertWeights, *, pad: int, options: BlockOptions, seed: int = 0) -> None:
    """Raise if a row's output depends on its group, for groups filled to a multiple of `pad` rows.

    Args:
        weights: home weights of one layer; the first expert is used
    """
    one = ExpertWeights(*(None if tensor is None else tensor.detach()[:1] for tensor in weights))
    total = pad * sum(SIZES)
    make = torch.Generator().manual_seed(seed)
    rows_ND = torch.randn((total, one.down_SDF.shape[1]), generator=make).to(one.down_SDF)
    together_ND = _outputs(rows_ND, one, [total], options)
    apart_ND = _outputs(rows_ND, one, [pad * size for size in SIZES], options)
    differing = (together_ND != apart_ND).any(dim=1).nonzero().flatten()
    if len(differing):
        raise TopologyError(
            f"the deterministic mode cannot be kept on {rows_ND.device} in {rows_ND.dtype} for hidden "
            f"{rows_ND.shape[1]} and expert width {one.down_SDF.shape[2]}: {len(differing)} of {total} rows have other "
            f"bits in smaller groups; turn the mode off or pad to more than {pad} rows"
        )


def _outputs(rows_ND: Tensor, one: ExpertWeights, lengths: list[int], options: BlockOptions) -> Tensor:
    """The same expert in as many slots as there are groups."""
    slots = ExpertWeights(*(None if t is None else t.expand(len(lengths), *t.shape[1:]).contiguous() for t in one))
    end_S = torch.tensor(lengths, device=rows_ND.device).cumsum(0).to(torch.int32)
    return apply_experts(rows_ND, slots, end_S, options)[0]

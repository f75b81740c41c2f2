"""Transformer Engine's grouped linear, as far as Megatron's `TEGroupedMLP` sees it, for CPUs: it needs a GPU itself."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core import __version__ as VERSION
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import TEGroupedMLP
from torch import Tensor, nn


class GroupedLinear(nn.Module):
    """Has the parameters of `transformer_engine.pytorch.GroupedLinear` (1.7 to 2.14): `weight0`, ... [out, in]."""

    def __init__(
        self, num_gemms: int, in_features: int, out_features: int, *, config: Any, init_method: Callable, **_: Any
    ) -> None:
        super().__init__()
        for at in range(num_gemms):
            weight = nn.Parameter(torch.empty(out_features, in_features, dtype=config.params_dtype))
            init_method(weight.data)
            # As Megatron's wrapper does: DDP reduces such parameters over the ranks that hold the same experts.
            weight.allreduce = False
            self.register_parameter(f"weight{at}", weight)

    def forward(self, rows: Tensor, splits: list[int]) -> tuple[Tensor, None]:
        """Multiply each expert's rows by its matrix."""
        parts = zip(rows.split(splits), self.parameters(), strict=True)
        return torch.cat([nn.functional.linear(part, weight) for part, weight in parts]), None


def grouped_mlp_modules(*_: Any) -> Any:
    """Take the place of `LocalSpecProvider.grouped_mlp_modules`, which has no Transformer Engine to offer."""
    parts = MLPSubmodules(linear_fc1=GroupedLinear, linear_fc2=GroupedLinear)
    return (TEGroupedMLP, parts) if VERSION.startswith("0.16.") else partial(TEGroupedMLP, submodules=parts)

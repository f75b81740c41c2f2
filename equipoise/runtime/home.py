"""The node through which home weights enter a layer, and at which the gradients of their replicas come home.

It changes no value. Create it *before* the layer's attention: autograd runs nodes created later first, so its backward
comes after the attention's, and a return hides behind that. Hooks and reducers on the parameters see a complete
gradient.

Invariants (asserted by the tests):
1. Its backward runs after the backward of everything created between it and the experts, plain and checkpointed.
2. It waits for returns on every rank, whatever the rank's rows and replicas.
3. A gradient that the engine of autograd holds elsewhere too, or that overlaps itself, is not changed in place. A hook
   that keeps the gradient of an entered weight sees returns added to it later.
"""

from typing import Any

import torch
from torch import Tensor

from equipoise.core.itinerary import Visit
from equipoise.runtime.bank import ExpertWeights, ReplicaBank


def enter_home(home: ExpertWeights, bank: ReplicaBank, visit: Visit) -> ExpertWeights:
    """Return the home weights as the layer shall use them; call before the layer's attention.

    Args:
        home: this rank's home weights of the layer
        bank: where the gradients of their replicas return to
        visit: the layer's turn; its phase does not matter
    """
    entered = iter(_EnterHome.apply(bank, visit, *home.tensors()))
    return ExpertWeights(*(None if tensor is None else next(entered) for tensor in home))


class _EnterHome(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, bank: ReplicaBank, visit: Visit, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.bank, ctx.visit = bank, visit
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        # The experts' own backward made these gradients, so mostly no one else holds them and adding in place is safe.
        own = tuple(_own(gradient) for gradient in gradients)
        ctx.bank.collect_returns(ctx.visit.micro_step, ctx.visit.layer, ExpertWeights(*own))
        return None, None, *own


def _own(gradient: Tensor) -> Tensor:
    """The gradient, or a copy where it is shared or overlaps itself."""
    is_shared = gradient._use_count() > 1 or not gradient.is_contiguous()
    return gradient.clone(memory_format=torch.contiguous_format) if is_shared else gradient

"""The activations between an expert's two products, forward beside backward.

Knows fused gate_up rows of 2F entries. Does not know experts, groups or slots.

- `swiglu`: gate is the first half, up the second; silu(gate) * up. (Qwen3, DeepSeek, GLM, Mixtral, OLMoE)
- `gpt_oss`: gate and up alternate; both are clamped at 7, gate from above only, then (up + 1) * gate *
  sigmoid(1.702 * gate). (gpt-oss, as in transformers' `GptOssExperts`)
"""

from typing import Literal

import torch
from torch import Tensor

from equipoise.runtime.kernels import fused_for

Activation = Literal["swiglu", "gpt_oss"]

LIMIT = 7.0
SLOPE = 1.702


def activate(pre_NF: Tensor, activation: Activation) -> Tensor:
    """Apply the activation.

    Args:
        pre_NF: [N, 2F] output of the gate_up product

    Returns: [N, F]
    """
    if activation == "swiglu":
        fused = fused_for(pre_NF)
        if fused is not None:
            return fused.swiglu(pre_NF)
        gate_NF, up_NF = pre_NF.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate_NF) * up_NF
    gate_NF, up_NF = pre_NF[:, ::2].clamp(max=LIMIT), pre_NF[:, 1::2].clamp(-LIMIT, LIMIT)
    return (up_NF + 1) * (gate_NF * torch.sigmoid(gate_NF * SLOPE))


def activate_backward(grad_NF: Tensor, pre_NF: Tensor, activation: Activation) -> Tensor:
    """Return the gradient of `activate` in its input.

    Args:
        grad_NF: [N, F] gradient of the activation's output
        pre_NF: [N, 2F] the activation's input

    Returns: [N, 2F]
    """
    if activation == "swiglu":
        fused = fused_for(grad_NF, pre_NF)
        if fused is not None:
            return fused.swiglu_backward(grad_NF, pre_NF)
        gate_NF, up_NF = pre_NF.chunk(2, dim=-1)
        sigmoid_NF = torch.sigmoid(gate_NF)
        grad_gate_NF = grad_NF * up_NF * sigmoid_NF * (1 + gate_NF * (1 - sigmoid_NF))
        return torch.cat([grad_gate_NF, grad_NF * gate_NF * sigmoid_NF], dim=-1)
    return _gpt_oss_backward(grad_NF, pre_NF)


def _gpt_oss_backward(grad_NF: Tensor, pre_NF: Tensor) -> Tensor:
    raw_gate_NF, raw_up_NF = pre_NF[:, ::2], pre_NF[:, 1::2]
    gate_NF, up_NF = raw_gate_NF.clamp(max=LIMIT), raw_up_NF.clamp(-LIMIT, LIMIT)
    sigmoid_NF = torch.sigmoid(gate_NF * SLOPE)
    grad_gate_NF = grad_NF * (up_NF + 1) * sigmoid_NF * (1 + SLOPE * gate_NF * (1 - sigmoid_NF))
    grad_up_NF = grad_NF * gate_NF * sigmoid_NF
    # Where a clamp binds, nothing passes it.
    grad_gate_NF = grad_gate_NF.where(raw_gate_NF <= LIMIT, 0)
    grad_up_NF = grad_up_NF.where(raw_up_NF.abs() <= LIMIT, 0)
    return torch.stack([grad_gate_NF, grad_up_NF], dim=-1).flatten(-2)

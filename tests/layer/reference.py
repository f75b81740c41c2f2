"""The balanced layer in its plainest form: one process, every expert, loops. The specification of the fast files.

Never optimised, never used in training. Works in any floating dtype; tests use float64.
"""

import torch
from torch import Tensor

from equipoise.layer.dispatch import SourceSplit
from equipoise.layer.expert_block import Activation
from equipoise.transfer.node import ExpertWeights


def dense_experts(
    hidden_TD: Tensor, ids_TK: Tensor, gates_TK: Tensor, weights: ExpertWeights, *, activation: Activation = "swiglu"
) -> Tensor:
    """Apply a layer's routed experts, one token and one choice after the other, by plain autograd.

    Without a bias of the second product it does not matter to the sum whether gates multiply outputs or activations.

    Args:
        ids_TK: [T, K]; -1: the token has fewer experts
        weights: all E experts, in logical order

    Returns: [T, D]
    """
    outputs = []
    for hidden_D, ids_K, gates_K in zip(hidden_TD, ids_TK.tolist(), gates_TK, strict=True):
        total_D = torch.zeros_like(hidden_D)
        for expert, gate in zip(ids_K, gates_K, strict=True):
            if expert == -1:
                continue
            total_D = total_D + gate * expert_output(hidden_D, weights, expert, activation=activation)
        outputs.append(total_D)
    return torch.stack(outputs) if outputs else hidden_TD.clone()


def expert_output(rows_ND: Tensor, weights: ExpertWeights, expert: int, *, activation: Activation) -> Tensor:
    """One expert's output for one or many rows."""
    pre_NF = rows_ND @ weights.gate_up_SFD[expert].T
    if weights.gate_up_bias_SF is not None:
        pre_NF = pre_NF + weights.gate_up_bias_SF[expert]
    out_ND = _activate(pre_NF, activation) @ weights.down_SDF[expert].T
    return out_ND if weights.down_bias_SD is None else out_ND + weights.down_bias_SD[expert]


def _activate(pre_NF: Tensor, activation: Activation) -> Tensor:
    if activation == "swiglu":
        gate_NF, up_NF = pre_NF.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate_NF) * up_NF
    gate_NF, up_NF = pre_NF[..., ::2].clamp(max=7.0), pre_NF[..., 1::2].clamp(-7.0, 7.0)
    return (up_NF + 1) * gate_NF * torch.sigmoid(1.702 * gate_NF)


def assign_slots_by_hand(ids_TK: Tensor, split: SourceSplit) -> Tensor:
    """`assign_slots`, row by row: the next holder with room takes the row, else the home."""
    shares: dict[int, list[list[int]]] = {}
    for expert, end, slot in zip(split.expert_H.tolist(), split.end_H.tolist(), split.slot_H.tolist(), strict=True):
        shares.setdefault(expert, []).append([end, slot])
    seen: dict[int, int] = {}
    slots = []
    for expert in ids_TK.reshape(-1).tolist():
        number = seen.get(expert, 0)
        seen[expert] = number + 1
        holders = [slot for end, slot in shares.get(expert, []) if number < end]
        slots.append(holders[0] if holders else int(split.home_slot_E[expert]))
    return torch.tensor(slots, dtype=torch.int64).view(ids_TK.shape)

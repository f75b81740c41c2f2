"""`assign_slots`: which slot computes each row. The one seam between a plan and the dispatcher.

Knows ids, splits and slot numbers. Does not know ranks' processes, hidden states or how rows travel.

A *physical slot* numbers every slot of the EP group: rank * (home slots + replica slots) + local slot, home slots
first, then replica slots in the order of the plan's replica table.

Steps, for the rows of one source rank in one (micro-step, layer):
1. Number the rows of each expert in token order, then top-k column order.
2. Holders of the expert take them in ascending rank order, each as many as the split gives it from this source.
3. Rows beyond the split (routes the plan did not know) go to the expert's home.

Invariants (asserted by the tests):
1. Each row gets exactly one slot, and that slot holds the row's expert.
2. Where the actual routes are the planned ones, rows per holder equal the split.
3. A wrong or partial plan changes where rows go, never whether they do.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from equipoise.core.errors import RoutesError
from equipoise.core.plan import Plan
from equipoise.runtime.ordering import stable_order


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSplit:
    """How one source rank's rows of each expert are shared out, in one (micro-step, layer)."""

    home_slot_E: Tensor
    """[E] physical slot of each expert's home."""
    expert_H: Tensor
    """[H] experts, ascending; one entry per holder that takes rows from this source."""
    end_H: Tensor
    """[H] where the holder's share of its expert's rows ends. Example: expert_H = [3, 3], end_H = [10, 14]: the
    first holder takes rows 0..9 of expert 3, the second 10..13, and any row from 14 on goes home."""
    slot_H: Tensor
    """[H] physical slot of the holder."""

    @property
    def rows_H(self) -> Tensor:
        """[H] rows that each holder takes from this source."""
        before_H = self.end_H.roll(1)
        is_first_H = self.expert_H != self.expert_H.roll(1)
        is_first_H[:1] = True
        return torch.where(is_first_H, self.end_H, self.end_H - before_H)

    @classmethod
    def of(cls, plan: Plan, micro_step: int, layer: int, *, source: int, device: str = "cpu") -> "SourceSplit":
        """Read one entry of a plan as `source` sees it."""
        slot_ER = physical_slots(plan, micro_step, layer)
        split_ER = plan.split_RER(micro_step, layer)[source]
        expert_H, rank_H = np.nonzero(split_ER)
        end_H = np.cumsum(split_ER, axis=1)[expert_H, rank_H]
        home_slot_E = slot_ER[np.arange(len(slot_ER)), plan.home_LE[layer]]
        arrays = (home_slot_E, expert_H, end_H, slot_ER[expert_H, rank_H])
        names = ("home_slot_E", "expert_H", "end_H", "slot_H")
        return cls(**{name: torch.from_numpy(array).to(device) for name, array in zip(names, arrays, strict=True)})


def slots_per_rank(plan: Plan) -> int:
    """Home and replica slots of one rank, the stride of physical slots."""
    return plan.home_slots + plan.slots


def physical_slots(plan: Plan, micro_step: int, layer: int) -> np.ndarray:
    """[E, R] physical slot of each expert on each rank that holds it, -1 elsewhere."""
    experts = np.arange(plan.loads.num_experts)
    width = slots_per_rank(plan)
    slot_ER = np.full((len(experts), plan.cluster.ep), -1, dtype=np.int64)
    slot_ER[experts, plan.home_LE[layer]] = plan.home_LE[layer] * width + plan.home_slot_LE[layer]
    used_R = np.zeros(plan.cluster.ep, dtype=np.int64)
    for expert, rank in plan.replicas(micro_step, layer):
        slot_ER[expert, rank] = rank * width + plan.home_slots + used_R[rank]
        used_R[rank] += 1
    return slot_ER


def assign_slots(ids_TK: Tensor, split: SourceSplit) -> Tensor:
    """Give each row of this source a physical slot.

    Args:
        ids_TK: [T, K] expert ids that the tokens really use
        split: what the plan says for this source rank

    Returns: [T, K] int64 physical slots
    """
    ids_N = ids_TK.reshape(-1).long()
    _check_ids(ids_N, len(split.home_slot_E))
    # Step 1: the key of a row is (expert, number among its expert's rows), as one integer.
    stride = ids_N.numel() + 1
    key_N = ids_N * stride + _number_in_expert(ids_N, num_experts=len(split.home_slot_E))
    # Step 2: the first holder whose share ends beyond the row, among the holders of the same expert.
    end_H = split.expert_H * stride + split.end_H.clamp(max=stride - 1)
    at_N = torch.searchsorted(end_H, key_N, right=True)
    # Step 3: one entry past the end stands for "no holder", and leads home as every other expert's entry does.
    expert_H = torch.cat([split.expert_H, split.expert_H.new_full((1,), -1)])
    slot_H = torch.cat([split.slot_H, split.slot_H.new_full((1,), -1)])
    # Gathered, not indexed: an index of -1 would mean the last expert, and no one would notice on a device.
    home_slot_N = split.home_slot_E.gather(0, ids_N)
    slot_N = torch.where(expert_H[at_N] == ids_N, slot_H[at_N], home_slot_N)
    return slot_N.view(ids_TK.shape)


def _number_in_expert(ids_N: Tensor, *, num_experts: int) -> Tensor:
    """[N] how many earlier rows chose the same expert."""
    order_N = stable_order(ids_N, below=num_experts)
    sorted_N = ids_N[order_N]
    place_N = torch.arange(ids_N.numel(), device=ids_N.device)
    number_N = torch.empty_like(place_N)
    number_N[order_N] = place_N - torch.searchsorted(sorted_N, sorted_N)
    return number_N


def _check_ids(ids_N: Tensor, num_experts: int) -> None:
    # A device would have to be waited for; there the gather below asserts the same range.
    if ids_N.is_cuda or not ids_N.numel():
        return
    low, high = (int(bound) for bound in torch.aminmax(ids_N))
    if low < 0 or high >= num_experts:
        bad = low if low < 0 else high
        raise RoutesError(
            f"a token was routed to expert {bad}; ids are 0..{num_experts - 1} (fill missing routes first)"
        )

"""EPLB, the expert-parallel load balancer everyone has: our own implementation of DeepSeek's published description.

One placement with copies for the whole window, per layer, from loads summed over a window: this one's (`eplb-oracle`)
or the previous one's (`eplb-history`). No groups, no nodes: the global variant, which balances best.

Steps, per layer:
1. Copies: every expert has one; each of the `slots` x ranks further slots goes to the expert with the largest load per
   copy (`count_copies`).
2. Packing: copies, largest load first, each to the lightest rank that has a free slot (`pack`).
3. In every micro-step an expert's rows are shared evenly over its copies, in whole rows; the rows that do not divide go
   to the first copies from one that moves on with the micro-step, so that no rank collects them all (`share_evenly`).

Two copies of an expert may stand on one rank: they count twice in the share, and once as a holder.

Invariants (asserted by the tests):
1. Every expert has a copy; every rank holds exactly home + replica slots copies.
2. No copy can be given to another expert so that the largest load per copy falls.
3. Shares of an expert differ by at most one row per copy, and add up to its load.
4. Skews of DeepSeek's own code on real traces are reproduced within 0.5 %.
"""

import numpy as np

from equipoise.core import InfeasiblePlanError, LoadMatrix
from equipoise.planner.assemble import Draft, Task
from equipoise.planner.pricing import owner_homes, persistent_draft


def draft_eplb(task: Task, *, predictor: LoadMatrix | None) -> Draft:
    """Draft EPLB's plan of a window.

    Args:
        task: the window
        predictor: the loads the placement is made from; the window's own for the oracle
    """
    load_LE = _checked(task, predictor).load_MLRE.sum(axis=(0, 2))
    copies_LER = np.stack([place(load_E, ranks=task.cluster.ep, slots=task.slots) for load_E in load_LE])
    total_MLE = task.loads.total_MLE()
    quotas = [share_evenly(total_MLE[:, layer], copies_LER[layer]) for layer in range(task.model.layers)]
    holds_LER = copies_LER > 0
    return persistent_draft(task, choose_homes(task, holds_LER), quotas_L=quotas, holds_LER=holds_LER)


def _checked(task: Task, predictor: LoadMatrix | None) -> LoadMatrix:
    if predictor is None:
        raise InfeasiblePlanError(
            f"policy {task.policy!r} places experts by an earlier window's loads; pass history=LoadMatrix(...)"
        )
    found, wanted = (predictor.num_layers, predictor.num_experts), (task.model.layers, task.model.experts)
    if found != wanted:
        raise InfeasiblePlanError(
            f"history has {found[0]} layers of {found[1]} experts, the window {wanted[0]} of {wanted[1]}; "
            "pass the loads of the same model"
        )
    return predictor


def place(load_E: np.ndarray, *, ranks: int, slots: int) -> np.ndarray:
    """[E, R] number of copies of each expert on each rank."""
    experts = len(load_E)
    copies_E = count_copies(load_E, experts + slots * ranks)
    expert_C = np.repeat(np.arange(experts), copies_E)
    rank_C = pack(load_E[expert_C] / copies_E[expert_C], ranks)
    placed_ER = np.zeros((experts, ranks), dtype=np.int64)
    np.add.at(placed_ER, (expert_C, rank_C), 1)
    return placed_ER


def count_copies(load_E: np.ndarray, total: int) -> np.ndarray:
    """[E] copies of each expert, `total` in all: each further one to the largest load per copy, ties to the lowest."""
    copies_E = np.ones(len(load_E), dtype=np.int64)
    for _ in range(total - len(load_E)):
        copies_E[np.argmax(load_E / copies_E)] += 1
    return copies_E


def pack(load_C: np.ndarray, ranks: int) -> np.ndarray:
    """[C] rank of each copy: largest load first, to the lightest rank with a free slot; equally many on each rank."""
    free_R = np.full(ranks, len(load_C) // ranks)
    load_R = np.zeros(ranks)
    rank_C = np.zeros(len(load_C), dtype=np.int64)
    for copy in np.argsort(-load_C, kind="stable"):
        rank = int(np.argmin(np.where(free_R > 0, load_R, np.inf)))
        rank_C[copy] = rank
        free_R[rank] -= 1
        load_R[rank] += load_C[copy]
    return rank_C


def share_evenly(load_ME: np.ndarray, copies_ER: np.ndarray) -> np.ndarray:
    """[M, E, R] whole rows of each expert on each rank, shared evenly over its copies."""
    micro_steps, experts = load_ME.shape
    expert_P, rank_P = np.nonzero(copies_ER)
    expert_C = np.repeat(expert_P, copies_ER[expert_P, rank_P])
    rank_C = np.repeat(rank_P, copies_ER[expert_P, rank_P])
    copies_E = copies_ER.sum(axis=1)
    index_C = np.arange(len(expert_C)) - np.repeat(np.cumsum(copies_E) - copies_E, copies_E)
    whole_ME, rest_ME = np.divmod(load_ME, copies_E)
    turn_MC = (index_C + np.arange(micro_steps)[:, None]) % copies_E[expert_C]
    rows_MC = whole_ME[:, expert_C] + (turn_MC < rest_ME[:, expert_C])
    quota_ERM = np.zeros((experts, copies_ER.shape[1], micro_steps), dtype=np.int64)
    np.add.at(quota_ERM, (expert_C, rank_C), rows_MC.T)
    return quota_ERM.transpose(2, 0, 1)


def choose_homes(task: Task, holds_LER: np.ndarray) -> np.ndarray:
    """[L, E] the copy that counts as home: the owner's where it has one, else the lowest rank's."""
    owner_LE = owner_homes(task)
    at_owner_LE = np.take_along_axis(holds_LER, owner_LE[:, :, None], axis=2)[:, :, 0]
    return np.where(at_owner_LE, owner_LE, holds_LER.argmax(axis=2))

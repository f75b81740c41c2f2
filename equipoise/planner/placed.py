"""`plan_placement`: the plan of experts that are already placed, as an engine's file or another planner decided.

Nothing is searched. Copies stay for the whole window, each expert's rows are shared evenly over its copies, as EPLB's
dispatch does, and everything is priced as in every other plan. So a placement can be compared with ours.
"""

import numpy as np

from equipoise.core import Cluster, InfeasiblePlanError, LoadMatrix, LoadsError, ModelShape, Plan
from equipoise.core.options import PlanOptions
from equipoise.core.value import int64_array
from equipoise.planner.assemble import WindowTask, build_plan, choose_waves
from equipoise.planner.baselines import choose_homes, persistent_draft, share_evenly
from equipoise.planner.plan import check_rows, complete


def plan_placement(
    loads: LoadMatrix,
    held_LER: np.ndarray,
    *,
    cluster: Cluster,
    model: ModelShape,
    options: PlanOptions | None = None,
) -> Plan:
    """Plan a window with experts that stay where they are.

    Args:
        loads: of the window
        held_LER: [L, E, R] copies of each expert on each rank, as many on every rank
        cluster, model: as for `plan`
        options: as for `plan`; those that guide a search have no effect
    """
    held_LER = int64_array("held_LER", held_LER, ndim=3, error=InfeasiblePlanError)
    wanted = (loads.num_layers, loads.num_experts, loads.num_ranks)
    if (model.layers, model.experts, cluster.ep) != wanted:
        raise LoadsError(
            f"loads have {wanted[0]} layers of {wanted[1]} experts on {wanted[2]} ranks, model and cluster "
            f"{model.layers} of {model.experts} on {cluster.ep}; they must be equal"
        )
    if held_LER.shape != wanted:
        raise InfeasiblePlanError(f"held_LER has shape {held_LER.shape}, the loads need {wanted}")
    count_LR = held_LER.sum(axis=1)
    if held_LER.min() < 0 or (held_LER.sum(axis=2) == 0).any() or (count_LR != count_LR[0, 0]).any():
        raise InfeasiblePlanError(
            f"ranks hold {count_LR.min()} to {count_LR.max()} experts of a layer, or an expert has no copy; every rank "
            "must hold as many, and every expert be held"
        )
    check_rows(loads)
    completed, estimated = complete(loads)
    check_rows(completed)
    task = WindowTask(
        loads=completed,
        cluster=cluster,
        model=model,
        slots=int(count_LR[0, 0]) - cluster.home_slots(model),
        objective="seconds",
        options=PlanOptions() if options is None else options,
        policy="placed",
        estimated_share=estimated,
        pair_LEE=None,
    )
    total_MLE, holds_LER = completed.total_MLE(), held_LER > 0
    quotas = [share_evenly(total_MLE[:, layer], held_LER[layer]) for layer in range(model.layers)]
    draft = persistent_draft(task, choose_homes(task, holds_LER), quotas_L=quotas, holds_LER=holds_LER)
    return choose_waves(task, build_plan(task, draft))

"""From loads to a plan.

    plan.py       plan, plan_step: the story of the room; completing loads that are partly unknown
    layer.py      one layer: which homes are tried, and which win
    homes.py      the search for homes, compiled
    replicas.py   replicas and their rows for given homes, compiled
    assemble.py   decisions to a checked Plan: itinerary, slots, paths, edges, seconds, bytes
    baselines.py  the other policies: static, lpt, eplb-history, eplb-oracle, lplb, reactive, balanced
    relibra.py    ReLibra's way to plan a layer, for the policy relibra

Planning decides in integers: same input, same plan, on every machine; only the annealing of `relibra` has fractions.
The compiled functions are specified by plain ones in `tests/planner`, and run as plain Python themselves with
`NUMBA_DISABLE_JIT=1`.

To add a policy: write a function from `WindowTask` to `Draft` and name it in `POLICIES`.
"""

from equipoise.core.options import PlanOptions
from equipoise.planner.plan import plan, plan_step

__all__ = ["PlanOptions", "plan", "plan_step"]

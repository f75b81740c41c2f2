"""From loads to a plan.

    plan.py       plan, plan_step: the story of the room
    options.py    PlanOptions: the deeper knobs
    reference.py  the inner functions specified: short, plain, never optimised; fill_reference.py and
                  trade_reference.py are its second and third part
    layer.py      one layer: which homes are tried, and which win
    fast.py       its inner functions, compiled, the same bit for bit; _level.py, _near.py, _fill.py and _trade.py are
                  its parts
    assemble.py   decisions to a checked Plan: slots, paths, edges, seconds, bytes
    itinerary.py  visits in execution order and their buffers
    estimate.py   loads that are partly unknown
    policies.py   the baselines: static, eplb-history, eplb-oracle, lplb, reactive, balanced (eplb.py, lplb.py,
                  pricing.py are their parts)
    bounds.py     what no plan can beat

To add a policy: write a function from `Task` to `Draft` and name it in `POLICIES`.
"""

from equipoise.core.options import PlanOptions
from equipoise.planner.plan import plan, plan_step

__all__ = ["PlanOptions", "plan", "plan_step"]

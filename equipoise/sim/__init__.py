"""What a step would cost on a described cluster, predicted from its loads without a GPU.

    step.py        `simulate`: an RL step replayed under policies or plans (`windows.py`, `plans.py` and `setting.py`
                   are what goes in; `result.py`, `break_even.py` and `notes.py` what comes out)
    group.py       one EP group's window: `work.py` what there is to do, `course.py` in which order,
                   `replay.py` on a clock, `shown.py` what a page shows of it
    events.py      the same clock event by event, the specification of `replay.py`; `clockwork.py` its heap and lanes
    sweep.py       the same step at other widths, slots and sizes, and from where on a plan pays
    prediction.py  seconds of a window as it is, and if every rank were level
    trial.py       a plan for every window, and what it would give back
    summary.py     a simulation as text; demo.py, a generated step to show it with
    analysis.py    all that `equipoise analyze` says about one step

Shape letters beside the package's: G EP group, Q pipeline stage, X rank over all stages of a group, C kind of seconds.
`python -m equipoise.sim` shows a demo. May import core, loads, cost and planner; never torch, routes or runtime.
"""

from equipoise.sim.analysis import Analysis, Prediction, Trial, analyze_loads, predict, try_plans
from equipoise.sim.result import Simulation
from equipoise.sim.step import simulate
from equipoise.sim.windows import StepSetting

__all__ = [
    "simulate",
    "Simulation",
    "StepSetting",
    "Analysis",
    "analyze_loads",
    "Prediction",
    "predict",
    "Trial",
    "try_plans",
]

"""What a step would cost on a described cluster, predicted from its loads without a GPU.

    step.py        `simulate`: an RL step replayed under policies or plans
    windows.py     what goes in: the setting of a step, its windows, and where their plans are from
    replay.py      one EP group's window on the clock (`cost.clock`), and what a page shows of it
    result.py      the results: their types and the JSON document
    summary.py     the result as plain text, and the notes beside its figures
    sweep.py       the same step at other widths, slots and sizes, and from where on a plan pays
    analysis.py    `analyze_loads`: the short form, for `equipoise analyze`

Shape letters beside the package's: G EP group, Q pipeline stage, X rank over all stages of a group, C kind of seconds.
`python -m equipoise.sim` shows a demo.
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

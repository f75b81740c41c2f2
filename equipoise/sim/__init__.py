"""What a step would cost on a described cluster, predicted from its loads without a GPU.

    prediction.py  seconds of a window as it is, and if every rank were level
    trial.py       a plan for every window, and what it would give back
    analysis.py    all that `equipoise analyze` says about one step

Not built yet: replay of a plan event by event (`simulate`), and comparison of policies over many steps.
May import core, loads, cost and planner; never torch, routes or runtime.
"""

from equipoise.sim.analysis import Analysis, analyze_loads
from equipoise.sim.prediction import Prediction, predict
from equipoise.sim.trial import Trial, try_plans

__all__ = ["Analysis", "analyze_loads", "Prediction", "predict", "Trial", "try_plans"]

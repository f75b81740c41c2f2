"""The parity run judges rightly: equal trainings are good, each kind of difference is found."""

import dataclasses

import numpy as np
import pytest
import torch

from equipoise.planning.report import WindowReport
from tests.parity.case import ParityCase
from tests.parity.run import Training
from tests.parity.stack import dense_gradients
from tests.parity.verdict import judge

CASE = ParityCase(ranks=2, layers=1, tokens=4, steps=1)
REPORT = WindowReport(
    digest="",
    predicted_s=0.0,
    static_s=0.0,
    displaced=3,
    replicas=2,
    planning_s=0.0,
    waited_s=0.0,
    counts={"pulls": 1},
    bytes={},
    exposed_s={},
    planned_ML=np.ones((2, 1)),
    arrived_ML=np.ones((2, 1)),
)


def trainings():
    """What both ranks would see if float32 gradients were float64's, rounded."""
    exact = dense_gradients(CASE, 0)
    halves = [tensor.chunk(2) for tensor in exact]
    return [
        Training(
            losses=[4.0],
            outputs=[torch.ones(2, 3)],
            gradients=[half[rank].float() for half in halves],
            norm=2.0,
            weights=[torch.ones(2, 2)],
            reports=[REPORT],
        )
        for rank in range(2)
    ]


def findings(**changed):
    """Names of the measures that do not hold when rank 1, and rank 0 where the figure is shared, saw something else."""
    balanced = [dataclasses.replace(training, **changed) for training in trainings()]
    verdict = judge(CASE, trainings(), balanced)
    return [measure.name for measure in verdict.measures if not measure.is_good], verdict


def test_equal_trainings_are_good():
    names, verdict = findings()
    assert names == []
    assert verdict.is_good


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ({"losses": [4.0000001]}, ["loss, window 1"]),
        ({"losses": [float("nan")]}, ["loss, window 1", "loss, window 1"]),
        ({"outputs": [torch.ones(2, 3) + 1e-6]}, ["output difference, window 1"]),
        ({"norm": 2.00001}, ["gradient norm, window 1"]),
        ({"weights": [torch.ones(2, 2) + 1e-4]}, ["weight difference, 1 steps"]),
        ({"gradients": [t + 1e-3 for t in trainings()[0].gradients]}, ["gradient error ratio"]),
        ({"reports": [dataclasses.replace(REPORT, arrived_ML=np.zeros((2, 1)))]}, ["windows with unplanned rows"]),
        ({"reports": [dataclasses.replace(REPORT, arrived_ML=None)]}, ["windows with unplanned rows"]),
    ],
    ids=["loss", "loss is not a number", "output", "gradient norm", "weights", "gradients", "rows", "no rows"],
)
def test_each_difference_is_found(changed, found):
    names, verdict = findings(**changed)
    assert names == found
    assert not verdict.is_good


def test_a_run_in_which_nothing_moved_is_not_good():
    names, verdict = findings(reports=[dataclasses.replace(REPORT, counts={"pulls": 0})])
    assert names == []
    assert not verdict.is_good


def test_in_bf16_limits_are_those_of_its_rounding():
    case = dataclasses.replace(CASE, device="cuda")
    balanced = [dataclasses.replace(training, weights=[torch.ones(2, 2) + 2.0**-8]) for training in trainings()]
    assert judge(case, trainings(), balanced).is_good
    off = [dataclasses.replace(training, weights=[torch.ones(2, 2) + 2.0**-7]) for training in trainings()]
    assert [m.name for m in judge(case, trainings(), off).measures if not m.is_good] == ["weight difference, 1 steps"]

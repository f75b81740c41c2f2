"""`PlanOptions`: values that make no sense are refused, byte budgets become slots."""

import dataclasses

import numpy as np
import pytest

from equipoise.core import InfeasiblePlanError, ModelShape
from equipoise.core.options import replica_bytes
from equipoise.planner import PlanOptions

MODEL = ModelShape.preset("qwen3-30b-a3b")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"gate": "no"}, "PlanOptions.gate is 'no'; it must be True or False"),
        ({"cross_node": 1}, "PlanOptions.cross_node is 1; it must be True or False"),
        ({"waves": 0}, "PlanOptions.waves is 0; it must be from 1 to 8"),
        ({"waves": 9}, "PlanOptions.waves is 9; it must be from 1 to 8"),
        ({"waves": "many"}, "PlanOptions.waves is 'many'; it must be a whole number from 1 to 8, or 'auto'"),
        ({"effort": 0}, "PlanOptions.effort is 0; it must be at least 1"),
        ({"workers": 0}, "PlanOptions.workers is 0"),
        ({"workers": 1.5}, "PlanOptions.workers must be a whole number"),
        ({"depth": 0}, "PlanOptions.depth is 0"),
        ({"max_displaced": -1}, "PlanOptions.max_displaced is -1"),
        ({"memory_bytes": -1}, "PlanOptions.memory_bytes is -1"),
        ({"memory_bytes": True}, "PlanOptions.memory_bytes must be a whole number"),
        ({"limit_bytes": 0}, "PlanOptions.limit_bytes is 0; it must be at least 1"),
        ({"activations": "lost"}, "PlanOptions.activations is .lost.; it must be one of recomputed, kept"),
        ({"order": "zigzag"}, "PlanOptions.order is 'zigzag'; it must be one of plain, recompute, 1f1b"),
        ({"sends": "bytes"}, "PlanOptions.sends is 'bytes'; it must be one of rows, tokens"),
        ({"pipeline_stage": 2, "pipeline_stages": 2}, "PlanOptions.pipeline_stage is 2; there are 2 stages from 0"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_values_that_make_no_sense_are_refused_by_name(values, words):
    with pytest.raises(InfeasiblePlanError, match=words):
        PlanOptions(**values)


def test_unknown_names_are_errors_and_nothing_can_be_changed():
    with pytest.raises(TypeError, match="swiftness"):
        PlanOptions(swiftness=3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        PlanOptions().effort = 2


@pytest.mark.parametrize("stage", ["recompute", "update"])
@pytest.mark.parametrize(("depth", "slots"), [(1, 3), (2, 2), (5, 1), (6, 0)])
def test_a_byte_budget_holds_every_buffer_and_the_gradients_of_updates(depth, slots, stage):
    each = replica_bytes(MODEL, stage)
    assert (each > MODEL.expert_bytes) == (stage == "update")
    options = PlanOptions(memory_bytes=6 * each, depth=depth)
    assert options.slots_within(MODEL, None, stage=stage) == slots
    assert slots * (depth + 1) * each <= 6 * each


def test_numbers_of_numpy_become_plain_ones():
    options = PlanOptions(memory_bytes=np.int64(10**9), depth=np.int32(2), max_displaced=np.uint8(3))
    assert options == PlanOptions(memory_bytes=10**9, depth=2, max_displaced=3)
    for value in (
        options.memory_bytes,
        options.depth,
        options.max_displaced,
        options.slots_within(MODEL, None, stage="update"),
    ):
        assert type(value) is int


def test_slots_are_one_unless_said_and_never_said_twice():
    assert PlanOptions().slots_within(MODEL, None, stage="update") == 1
    assert PlanOptions().slots_within(MODEL, 4, stage="update") == 4
    with pytest.raises(InfeasiblePlanError, match=r"not both \(slots=0, memory_bytes=5\)"):
        PlanOptions(memory_bytes=5).slots_within(MODEL, 0, stage="update")

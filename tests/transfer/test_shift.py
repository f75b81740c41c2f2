"""Pulls leave a path that falls behind: when, where to, and that no bit changes."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from equipoise.core import Cluster
from equipoise.transfer.pulls import RECENT, Need, PathShift
from equipoise.transfer.waits import Standstill
from tests.transfer.play import play_windows
from tests.transfer.windows import LAYOUTS, random_plan

CPU = torch.device("cpu")
CLUSTER = Cluster.preset("h200", nvlink_bytes_per_s=1000, host_bytes_per_s=100)
NEAR = Need(layer=0, expert=1, source=1, source_slot=0, path="host")
NEVER, ALWAYS = 1, 10**15
"""Planned rates, in bytes/s, behind which a path never, or always, falls."""


def shift_of(*, is_on=True, ready=("peer", "host")):
    names = ("peer", "host")
    paths = {name: SimpleNamespace(is_ready=lambda need, version, name=name: name in ready) for name in names}
    made = PathShift(paths, near=(0, 1), is_on=is_on)
    made.open_window(CLUSTER)
    return made


def note(shift, name, rate, times=1):
    for _ in range(times):
        copying = Standstill(CPU)
        copying.end()
        shift.note(name, rate, waited_s=1.0, copying=copying)


@pytest.mark.parametrize(
    ("measured", "wanted"),
    [
        ({}, "host"),
        ({"host": 51}, "host"),
        ({"host": 49}, "peer"),
        ({"host": 49, "peer": 501}, "peer"),
        ({"host": 49, "peer": 499}, "host"),
    ],
    ids=["not measured", "half the rate", "behind", "the other keeps up", "both behind"],
)
def test_a_pull_leaves_a_path_that_is_behind_for_one_that_is_not(measured, wanted):
    shift = shift_of()
    for name, rate in measured.items():
        note(shift, name, rate)
    assert shift.choose(NEAR, version=1).path == wanted


def test_the_last_visits_count_and_a_window_begins_anew():
    shift = shift_of()
    note(shift, "host", 10, times=3)
    assert shift.is_behind("host")
    note(shift, "host", 1000, times=RECENT)
    assert not shift.is_behind("host")
    note(shift, "host", 1, times=RECENT)
    shift.open_window(CLUSTER)
    assert not shift.is_behind("host")


@pytest.mark.parametrize(
    ("given", "need"),
    [({"is_on": False}, NEAR), ({"ready": ("host",)}, NEAR), ({}, NEAR._replace(source=5))],
    ids=["a forced path", "weights are not there", "another node"],
)
def test_a_pull_stays_where_it_may_not_or_cannot_leave(given, need):
    shift = shift_of(**given)
    note(shift, "host", 1)
    assert shift.choose(need, version=1) is need


CASES = {
    "the store is behind": ({"nvlink_bytes_per_s": NEVER, "host_bytes_per_s": ALWAYS}, {}, True),
    "mapped memory is behind": ({"nvlink_bytes_per_s": ALWAYS, "host_bytes_per_s": NEVER}, {}, True),
    "none is": ({"nvlink_bytes_per_s": NEVER, "host_bytes_per_s": NEVER}, {}, False),
    "forced": ({"nvlink_bytes_per_s": NEVER, "host_bytes_per_s": ALWAYS}, {"path": "host"}, False),
}


@pytest.mark.dist(4)
@pytest.mark.parametrize("case", CASES)
def test_shifted_pulls_have_the_same_bits_and_are_counted(pool, case):
    figures, transfer, is_shifted = CASES[case]
    plans = [random_plan(LAYOUTS["4 as two nodes"], seed=w, slots=2, fewest=1, micro_steps=4) for w in range(2)]
    plans = [replace(plan, cluster=replace(plan.cluster, **figures)) for plan in plans]
    results = pool.run(play_windows, 4, plans, {"transfer": transfer})
    shifted = sum(moved["shifted"] for moved in results)
    assert (shifted > 0) == is_shifted
    assert shifted < sum(moved["pulls"] for moved in results), "nothing is shifted before its path was measured"

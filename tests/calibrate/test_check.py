"""Checking a profile: its sample is in its tables, deviations are shares, only judged figures decide."""

import copy
import json
from importlib import resources

import pytest

from equipoise.calibrate.bench import Grid
from equipoise.calibrate.run import Deviation, compare, sample_of
from equipoise.core import TopologyError

FILED = json.loads((resources.files("equipoise.cost") / "profiles" / "h200.json").read_text())


def test_the_sample_is_small_and_all_of_it_is_in_the_profile():
    sample = sample_of(FILED, Grid.full())
    assert len(sample.slots) * len(sample.rows) <= 2
    assert len(sample.shapes) == len(FILED["compute"])
    for table in FILED["compute"]:
        assert (table["hidden"], table["expert_width"]) in sample.shapes
        assert set(sample.slots) <= set(table["slots"]) and set(sample.rows) <= set(table["rows"])


def test_a_derived_profile_cannot_be_measured_again():
    with pytest.raises(TopologyError, match="is derived; only a measured one"):
        sample_of({**FILED, "kind": "derived"}, Grid.full())


def test_tables_without_common_rows_are_refused():
    changed = copy.deepcopy(FILED)
    changed["compute"][0]["rows"] = [7]
    with pytest.raises(TopologyError, match="no common rows"):
        sample_of(changed, Grid.full())


def fresh_sample():
    """The sample's figures as if measured anew, all as filed."""
    sample, fresh = sample_of(FILED, Grid.full()), copy.deepcopy(FILED)
    for table in fresh["compute"]:
        s, x = ([table[key].index(n) for n in getattr(sample, key)] for key in ("slots", "rows"))
        for key in ("forward_ns", "update_ns"):
            table[key] = [[table[key][i][j] for j in x] for i in s]
        table["slots"], table["rows"] = list(sample.slots), list(sample.rows)
    return fresh


def test_a_profile_compared_with_itself_deviates_by_nothing():
    deviations = compare(FILED, fresh_sample())
    assert len(deviations) > 4 * len(FILED["compute"])
    assert all(one.share == 0 and one.holds(0.0) for one in deviations)


def test_a_figure_twice_as_large_deviates_by_its_whole_and_is_found():
    fresh = fresh_sample()
    fresh["compute"][1]["update_ns"][0][0] *= 2
    fresh["pull"]["host_fixed_ns"] *= 3
    off = [one for one in compare(FILED, fresh) if one.share != 0]
    assert [(one.is_judged, round(one.share, 6)) for one in off] == [(True, 1.0), (False, 2.0)]
    assert [one.holds(0.1) for one in off] == [False, True]
    assert off[0].name.startswith("2048 x 1408, 8 slots, ") and off[1].name == "pull.host_fixed_ns"


def test_slower_and_faster_are_judged_alike():
    for measured, holds in ((109, True), (91, True), (111, False), (89, False)):
        assert Deviation(name="n", filed=100, measured=measured, is_judged=True).holds(0.1) is holds


def test_what_is_assumed_is_not_compared():
    assert not any(one.name.startswith("all_to_all") for one in compare(FILED, fresh_sample()))

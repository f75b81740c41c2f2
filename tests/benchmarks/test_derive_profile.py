"""Derived profiles: the roofline by hand, and the committed files remade."""

import json
from itertools import pairwise

import pytest

from benchmarks.derive_profile import PROFILES, derive, floor_s, published_figures
from equipoise.cost.profile import SECTIONS, write_profile

MEASURED = json.loads((PROFILES / "h200.json").read_text())
H200 = published_figures("h200")


@pytest.mark.parametrize(
    ("rows", "slots", "seconds"),
    [
        # 6 x 2048 x 768 operations a row at 989.4e12 per s.
        pytest.param(131072, 1, 131072 * 9437184 / 989.4e12, id="bound-by-operations"),
        # 32 experts of 9,437,184 bytes and 64 rows of 2 x 2048 + 6 x 768 bf16 numbers at 4.8e12 bytes/s.
        pytest.param(64, 32, (32 * 9437184 + 64 * 2 * (4096 + 4608)) / 4.8e12, id="bound-by-bytes"),
    ],
)
def test_the_floor_is_the_larger_of_operations_and_bytes(rows, slots, seconds):
    assert floor_s(rows, slots, shape=(2048, 768), figures=H200) == pytest.approx(seconds, rel=1e-12)


def cell_ratios(target):
    """(slots, rows, derived / measured) of every forward cell of the first shape."""
    derived = derive(MEASURED, base="h200", target=target)["compute"][0]
    measured = MEASURED["compute"][0]
    for s, slots in enumerate(measured["slots"]):
        for r, rows in enumerate(measured["rows"]):
            yield slots, rows, derived["forward_ns"][s][r] / measured["forward_ns"][s][r]


def test_h100_keeps_arithmetic_and_slows_memory():
    ratios = {(slots, rows): ratio for slots, rows, ratio in cell_ratios("h100")}
    assert ratios[1, 131072] == pytest.approx(1.0, rel=1e-3)
    assert ratios[32, 64] == pytest.approx(4.8 / 3.35, rel=1e-3)
    assert all(0.999 <= ratio <= 4.8 / 3.35 * 1.001 for ratio in ratios.values())


def test_a100_is_slower_by_operations_or_by_bytes():
    ratios = {(slots, rows): ratio for slots, rows, ratio in cell_ratios("a100")}
    assert ratios[1, 131072] == pytest.approx(989.4 / 312, rel=1e-3)
    assert ratios[32, 64] == pytest.approx(4.8 / 2.039, rel=1e-3)


def test_b200_is_faster_by_operations_or_by_bytes():
    ratios = {(slots, rows): ratio for slots, rows, ratio in cell_ratios("b200")}
    assert ratios[1, 131072] == pytest.approx(989.4 / 2250, rel=1e-3)
    assert ratios[32, 64] == pytest.approx(4.8 / 8, rel=1e-3)


def test_a_device_with_the_same_figures_has_the_same_tables():
    same = derive(MEASURED, base="h200", target="h200")
    assert [part["update_ns"] for part in same["compute"]] == [part["update_ns"] for part in MEASURED["compute"]]
    assert same["add"]["bytes_per_s"] == MEASURED["add"]["bytes_per_s"]


def test_only_a_measured_profile_can_be_derived_from():
    derived = derive(MEASURED, base="h200", target="h100")
    with pytest.raises(ValueError, match="the base profile is 'derived'"):
        derive(derived, base="h100", target="a100")


@pytest.mark.parametrize("target", ["h100", "a100", "b200"])
def test_the_committed_file_is_what_the_command_makes(target, tmp_path):
    path = tmp_path / "profile.json"
    write_profile(derive(MEASURED, base="h200", target=target), path)
    assert path.read_text() == (PROFILES / f"{target}.json").read_text()


@pytest.mark.parametrize("name", ["h200", "h100", "a100", "b200"])
def test_a_committed_profile_is_complete_and_names_every_source(name):
    profile = json.loads((PROFILES / f"{name}.json").read_text())
    assert profile["kind"] == ("measured" if name == "h200" else "derived")
    assert "unknown" not in (profile["commit"], profile["driver"], profile["torch"], profile["device"])
    assert len(profile["commit"]) == 40
    sections = [*profile["compute"], *(profile[key] for key in SECTIONS)]
    assert all(len(section["source"]) > 20 for section in sections)
    for part in profile["compute"]:
        assert part["slots"] == sorted(set(part["slots"]))
        assert part["rows"] == sorted(set(part["rows"]))
        for table in (part["forward_ns"], part["update_ns"]):
            assert [len(line) for line in table] == [len(part["rows"])] * len(part["slots"])
            assert all(ns > 0 for line in table for ns in line)


@pytest.mark.parametrize("part", MEASURED["compute"], ids=lambda part: f"D{part['hidden']}")
def test_measured_cells_lie_above_the_floor_and_repeat(part):
    shape = (part["hidden"], part["expert_width"])
    for slots, forward, update in zip(part["slots"], part["forward_ns"], part["update_ns"], strict=True):
        for rows, forward_ns, update_ns in zip(part["rows"], forward, update, strict=True):
            assert forward_ns * 1e-9 > floor_s(rows, slots, shape=shape, figures=H200)
            assert 2 < update_ns / forward_ns < 4, f"forward and backward of {slots} slots, {rows} rows"
        # Above 2,048 rows more rows always take longer; below, launches and tile choices make tables uneven.
        large = [ns for rows, ns in zip(part["rows"], forward, strict=True) if rows >= 4096]
        assert all(a < b for a, b in pairwise(large))
        # A hiccup that became a median would stand out against the cell with the next more rows.
        assert all(a < 1.5 * b for line in (forward, update) for a, b in pairwise(line))
    assert part["spread"] > 0


def test_a_link_that_takes_more_of_the_memory_bandwidth_slows_more():
    """An A100's memory has 0.425 of an H200's bandwidth and its NVLink two thirds of the rate; a B200's 1.67 and 2."""
    measured = MEASURED["beside"]["peer_slowdown_permille"]
    for target, ratio in (("a100", 300 / 450 / (2039 / 4800)), ("b200", 900 / 450 / (8000 / 4800))):
        derived = derive(MEASURED, base="h200", target=target)["beside"]
        assert derived["peer_slowdown_permille"] == round(measured * ratio) > measured

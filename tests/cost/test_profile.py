"""Hardware profiles: every figure has a source, tables never fall, damaged files are refused."""

import json
from importlib import resources

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from equipoise.core import TopologyError
from equipoise.core import cluster as clusters
from equipoise.cost import Profile, profile_names
from equipoise.cost.profile import OVERHEADS, SECTIONS, monotone, write_profile

FOLDER = resources.files("equipoise.cost") / "profiles"


def content(name):
    """The JSON content of a profile that comes with the package."""
    return json.loads((FOLDER / f"{name}.json").read_text())


def test_every_cluster_preset_has_a_profile():
    assert list(profile_names()) == clusters.preset_names()
    assert {"a100", "h100", "h200"} <= set(profile_names())


@pytest.mark.parametrize("name", profile_names())
def test_every_section_names_its_source_and_how_it_was_made(name):
    data = content(name)
    for section in (*data["compute"], *(data[key] for key in SECTIONS)):
        assert len(section["source"]) > 20
    assert data["kind"] in ("measured", "derived")
    assert data["made_by"]


@pytest.mark.parametrize("name", profile_names())
def test_tables_never_fall_with_rows_or_slots(name):
    for table in Profile.read(name).tables:
        for ns_SX in (table.forward_ns_SX, table.update_ns_SX):
            assert (np.diff(ns_SX, axis=0) >= 0).all()
            assert (np.diff(ns_SX, axis=1) >= 0).all()
            assert (ns_SX[:, -1] > ns_SX[:, 0]).all()
        assert (table.update_ns_SX >= table.forward_ns_SX).all()


@given(arrays(np.int64, st.tuples(st.integers(1, 5), st.integers(1, 6)), elements=st.integers(0, 100)))
@settings(deadline=None)
def test_monotone_is_the_smallest_table_above_that_never_falls(ns_SX):
    made = monotone(ns_SX)
    assert (made >= ns_SX).all()
    for s in range(ns_SX.shape[0]):
        for x in range(ns_SX.shape[1]):
            assert made[s, x] == ns_SX[: s + 1, : x + 1].max()


def test_a_trial_is_read_only_where_allowed(tmp_path):
    path = tmp_path / "small.json"
    path.write_text(json.dumps({**content("h200"), "kind": "trial"}))
    with pytest.raises(
        TopologyError, match=r"small.json is a trial .* measure a GPU with equipoise calibrate, without"
    ):
        Profile.read(path)
    assert Profile.read(path, allow_trial=True).kind == "trial"


def test_a_kind_nobody_knows_is_refused():
    with pytest.raises(TopologyError, match="profile x: kind is 'guessed'; it must be one of measured, derived, trial"):
        Profile.from_json(json.dumps({**content("h200"), "kind": "guessed"}), name="x")


@pytest.mark.parametrize("section", [*SECTIONS, "compute"])
def test_a_section_without_a_source_is_refused(section):
    data = content("h200")
    part = data[section][0] if section == "compute" else data[section]
    part["source"] = ""
    with pytest.raises(TopologyError, match="no source"):
        Profile.from_json(json.dumps(data), name="mine")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": "equipoise-profile-1"}, "format is 'equipoise-profile-1'.*measure it again"),
        ({"pull": {"source": "s"}}, "not a equipoise-profile-2 file"),
        ({"compute": [{"source": "s", "slots": [1, 1], "rows": [1]}]}, "must ascend"),
        (
            {"compute": [{"source": "s", "slots": [1], "rows": [1, 2], "forward_ns": [[1]], "update_ns": [[1]]}]},
            "has shape",
        ),
    ],
    ids=["format", "missing figures", "slots twice", "table too small"],
)
def test_damaged_content_is_refused_in_words(change, words):
    with pytest.raises(TopologyError, match=words):
        Profile.from_json(json.dumps({**content("h200"), **change}), name="mine")


@pytest.mark.parametrize("text", ["", "[]", "{}", "not json"])
def test_what_is_no_profile_is_refused(text):
    with pytest.raises(TopologyError, match="profile mine"):
        Profile.from_json(text, name="mine")


def test_a_profile_can_be_read_from_a_file(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(content("h100")))
    assert Profile.read(path) == Profile.read("h100")
    with pytest.raises(TopologyError, match=r"no hardware profile 'b900'; known: a100, .*h100, h200"):
        Profile.read("b900")


def test_a_written_profile_reads_back_with_one_line_per_table_line(tmp_path):
    path = tmp_path / "mine.json"
    data = content("h200")
    data["compute"][0]["even_forward_ns"][0] = [None] * len(data["compute"][0]["rows"])
    write_profile(data, path)
    assert json.loads(path.read_text()) == data
    lines = path.read_text().splitlines()
    assert sum(line.strip().startswith("[null, null") for line in lines) >= 1
    assert len(lines) < 80 + 45 * len(data["compute"])


SHARED = {
    "ranks": {"count": 8, "nodes": 1, "spread": 0.1, "median_spread": 0.01, "source": "measured by eight ranks"},
    "overheads": {name: 1000 + at for at, name in enumerate(OVERHEADS)} | {"source": "measured by eight ranks"},
}


def test_a_profile_of_several_ranks_has_their_figures_and_others_have_none():
    alone = content("h200")
    profile = Profile.from_json(json.dumps(alone | SHARED), name="shared")
    assert profile.is_shared and [getattr(profile, name) for name in OVERHEADS] == [1000, 1001, 1002, 1003, 1004]
    assert profile.relocation_bytes_per_s == 0
    far = alone | SHARED | {"exchange": alone["exchange"] | {"across_bytes_per_s": 5 * 10**9}}
    assert Profile.from_json(json.dumps(far), name="far").relocation_bytes_per_s == 5 * 10**9
    before = Profile.read("h200")
    assert not before.is_shared and not any(getattr(before, name) for name in OVERHEADS)


@pytest.mark.parametrize("section", SHARED)
def test_sections_of_several_ranks_need_a_source_too(section):
    damaged = content("h200") | SHARED | {section: SHARED[section] | {"source": ""}}
    with pytest.raises(TopologyError, match="a section has no source"):
        Profile.from_json(json.dumps(damaged), name="damaged")


def test_a_profile_says_what_is_assumed_until_everything_is_measured():
    assert "host store, agreement, counts and prepared dispatches are free" in Profile.read("h200").say_assumed(1)
    alone = content("h200")
    shared = Profile.from_json(json.dumps(alone | SHARED), name="shared")
    assert shared.say_assumed(1) == ""
    assert "all-to-all and relocation of experts between nodes" in shared.say_assumed(2)
    far = alone | SHARED | {"exchange": alone["exchange"] | {"across_bytes_per_s": 5 * 10**9}}
    assert Profile.from_json(json.dumps(far), name="far").say_assumed(2) == ""

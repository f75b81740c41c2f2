"""Plans on disk: what is saved comes back, and whatever is wrong with a file is one kind of error."""

import functools
import io
import json
import zipfile

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from equipoise.core import InfeasiblePlanError, LoadMatrix, Plan
from equipoise.core.plan_file import FORMAT, load_plan, save_plan
from tests.core.plans import itinerary_of, parts, plan_of, table_of

VISITS = [(m, phase, layer) for m in range(2) for phase in range(2) for layer in range(2)]
LOAD = parts()["loads"].load_MLRE
FULL = LoadMatrix(
    LOAD,
    stage="recompute",
    padding_MLRE=LOAD // 3,
    coverage_MLR=np.linspace(0, 1, 16).reshape(2, 2, 4),
    layer_numbers_L=np.array([3, 7]),
)
PLANS = {
    "plain": plan_of(),
    "itinerary": plan_of(itinerary=itinerary_of(*VISITS, depth=3)),
    "every optional part": plan_of(loads=FULL, estimated_share=0.25, objective="skew"),
    "no replica": plan_of(replica_table=table_of(), slots=0),
    "edges": plan_of(edge_ns_2L=np.array([[5, 0], [10**12, 7]]), edge_slow_2L=np.array([[1, 0], [9, 2]])),
    "waves": plan_of(waves=3),
    "persistent, across nodes": plan_of(persistent=True, cross_node=True, policy="eplb-oracle"),
}


@functools.cache
def bytes_of(name):
    """The file of a plan, in memory."""
    buffer = io.BytesIO()
    save_plan(PLANS[name], buffer)
    return buffer.getvalue()


@pytest.mark.parametrize("name", PLANS)
def test_a_loaded_plan_equals_the_saved_one(name, tmp_path):
    plan = PLANS[name]
    plan.save(tmp_path / "plan.npz")
    loaded = Plan.load(tmp_path / "plan.npz")
    assert loaded == plan
    assert loaded.digest() == plan.digest()
    assert (loaded.seconds, loaded.bytes, loaded.cluster, loaded.model) == (
        *(plan.seconds, plan.bytes, plan.cluster, plan.model),
    )
    assert np.array_equal(loaded.rank_load_MLR, plan.rank_load_MLR)


@pytest.mark.parametrize("name", PLANS)
def test_the_same_plan_gives_the_same_bytes_before_and_after_loading(name, tmp_path):
    first, second = tmp_path / "first.npz", tmp_path / "second.npz"
    PLANS[name].save(first)
    Plan.load(first).save(second)
    assert first.read_bytes() == second.read_bytes() == bytes_of(name)


def test_a_file_from_before_there_were_waves_has_one(tmp_path):
    arrays = arrays_of("plain")
    facts = json.loads(str(arrays["facts"]))
    assert facts.pop("waves") == 1
    arrays["facts"] = np.array(json.dumps(facts))
    assert load_plan(written(tmp_path / "plan.npz", arrays)) == PLANS["plain"]


def damaged(path, content):
    """Write `content`; loading it must give the error of plans, or exactly the plan."""
    path.write_bytes(content)
    try:
        return load_plan(path)
    except InfeasiblePlanError as error:
        assert str(path) in str(error)
        return None


@given(st.integers(0, 10**6))
@settings(max_examples=80, deadline=None)
def test_a_truncated_file_is_refused(tmp_path_factory, at):
    content = bytes_of("itinerary")
    path = tmp_path_factory.getbasetemp() / "truncated.npz"
    assert damaged(path, content[: at % len(content)]) is None


@given(st.integers(0, 10**6), st.integers(0, 7))
@example(302, 3)
@settings(max_examples=80, deadline=None)
def test_a_flipped_bit_is_refused_or_changes_nothing(tmp_path_factory, at, bit):
    content = bytearray(bytes_of("itinerary"))
    content[at % len(content)] ^= 1 << bit
    path = tmp_path_factory.getbasetemp() / "flipped.npz"
    assert damaged(path, bytes(content)) in (None, PLANS["itinerary"])


@given(st.binary(max_size=200))
@settings(max_examples=60, deadline=None)
def test_arbitrary_bytes_are_refused(tmp_path_factory, content):
    assert damaged(tmp_path_factory.getbasetemp() / "bytes.npz", content) is None


def arrays_of(name):
    """Every array of a plan's file."""
    with np.load(io.BytesIO(bytes_of(name)), allow_pickle=False) as file:
        return {member: file[member] for member in file.files}


def written(path, arrays):
    with path.open("wb") as file:
        np.savez(file, **arrays)
    return path


WRONG = [None, -1, 2**63 - 1, 1.5, True, "word", [], {}]


@given(st.data())
@settings(max_examples=80, deadline=None)
def test_any_fact_replaced_by_something_else_is_refused_or_a_plan(tmp_path_factory, data):
    arrays = arrays_of("itinerary")
    facts = json.loads(str(arrays["facts"]))
    inner = data.draw(st.sampled_from([None, "seconds", "bytes", "cluster", "model"]))
    target = facts if inner is None else facts[inner]
    target[data.draw(st.sampled_from(sorted(target)))] = data.draw(st.sampled_from(WRONG))
    arrays["facts"] = np.array(json.dumps(facts))
    path = written(tmp_path_factory.getbasetemp() / "facts.npz", arrays)
    found = damaged(path, path.read_bytes())
    assert found is None or isinstance(found, Plan)


@given(st.data())
@settings(max_examples=80, deadline=None)
def test_any_array_replaced_by_something_else_is_refused_or_a_plan(tmp_path_factory, data):
    arrays = arrays_of("itinerary")
    name = data.draw(st.sampled_from(sorted(arrays)))
    other = [np.zeros(0, np.int64), np.zeros((2, 2)), np.array("word"), np.array(2**63, np.uint64)]
    if arrays[name].dtype.kind in "iub":
        other += [arrays[name] * 0, arrays[name].astype(np.int64) - 1]
    arrays[name] = other[data.draw(st.integers(0, len(other) - 1))]
    path = written(tmp_path_factory.getbasetemp() / "arrays.npz", arrays)
    found = damaged(path, path.read_bytes())
    assert found is None or isinstance(found, Plan)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("policy", 7, "policy is 7; it must be a str"),
        ("cross_node", 1, "cross_node is 1; it must be a bool"),
        ("persistent", "no", "persistent is 'no'; it must be a bool"),
        ("objective", None, "objective is None; it must be a str"),
        ("objective", "speed", "objective is 'speed'"),
        ("static_seconds", -1, "static_seconds is -1; it must be a number from 0"),
        ("static_seconds", True, "static_seconds is True; it must be a number from 0"),
        ("estimated_share", float("inf"), "estimated_share is inf; it must be a number from 0"),
        ("estimated_share", float("nan"), "estimated_share is nan; it must be a number from 0"),
    ],
)
def test_a_fact_of_a_wrong_kind_is_named(name, value, words, tmp_path):
    arrays = arrays_of("plain")
    arrays["facts"] = np.array(json.dumps(json.loads(str(arrays["facts"])) | {name: value}))
    with pytest.raises(InfeasiblePlanError, match=words):
        load_plan(written(tmp_path / "plan.npz", arrays))


@pytest.mark.parametrize("inner", [None, "seconds", "bytes", "cluster"])
def test_a_fact_that_nobody_knows_is_refused(inner, tmp_path):
    arrays = arrays_of("plain")
    facts = json.loads(str(arrays["facts"]))
    (facts if inner is None else facts[inner])["extra"] = 1
    arrays["facts"] = np.array(json.dumps(facts))
    with pytest.raises(InfeasiblePlanError, match=f"{inner or 'facts'} must be an object with "):
        load_plan(written(tmp_path / "plan.npz", arrays))


@pytest.mark.parametrize("name", ["name", "device", "profile"])
def test_a_cluster_whose_names_are_no_text_is_refused(name, tmp_path):
    arrays = arrays_of("plain")
    facts = json.loads(str(arrays["facts"]))
    facts["cluster"][name] = 7
    arrays["facts"] = np.array(json.dumps(facts))
    with pytest.raises(InfeasiblePlanError, match="cluster name, device and profile must be text"):
        load_plan(written(tmp_path / "plan.npz", arrays))


@pytest.mark.parametrize(
    "name",
    ["home_LE", "ns_ML", "edge_ns_2L", "edge_slow_2L", "rows_P", "load_MLRE", "stage", "facts", "format", "buffer_V"],
)
def test_a_missing_array_is_named(name, tmp_path):
    arrays = arrays_of("itinerary")
    del arrays[name]
    with pytest.raises(InfeasiblePlanError, match="format is 'nothing'" if name == "format" else name):
        load_plan(written(tmp_path / "plan.npz", arrays))


def test_an_unknown_array_and_another_format_are_refused(tmp_path):
    arrays = arrays_of("plain")
    with pytest.raises(InfeasiblePlanError, match="array 'extra' is unknown"):
        load_plan(written(tmp_path / "plan.npz", {**arrays, "extra": np.zeros(1)}))
    with pytest.raises(InfeasiblePlanError, match=f"'equipoise-plan-3', expected '{FORMAT}'$"):
        load_plan(written(tmp_path / "plan.npz", {**arrays, "format": np.array("equipoise-plan-3")}))
    older = {name: array for name, array in arrays.items() if name != "edge_ns_2L"}
    with pytest.raises(InfeasiblePlanError, match=r"'equipoise-plan-1', expected .*plan the window again"):
        load_plan(written(tmp_path / "plan.npz", {**older, "format": np.array("equipoise-plan-1")}))


def test_content_that_breaks_a_promise_is_refused_as_the_plan_itself_would_be(tmp_path):
    arrays = arrays_of("plain")
    arrays["rows_P"] = arrays["rows_P"].astype(np.int64) + 10**6
    with pytest.raises(InfeasiblePlanError, match="replicas of expert 0 take more rows than it has"):
        load_plan(written(tmp_path / "plan.npz", arrays))


def test_a_plan_made_of_numbers_of_numpy_can_be_saved(tmp_path):
    plan = plan_of(slots=np.int64(1), itinerary=itinerary_of(*np.ndindex(2, 2, 2), depth=np.int32(1)))
    save_plan(plan, tmp_path / "plan.npz")
    assert load_plan(tmp_path / "plan.npz") == plan


def test_pickled_content_is_refused(tmp_path):
    arrays = arrays_of("plain")
    arrays["ns_ML"] = np.array([[print, print], [print, print]], dtype=object)
    with pytest.raises(InfeasiblePlanError, match="allow_pickle=False"):
        load_plan(written(tmp_path / "plan.npz", arrays))


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(InfeasiblePlanError, match=r"no file at .*absent\.npz"):
        load_plan(tmp_path / "absent.npz")


def test_every_member_is_an_array_and_documented():
    documented = load_plan.__globals__["__doc__"]
    with zipfile.ZipFile(io.BytesIO(bytes_of("every optional part"))) as file:
        for member in file.namelist():
            assert member.removesuffix(".npy") in documented
    facts = json.loads(str(arrays_of("plain")["facts"]))
    assert all(f"        {name} " in documented for name in facts)

"""A timeline as a Chrome trace has every event at its place, and the keys that torch.profiler writes."""

import json

import pytest

from equipoise.core import EquipoiseError
from equipoise.report import chrome_trace
from tests.report.documents import simulation


@pytest.fixture(scope="module")
def document():
    return simulation().to_dict()


def test_every_event_is_one_complete_event_at_the_same_microsecond(document):
    trace = chrome_trace(document)
    complete = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    wanted = [event for policy in document["policies"] for event in policy["timeline"]]
    assert len(complete) == len(wanted) > 0
    for found, event in zip(complete, wanted, strict=True):
        assert (found["name"], found["cat"], found["args"]["rank"]) == (event["name"], event["lane"], event["rank"])
        assert found["ts"] == pytest.approx(event["start_s"] * 1e6)
        assert found["ts"] + found["dur"] == pytest.approx(event["end_s"] * 1e6)


def test_ranks_of_different_policies_are_different_processes_with_names(document):
    trace = chrome_trace(document)
    names = {e["pid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    ranks = document["cluster"]["ep"]
    assert names[0] == "simulated, static, rank 0"
    assert names[ranks] == "simulated, eplb-oracle, rank 0"
    assert len(set(names.values())) == len(document["policies"]) * ranks
    lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            assert lanes[event["pid"], event["tid"]] == event["cat"]


def test_it_has_the_keys_of_a_torch_profiler_trace(document, tmp_path):
    torch = pytest.importorskip("torch")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        torch.ones(4) + 1
    profiler.export_chrome_trace(str(tmp_path / "torch.json"))
    theirs = json.loads((tmp_path / "torch.json").read_text())
    ours = json.loads(json.dumps(chrome_trace(document)))
    assert set(ours) <= set(theirs)
    assert ours["displayTimeUnit"] == theirs["displayTimeUnit"]
    for kind in ("X", "M"):
        mine, other = ([e for e in t["traceEvents"] if e["ph"] == kind] for t in (ours, theirs))
        assert set(mine[0]) <= set().union(*(set(e) for e in other))


def test_a_result_without_timeline_is_refused_with_the_command_that_gives_one():
    with pytest.raises(EquipoiseError, match=r"no timeline.*equipoise simulate"):
        chrome_trace(simulation(timed=False).to_dict())
    with pytest.raises(EquipoiseError, match="no timeline"):
        chrome_trace({"format": "equipoise-analysis-2"})


def test_a_bar_in_an_unknown_lane_is_refused_by_name(document):
    damaged = json.loads(json.dumps(document))
    damaged["policies"][0]["timeline"][0]["lane"] = "tarot"
    with pytest.raises(EquipoiseError, match=r"simulated, static has a bar .* in lane 'tarot'.*write the result again"):
        chrome_trace(damaged)

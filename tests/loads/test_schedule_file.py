"""A trainer's own micro-batches on disk."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.core import Schedule, ScheduleError
from equipoise.loads.packing import FORMAT, TokenPolicy, read_schedules, slice_context, step_schedules, write_schedules

GOOD = {"stage": "update", "ranks": 2, "pieces": [[0, 0, 5, 0, 1]]}


def test_what_is_written_is_read(tmp_path):
    policy = TokenPolicy(last_token="spread", padding="arange", pad_to_multiple=8)
    step = step_schedules(np.array([5, 9, 30, 2]), ranks=2, mini_batches=2, token_budget=40, policy=policy)
    step = (*step, slice_context(step[0], 2))
    write_schedules(step, tmp_path / "step.json")
    assert read_schedules(tmp_path / "step.json") == step


def test_optional_keys_have_the_defaults_of_schedule_of(tmp_path):
    path = tmp_path / "s.json"
    path.write_text(json.dumps({"format": FORMAT, "windows": [GOOD]}))
    assert read_schedules(path) == (Schedule.of([(0, 0, 5, 0, 1)], ranks=2),)


@pytest.mark.parametrize(
    ("window", "message"),
    [
        pytest.param({**GOOD, "rank": 1}, "window 0: key 'rank' is unknown", id="unknown key"),
        pytest.param({"stage": "update", "ranks": 2}, "window 0: key 'pieces' is unknown or missing", id="missing key"),
        pytest.param({**GOOD, "pieces": [[0, 0, 5, 0]]}, "piece 0 is", id="short piece"),
        pytest.param({**GOOD, "pieces": [[0, 0, 5.0, 0, 1]]}, "piece 0 is", id="float"),
        pytest.param({**GOOD, "pieces": [[0, 0, 5, 0, 7]]}, "ranks 0..1", id="no such rank"),
        pytest.param({**GOOD, "pieces": [[0, 0, 2**70, 0, 1]]}, "window 0", id="huge token"),
        pytest.param({**GOOD, "pieces": [[0, 0, 5, 2**40, 1]]}, "micro_steps is", id="huge micro-step"),
        pytest.param({**GOOD, "ranks": 2**40}, "ranks is", id="huge number of ranks"),
        pytest.param({**GOOD, "padding": [[1], [2, 3]]}, "window 0", id="ragged padding"),
        pytest.param({**GOOD, "padding": [[0.5, 1]]}, "window 0: padding_MR", id="fractional padding"),
        pytest.param({**GOOD, "stage": "rollout"}, "stage is 'rollout'", id="stage"),
        pytest.param(7, "window 0 is a int", id="not an object"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, window, message):
    path = tmp_path / "s.json"
    path.write_text(json.dumps({"format": FORMAT, "windows": [window]}))
    with pytest.raises(ScheduleError, match=message):
        read_schedules(path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": "equipoise-schedule-1", "windows": []}', "nonsense"])
def test_other_files_are_refused(tmp_path, text):
    path = tmp_path / "s.json"
    path.write_text(text)
    with pytest.raises(ScheduleError, match=r"s\.json"):
        read_schedules(path)
    with pytest.raises(ScheduleError, match="no schedule at"):
        read_schedules(tmp_path / "absent.json")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=100, deadline=None)
@given(key=st.sampled_from(["stage", "ranks", "pieces", "padding", "micro_steps", "last_token"]), value=json_values)
def test_any_value_gives_a_schedule_or_our_error(tmp_path_factory, key, value):
    path = tmp_path_factory.getbasetemp() / "fuzz.json"
    path.write_text(json.dumps({"format": FORMAT, "windows": [{**GOOD, key: value}]}))
    try:
        (schedule,) = read_schedules(path)
    except ScheduleError as error:
        assert "window 0" in str(error)
    else:
        assert schedule.stage == "update"


def test_the_schedule_on_the_page_of_formats_can_be_read(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "formats.md").read_text(encoding="utf-8")
    (tmp_path / "s.json").write_text(page.split("```json\n")[1].split("```")[0], encoding="utf-8")
    recompute, update = read_schedules(tmp_path / "s.json")
    assert (recompute.stage, update.micro_steps) == ("recompute", 2)
    assert recompute.padding_MR.tolist() == [[1, 212]]

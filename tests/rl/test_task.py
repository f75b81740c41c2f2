"""Questions, answers and rewards; and the tokenizer they are written with."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.core import TrainingError
from equipoise.rl.config import TaskConfig
from equipoise.rl.task import Arithmetic, CharTokenizer, Dataset, NamedReward, exact_reward, find_reward, open_task


def right_answer(prompt):
    """What the prompt asks for, worked out another way."""
    text = prompt.rstrip("=")
    if text.startswith("rev "):
        return "".join(reversed(text[4:]))
    if text.startswith("max "):
        return str(max(int(d) for d in text[4:]))
    sign = "+" if "+" in text else "-"
    a, b = text.split(sign)
    return str(int(a) + int(b) if sign == "+" else int(a) - int(b))


def test_every_embedded_answer_is_right_and_earns_one():
    asked = open_task(TaskConfig()).questions(400, seed=3, step=5)
    marks = ("+", "-", "rev ", "max ")
    assert {mark for q in asked for mark in marks if mark in q.prompt} == set(marks)
    for q in asked:
        assert q.answer == right_answer(q.prompt), q
        assert exact_reward(q.prompt, q.answer, q.answer) == 1.0


def test_questions_depend_on_seed_and_step_alone():
    task = Arithmetic(("add", "reverse"))
    assert task.questions(50, seed=1, step=2) == task.questions(50, seed=1, step=2)
    assert task.questions(50, seed=1, step=2) != task.questions(50, seed=1, step=3)
    assert task.questions(50, seed=1, step=2) != task.questions(50, seed=2, step=2)


@settings(max_examples=50, deadline=None)
@given(answer=st.text("0123456789", min_size=1, max_size=4), response=st.text("0123456789", max_size=6))
def test_only_the_answer_earns_one(answer, response):
    reward = exact_reward("", response, answer)
    assert (reward == 1.0) == (response == answer)
    assert 0.0 <= reward <= 1.0


def test_a_dataset_is_read_whole_in_every_pass_in_another_order(tmp_path):
    lines = [json.dumps({"prompt": f"q{i}", "answer": str(i)}) for i in range(6)]
    (tmp_path / "d.jsonl").write_text("\n".join(lines) + "\n\n")
    data = Dataset.read(tmp_path / "d.jsonl")
    passes = [[q.prompt for step in (2 * n, 2 * n + 1) for q in data.questions(3, seed=0, step=step)] for n in range(3)]
    assert all(sorted(p) == [f"q{i}" for i in range(6)] for p in passes)
    assert len({tuple(p) for p in passes}) > 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{}", "line 1: expected"),
        ('{"prompt": "a", "answer": "b"}\nnonsense', "line 2 is not JSON"),
        ('{"prompt": "a", "answer": 3}', "line 1: expected"),
        ("", "holds no question"),
    ],
)
def test_a_broken_dataset_is_refused_by_line(tmp_path, text, words):
    (tmp_path / "d.jsonl").write_text(text)
    with pytest.raises(TrainingError, match=words):
        Dataset.read(tmp_path / "d.jsonl")


def test_unknown_domains_files_and_rewards_are_refused_by_name(tmp_path):
    with pytest.raises(TrainingError, match=r"task.domains is \['poetry'\]; known: add, sub"):
        Arithmetic(("poetry",))
    with pytest.raises(TrainingError, match=r"absent.jsonl', which cannot be read \(No such file"):
        Dataset.read(tmp_path / "absent.jsonl")
    for name in ("no.such.module:f", "math:nothing"):
        with pytest.raises(TrainingError, match="cannot be imported as module:function"):
            find_reward(name)
    for name in ("math", ":", ":f"):
        with pytest.raises(TrainingError, match="is not of the form module:function"):
            find_reward(name)
    with pytest.raises(TrainingError, match="is a float; give a function"):
        find_reward("math:pi")
    with pytest.raises(TrainingError, match=r"'math:copysign' takes \(x, y, /\) \(too many positional arguments\)"):
        find_reward("math:copysign")
    assert find_reward("math:hypot").function(2.0, 3.0, 6.0) == 7.0


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (float("nan"), "is nan; give a finite number"),
        (float("-inf"), "is -inf; give a finite number"),
        (None, "is None, a NoneType; give a number"),
        ("good", "is 'good', a str; give a number"),
        (OSError("the judge\nis away"), "fails with OSError: the judge is away ("),
    ],
)
def test_a_reward_that_fails_or_is_no_number_is_told_with_its_sample(given, words):
    def judge(prompt, response, answer):
        if isinstance(given, Exception):
            raise given
        return given

    with pytest.raises(TrainingError) as error:
        NamedReward("judges:judge", judge)("1+1=", "3", "2")
    assert str(error.value).startswith("reward 'judges:judge' of prompt '1+1=', response '3' " + words)
    if isinstance(given, Exception):
        assert f"({__file__}:" in str(error.value), "the place where it was raised"


def test_a_reward_may_be_any_finite_number():
    for number, worth in ((True, 1.0), (3, 3.0), (np.float32(0.5), 0.5)):
        assert NamedReward("judges:judge", lambda *_, number=number: number)("", "", "") == worth


@settings(max_examples=50, deadline=None)
@given(st.text(st.characters(min_codepoint=32, max_codepoint=126)))
def test_text_survives_the_tokenizer_and_stops_at_the_end_token(text):
    tokenizer = CharTokenizer()
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([*ids, tokenizer.end, 5, 6]) == text
    assert all(tokenizer.end < i < tokenizer.size for i in ids)


def test_a_character_without_an_id_is_refused():
    with pytest.raises(TrainingError, match="has no token: the embedded tokenizer knows printable ASCII"):
        CharTokenizer().encode("x\u00e9")

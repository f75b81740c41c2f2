"""Prompt rows of a decoding server are found, zeros or left-over rows; good prompts, and nearly equal ones, are not."""

from dataclasses import replace

import numpy as np
import pytest

from equipoise.core import ModelShape
from equipoise.routes import stream_recordings
from equipoise.routes.doctor.diagnosis import diagnose
from tests.engines.answers import sglang_523, vllm_32

PROMPT, TOKENS = 20, 45
MODEL = ModelShape.preset("qwen3-30b-a3b", experts=64, layers=4, top_k=4)
TOP1 = ModelShape.preset("qwen3-30b-a3b", experts=64, layers=4, top_k=1)


def routes(rng, count, model):
    return np.argsort(rng.random((count, model.layers, model.experts)), axis=2)[:, :, : model.top_k]


def group(form, *, garbage, model=MODEL):
    """Two samples of one prompt as an engine answers; the second one's prompt rows may be zeros or left over."""
    rng = np.random.default_rng(3)
    prompt, prompt_rows = rng.integers(0, 999, PROMPT).tolist(), routes(rng, PROMPT, model)
    records = []
    for number in range(2):
        rows = np.concatenate([prompt_rows, routes(rng, TOKENS - 1 - PROMPT, model)])
        if number and garbage == "zeros":
            rows[: PROMPT - 1] = 0
        elif number and garbage == "left over":
            rows[: PROMPT - 1] = routes(rng, PROMPT - 1, model)
        elif number and garbage == "other batch":
            rows[::5, :, 0] = rows[1::5, :, 0][: len(rows[::5])]
        output = {"tokens": rng.integers(0, 999, TOKENS - PROMPT).tolist(), "rows": rows, "finish": "stop"}
        record = {"vllm-http": vllm_32, "sglang": sglang_523}[form](prompt, [output])
        if form == "vllm-http":
            record |= {"request_id": f"r{number}", "prompt_token_ids": prompt}
        else:
            record |= {"input_ids": prompt, "meta_info": {**record["meta_info"], "id": f"r{number}"}}
        records.append(record)
    return list(stream_recordings(records, model=model, format=form))


@pytest.mark.parametrize("form", ["vllm-http", "sglang"])
@pytest.mark.parametrize(
    ("garbage", "words"),
    [("zeros", "hold no routes, but the generated tokens do"), ("left over", "agree with those of sample 'r0'")],
)
def test_a_prompt_that_was_not_forwarded_is_named(form, garbage, words):
    finding = diagnose(group(form, garbage=garbage), model=MODEL)["prompt-rows"]
    assert finding.verdict == "finding" and (finding.count, finding.total) == (PROMPT - 1, 2 * (PROMPT - 1))
    assert finding.first_place.startswith("sample 'r1', tokens 0 to 18: ") and words in finding.first_place
    assert "prefill/decode router" in finding.advice


def test_left_over_rows_alone_are_a_finding_of_this_check_alone():
    assert diagnose(group("vllm-http", garbage="left over"), model=MODEL).fired == ("prompt-rows",)


def test_zeros_are_found_where_a_route_is_one_expert():
    assert "prompt-rows" in diagnose(group("sglang", garbage="zeros", model=TOP1), model=TOP1).fired


@pytest.mark.parametrize("garbage", ["none", "other batch"])
def test_equal_prompts_with_nearly_equal_rows_are_good(garbage):
    found = diagnose(group("vllm-http", garbage=garbage), model=MODEL)["prompt-rows"]
    assert (found.verdict, found.total) == ("good", 2 * (PROMPT - 1))


def test_other_weights_other_prompts_and_unknown_ends_are_not_compared():
    first, second = group("vllm-http", garbage="left over")
    tokens = second.tokens.copy()
    tokens[3] += 1
    for changed in (
        replace(second, weight_version="new"),
        replace(second, tokens=tokens),
        replace(second, tokens=None),
    ):
        assert diagnose([first, changed], model=MODEL)["prompt-rows"].verdict == "good"
    unknown = [replace(one, num_prompt=None) for one in (first, second)]
    assert diagnose(unknown, model=MODEL)["prompt-rows"].verdict == "skipped"


def test_a_sample_without_any_route_is_not_the_routers_fault():
    first, second = group("vllm-http", garbage="none")
    empty = replace(second, rows=np.zeros_like(second.rows), name="empty", tokens=None)
    assert diagnose([first, empty], model=MODEL)["prompt-rows"].verdict == "good"

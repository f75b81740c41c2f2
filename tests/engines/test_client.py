"""Samples over HTTP: read back equal from the named versions' answers; busy, cut off and route-less answers."""

import threading
import time

import numpy as np
import pytest

from equipoise.core import ModelShape, RoutesError
from equipoise.core.errors import TrainingError
from equipoise.engines.client import EngineClient
from equipoise.engines.connection import Patience
from equipoise.engines.dialects import Sampling
from equipoise.routes import read_routes
from tests.engines.answers import compact, served, sglang_523, vllm_28, vllm_32

MODEL = ModelShape.preset("qwen3-30b-a3b", experts=16, layers=3, top_k=2)
ENGINES = {"vllm 0.28": vllm_28, "vllm 0.32": vllm_32, "sglang 0.5.23": sglang_523}
FAST = Patience(attempts=3, wait_s=0.01, open_requests=2)
PROMPTS = [[5, 6, 7], [8, 9]]


def name_of(version):
    return version.split()[0]


def draw(prompt, sample, length=6):
    """Tokens and rows of one sample: the same for every request."""
    rng = np.random.default_rng([*prompt, sample])
    tokens = [*prompt, *rng.integers(10, 99, length).tolist()]
    rows = np.argsort(rng.random((len(tokens) - 1, 3, 16)), axis=2)[:, :, :2]
    return tokens, rows


def request_of(body):
    """The prompt, the number of samples, and the start of a request to either engine."""
    params = body["sampling_params"]
    start = body.get("routed_experts_start_len", params.get("routed_experts_prompt_start", 0))
    return body.get("token_ids") or body["input_ids"], params["n"], start


def check(turns, form, tokens, rows, versions=None):
    """The turns are one sample with these tokens and rows."""
    (sample,) = read_routes(turns, model=MODEL, format=form)
    assert sample.tokens_T.tolist() == tokens and np.array_equal(sample.ids_TLK, rows)
    assert sample.known_TL is None
    if versions is not None:
        assert [(s.start, s.stop, s.weight_version) for s in sample.segments] == versions


@pytest.mark.parametrize("version", ENGINES)
def test_samples_of_all_prompts_are_read_back_equal_with_their_weight_versions(version):
    asked = []

    def reply(path, body):
        asked.append((path, body))
        prompt, n, _ = request_of(body)
        outputs = []
        for index in range(n):
            tokens, rows = draw(prompt, index)
            spans = [{"version": "w1", "start": 0, "end": 2}, {"version": "w2", "start": 2, "end": 6}]
            outputs.append({"tokens": tokens[len(prompt) :], "rows": rows, "finish": "length", "versions": spans})
        return 200, {}, compact(ENGINES[version](prompt, outputs))

    with served(reply) as url:
        client = EngineClient(url, name_of(version), patience=FAST)
        found = list(client.generate(PROMPTS, Sampling(samples=2, max_new_tokens=6, temperature=0.5, seed=3)))
    for prompt, samples in zip(PROMPTS, found, strict=True):
        for index, turns in enumerate(samples):
            tokens, rows = draw(prompt, index)
            edge = len(prompt) + 1
            spans = None if version == "vllm 0.28" else [(0, edge, "w1"), (edge, len(rows), "w2")]
            check(turns, client.form, tokens, rows, spans)
    wanted = {
        "vllm": {"token_ids": [5, 6, 7], "sampling_params": {"n": 2, "max_tokens": 6, "temperature": 0.5, "seed": 3}},
        "sglang": {
            "input_ids": [5, 6, 7],
            "sampling_params": {"n": 2, "max_new_tokens": 6, "temperature": 0.5, "sampling_seed": 3},
            "return_routed_experts": True,
        },
    }[name_of(version)]
    assert ("/generate" if name_of(version) == "sglang" else "/inference/v1/generate", wanted) in asked


@pytest.mark.parametrize("has_rows", [True, False], ids=["routes-returned", "routes-lost"])
@pytest.mark.parametrize("version", ["vllm 0.32", "sglang 0.5.23"])
def test_a_sample_that_is_cut_off_is_continued_where_its_routes_end(version, has_rows):
    tokens, rows = draw(PROMPTS[0], 0)
    starts = []

    def reply(path, body):
        prompt, n, start = request_of(body)
        starts.append((len(prompt), n, start))
        is_first = len(prompt) == 3
        # First 2 tokens, then nothing, then the rest.
        count = {1: 2, 2: 0}.get(len(starts), 4)
        stop = len(prompt) + count
        lost = len(starts) == 2 or (is_first and not has_rows)
        weights = "old" if is_first else "new"
        output = {"tokens": tokens[len(prompt) : stop], "rows": None if lost else rows[start : stop - 1]}
        output |= {"finish": "stop" if len(starts) == 3 else "abort"}
        output["versions"] = [{"version": weights, "start": 0, "end": count}]
        return 200, {}, compact(ENGINES[version](prompt, [output]))

    with served(reply) as url:
        client = EngineClient(url, name_of(version), patience=FAST)
        ((turns,),) = client.generate(PROMPTS[:1], Sampling(samples=1, max_new_tokens=6))
    assert starts == [(3, 1, 0), (5, 1, 4 * has_rows), (5, 1, 4 * has_rows)]
    check(turns, client.form, tokens, rows, [(0, 4, "old"), (4, 8, "new")] if has_rows else [(0, 8, "new")])


def test_an_engine_that_aborts_for_ever_is_given_up():
    def reply(path, body):
        return 200, {}, compact(vllm_32(body["token_ids"], [{"tokens": [], "rows": None, "finish": "abort"}]))

    with served(reply) as url, pytest.raises(TrainingError, match="aborted a request 3 times without a new token"):
        list(EngineClient(url, "vllm", patience=FAST).generate(PROMPTS[:1], Sampling(samples=1, max_new_tokens=6)))


def answer_of(body, **changes):
    prompt, _, _ = request_of(body)
    tokens, rows = draw(prompt, 0)
    return vllm_32(prompt, [{"tokens": tokens[len(prompt) :], "rows": rows, "finish": "stop", **changes}])


@pytest.mark.parametrize("trouble", [429, 503, "cut", "reset"])
def test_a_busy_or_broken_server_is_asked_again_and_then_given_up(trouble):
    times, failures = [], 2

    def reply(path, body):
        times.append(time.monotonic())
        content = compact(answer_of(body))
        if len(times) > failures:
            return 200, {}, content
        if trouble == "cut":
            return 200, {"Content-Length": str(len(content))}, content[:100]
        if trouble == "reset":
            raise ConnectionResetError("the test drops this connection")
        return trouble, {"Retry-After": "1"} if trouble == 429 else {}, b'{"error":"full"}'

    with served(reply) as url:
        client = EngineClient(url, "vllm", patience=FAST)
        ((turns,),) = client.generate(PROMPTS[:1], Sampling(samples=1, max_new_tokens=6))
        check(turns, client.form, *draw(PROMPTS[0], 0))
        assert len(times) == 3
        if trouble == 429:
            assert times[1] - times[0] >= 1.0, "the server asked for a second"
        times, failures = [], 9
        with pytest.raises(TrainingError, match=r"gave no usable answer: .* \(asked 3 times\)"):
            list(client.generate(PROMPTS[:1], Sampling(samples=1, max_new_tokens=6)))


def test_no_more_requests_are_open_than_allowed_and_none_is_sent_while_the_server_is_full():
    lock, seen = threading.Lock(), []

    def reply(path, body):
        with lock:
            seen.append(time.monotonic())
            number = len(seen)
        if number == 1:
            return 503, {"Retry-After": "1"}, b"{}"
        return 200, {}, compact(answer_of(body))

    patience = Patience(attempts=3, wait_s=0.0, open_requests=2)
    with served(reply) as url:
        found = EngineClient(url, "vllm", patience=patience).generate(
            [[5, 6]] * 6, Sampling(samples=1, max_new_tokens=6)
        )
        next(found)
        # The first answer may be the second prompt's, while the first one still waits to be asked again.
        end = time.monotonic() + 60
        while len(seen) < 3 and time.monotonic() < end:
            time.sleep(0.01)
        time.sleep(0.3)
        # One refused, two answered; a third prompt is not asked before the first answer is taken.
        assert len(seen) == 3
        # The second request may have been under way when the first was refused; the third came after the wait.
        assert seen[2] - seen[0] >= 0.9
        assert len(list(found)) == 5 and len(seen) == 7


@pytest.mark.parametrize(
    ("engine", "drop", "info", "words"),
    [
        (
            "vllm",
            False,
            {"/version": {"version": "0.30.2"}},
            "start it with `vllm serve MODEL --enable-return-routed-"
            "experts`, without pipeline or context parallelism or a KV connector .vLLM 0.30.2",
        ),
        ("vllm", False, {"/version": {"version": "0.32.0"}}, "prefix caching on and VLLM_USE_V2_MODEL_RUNNER=1"),
        ("vllm", False, {}, "start it with `vllm serve MODEL --enable-return-routed-experts`$"),
        ("vllm", True, {"/version": {"version": "0.21.0"}}, "vLLM 0.21.0 returns no routes over HTTP; use 0.22"),
        ("vllm", True, {"/version": {"version": "0.32.0"}}, "a gateway dropped it"),
        ("sglang", False, {"/server_info": {"enable_return_routed_experts": False}}, r"not routes\): start it with"),
        ("sglang", False, {"/get_server_info": {"enable_return_routed_experts": True}}, "a gateway dropped return_rou"),
        ("sglang", False, {}, "start it with `python -m sglang.launch_server .*; or a gateway dropped them"),
    ],
)
def test_an_answer_without_routes_says_whether_flag_version_or_gateway_is_the_cause(engine, drop, info, words):
    def reply(path, body):
        if body is None:
            return (200, {}, compact(info[path])) if path in info else (404, {}, b'{"detail":"Not Found"}')
        prompt, _, _ = request_of(body)
        output = {"tokens": [11, 12], "rows": None, "finish": "stop"}
        answer = (sglang_523 if engine == "sglang" else vllm_28)(prompt, [output])
        if drop:
            del answer["choices"][0]["routed_experts"]
        return 200, {}, compact(answer)

    with served(reply) as url:
        client, sampling = EngineClient(url, engine, patience=FAST), Sampling(samples=1, max_new_tokens=2)
        with pytest.raises(RoutesError, match=words) as error:
            list(client.generate(PROMPTS[:1], sampling))
        assert str(error.value).startswith(f"{url}: ")
        ((turns,),) = client.generate(PROMPTS[:1], sampling, require_routes=False)
        assert len(turns) == 1

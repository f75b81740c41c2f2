"""Rollouts from outside: a folder that `--record` wrote, engines that answer over HTTP, and what is broken in them."""

import base64
import io
import json
import threading
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import ClassVar

import numpy as np
import pytest

from equipoise.adapters.transformers import inspect
from equipoise.core import RoutesError, TrainingError
from equipoise.engines.connection import Patience
from equipoise.rl.config import RolloutConfig, change
from equipoise.rl.model import build_model, copy_model
from equipoise.rl.rollout import Engine, Outside, RecordedRollouts, Request, Sampler, to_routes
from equipoise.rl.task import Arithmetic, CharTokenizer
from tests.engines.answers import served as answered
from tests.engines.live import LiveEngine
from tests.rl import work
from tests.rl.test_model import tiny
from tests.routes.writers import write_dump

CONFIG = RolloutConfig(samples=2, max_new_tokens=4, prompts=3)
MODEL = copy_model(build_model(tiny("qwen3-moe"), seed=0))
SHAPE = inspect(MODEL).shape
REQUEST = Request(step=0, first=0, questions=Arithmetic(("add", "reverse")).questions(3, seed=0, step=0), seed=5)
FORMS = {"vllm": ".npz", "vllm-http": ".jsonl", "sglang": ".jsonl"}


def sampled():
    found = dict(Sampler(MODEL, config=CONFIG, tokenizer=CharTokenizer()).generate(REQUEST))
    return [found[place] for place in range(len(found))]


def outside(**changes):
    return Outside(
        config=CONFIG if not changes else RolloutConfig(**{**rollout_fields(), **changes}),
        model=SHAPE,
        tokenizer=CharTokenizer(),
    )


def rollout_fields():
    return {name: getattr(CONFIG, name) for name in RolloutConfig.__struct_fields__}


def assert_same(found, wanted):
    for sample, other in zip(in_order(found), wanted, strict=True):
        assert np.array_equal(sample.tokens_T, other.tokens_T) and np.array_equal(sample.ids_TLK, other.ids_TLK)
        assert sample.num_prompt == other.num_prompt and sample.name == other.name


def in_order(found):
    by_place = dict(found)
    return [by_place[place] for place in range(len(found))]


@pytest.mark.parametrize("form", ["vllm", "vllm-http", "sglang"])
def test_a_recorded_folder_gives_the_same_samples_the_short_ones_first(tmp_path, form):
    samples = sampled()
    for place, lost in ((1, 2), (4, 2), (2, 1)):
        whole = samples[place]
        samples[place] = replace(whole, tokens_T=whole.tokens_T[:-lost], ids_TLK=whole.ids_TLK[:-lost])
    write_dump(to_routes(samples, SHAPE), tmp_path / f"step-000000{FORMS[form]}", format=form)
    found = list(RecordedRollouts(str(tmp_path), outside()).generate(REQUEST))
    assert_same(found, samples)
    assert [place for place, _ in found] == [1, 4, 2, 0, 3, 5]


def test_a_rank_takes_its_own_questions(tmp_path):
    samples = sampled()
    write_dump(to_routes(samples, SHAPE), tmp_path / "a.jsonl", format="vllm-http")
    second = Request(step=0, first=1, questions=REQUEST.questions[1:], seed=5)
    found = list(RecordedRollouts(str(tmp_path), outside()).generate(second))
    assert_same(found, samples[2:])


class Speaker(BaseHTTPRequestHandler):
    """Answers as vLLM's or SGLang's generate do, from our own sampler."""

    asked: ClassVar[list] = []

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append((self.path, body))
        prompt = body["token_ids"] if self.path == "/inference/v1/generate" else body["input_ids"]
        question = [CharTokenizer().encode(q.prompt) for q in REQUEST.questions].index(prompt)
        mine = sampled()[question * CONFIG.samples : (question + 1) * CONFIG.samples]
        answer = self.vllm(mine) if self.path == "/inference/v1/generate" else self.sglang(mine)
        content = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def vllm(self, samples):
        choices = []
        for index, sample in enumerate(samples):
            stream = io.BytesIO()
            np.save(stream, sample.ids_TLK.astype(np.uint8))
            routes = base64.b64encode(stream.getvalue()).decode()
            choices.append({"index": index, "token_ids": sample.response_T.tolist(), "routed_experts": routes})
        return {"request_id": "a1", "choices": choices, "usage": {"prompt_tokens": 3}}

    def sglang(self, samples):
        return [
            {
                "text": "",
                "output_ids": sample.response_T.tolist(),
                "meta_info": {
                    "id": f"r{number}",
                    "prompt_tokens": sample.num_prompt,
                    "completion_tokens": len(sample.response_T),
                    "routed_experts": base64.b64encode(sample.ids_TLK.astype("<i4").tobytes()).decode(),
                },
            }
            for number, sample in enumerate(samples)
        ]

    def log_message(self, *words):
        """Say nothing."""


@contextmanager
def served(handler):
    """The address of a server that answers so."""
    server = HTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture
def server():
    Speaker.asked.clear()
    with served(Speaker) as url:
        yield url


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_an_engine_that_answers_over_http_gives_the_same_samples(server, engine):
    found = list(Engine(server, outside(engine=engine)).generate(REQUEST))
    assert_same(found, sampled())
    path, body = Speaker.asked[0]
    if engine == "vllm":
        assert path == "/inference/v1/generate" and body["sampling_params"]["n"] == 2
    else:
        assert path == "/generate" and body["return_routed_experts"] is True and body["sampling_params"]["n"] == 2


def test_an_engine_that_is_not_there_is_told_with_its_address():
    with pytest.raises(TrainingError, match=r"the engine at http://127.0.0.1:9/inference/v1/generate gave no usable"):
        list(Engine("http://127.0.0.1:9", outside(), patience=Patience(attempts=2, wait_s=0.01)).generate(REQUEST))


class Wrong(BaseHTTPRequestHandler):
    """Answers everything with one status and content."""

    answer: ClassVar[tuple] = ()

    def do_POST(self):
        status, content = self.answer
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *words):
        """Say nothing."""


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((400, b'{"message": "max_tokens\\nis too large"}'), r"HTTP Error 400: Bad Request {\"message\": \"max_tokens"),
        ((200, b"<html>"), "gave no usable answer: Expecting value"),
        ((200, b"null"), "answered None, which holds no samples; is it a {engine} server"),
        ((200, b"[1, 2]"), r"answered \[1, 2\], which holds no samples; is it a {engine} server"),
    ],
)
def test_an_answer_that_is_of_no_use_is_told_with_what_the_engine_says(monkeypatch, engine, answer, words):
    monkeypatch.setattr(Wrong, "answer", answer)
    with served(Wrong) as url, pytest.raises(TrainingError, match=words.replace("{engine}", engine)) as error:
        list(Engine(url, outside(engine=engine)).generate(REQUEST))
    assert str(error.value).startswith(f"the engine at {url}/") and "\n" not in str(error.value)


def broken_file(folder, *, what):
    """A recording in which the second sample is broken."""
    path = folder / "step-000000.jsonl"
    write_dump(to_routes(sampled(), SHAPE), path, format="vllm-http")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    choice = lines[1]["choices"][0]
    if what == "base64":
        choice["routed_experts"] = choice["routed_experts"][:-30]
    elif what == "expert":
        stream = io.BytesIO()
        rows = sampled()[1].ids_TLK.astype(np.uint8)
        rows[0, 0, 0] = 200
        np.save(stream, rows)
        choice["routed_experts"] = base64.b64encode(stream.getvalue()).decode()
    else:
        del choice["routed_experts"]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.parametrize("what", ["base64", "expert", "absent"])
def test_broken_routes_are_refused_by_name_or_used_without_foresight(tmp_path, what):
    path = broken_file(tmp_path, what=what)
    with pytest.raises(RoutesError) as error:
        list(RecordedRollouts(str(tmp_path), outside()).generate(REQUEST))
    assert f"{path} line 2" in str(error.value) and "--allow-missing-routes" in str(error.value)
    found = in_order(list(RecordedRollouts(str(tmp_path), outside(allow_missing_routes=True)).generate(REQUEST)))
    wanted = sampled()
    assert (found[1].ids_TLK == -1).all() and np.array_equal(found[1].tokens_T, wanted[1].tokens_T)
    assert all(np.array_equal(found[i].ids_TLK, wanted[i].ids_TLK) for i in range(6) if i != 1)


def test_another_tasks_rollouts_too_few_samples_and_missing_steps_are_refused(tmp_path):
    write_dump(to_routes(sampled(), SHAPE), tmp_path / "a.jsonl", format="vllm-http")
    rollouts = RecordedRollouts(str(tmp_path), outside())
    other = Request(step=0, first=0, questions=Arithmetic(("add",)).questions(3, seed=9, step=9), seed=5)
    with pytest.raises(RoutesError, match="does not begin with question"):
        list(rollouts.generate(other))
    more = Request(step=0, first=0, questions=[*REQUEST.questions, *REQUEST.questions], seed=5)
    with pytest.raises(RoutesError, match=r"a.jsonl: 6 samples for 6 questions of 2 samples each; 12 are needed"):
        list(rollouts.generate(more))
    with pytest.raises(TrainingError, match="holds rollouts of 1 steps; step 3 has none"):
        list(rollouts.generate(Request(step=3, first=0, questions=REQUEST.questions, seed=5)))
    with pytest.raises(TrainingError, match="no folder"):
        RecordedRollouts(str(tmp_path / "absent"), outside())


@pytest.mark.dist(2)
def test_what_a_run_recorded_trains_again_to_the_same_losses(pool, tmp_path):
    config = work.small(balance={"mode": "equipoise"})
    for name in ("first", "second", "third"):
        (tmp_path / name).mkdir()
    pool.run(work.record_run, 2, config, tmp_path / "first", tmp_path / "routes")
    again = change(config, rollout={"source": str(tmp_path / "routes")})
    pool.run(work.train_run, 2, again, tmp_path / "second")
    losses = [
        [json.loads(line)["loss"] for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("first", "second")
    ]
    assert losses[0] == losses[1] and any(losses[0])
    # One sample of the first step loses its routes: training goes on, and says how much it knew.
    path = tmp_path / "routes" / "step-000000.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    del lines[3]["choices"][0]["routed_experts"]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    allowed = change(again, rollout={"allow_missing_routes": True})
    pool.run(work.train_run, 2, allowed, tmp_path / "third")
    metrics = [json.loads(line) for line in (tmp_path / "third" / "metrics.jsonl").read_text().splitlines()]
    assert 0.8 < metrics[0]["coverage"] < 1.0 and metrics[0]["checked_windows"] == 0
    assert metrics[1]["coverage"] == 1.0 and metrics[1]["checked_windows"] == 8


@pytest.mark.dist(2)
@pytest.mark.parametrize(("version", "by_folder"), [("vllm 0.32", True), ("sglang 0.5.23", False)])
def test_training_goes_on_step_by_step_with_an_engine_that_is_given_each_steps_weights(
    pool, tmp_path, version, by_folder
):
    config, engine = against(version, tmp_path if by_folder else "")
    with answered(engine.reply) as url:
        found = pool.run(work.outside_steps, 2, change(config, rollout={"source": url}), 2)
    weights, versions, metrics = found[0]
    # The engine had other weights at first, and before each rollout those that the owners hold.
    assert len(weights) == len(engine.held) == 2
    for trained, held in zip(weights, engine.held, strict=True):
        assert work.same_weights(trained, held)
    assert not work.same_weights(*weights)
    assert versions == found[1][1] and [len(one) for one in versions] == [1, 1]
    assert [min(one).rpartition("-")[0] for one in versions] == ["step-0", "step-1"]
    assert all(step["coverage"] == 1.0 and step["checked_windows"] for step in metrics)


def against(version, folder):
    """Settings of a small run, and the engine that it is to ask."""
    rollout = {"engine": version.split()[0], "weights": str(folder), "bucket_mib": 1}
    config = work.small(rollout=rollout, balance={"mode": "equipoise"})
    return config, LiveEngine(build_model(config.model, seed=99), version)


@pytest.mark.dist(2)
def test_an_update_that_fails_and_answers_of_other_weights_end_training_on_every_rank(pool, tmp_path):
    config, engine = against("sglang 0.5.23", "")
    engine.keeps_version = True
    with answered(engine.reply) as url:
        config = change(config, rollout={"source": url})
        first, second = pool.run(work.outside_steps, 2, config, 1)
        assert first == second and "it says that its weights are 'default'" in first
        assert first.startswith("TrainingError: rank 0: weights 'step-0-")
        engine.keeps_version, engine.has_session = False, False
        generate = engine._generate

        def by_another(body):
            engine.version = "someone else's"
            return generate(body)

        engine._generate = by_another
        for told in pool.run(work.outside_steps, 2, config, 1):
            assert "was made with weights someone else's, the engine was given step-0-" in told

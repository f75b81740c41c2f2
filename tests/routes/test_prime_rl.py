"""The prime-rl form: hand-made wire objects against the spec in the module docstring, round trips, refusals."""

import base64
import json
import struct
from types import SimpleNamespace

import numpy as np
import pytest

from equipoise.core import Routes, RoutesError, SampleRoutes, Segment
from equipoise.routes import prime_rl
from equipoise.routes.source import Source
from tests.routes.wire_cases import MODELS, model_of, read, round_trip, routes_of
from tests.routes.writers import write_form

(FORM,) = prime_rl.FORMATS

ROWS = [[[0, 0], [3, 1], [7, 0]], [[0, 0], [2, 5], [4, 6]]]
IDS = (0, 0, 3, 1, 7, 0, 0, 0, 2, 5, 4, 6)
WIRE = {"data": "AAADAQcAAAACBQQG", "shape": [2, 3, 2], "start": 0, "dtype": "uint8"}


def test_a_wire_object_decodes_to_the_hand_made_array(tmp_path):
    path = tmp_path / "dump.jsonl"
    path.write_text(json.dumps(WIRE) + "\n" + json.dumps({**WIRE, "start": 4}) + "\n")
    assert FORM.matches(Source.of(path))
    first, second = read(FORM, path, model_of())
    assert first.rows.tolist() == ROWS and first.rows.dtype == np.uint8
    assert (first.name, first.start, first.num_tokens) == ("line 1", 0, 3)
    assert (second.name, second.start, second.num_tokens) == ("line 2", 4, 7)


@pytest.mark.parametrize(("dtype", "code"), [("uint16", "H"), ("int16", "h"), ("int32", "i")])
def test_every_dtype_of_the_spec_decodes(dtype, code):
    data = base64.b64encode(struct.pack(f"<12{code}", *IDS)).decode()
    [recording] = read(FORM, {**WIRE, "data": data, "dtype": dtype}, model_of())
    assert recording.rows.tolist() == ROWS
    assert recording.rows.dtype == np.dtype(dtype)


def test_a_generate_response_gives_name_tokens_and_start():
    record = {
        "request_id": "g",
        "prompt_token_ids": [1, 2, 3, 4, 5],
        "choices": [{"index": 0, "token_ids": [6, 7], "routed_experts": {**WIRE, "start": 4}}],
    }
    assert FORM.matches(Source.of([record]))
    [recording] = read(FORM, [record], model_of())
    assert (recording.name, recording.start, recording.tokens.tolist()) == ("g", 4, [1, 2, 3, 4, 5, 6, 7])


def test_the_transport_form_has_raw_bytes_and_a_row_for_every_token():
    routed = SimpleNamespace(data=bytes(IDS), shape=[2, 3, 2], dtype="uint8")
    sample = SimpleNamespace(token_ids=[5, 6], routed_experts=routed)
    assert FORM.matches(Source.of([sample])) and FORM.matches(Source.of([routed]))
    [recording] = read(FORM, [sample], model_of())
    assert (recording.rows.tolist(), recording.tokens.tolist(), recording.num_tokens) == (ROWS, [5, 6], 2)
    assert read(FORM, [routed], model_of())[0].num_tokens == 2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"data": "AAADAQcAAAACBQQ="}, "11 bytes.*needs 12"),
        ({"data": "AAADAQcAAAACBQQ"}, "not base64"),
        ({"shape": [2, 3]}, "rows, layers, top-k"),
        ({"shape": [2, 3, 2.0]}, "whole number"),
        ({"shape": [-2, -3, 2]}, "at least 0"),
        ({"shape": [2, 3, 10**30]}, "needs"),
        ({"dtype": "float32"}, "known: uint8"),
        ({"dtype": "O"}, "known: uint8"),
        ({"start": -1}, "start is -1"),
        ({"start": True}, "whole number"),
        ({"data": None}, "data, shape and dtype"),
    ],
    ids=["cut", "alphabet", "flat", "float", "negative", "huge", "dtype", "object", "start", "bool", "null"],
)
def test_broken_wire_objects_are_refused(change, words):
    with pytest.raises(RoutesError, match=words):
        read(FORM, [{"choices": [{"routed_experts": {**WIRE, **change}}]}], model_of())


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
@pytest.mark.parametrize("tokens", [True, False], ids=["tokens", "no-tokens"])
def test_write_read_equal(model, tokens, tmp_path):
    routes = routes_of(model, tokens=tokens)
    assert round_trip(FORM, routes, tmp_path / "dump.jsonl") == routes


def test_turns_without_a_version_are_kept_by_their_start(tmp_path):
    model = model_of()
    one = routes_of(model, unknown=False).samples[0]
    turns = (Segment(start=0, stop=2), Segment(start=2, stop=5))
    sample = SampleRoutes(name="s", ids_TLK=one.ids_TLK, num_tokens=6, tokens_T=one.tokens_T, segments=turns)
    path = tmp_path / "dump.jsonl"
    back = round_trip(FORM, Routes.of([sample], model=model), path)
    starts = [json.loads(line)["choices"][0]["routed_experts"]["start"] for line in path.read_text().splitlines()]
    assert starts == [0, 2]
    assert back.samples[0].ids_TLK.tolist() == one.ids_TLK.tolist()
    assert back.samples[0].num_tokens == 6


def test_weight_versions_and_unknown_top_1_rows_are_refused(tmp_path):
    with pytest.raises(RoutesError, match="no place for them, write vllm-http"):
        write_form(FORM, routes_of(model_of(), segments=True), tmp_path / "a.jsonl")
    with pytest.raises(RoutesError, match="top-1"):
        write_form(FORM, routes_of(model_of(top_k=1)), tmp_path / "a.jsonl")


@pytest.mark.parametrize(
    "dump",
    [[], [None], [{}], [5], {"choices": [{"routed_experts": "k05VTVBZ"}]}, np.zeros((2, 3, 2), dtype=np.uint8)],
    ids=["empty", "null", "object", "number", "vllm-http", "array"],
)
def test_foreign_content_is_not_claimed(dump):
    assert not FORM.matches(Source.of(dump))

"""SGLang forms: hand-made int32 bytes against the spec in the module docstring, round trips, refusals."""

import base64
import json
import struct

import numpy as np
import pytest

from equipoise.core import RoutesError
from equipoise.routes import sglang
from equipoise.routes.source import Source
from tests.routes.wire_cases import MODELS, model_of, read, round_trip, routes_of
from tests.routes.writers import write_form

NATIVE, OPENAI = sglang.FORMATS

# Two rows, three hidden layers of which the first is dense, top-2.
ROWS = [[[0, 0], [3, 1], [7, 0]], [[0, 0], [2, 5], [4, 6]]]
IDS = (0, 0, 3, 1, 7, 0, 0, 0, 2, 5, 4, 6)
PAYLOAD = base64.b64encode(struct.pack("<12i", *IDS)).decode()


def test_the_payload_has_no_header():
    assert PAYLOAD == "AAAAAAAAAAADAAAAAQAAAAcAAAAAAAAAAAAAAAAAAAACAAAABQAAAAQAAAAGAAAA"


def test_native_response_decodes_to_the_hand_made_array(tmp_path):
    record = {
        "text": "hi",
        "output_ids": [13, 14],
        "request": {"input_ids": [9, 10, 11, 12], "routed_experts_start_len": 3},
        "meta_info": {
            "id": "r-1",
            "prompt_tokens": 4,
            "completion_tokens": 2,
            "weight_version": "17",
            "routed_experts": PAYLOAD,
        },
    }
    path = tmp_path / "dump.json"
    path.write_text(json.dumps([record]))
    assert NATIVE.matches(Source.of(path))
    [recording] = read(NATIVE, path, model_of())
    assert recording.rows.tolist() == ROWS
    assert recording.rows.dtype == np.int32
    assert (recording.name, recording.start, recording.num_tokens, recording.weight_version) == ("r-1", 3, 6, "17")
    assert recording.tokens.tolist() == [9, 10, 11, 12, 13, 14]


def test_flat_and_shaped_arrays_and_tensors_decode():
    torch = pytest.importorskip("torch")
    flat = np.array(IDS, dtype=np.int32)
    for payload in (flat, flat.reshape(2, 3, 2), torch.from_numpy(flat), torch.from_numpy(flat).reshape(2, 3, 2)):
        dump = {"meta_info": {"routed_experts": payload}}
        assert NATIVE.matches(Source.of(dump))
        assert read(NATIVE, dump, model_of())[0].rows.tolist() == ROWS


def test_rows_that_start_behind_the_last_token_are_refused():
    figures = {"prompt_tokens": 4, "completion_tokens": 2, "routed_experts": PAYLOAD}
    for start in (7, 900):
        with pytest.raises(RoutesError, match=f"its rows start at token {start} of 6"):
            read(NATIVE, {"routed_experts_start_len": start, "meta_info": figures}, model_of())


@pytest.mark.parametrize("holder", ["record", "request", "meta_info"])
def test_start_len_is_found_wherever_it_is_kept(holder):
    record = {"meta_info": {"routed_experts": PAYLOAD}, "request": {}}
    (record if holder == "record" else record[holder])["routed_experts_start_len"] = 5
    [recording] = read(NATIVE, [record], model_of())
    assert (recording.start, recording.num_tokens) == (5, 8)


def test_token_ids_that_do_not_cover_the_tokens_are_left_out():
    meta = {"routed_experts": PAYLOAD, "prompt_tokens": 700, "completion_tokens": 1}
    [recording] = read(NATIVE, [{"input_ids": [1, 2], "output_ids": [3], "meta_info": meta}], model_of())
    assert recording.tokens is None
    assert recording.num_tokens == 701


def test_weight_version_spans_come_before_the_single_version():
    meta = {
        "routed_experts": PAYLOAD,
        "prompt_tokens": 1,
        "completion_tokens": 2,
        "weight_version": "b",
        "weight_versions": [{"version": "a", "start": 0, "end": 1}, {"version": "b", "start": 1, "end": 2}],
    }
    first, second = read(NATIVE, [{"meta_info": meta}], model_of())
    assert (first.weight_version, first.start, first.rows.tolist()) == ("a", 0, ROWS[:1])
    assert (second.weight_version, second.start, second.rows.tolist()) == ("b", 1, ROWS[1:])


@pytest.mark.parametrize(
    "spans",
    [
        5,
        [{"version": "a", "start": 1, "end": 2}],
        [{"version": "a", "start": 0, "end": 2}, {"version": "b", "start": 1, "end": 3}],
        [{"version": "a", "start": 0, "end": 2.5}],
        [None],
    ],
    ids=["number", "gap", "overlap", "float", "null"],
)
def test_broken_spans_are_refused(spans):
    meta = {"routed_experts": PAYLOAD, "prompt_tokens": 1, "completion_tokens": 2, "weight_versions": spans}
    with pytest.raises(RoutesError, match=r"span|weight version"):
        read(NATIVE, [{"meta_info": meta}], model_of())


def test_bytes_that_do_not_divide_are_refused_naming_the_numbers():
    with pytest.raises(RoutesError, match=r"48 bytes.*do not divide by 40 \(5 hidden layers x top-2 x 4 bytes\)"):
        read(NATIVE, [{"meta_info": {"routed_experts": PAYLOAD}}], model_of(hidden_layers=5))


def test_layers_are_never_guessed_from_what_would_divide():
    """48 bytes divide by the two MoE layers as well; the spec says hidden layers."""
    model = model_of(layer_numbers=(1, 2), hidden_layers=6)
    (recording,) = read(NATIVE, [{"meta_info": {"routed_experts": PAYLOAD}}], model)
    assert np.array_equal(recording.rows, np.reshape(IDS, (1, 6, 2)))


@pytest.mark.parametrize(
    "payload",
    [None, 3, 1.5, "@@@@", PAYLOAD[:-1], np.zeros(12), np.zeros((3, 4), dtype=np.int32)],
    ids=["null", "int", "float", "alphabet", "cut", "float-array", "two-axes"],
)
def test_broken_payloads_are_refused(payload):
    with pytest.raises(RoutesError):
        read(NATIVE, {"meta_info": {"routed_experts": payload}}, model_of())


def test_sglext_belongs_to_the_first_choice_only():
    record = {
        "id": "chat-1",
        "choices": [{"index": 0}, {"index": 1}],
        "usage": {"prompt_tokens": 2, "completion_tokens": 9},
        "metadata": {"weight_version": "v3"},
        "sglext": {"routed_experts": PAYLOAD},
    }
    assert OPENAI.matches(Source.of([record]))
    [recording] = read(OPENAI, [record], model_of())
    assert recording.rows.tolist() == ROWS
    assert (recording.name, recording.weight_version) == ("choice 0 of chat-1", "v3")
    assert recording.num_tokens == 3, "usage counts the tokens of both choices, so the rows decide"


def test_openai_weight_versions_are_those_of_the_first_choice():
    spans = [{"version": "a", "start": 0, "end": 1}, {"version": "b", "start": 1, "end": 2}]
    record = {
        "id": "chat-1",
        "choices": [{"index": 0}, {"index": 1}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 4},
        "metadata": {"weight_version": "b", "weight_versions": spans},
        "sglext": {"routed_experts": PAYLOAD},
    }
    first, second = read(OPENAI, [record], model_of())
    assert (first.weight_version, first.start, first.rows.tolist()) == ("a", 0, ROWS[:1])
    assert (second.weight_version, second.start, second.rows.tolist()) == ("b", 1, ROWS[1:])


def test_indexer_choices_are_no_routes():
    meta = {"id": "r", "finish_reason": {"type": "stop"}, "indexer_topk": PAYLOAD}
    with pytest.raises(RoutesError, match="has no routed_experts"):
        read(NATIVE, [{"output_ids": [1], "meta_info": meta}], model_of())


def test_openai_token_ids_are_those_the_server_returns():
    record = {
        "id": "chat-3",
        "prompt_token_ids": [10, 11],
        "choices": [{"index": 0, "token_ids": [12]}],
        "sglext": {"routed_experts": PAYLOAD},
    }
    [recording] = read(OPENAI, [record], model_of())
    assert (recording.tokens.tolist(), recording.num_tokens) == ([10, 11, 12], 3)


def test_every_choice_with_its_own_meta_info_is_read():
    metas = [{"routed_experts": PAYLOAD, "prompt_tokens": 2, "completion_tokens": n, "id": "x"} for n in (1, 4)]
    record = {"id": "chat-2", "choices": [{"index": i, "meta_info": meta} for i, meta in enumerate(metas)]}
    assert OPENAI.matches(Source.of([record]))
    assert [(r.name, r.num_tokens) for r in read(OPENAI, [record], model_of())] == [
        ("choice 0 of chat-2", 3),
        ("choice 1 of chat-2", 6),
    ]


def test_a_choice_without_routes_among_others_is_refused():
    choices = [{"index": 0, "meta_info": {"routed_experts": PAYLOAD}}, {"index": 1, "meta_info": {}}]
    with pytest.raises(RoutesError, match="choice 1 of record 0 has no routed_experts"):
        read(OPENAI, [{"choices": choices}], model_of())


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
@pytest.mark.parametrize("tokens", [True, False], ids=["tokens", "no-tokens"])
@pytest.mark.parametrize("segments", [True, False], ids=["segments", "one-segment"])
@pytest.mark.parametrize("form", sglang.FORMATS, ids=lambda f: f.name)
def test_write_read_equal(form, segments, tokens, model, tmp_path):
    routes = routes_of(model, tokens=tokens, segments=segments)
    assert round_trip(form, routes, tmp_path / "dump.jsonl") == routes


def test_the_writer_puts_weight_version_and_start_where_the_spec_says(tmp_path):
    routes = routes_of(model_of(), segments=True)
    write_form(NATIVE, routes, tmp_path / "native.jsonl")
    write_form(OPENAI, routes, tmp_path / "openai.jsonl")
    native = [json.loads(line) for line in (tmp_path / "native.jsonl").read_text().splitlines()]
    openai = [json.loads(line) for line in (tmp_path / "openai.jsonl").read_text().splitlines()]
    assert [r["meta_info"].get("weight_version") for r in native] == ["3", "4", None, "3", "4"]
    assert [r.get("metadata", {}).get("weight_version") for r in openai] == ["3", "4", None, "3", "4"]
    assert [r.get("routed_experts_start_len", 0) for r in native] == [0, 1, 0, 0, 1]
    raw = base64.b64decode(native[2]["meta_info"]["routed_experts"])
    dense_then_moe = struct.unpack("<6i", raw)
    assert dense_then_moe[:2] == (0, 0), "the dense layer is zeros"
    assert dense_then_moe[2:4] == tuple(int(i) for i in routes.samples[1].ids_TLK[0, 0])


@pytest.mark.parametrize("form", sglang.FORMATS, ids=lambda f: f.name)
def test_unknown_rows_of_a_top_1_model_are_refused(form, tmp_path):
    with pytest.raises(RoutesError, match="top-1"):
        write_form(form, routes_of(model_of(top_k=1)), tmp_path / "a.jsonl")


@pytest.mark.parametrize(
    "dump",
    [
        [],
        [None],
        [{}],
        {"meta_info": None},
        {"meta_info": {"routed_experts": None}},
        {"meta_info": {"routed_experts": [1, 2]}},
        {"choices": [{"routed_experts": "k05VTVBZ"}]},
        {"choices": [], "sglext": {"routed_experts": PAYLOAD}},
        np.zeros((2, 3, 2), dtype=np.int32),
        [PAYLOAD],
    ],
    ids=["empty", "null", "object", "no-meta", "no-payload", "list", "vllm-http", "no-choices", "vllm", "text"],
)
def test_foreign_content_is_not_claimed(dump):
    assert not any(form.matches(Source.of(dump)) for form in sglang.FORMATS)


def test_the_two_forms_do_not_claim_each_other():
    native = [{"meta_info": {"routed_experts": PAYLOAD}}]
    openai = [{"choices": [{"meta_info": {"routed_experts": PAYLOAD}}]}]
    assert [form.matches(Source.of(native)) for form in sglang.FORMATS] == [True, False]
    assert [form.matches(Source.of(openai)) for form in sglang.FORMATS] == [False, True]

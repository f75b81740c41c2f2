"""vLLM forms: hand-made bytes against the spec in the module docstring, round trips, refusals."""

import base64
import json
import struct
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.core import Routes, RoutesError, SampleRoutes
from equipoise.routes import vllm
from equipoise.routes.registry import read_routes
from equipoise.routes.source import Source
from equipoise.routes.wire import Response, recordings
from tests.routes.wire_cases import MODELS, model_of, read, round_trip, routes_of
from tests.routes.writers import write_form

OFFLINE, HTTP = vllm.FORMATS


def npy_bytes(descr, shape, data, *, fortran=False):
    """A version 1.0 `.npy` file by the letter of numpy's format description."""
    header = f"{{'descr': '{descr}', 'fortran_order': {fortran}, 'shape': {shape}, }}".encode()
    header += b" " * (-(10 + len(header) + 1) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + data


def base64_npy(*args, **kwargs):
    return base64.b64encode(npy_bytes(*args, **kwargs)).decode()


# Two rows, three hidden layers of which the first is dense, top-2.
ROWS = [[[0, 0], [3, 1], [7, 0]], [[0, 0], [2, 5], [4, 6]]]
DATA_U8 = bytes([0, 0, 3, 1, 7, 0, 0, 0, 2, 5, 4, 6])


def test_chat_response_decodes_to_the_hand_made_array():
    record = {
        "id": "chatcmpl-7",
        "choices": [{"index": 0, "message": {}, "routed_experts": base64_npy("|u1", (2, 3, 2), DATA_U8)}],
        "usage": {"prompt_tokens": 2, "completion_tokens": 1, "total_tokens": 3},
    }
    [recording] = read(HTTP, [record], model_of())
    assert recording.name == "chatcmpl-7"
    assert recording.rows.dtype == np.uint8
    assert recording.rows.tolist() == ROWS
    assert (recording.start, recording.num_tokens, recording.weight_version) == (0, 3, "")


def test_the_npy_payload_is_recognised_by_its_first_bytes():
    assert base64_npy("|u1", (0, 3, 2), b"").startswith("k05VTVBZ")


@pytest.mark.parametrize(
    ("descr", "data"),
    [
        ("<u2", struct.pack("<12H", *DATA_U8)),
        ("<i4", struct.pack("<12i", *DATA_U8)),
        (">i4", struct.pack(">12i", *DATA_U8)),
    ],
    ids=["uint16", "int32", "big-endian"],
)
def test_every_dtype_vllm_has_used_decodes(descr, data):
    record = {"choices": [{"routed_experts": base64_npy(descr, (2, 3, 2), data)}]}
    [recording] = read(HTTP, [record], model_of())
    assert recording.rows.tolist() == ROWS
    assert recording.rows.dtype.isnative


def test_fortran_order_is_honoured():
    data = np.array(ROWS, dtype=np.uint8).tobytes(order="F")
    record = {"choices": [{"routed_experts": base64_npy("|u1", (2, 3, 2), data, fortran=True)}]}
    assert read(HTTP, [record], model_of())[0].rows.tolist() == ROWS


def test_generate_response_gives_token_ids_and_start(tmp_path):
    record = {
        "request_id": "r1",
        "prompt_token_ids": [11, 12, 13, 14],
        "choices": [
            {"index": 0, "token_ids": [15, 16], "routed_experts": base64_npy("|u1", (2, 3, 2), DATA_U8)},
        ],
        "request": {"sampling_params": {"routed_experts_prompt_start": 3}},
    }
    path = tmp_path / "dump.jsonl"
    path.write_text(json.dumps(record) + "\n")
    [recording] = read(HTTP, path, model_of())
    assert recording.tokens.tolist() == [11, 12, 13, 14, 15, 16]
    assert (recording.name, recording.start, recording.num_tokens) == ("r1", 3, 6)


@pytest.mark.parametrize(
    "extra",
    [
        {"routed_experts_prompt_start": 5},
        {"request": {"routed_experts_prompt_start": 5}},
        {"sampling_params": {"routed_experts_prompt_start": 5}},
        {"request": {"sampling_params": {"routed_experts_prompt_start": 5}}},
    ],
    ids=["record", "request", "sampling_params", "request.sampling_params"],
)
def test_prompt_start_is_found_wherever_it_is_kept(extra):
    record = {"choices": [{"routed_experts": base64_npy("|u1", (2, 3, 2), DATA_U8)}], **extra}
    [recording] = read(HTTP, [record], model_of())
    assert recording.start == 5
    assert recording.num_tokens == 8, "five before, two rows, and the last token without one"


def test_choices_are_samples_and_the_usage_sum_is_not_taken_for_one():
    payload = base64_npy("|u1", (2, 3, 2), DATA_U8)
    record = {
        "id": "c",
        "usage": {"prompt_tokens": 2, "completion_tokens": 40},
        "choices": [{"index": 0, "routed_experts": payload}, {"index": 1, "routed_experts": payload}],
    }
    first, second = read(HTTP, [record], model_of())
    assert [first.name, second.name] == ["choice 0 of c", "choice 1 of c"]
    assert first.num_tokens == 3


def test_weight_version_spans_split_the_rows_they_computed():
    """Prompt of 3, 4 generated: token 3+g is computed by row 2+g."""
    data = bytes(range(6)) * 6
    record = {
        "request_id": "r",
        "usage": {"prompt_tokens": 3, "completion_tokens": 4},
        "choices": [
            {
                "routed_experts": base64_npy("|u1", (6, 3, 2), data),
                "weight_versions": [
                    {"version": "v1", "start": 0, "end": 2},
                    {"version": "v2", "start": 2, "end": 4},
                ],
            }
        ],
    }
    first, second = read(HTTP, [record], model_of())
    assert (first.start, len(first.rows), first.weight_version, first.num_tokens) == (0, 4, "v1", 5)
    assert (second.start, len(second.rows), second.weight_version, second.num_tokens) == (4, 2, "v2", 7)
    assert np.concatenate([first.rows, second.rows]).tobytes() == data


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6), st.lists(st.integers(0, 4), max_size=4), st.integers(0, 8))
def test_rows_are_handed_out_once_each_in_order_whatever_the_spans(num_prompt, lengths, start):
    """Against the definition, row by row: row t computes token t + 1."""
    edges = np.cumsum([0, *lengths])
    num_rows = max(num_prompt + int(edges[-1]) - 1 - start, 0)
    start = min(start, num_prompt)
    rows = np.arange(num_rows * 6).reshape(num_rows, 3, 2)
    spans = [{"version": f"v{i}", "start": int(a), "end": int(b)} for i, (a, b) in enumerate(pairwise(edges))]
    response = Response(name="s", start=start, num_prompt=num_prompt, versions=spans)
    parts = list(recordings(rows, response))
    assert np.concatenate([part.rows for part in parts]).tolist() == rows.tolist()
    for part in parts:
        for token in range(part.start, part.start + len(part.rows)):
            generated = max(token + 1 - num_prompt, 0)
            computed_by = [s["version"] for s in spans if s["start"] <= generated < s["end"]]
            # Rows beyond the last span can only be the last version's.
            assert part.weight_version == (computed_by or [s["version"] for s in spans[-1:]] or [""])[0]


def test_rows_that_start_behind_the_tokens_are_refused():
    record = {
        "usage": {"prompt_tokens": 2, "completion_tokens": 1},
        "routed_experts_prompt_start": 9,
        "choices": [{"routed_experts": base64_npy("|u1", (2, 3, 2), DATA_U8)}],
    }
    with pytest.raises(RoutesError, match="start at token 9 of 3"):
        read(HTTP, [record], model_of())


def test_spans_without_a_prompt_length_are_refused():
    spans = [{"version": "a", "start": 0, "end": 1}, {"version": "b", "start": 1, "end": 2}]
    record = {"choices": [{"routed_experts": base64_npy("|u1", (2, 3, 2), DATA_U8), "weight_versions": spans}]}
    with pytest.raises(RoutesError, match="prompt tokens is not recorded"):
        read(HTTP, [record], model_of())


@pytest.mark.parametrize(
    ("payload", "words"),
    [
        (None, "no routed_experts"),
        (17, "base64 text"),
        ("k05V!!", "not base64"),
        (base64.b64encode(b"not numpy").decode(), "not a .npy file"),
        (base64_npy("|u1", (2, 3, 2), DATA_U8[:-1]), "11 bytes.*needs 12"),
        (base64_npy("|u1", (2, 3, 2), DATA_U8 + b"\0"), "13 bytes.*needs 12"),
        (base64_npy("<f4", (2, 3, 2), b"\0" * 48), "routed_experts has dtype float32; expert ids are integers"),
        (base64_npy("|O", (2, 3, 2), b"\0" * 12), "object"),
        (base64_npy("|u1", (12,), DATA_U8), "rows, layers, top-k"),
        (base64_npy("|u1", (-2, -3, 2), DATA_U8), "at least 0"),
        (base64_npy("|u1", (0, 2**62, 2**62), b""), "cannot have shape"),
    ],
    ids=["null", "number", "alphabet", "magic", "cut", "tail", "float", "pickle", "flat", "negative", "huge"],
)
def test_broken_payloads_are_refused(payload, words):
    with pytest.raises(RoutesError, match=words):
        read(HTTP, [{"choices": [{"routed_experts": payload}]}], model_of())


def test_offline_arrays_and_request_outputs_decode():
    rows = np.array(ROWS, dtype=np.uint8)
    [bare] = read(OFFLINE, rows, model_of())
    assert bare.rows.tolist() == ROWS and bare.num_tokens == 3
    assert [r.name for r in read(OFFLINE, [rows, rows], model_of())] == ["record 0", "record 1"]
    output = SimpleNamespace(
        request_id="q",
        prompt_token_ids=[1, 2],
        outputs=[SimpleNamespace(index=0, token_ids=(3,), routed_experts=rows)],
    )
    [recording] = read(OFFLINE, [output], model_of())
    assert (recording.name, recording.tokens.tolist()) == ("q", [1, 2, 3])
    as_dict = {"request_id": "q", "prompt_token_ids": [1, 2], "outputs": [vars(output.outputs[0])]}
    assert read(OFFLINE, as_dict, model_of()) == [recording]


def test_a_folder_of_npy_names_samples_by_file(tmp_path):
    for name in ("b", "a"):
        (tmp_path / f"{name}.npy").write_bytes(npy_bytes("|u1", (2, 3, 2), DATA_U8))
    assert OFFLINE.matches(Source.of(tmp_path))
    assert [(r.name, r.rows.tolist()) for r in read(OFFLINE, tmp_path, model_of())] == [("a", ROWS), ("b", ROWS)]


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
@pytest.mark.parametrize("tokens", [True, False], ids=["tokens", "no-tokens"])
@pytest.mark.parametrize("form", vllm.FORMATS, ids=lambda f: f.name)
def test_write_read_equal(form, model, tokens, tmp_path):
    routes = routes_of(model, tokens=tokens)
    assert round_trip(form, routes, tmp_path / f"dump{form.suffixes[0]}") == routes


@pytest.mark.parametrize("tokens", [True, False], ids=["tokens", "no-tokens"])
def test_http_keeps_segments_and_weight_versions(tokens, tmp_path):
    routes = routes_of(model_of(), segments=True, tokens=tokens)
    path = tmp_path / "dump.jsonl"
    assert round_trip(HTTP, routes, path) == routes
    starts = [json.loads(line).get("routed_experts_prompt_start", 0) for line in path.read_text().splitlines()]
    assert starts == [0, 1, 0, 0, 1]


@pytest.mark.parametrize("name", ["file", "outputs", "a/b", "routed_experts", "x.npy"])
def test_any_sample_name_survives_the_archive(name, tmp_path):
    sample = replace(routes_of(model_of()).samples[0], name=name)
    routes = Routes.of([sample], model=model_of())
    assert round_trip(OFFLINE, routes, tmp_path / "dump.npz") == routes


def test_archives_of_a_folder_do_not_share_sample_names(tmp_path):
    for name in ("a", "b"):
        np.savez(tmp_path / f"{name}.npz", np.array(ROWS, dtype=np.uint8))
    assert [r.name for r in read(OFFLINE, tmp_path, model_of())] == ["arr_0 of a.npz", "arr_0 of b.npz"]


def test_offline_refuses_what_it_cannot_hold(tmp_path):
    model = model_of()
    with pytest.raises(RoutesError, match="no place for them, write vllm-http"):
        write_form(OFFLINE, routes_of(model, segments=True), tmp_path / "a.npz")
    full = SampleRoutes(name="s", ids_TLK=np.array([[[1, 2], [3, 4]]]), num_tokens=1)
    with pytest.raises(RoutesError, match="1 rows for 1 tokens"):
        write_form(OFFLINE, Routes.of([full], model=model), tmp_path / "a.npz")
    with pytest.raises(RoutesError, match="two samples are named 's'"):
        write_form(HTTP, Routes.of([full, full], model=model), tmp_path / "a.jsonl")


@pytest.mark.parametrize("form", vllm.FORMATS, ids=lambda f: f.name)
def test_unknown_rows_of_a_top_1_model_are_refused(form, tmp_path):
    model = model_of(top_k=1)
    with pytest.raises(RoutesError, match="top-1"):
        write_form(form, routes_of(model), tmp_path / "a")
    routes = routes_of(model, unknown=False)
    assert round_trip(form, routes, tmp_path / f"dump{form.suffixes[0]}") == routes


@pytest.mark.parametrize("form", vllm.FORMATS, ids=lambda f: f.name)
def test_padding_and_partial_layers_are_refused(form, tmp_path):
    model = model_of()
    padded = SampleRoutes(name="s", ids_TLK=np.array([[[1, 2], [3, 4]]]), num_tokens=2, padding_T=np.array([True]))
    with pytest.raises(RoutesError, match="padding"):
        write_form(form, Routes.of([padded], model=model), tmp_path / "a")
    part = SampleRoutes(name="s", ids_TLK=np.array([[[1, 2]]]), num_tokens=2)
    with pytest.raises(RoutesError, match="1 of 2 MoE layers"):
        write_form(form, Routes.of([part], model=model, layer_numbers=[2]), tmp_path / "a")


@pytest.mark.parametrize(
    "dump",
    [
        [],
        [None],
        [{}],
        {"choices": []},
        {"choices": "x"},
        {"choices": [{"routed_experts": {"data": "", "shape": [], "dtype": "uint8"}}]},
        {"choices": [{"routed_experts": "AAAA"}]},
        np.zeros((2, 3), dtype=np.int64),
        np.zeros((2, 3, 2)),
        np.zeros((1, 2, 3, 2), dtype=np.int16),
        {"routed_experts": np.zeros((1, 2, 3, 2), dtype=np.int16)},
        ["nrlre1:int8:1x1x1:AA=="],
    ],
    ids=[
        "empty",
        "null",
        "object",
        "no-choices",
        "text-choices",
        "prime-rl",
        "sglang-payload",
        "two-axes",
        "float",
        "batch",
        "batch-dict",
        "nemo-rl",
    ],
)
def test_foreign_content_is_not_claimed(dump):
    assert not any(form.matches(Source.of(dump)) for form in vllm.FORMATS)


@pytest.mark.parametrize("as_object", [True, False], ids=["object", "dict"])
def test_outputs_without_their_request_are_read(as_object):
    model = model_of()
    rows = np.array([[[0, 0], [1, 2], [3, 4]], [[0, 0], [5, 6], [7, 0]]], dtype=np.uint8)
    output = {"index": 0, "token_ids": [5], "routed_experts": rows, "weight_versions": "9"}
    sample, other = read_routes([SimpleNamespace(**output) if as_object else output] * 2, model=model)
    assert sample.ids_TLK.tolist() == rows[:, 1:].tolist()
    assert (sample.num_tokens, sample.tokens_T, sample.segments[0].weight_version) == (3, None, "9")
    assert (sample.name, other.name) == ("record 0", "record 1")


@pytest.mark.parametrize(
    ("cuts", "expected"),
    [
        ({"lengths": [2, 1]}, [2, 1]),
        ({"lengths": [3, 2]}, [2, 1]),  # in tokens: the last one has no row
        ({"offsets": [0, 1, 3]}, [1, 2]),
        ({"cu_seqlens": [0, 3, 3]}, [3, 0]),
    ],
    ids=str,
)
def test_samples_one_behind_the_other_are_cut_as_the_archive_says(tmp_path, cuts, expected):
    rows = np.array([*ROWS, ROWS[0]], dtype=np.uint8)
    np.savez(tmp_path / "batch.npz", routed_experts=rows, **{name: np.array(ends) for name, ends in cuts.items()})
    found = read(OFFLINE, tmp_path / "batch.npz", model_of())
    assert [len(one.rows) for one in found] == expected
    assert len({one.name for one in found}) == 2
    assert np.concatenate([one.rows for one in found]).tolist() == rows.tolist()


@pytest.mark.parametrize(
    "cuts", [{"lengths": [1, 1]}, {"lengths": [4, -1]}, {"offsets": [1, 3]}, {"offsets": []}], ids=str
)
def test_lengths_that_do_not_fit_the_rows_are_refused(cuts):
    record = {"routed_experts": np.array([*ROWS, ROWS[0]], dtype=np.uint8)}
    record |= {name: np.array(ends, dtype=np.int64) for name, ends in cuts.items()}
    with pytest.raises(RoutesError, match=r"lengths or offsets cut routed_experts into .* samples .* 3 rows"):
        read(OFFLINE, record, model_of())

"""NeMo-RL forms: hand-made envelopes and batches against the spec in the module docstring, round trips, refusals."""

import base64
import struct
from dataclasses import replace

import numpy as np
import pytest

from equipoise.core import Routes, RoutesError, SampleRoutes
from equipoise.routes import nemo_rl
from equipoise.routes.interpret import interpret
from equipoise.routes.source import Source
from tests.routes.wire_cases import MODELS, model_of, read, round_trip, routes_of
from tests.routes.writers import carry_dtype, write_form

TEXT, BATCH = nemo_rl.FORMATS

# Four tokens, two layers, top-2: two routes, a missing row, and the filler of the last token.
IDS = (3, 1, 7, 0, 2, 5, 4, 6, -1, -1, -1, -1, 0, 1, 0, 1)
ROWS = [[[3, 1], [7, 0]], [[2, 5], [4, 6]], [[-1, -1], [-1, -1]]]


def envelope(dtype, shape, raw):
    return f"nrlre1:{dtype}:{shape}:{base64.b64encode(raw).decode()}"


def test_the_envelope_of_the_project_that_defines_it():
    """The literal that NeMo-Gym's own tests carry: int16, two tokens, one layer, top-2, values 0 1 2 3."""
    [recording] = read(TEXT, ["nrlre1:int16:2x1x2:AAABAAIAAwA="], model_of())
    assert recording.rows.tolist() == [[[0, 1]], [[2, 3]]]
    assert (recording.rows.dtype, recording.num_tokens) == (np.int16, 2)


@pytest.mark.parametrize(("dtype", "code"), [("int8", "b"), ("int16", "h"), ("int32", "i")])
def test_minus_one_stays_and_the_last_filler_is_not_a_row(dtype, code, tmp_path):
    path = tmp_path / "dump.txt"
    path.write_text(envelope(dtype, "4x2x2", struct.pack(f"<16{code}", *IDS)) + "\n")
    assert TEXT.matches(Source.of(path))
    [recording] = read(TEXT, path, model_of())
    assert recording.rows.tolist() == ROWS
    assert (recording.name, recording.num_tokens, recording.rows.dtype) == ("line 1", 4, np.dtype(dtype))


def test_a_record_gives_name_and_tokens():
    record = {
        "id": "n",
        "prompt_token_ids": [5, 6],
        "generation_token_ids": [7, 8],
        "routed_experts": envelope("int8", "4x2x2", struct.pack("<16b", *IDS)),
    }
    assert TEXT.matches(Source.of([record]))
    [recording] = read(TEXT, [record], model_of())
    assert (recording.name, recording.tokens.tolist(), len(recording.rows)) == ("n", [5, 6, 7, 8], 3)


def test_an_envelope_that_does_not_cover_its_tokens_is_refused():
    record = {
        "prompt_token_ids": [1],
        "generation_token_ids": [2, 3],
        "routed_experts": "nrlre1:int16:2x1x2:AAABAAIAAwA=",
    }
    with pytest.raises(RoutesError, match="2 rows for 3 tokens"):
        read(TEXT, [record], model_of())


def test_a_last_row_that_is_a_route_is_kept():
    text = envelope("int8", "1x2x2", bytes([5, 1, 0, 1]))
    assert read(TEXT, [text], model_of())[0].rows.tolist() == [[[5, 1], [0, 1]]]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nrlre2:int8:1x1x1:AA==", "envelope"),
        ("nrlre1:int8:1x1x1", "lacks a shape"),
        ("nrlre1:int8:1x1:AA==", "lacks a shape"),
        ("nrlre1:int8:1x1x-1:AA==", "lacks a shape"),
        ("nrlre1:int8:1x1x1x1:AA==", "lacks a shape"),
        ("nrlre1:uint8:1x1x1:AA==", "known: int8, int16, int32"),
        ("nrlre1:int8:1x1x2:AA==", "1 bytes.*needs 2"),
        ("nrlre1:int8:1x1x1:AA", "not base64"),
        ("nrlre1:int8:999999999999999999x1x1:AA==", "needs 999999999999999999"),
    ],
    ids=["version", "no-data", "two-axes", "negative", "four-axes", "dtype", "short", "base64", "huge"],
)
def test_broken_envelopes_are_refused(text, words):
    with pytest.raises(RoutesError, match=words):
        read(TEXT, [text], model_of())


def hand_made_batch(**change):
    """Two samples of lengths 4 and 2 padded to 5 rows with 0..k-1."""
    filler = [[0, 1], [0, 1]]
    batch = np.array([[*ROWS, filler, filler], [ROWS[0], filler, filler, filler, filler]], dtype=np.int8)
    return {"routed_experts": batch, "input_lengths": np.array([4, 2]), **change}


def test_a_batch_decodes_rows_padding_and_lengths(tmp_path):
    np.savez(tmp_path / "batch.npz", **hand_made_batch(input_ids=np.arange(10).reshape(2, 5)))
    source = Source.of(tmp_path / "batch.npz")
    assert BATCH.matches(source)
    first, second = BATCH.read(source, model_of())
    assert (first.name, first.num_tokens, first.tokens.tolist()) == ("row 0", 4, [0, 1, 2, 3])
    assert first.rows.tolist() == [*ROWS, [[0, 1], [0, 1]]]
    assert first.padding.tolist() == [False, False, False, True]
    assert second.rows[0].tolist() == ROWS[0] and second.tokens.tolist() == [5, 6]
    assert second.padding.tolist() == [False, True, True, True]


def test_a_torch_batch_decodes_like_the_numpy_one(tmp_path):
    torch = pytest.importorskip("torch")
    torch.save({k: torch.from_numpy(v) for k, v in hand_made_batch().items()}, tmp_path / "batch.pt")
    assert read(BATCH, tmp_path / "batch.pt", model_of()) == read(BATCH, hand_made_batch(), model_of())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"input_lengths": None}, "no input_lengths"),
        ({"input_lengths": np.array([4])}, "1 input_lengths for 2 samples"),
        ({"input_lengths": np.array([4, 6])}, "go from 4 to 6.*5 rows"),
        ({"input_lengths": np.array([-1, 2])}, "go from -1"),
        ({"input_lengths": np.array([4.0, np.nan])}, "integer array"),
        ({"routed_experts": np.zeros((2, 5, 2, 2))}, "integer array of 4 axes"),
        ({"routed_experts": np.zeros((2, 5, 2), dtype=np.int8)}, "integer array of 4 axes"),
        ({"input_ids": np.zeros((2, 4), dtype=np.int64)}, "input_ids has shape"),
        ({"names": np.array(["a"])}, "1 names for 2 samples"),
    ],
    ids=["none", "few", "long", "negative", "nan", "float", "axes", "ids", "names"],
)
def test_broken_batches_are_refused(change, words):
    with pytest.raises(RoutesError, match=words):
        read(BATCH, hand_made_batch(**change), model_of())


@pytest.mark.parametrize("top_k", [2, 1], ids=["top-2", "top-1"])
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
@pytest.mark.parametrize("tokens", [True, False], ids=["tokens", "no-tokens"])
def test_write_read_equal(model, tokens, top_k, tmp_path):
    model = replace(model, top_k=top_k)
    routes = routes_of(model, tokens=tokens)
    assert round_trip(TEXT, routes, tmp_path / "dump.jsonl") == routes


def test_envelopes_alone_keep_everything_but_names_and_tokens(tmp_path):
    routes = routes_of(model_of(), tokens=False)
    back = round_trip(TEXT, routes, tmp_path / "dump.txt")
    assert [s.name for s in back] == ["line 1", "line 2", "line 3"]
    assert [replace(b, name=a.name) for a, b in zip(routes, back, strict=True)] == list(routes)


@pytest.mark.parametrize("suffix", BATCH.suffixes)
@pytest.mark.parametrize("tokens", [True, False], ids=["tokens", "no-tokens"])
def test_a_batch_of_equal_lengths_reads_back_equal(tokens, suffix, tmp_path):
    if suffix == ".pt":
        pytest.importorskip("torch")
    model = model_of()
    samples = [replace(routes_of(model, tokens=tokens, seed=b).samples[2], name=f"s{b}") for b in range(3)]
    routes = Routes.of(samples, model=model)
    assert round_trip(BATCH, routes, tmp_path / f"dump{suffix}") == routes


def test_a_ragged_batch_gains_padding_and_is_stable_after_that(tmp_path):
    routes = routes_of(model_of())
    back = round_trip(BATCH, routes, tmp_path / "a.npz")
    assert [0 if s.padding_T is None else int(s.padding_T.sum()) for s in back] == [4, 8, 0]
    for sample, padded in zip(routes, back, strict=True):
        own = slice(0, sample.num_rows)
        assert padded.ids_TLK[own].tolist() == sample.ids_TLK[own].tolist()
        assert padded.num_tokens == sample.num_tokens
    assert round_trip(BATCH, back, tmp_path / "b.npz") == back


def test_a_recording_that_stopped_early_reads_back_with_missing_rows(tmp_path):
    model = model_of()
    sample = SampleRoutes(name="s", ids_TLK=np.array([[[1, 2], [3, 4]]]), num_tokens=4)
    write_form(TEXT, Routes.of([sample], model=model), tmp_path / "a.jsonl")
    [back] = interpret(TEXT.read(Source.of(tmp_path / "a.jsonl"), model), model=model)
    assert back.known_TL.tolist() == [[True, True], [False, False], [False, False]]


@pytest.mark.parametrize("form", nemo_rl.FORMATS, ids=lambda f: f.name)
def test_what_has_no_place_is_refused(form, tmp_path):
    model = model_of()
    with pytest.raises(RoutesError, match="no place for them"):
        write_form(form, routes_of(model, segments=True), tmp_path / "a.npz")
    part = SampleRoutes(name="s", ids_TLK=np.array([[[1, 2]]]), num_tokens=2)
    with pytest.raises(RoutesError, match="1 of them"):
        write_form(form, Routes.of([part], model=model, layer_numbers=[2]), tmp_path / "a.npz")


def test_the_smallest_signed_dtype_is_used():
    assert [carry_dtype(n) for n in (128, 129, 32768, 32769)] == [np.int8, np.int16, np.int16, np.int32]


@pytest.mark.parametrize(
    "dump",
    [
        [],
        [None],
        ["AAAA"],
        {"routed_experts": np.zeros((1, 2, 3, 2), dtype=np.uint8)},
        {"routed_experts": np.zeros((1, 2, 3, 2), dtype=np.int16), "attention_mask": np.ones((1, 2), dtype=np.int64)},
        {"routed_experts": np.zeros((2, 3, 2), dtype=np.int8)},
        {"routed_experts": "AAAA"},
    ],
    ids=["empty", "null", "text", "unsigned", "verl", "three-axes", "base64"],
)
def test_foreign_content_is_not_claimed(dump):
    assert not any(form.matches(Source.of(dump)) for form in nemo_rl.FORMATS)

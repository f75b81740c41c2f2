"""Damaged dumps of the engine forms: our error or the true rows, never another error and never a wrong array."""

import base64
import copy
import io
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.core import RoutesError
from equipoise.routes import nemo_rl, prime_rl, sglang, vllm
from equipoise.routes.interpret import interpret
from equipoise.routes.source import Source
from tests.routes.wire_cases import model_of, routes_of
from tests.routes.writers import write_form

MODEL = model_of()
FORMATS = {form.name: form for module in (vllm, sglang, prime_rl, nemo_rl) for form in module.FORMATS}
JSON_FORMS = ["vllm-http", "sglang", "sglang-openai", "prime-rl", "nemo-rl"]
PAYLOAD_KEYS = {"routed_experts", "data", "shape", "dtype"}

junk = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.sampled_from([-(2**63), 2**63, 2**64, 10**30])
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["k05VTVBZ", "nrlre1:int8:1x1x1:", "AAAA", "=", "uint8", "O", "<f4"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=4,
)
fuzzed = settings(max_examples=80, deadline=None)


def records_of(name, folder):
    """What the form's writer makes of three samples, segments and versions where it has room for them."""
    form = FORMATS[name]
    path = folder / f"{name}{form.suffixes[0]}"
    write_form(form, routes_of(MODEL, segments=name in ("vllm-http", "sglang", "sglang-openai")), path)
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fuzz")
    return {name: records_of(name, folder) for name in JSON_FORMS}


def attempt(form, dump):
    """Rows of every recording, and the interpreted samples; None for our own error. Any other error fails the test."""
    source = Source.of(dump)
    assert form.matches(source) in (True, False)
    try:
        rows = [recording.rows for recording in form.read(source, MODEL)]
        samples = list(interpret(form.read(source, MODEL), model=MODEL))
    except RoutesError:
        return None
    return rows, samples


def paths_of(value, path=()):
    yield path
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield from paths_of(child, (*path, key))


def put(value, path, new):
    changed = copy.deepcopy(value)
    owner = changed
    for key in path[:-1]:
        owner = owner[key]
    owner[path[-1]] = new
    return changed


@pytest.mark.parametrize("name", JSON_FORMS)
def test_any_value_in_any_field_gives_our_error_or_the_true_rows(name, records):
    form, dump = FORMATS[name], records[name]
    paths = [path for path in paths_of(dump) if path and len(path) < 6]
    true_rows, _ = attempt(form, dump)

    @fuzzed
    @given(st.sampled_from(paths), junk)
    def check(path, value):
        found = attempt(form, put(dump, path, value))
        if found is not None and not PAYLOAD_KEYS & set(path):
            # An answer that has lost its routes, like an aborted one, is left out; all others are read as they are.
            joined, count = np.concatenate(found[0]).tolist(), len(true_rows)
            cuts = [(i, j) for i in range(count) for j in range(i, count + 1) if (i, j) != (0, count)]
            kept = [[*true_rows[:i], *true_rows[j:]] for i, j in cuts]
            assert joined in [np.concatenate(rows).tolist() for rows in kept]

    check()


@pytest.mark.parametrize("name", JSON_FORMS)
def test_a_cut_payload_is_refused(name, records):
    form, dump = FORMATS[name], records[name]
    path = _payload_path(dump, len(dump) - 1)
    text = _at(dump, path)
    for length in range(len(text)):
        assert attempt(form, put(dump, path, text[:length])) is None, f"{length} of {len(text)} were accepted"


def test_a_turn_cut_between_rows_leaves_unknown_rows_not_wrong_ones(records):
    """Raw int32 has no header: only the next turn's start tells that rows are missing."""
    dump = records["sglang"]
    _, samples = attempt(FORMATS["sglang"], put(dump, _payload_path(dump, 0), ""))
    assert not samples[0].known_TL[0].any()
    assert samples[0].ids_TLK[1:].tolist() == attempt(FORMATS["sglang"], dump)[1][0].ids_TLK[1:].tolist()


def _payload_path(dump, record):
    paths = (path for path in paths_of(dump) if path[:1] == (record,) and path[-1] in ("routed_experts", "data"))
    return next(path for path in paths if isinstance(_at(dump, path), str))


def _at(value, path):
    for key in path:
        value = value[key]
    return value


@fuzzed
@given(
    data=st.binary(max_size=48),
    shape=st.lists(st.integers(-1, 6) | st.just(2**62), min_size=2, max_size=4),
    dtype=st.sampled_from(["uint8", "uint16", "int16", "int32", "int64", "float32", "O", ""]),
)
def test_what_prime_rl_accepts_is_exactly_what_was_sent(data, shape, dtype):
    wire = {"data": base64.b64encode(data).decode(), "shape": shape, "start": 0, "dtype": dtype}
    try:
        [recording] = prime_rl.FORMATS[0].read(Source.of(wire), MODEL)
    except RoutesError:
        return
    assert recording.rows.tobytes() == data
    assert list(recording.rows.shape) == shape
    assert recording.rows.dtype == np.dtype(dtype)


@fuzzed
@given(
    data=st.binary(max_size=32),
    shape=st.lists(st.integers(0, 6), min_size=3, max_size=3),
    dtype=st.sampled_from(["int8", "int16", "int32", "uint8"]),
)
def test_what_nemo_rl_accepts_is_exactly_what_was_sent(data, shape, dtype):
    text = f"nrlre1:{dtype}:{'x'.join(map(str, shape))}:{base64.b64encode(data).decode()}"
    try:
        [recording] = FORMATS["nemo-rl"].read(Source.of([text]), MODEL)
    except RoutesError:
        return
    sent = np.frombuffer(data, dtype=dtype).reshape(shape)
    assert recording.rows.tolist() in (sent.tolist(), sent[:-1].tolist())
    assert recording.num_tokens == shape[0]


@fuzzed
@given(data=st.binary(max_size=96))
def test_what_sglang_accepts_is_exactly_what_was_sent(data):
    dump = {"meta_info": {"routed_experts": base64.b64encode(data).decode()}}
    try:
        [recording] = FORMATS["sglang"].read(Source.of(dump), MODEL)
    except RoutesError:
        assert len(data) % 24
        return
    assert recording.rows.tobytes() == data


@fuzzed
@given(edits=st.lists(st.tuples(st.integers(0, 200), st.integers(0, 255)), max_size=4), cut=st.integers(0, 40))
def test_damaged_npy_bytes_give_our_error_or_the_same_bytes(edits, cut):
    rows = np.arange(12, dtype=np.uint8).reshape(2, 3, 2)
    file = io.BytesIO()
    np.lib.format.write_array(file, rows, version=(1, 0), allow_pickle=False)
    raw = bytearray(file.getvalue())
    for place, value in edits:
        raw[place % len(raw)] = value
    raw = bytes(raw[: len(raw) - cut])
    dump = {"choices": [{"routed_experts": base64.b64encode(raw).decode()}]}
    try:
        [recording] = FORMATS["vllm-http"].read(Source.of(dump), MODEL)
    except RoutesError:
        return
    assert sorted(recording.rows.tobytes()) == sorted(raw[-12:])


@pytest.mark.parametrize("name", [*JSON_FORMS, "vllm", "nemo-rl-batch"])
def test_damaged_files_give_our_error_only(name, tmp_path):
    form = FORMATS[name]
    path = tmp_path / f"dump{form.suffixes[0]}"
    write_form(form, routes_of(MODEL), path)
    whole = path.read_bytes()

    @settings(max_examples=60, deadline=None)
    @given(
        edits=st.lists(st.tuples(st.integers(0, len(whole) - 1), st.integers(0, 255)), max_size=3),
        cut=st.integers(0, len(whole)),
    )
    def check(edits, cut):
        raw = bytearray(whole)
        for place, value in edits:
            raw[place] = value
        path.write_bytes(bytes(raw[:cut]) if not edits else bytes(raw))
        attempt(form, path)

    check()


@pytest.mark.parametrize("array", ["nan", "negative", "huge", "object", "text", "bool", "empty"])
@pytest.mark.parametrize("name", FORMATS)
def test_odd_arrays_in_memory_give_our_error_only(array, name):
    odd = {
        "nan": np.full((2, 3, 2), np.nan),
        "negative": np.full((2, 3, 2), -5),
        "huge": np.full((2, 3, 2), 2**64 - 1, dtype=np.uint64),
        "object": np.array([[[None]]], dtype=object),
        "text": np.array([[["1"]]]),
        "bool": np.ones((2, 3, 2), dtype=bool),
        "empty": np.zeros((0, 0, 0), dtype=np.int32),
    }[array]
    holders = [
        odd,
        {"sample": odd},
        {"meta_info": {"routed_experts": odd}},
        {"outputs": [{"routed_experts": odd}]},
        {"routed_experts": odd[None], "input_lengths": np.array([2])},
        {"choices": [{"routed_experts": odd, "meta_info": {"routed_experts": odd}}]},
    ]
    for holder in holders:
        assert attempt(FORMATS[name], holder) is None, f"{name} made routes of {array}"

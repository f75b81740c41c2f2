"""Counting: fast equals reference, ranges add up, and what cannot be counted is refused."""

import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import store_memory
from equipoise.core import ModelShape, Routes, RoutesError, SampleRoutes, ScheduleError
from equipoise.loads.count import count_range, count_routes, count_sample
from tests.loads import reference

DTYPES = (np.uint8, np.uint16, np.int16, np.int32, np.int64)


def make_model(*, experts, top_k, layers):
    return ModelShape(
        name="tiny",
        experts=experts,
        top_k=top_k,
        layer_numbers=tuple(range(layers)),
        hidden_layers=layers,
        hidden=8,
        expert_width=4,
    )


@st.composite
def samples(draw, *, max_rows=12):
    """A sample with any shape, dtype and masks, and the number of its experts."""
    experts = draw(st.sampled_from([1, 2, 5, 8, 100, 128, 256, 512]))
    top_k = draw(st.sampled_from([k for k in (1, 2, 6, 8) if k <= experts]))
    rows, layers = draw(st.integers(0, max_rows)), draw(st.integers(1, 4))
    dtype = draw(st.sampled_from([d for d in DTYPES if np.iinfo(d).max >= experts - 1]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    padding_T = rng.random(rows) < 0.3 if draw(st.booleans()) else None
    known_TL = rng.random((rows, layers)) < draw(st.sampled_from([0.0, 0.7, 1.0])) if draw(st.booleans()) else None
    real = rows - (0 if padding_T is None else int(padding_T.sum()))
    ids = rng.integers(0, experts, size=(rows, layers, top_k)).astype(dtype)
    if known_TL is not None:
        # What stands in an unknown row means nothing, so it must not matter.
        ids[~known_TL] = np.iinfo(dtype).max
    sample = SampleRoutes(
        name="s",
        ids_TLK=ids,
        num_tokens=real + draw(st.integers(0, 2)),
        known_TL=known_TL,
        padding_T=padding_T,
    )
    return sample, experts


def assert_equals_reference(found, sample, experts):
    np.testing.assert_array_equal(found.count_LE, reference.count_LE(sample, experts))
    np.testing.assert_array_equal(found.padding_LE, reference.count_LE(sample, experts, padding=True))
    np.testing.assert_array_equal(found.unknown_L, reference.unknown_L(sample))


@settings(max_examples=100, deadline=None)
@given(samples())
def test_counting_equals_the_reference(case):
    sample, experts = case
    assert_equals_reference(count_sample(sample, experts), sample, experts)


@settings(max_examples=80, deadline=None)
@given(samples(), st.data())
def test_a_range_equals_the_reference_of_the_cut_sample(case, data):
    sample, experts = case
    start = data.draw(st.integers(0, sample.num_tokens))
    stop = data.draw(st.integers(start, sample.num_tokens))
    found = count_range(sample, start, stop, experts)
    assert_equals_reference(found, reference.cut(sample, start, stop), experts)


@settings(max_examples=80, deadline=None)
@given(samples(), st.lists(st.integers(0, 14), max_size=4))
def test_ranges_that_tile_a_sample_add_up_to_it(case, cuts):
    sample, experts = case
    if not sample.num_tokens:
        return
    edges = sorted({0, sample.num_tokens, *(c for c in cuts if c < sample.num_tokens)})
    parts = [count_range(sample, a, b, experts) for a, b in pairwise(edges)]
    whole = count_sample(sample, experts)
    for name in ("count_LE", "padding_LE", "unknown_L"):
        np.testing.assert_array_equal(sum(getattr(p, name) for p in parts), getattr(whole, name), err_msg=name)


AWKWARD = {
    "no rows": {"rows": 0},
    "one expert": {"experts": 1, "top_k": 1},
    "top-1": {"top_k": 1},
    "top-6": {"experts": 160, "top_k": 6},
    "eight bytes, odd experts": {"experts": 100, "top_k": 8},
    "eight bytes, all 256 ids": {"experts": 256, "top_k": 8},
    "two-byte ids": {"experts": 512, "top_k": 8, "dtype": np.uint16},
    "big-endian ids": {"experts": 512, "top_k": 8, "dtype": np.dtype(">i4")},
    "all rows equal": {"experts": 128, "top_k": 8, "same": True},
}


def make_sample(*, rows=300, layers=3, experts=128, top_k=8, dtype=np.uint8, same=False, seed=0, name="s"):
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, experts, size=(rows, layers, top_k)).astype(dtype)
    if same:
        ids[:] = experts - 1
    return SampleRoutes(name=name, ids_TLK=ids, num_tokens=rows + 1)


@pytest.mark.parametrize("shape", AWKWARD.values(), ids=AWKWARD.keys())
def test_awkward_shapes_equal_the_reference(shape):
    sample = make_sample(**shape)
    experts = shape.get("experts", 128)
    assert_equals_reference(count_sample(sample, experts), sample, experts)


@pytest.mark.parametrize("offset", [0, 1], ids=["aligned", "odd address"])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16], ids=["one byte", "two bytes"])
def test_layout_of_the_memory_does_not_matter(offset, dtype):
    plain = make_sample(dtype=dtype)
    raw = np.zeros(plain.ids_TLK.nbytes + offset, dtype=np.uint8)
    raw[offset:] = plain.ids_TLK.ravel().view(np.uint8)
    shifted = raw[offset:].view(dtype).reshape(plain.ids_TLK.shape)
    fortran = np.asfortranarray(plain.ids_TLK)
    for ids in (shifted, fortran):
        sample = SampleRoutes(name="s", ids_TLK=ids, num_tokens=plain.num_tokens)
        assert_equals_reference(count_sample(sample, 128), plain, 128)


def test_rows_and_unknown_tokens_add_up():
    rng = np.random.default_rng(3)
    ids = rng.integers(0, 64, size=(200, 4, 8)).astype(np.uint8)
    sample = SampleRoutes(name="s", ids_TLK=ids, num_tokens=203, known_TL=rng.random((200, 4)) < 0.8)
    found = count_sample(sample, 64)
    known_L = sample.known_TL.sum(axis=0)
    assert (found.count_LE.sum(axis=1) == known_L * 8).all()
    assert (found.unknown_L + known_L == 203).all()


@pytest.mark.parametrize(
    ("dtype", "bad"),
    [(np.uint8, 127), (np.uint8, 255), (np.uint16, 1100), (np.int16, -1), (np.int64, -(2**40)), (np.int64, 2**40)],
    ids=["in the power of two", "one byte", "two bytes", "minus one", "very negative", "very large"],
)
@pytest.mark.parametrize("masked", [False, True], ids=["plain", "masked"])
def test_an_id_outside_the_experts_is_named_and_never_counted(dtype, bad, masked):
    ids = np.zeros((5, 2, 8), dtype=dtype)
    ids[3, 1, 6] = bad
    known = np.ones((5, 2), dtype=bool)
    known[0] = not masked
    sample = SampleRoutes(name="s7", ids_TLK=ids, num_tokens=5, known_TL=known)
    with pytest.raises(RoutesError, match=rf"'s7': row 3, layer index 1, column 6 holds expert {bad}"):
        count_sample(sample, 100)


def test_more_rows_than_tokens_are_refused():
    sample = SampleRoutes(name="s", ids_TLK=np.zeros((5, 1, 1), dtype=np.uint8), num_tokens=4)
    with pytest.raises(RoutesError, match="5 rows for 4 tokens"):
        count_sample(sample, 8)


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 302)])
def test_a_range_outside_the_sample_is_refused(start, stop):
    with pytest.raises(ScheduleError, match=rf"'s': tokens {start}\.\.{stop} .* it has tokens 0\.\.301"):
        count_range(make_sample(), start, stop, 128)


def test_count_routes_counts_each_sample_and_keeps_padding_apart():
    model = make_model(experts=5, top_k=2, layers=2)
    rng = np.random.default_rng(0)
    plain = SampleRoutes(name="a", ids_TLK=rng.integers(0, 5, size=(7, 2, 2)), num_tokens=8)
    padded = SampleRoutes(
        name="b", ids_TLK=rng.integers(0, 5, size=(6, 2, 2)), num_tokens=4, padding_T=np.arange(6) >= 4
    )
    counts = count_routes(Routes.of([plain, padded], model=model))
    for b, sample in enumerate((plain, padded)):
        np.testing.assert_array_equal(counts.count_BLE[b], reference.count_LE(sample, 5))
        np.testing.assert_array_equal(counts.padding_BLE[b], reference.count_LE(sample, 5, padding=True))
    assert counts.unknown_BL.tolist() == [[1, 1], [0, 0]]
    assert counts.tokens_B.tolist() == [8, 4]
    assert counts.names == ("a", "b")
    assert count_routes(Routes.of([plain], model=model)).padding_BLE is None


@settings(max_examples=60, deadline=None)
@given(samples())
def test_pairs_equal_the_reference(case):
    sample, experts = case
    _, layers, top_k = sample.ids_TLK.shape
    counts = count_routes([sample], model=make_model(experts=experts, top_k=top_k, layers=layers), pairs=True)
    np.testing.assert_array_equal(counts.pair_LEE, reference.pair_LEE(sample, experts))


def test_duplicate_ids_are_rows_each_but_one_token_in_pairs():
    sample = SampleRoutes(name="s", ids_TLK=np.array([[[2, 2, 1]]]), num_tokens=1)
    counts = count_routes([sample], model=make_model(experts=3, top_k=3, layers=1), pairs=True)
    assert counts.count_BLE[0, 0].tolist() == [0, 1, 2]
    assert counts.pair_LEE[0].tolist() == [[0, 0, 0], [0, 1, 1], [0, 1, 1]]


def test_an_iterable_is_consumed_one_sample_at_a_time():
    model = make_model(experts=128, top_k=8, layers=3)
    events = []

    def produce():
        for i in range(20):
            events.append(("made", i))
            yield make_sample(rows=4, seed=i, name=f"s{i}")

    counts = count_routes(produce(), model=model, progress=lambda done, total: events.append(("counted", done, total)))
    assert events == [e for i in range(20) for e in (("made", i), ("counted", i + 1, 0))]
    same = count_routes([make_sample(rows=4, seed=i, name=f"s{i}") for i in range(20)], model=model)
    assert counts == same


def test_what_cannot_be_counted_is_said():
    sample = make_sample()
    with pytest.raises(RoutesError, match="needs model="):
        count_routes([sample])
    with pytest.raises(RoutesError, match="3 layers and top-8; 'tiny' here needs 2 layers"):
        count_routes([sample], model=make_model(experts=128, top_k=8, layers=2))
    routes = Routes.of([sample], model=make_model(experts=128, top_k=8, layers=3))
    with pytest.raises(RoutesError, match="cannot be counted as"):
        count_routes(routes, model=make_model(experts=64, top_k=8, layers=3))


def run_python(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    ).stdout


def test_importing_the_module_does_not_import_numba():
    code = "import sys, equipoise.loads.count; print('numba' in sys.modules)"
    assert run_python(code).strip() == "False"


def test_memory_does_not_grow_with_the_store(tmp_path):
    """Sizes of the store differ by 100 MB; what grows is 49 KB of histogram per sample."""
    peaks = []
    for mebibytes in (8, 104):
        path = tmp_path / f"{mebibytes}.eqr"
        store_memory.write_store(path, size=mebibytes * 2**20, tokens=4096)
        peaks.append(store_memory.count_in_new_process(path)["above_start_MB"])
    assert peaks[1] - peaks[0] < 16
    assert peaks[1] < 200


def test_kernels_run_where_nothing_can_be_cached(tmp_path):
    """A file where numba wants a folder makes every cache location unwritable, for any user."""
    blocker = tmp_path / "file"
    blocker.write_text("")
    code = """
import numba
import numba.core.caching as caching
import numpy as np
caching.CacheImpl._locator_classes = [caching.UserProvidedCacheLocator]
try:
    numba.njit(cache=True)(lambda x: x)
except RuntimeError as error:
    print(str(error)[:21])
from equipoise.core import SampleRoutes
from equipoise.loads.count import count_sample
sample = SampleRoutes(name="s", ids_TLK=np.array([[[1, 1, 2]]], dtype=np.uint8), num_tokens=1)
print(count_sample(sample, 4).count_LE.tolist())
"""
    lines = run_python(code, NUMBA_CACHE_DIR=str(blocker)).splitlines()
    assert lines == ["cannot cache function", "[[0, 2, 1, 0]]"]


@pytest.mark.parametrize(
    ("routes", "model", "words"),
    [
        ("rollouts.jsonl", ModelShape.preset("olmoe"), "a sample of routes is a str; it must be a SampleRoutes"),
        (None, ModelShape.preset("olmoe"), "routes is a NoneType; it must be a Routes or a Iterable"),
        ([], "olmoe", "model is a str; it must be a ModelShape"),
    ],
    ids=["path", "nothing", "model"],
)
def test_what_is_of_another_kind_is_refused_by_name(routes, model, words):
    with pytest.raises(RoutesError, match=words):
        count_routes(routes, model=model)

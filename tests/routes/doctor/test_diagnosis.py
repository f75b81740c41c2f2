"""The doctor as a whole: good data, streams, any content, real traces."""

import weakref
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.core import ModelShape, RoutesError
from equipoise.routes.doctor.diagnosis import CHECKS, diagnose
from equipoise.routes.doctor.reading import CheckCounts, judge
from equipoise.routes.interpret import Recording, interpret
from tests.routes.doctor.recordings import MODEL, fired, good

DATA = Path(__file__).parents[3].parent / "shared" / "data"


@pytest.mark.parametrize("layers", ["all", "moe"])
@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int16, np.uint16, np.int32, np.int64])
def test_good_data_has_no_finding(dtype, layers):
    diagnosis = diagnose(good(dtype=dtype, layers=layers), model=MODEL)
    assert diagnosis.ok
    assert diagnosis.num_samples == 4
    assert diagnosis.num_rows == 99 + 106 + 113 + 120


def test_every_check_gives_a_finding_that_is_named_once():
    names = [f.check for f in diagnose(good(), model=MODEL).findings]
    assert len(names) == len(set(names)) == 21
    assert len(CHECKS) == 14


class TestStream:
    def test_reader_error_is_a_finding_and_what_came_before_is_judged(self):
        def stream():
            yield from good(samples=2)
            raise RoutesError("line 3: base64 is damaged")

        diagnosis = diagnose(stream(), model=MODEL)
        assert diagnosis.fired == ("decode",)
        assert diagnosis["decode"].first_place == "line 3: base64 is damaged"
        assert diagnosis.num_samples == 2

    def test_empty_dump_is_a_finding(self):
        diagnosis = diagnose([], model=MODEL)
        assert diagnosis.fired == ("decode",)
        assert all(f.verdict == "skipped" for f in diagnosis.findings[1:])

    def test_nothing_is_asked_ahead_of_the_sample_being_judged(self):
        alive = []

        def stream():
            for r in good(samples=6):
                alive.append(r.name)
                yield r

        def partner():
            for i, r in enumerate(good(samples=6)):
                # A sample ends when the next one begins, so one more has been taken from the stream.
                assert len(alive) <= i + 2
                yield r

        assert not fired(stream(), second=partner())

    def test_nothing_is_kept_of_a_sample_that_has_been_judged(self):
        alive = []

        def stream():
            for i, r in enumerate(good(samples=6)):
                rows = r.rows.copy()
                alive.append(weakref.ref(rows))
                yield Recording(name=r.name, rows=rows, num_tokens=r.num_tokens, weight_version="v1")
                del rows
                # The sample just yielded, the one before it (being closed), and nothing older.
                assert [a() for a in alive[: max(0, i - 1)]] == [None] * max(0, i - 1)

        assert not fired(stream())

    @settings(max_examples=100, deadline=None)
    @given(seed=st.integers(0, 2**32 - 1), faults=st.integers(0, 2))
    def test_what_the_doctor_passes_can_be_interpreted(self, seed, faults):
        rng = np.random.default_rng(seed)
        recordings = shake(good(tokens=12, seed=seed), rng, faults)
        diagnosis = diagnose(recordings, model=MODEL)
        if diagnosis.ok:
            samples = list(interpret(recordings, model=MODEL))
            assert len(samples) == diagnosis.num_samples
            assert all(s.known_TL is None or s.known_TL.all() for s in samples)

    @settings(max_examples=80, deadline=None)
    @given(
        shape=st.tuples(st.integers(0, 40), st.integers(0, 5), st.integers(0, 5)),
        dtype=st.sampled_from(["i1", "u1", "i2", "u2", "i4", "i8", "u8"]),
        start=st.integers(0, 50) | st.sampled_from([2**31, 2**62]),
        num_tokens=st.none() | st.integers(0, 60),
        seed=st.integers(0, 2**32 - 1),
    )
    def test_no_content_raises(self, shape, dtype, start, num_tokens, seed):
        rng = np.random.default_rng(seed)
        info = np.iinfo(dtype)
        rows = rng.integers(info.min, info.max, size=shape, dtype=dtype, endpoint=True)
        padding = rng.random(shape[0]) < 0.3
        recording = Recording(name="x", rows=rows, start=start, num_tokens=num_tokens, padding=padding)
        diagnosis = diagnose([recording, recording], model=MODEL, second=[recording])
        assert all(0 <= f.share <= 1 for f in diagnosis.findings)


def shake(recordings, rng, faults):
    """Do some of the things that go wrong to randomly chosen recordings."""
    for _ in range(faults):
        i = int(rng.integers(len(recordings)))
        r = recordings[i]
        if not r.rows.size:
            continue
        row, layer, column = (int(rng.integers(n)) for n in r.rows.shape)
        rows = r.rows.copy()
        rows[row, layer, column] = rng.choice([-2, -1, 0, 3, 63, 64, 500])
        changes = [
            {"rows": rows},
            {"rows": r.rows[:row]},
            {"num_tokens": r.num_tokens + int(rng.integers(-2, 3))},
            {"start": int(rng.integers(3))},
            {"tokens": None},
            {"name": recordings[i - 1].name},
            {"rows": r.rows[:, 1:]},
            {"rows": r.rows[:, :, 1:]},
            {"rows": r.rows[:, 1:3], "layer_numbers": (1, 2)},
            {"padding": rng.random(len(r.rows)) < 0.2},
        ]
        recordings[i] = attempt(r, changes[int(rng.integers(len(changes)))])
    return recordings


def attempt(recording, change):
    """The recording with a change, or as it was where the change does not even make a recording."""
    try:
        return replace(recording, **change)
    except RoutesError:
        return recording


def test_a_finding_has_a_share_and_advice_exactly_when_it_is_one():
    counts = CheckCounts()
    none = judge("x", counts, unit="rows", advice="do", needs="pears")
    assert (none.verdict, none.detail, none.advice) == ("skipped", "needs pears", "")
    counts.add(0, 8, lambda: "nowhere")
    good_one = judge("x", counts, unit="rows", advice="do")
    assert (good_one.verdict, good_one.share, good_one.advice, good_one.first_place) == ("good", 0.0, "", "")
    counts.add(1, 2, lambda: "first")
    counts.add(1, 2, lambda: "second")
    bad_one = judge("x", counts, unit="rows", advice="do")
    assert (bad_one.verdict, bad_one.advice, bad_one.first_place) == ("finding", "do", "first")
    assert bad_one.share == pytest.approx(2 / 12)


@pytest.mark.data
@pytest.mark.skipif(not DATA.exists(), reason="real traces are not beside the project")
@pytest.mark.parametrize(
    ("file", "ids", "offsets", "preset"),
    [
        ("dsv2lite_esft_routes.npz", "law_ids", "law_offsets", "deepseek-v2-lite"),
        ("gptoss20b_decode_routes.npz", "ids", "offsets", "gpt-oss-20b"),
    ],
)
def test_real_traces_are_good(file, ids, offsets, preset):
    with np.load(DATA / file) as data:
        rows, edges = data[ids], data[offsets][:201]
    recordings = [
        Recording(name=f"s{i}", rows=rows[a:b], num_tokens=int(b - a) + 1) for i, (a, b) in enumerate(pairwise(edges))
    ]
    diagnosis = diagnose(recordings, model=ModelShape.preset(preset))
    assert diagnosis.fired == (), [f for f in diagnosis.findings if f.verdict == "finding"]


@pytest.mark.parametrize("given", ["rollouts.jsonl", Path("rollouts.jsonl"), None, 5], ids=repr)
def test_a_dump_in_place_of_its_recordings_is_refused(given):
    with pytest.raises(
        RoutesError, match=rf"recordings is a {type(given).__name__}; .*stream_recordings\(dump, model=\)"
    ):
        diagnose(given, model=MODEL)


def test_a_model_of_another_kind_is_refused():
    with pytest.raises(RoutesError, match="model is a str; it must be a ModelShape"):
        diagnose(good(), model="olmoe")

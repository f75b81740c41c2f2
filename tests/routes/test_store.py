"""The native store: equal after reading, whole after a crash, refused when damaged."""

import json
import os
import signal
import struct
import subprocess
import sys
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.core import ModelShape, Routes, RoutesError, SampleRoutes, Segment
from equipoise.routes import store
from equipoise.routes.registry import write_routes
from equipoise.routes.source import Source
from equipoise.routes.store import StoreWriter, open_store

MODEL = ModelShape(
    name="tiny", experts=9, top_k=3, layer_numbers=(1, 2), hidden_layers=4, hidden=8, expert_width=4, source="made up"
)
WIDE = ModelShape(
    name="wide", experts=300, top_k=2, layer_numbers=(0,), hidden_layers=1, hidden=8, expert_width=4, hash_layers=(0,)
)


def make_sample(name="a", rows=4, *, model=MODEL, seed=0, layers=None):
    rng = np.random.default_rng(seed)
    layers = layers or model.layers
    ids = rng.integers(0, model.experts, size=(rows, layers, model.top_k))
    return SampleRoutes(name=name, ids_TLK=ids, num_tokens=rows + 1)


def make_full_sample(name="full", rows=5, seed=1):
    """One with every optional part."""
    rng = np.random.default_rng(seed)
    return SampleRoutes(
        name=name,
        ids_TLK=rng.integers(0, 9, size=(rows, 2, 3)),
        num_tokens=rows,
        known_TL=rng.random((rows, 2)) < 0.6,
        padding_T=np.arange(rows) == rows - 1,
        segments=(Segment(start=0, stop=2, weight_version="v1"), Segment(start=2, stop=rows, weight_version="v2")),
        tokens_T=rng.integers(0, 1000, size=rows),
    )


def write_store(path, samples, *, model=MODEL, **options):
    with StoreWriter(path, model=model, **options) as writer:
        for sample in samples:
            writer.append(sample)
    return path


def comparable(sample, experts):
    """Everything a sample says: ids of unknown rows mean nothing."""
    known = True if sample.known_TL is None else sample.known_TL[:, :, None]
    ids = np.where(known, sample.ids_TLK, experts).tolist()
    masks = [None if m is None else m.tolist() for m in (sample.known_TL, sample.padding_T, sample.tokens_T)]
    return (sample.name, ids, sample.num_tokens, sample.segments, *masks)


@st.composite
def stored_samples(draw, model):
    rows, layers = draw(st.integers(0, 9)), model.layers
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    cuts = sorted(draw(st.lists(st.integers(0, rows), max_size=2)))
    edges = [0, *cuts, rows]
    versions = draw(st.lists(st.text(max_size=3), min_size=len(edges) - 1, max_size=len(edges) - 1))
    segments = tuple(
        Segment(start=a, stop=b, weight_version=v) for a, b, v in zip(edges, edges[1:], versions, strict=False)
    )
    tokens = rows + draw(st.integers(0, 2))
    return SampleRoutes(
        name=draw(st.text(max_size=12)),
        ids_TLK=rng.integers(0, model.experts, size=(rows, layers, model.top_k)),
        num_tokens=tokens,
        known_TL=rng.random((rows, layers)) < 0.5 if draw(st.booleans()) else None,
        padding_T=rng.random(rows) < 0.3 if draw(st.booleans()) else None,
        segments=segments if draw(st.booleans()) else (),
        tokens_T=rng.integers(-1, 2**40, size=tokens) if draw(st.booleans()) else None,
    )


@settings(max_examples=60, deadline=None)
@given(
    model=st.sampled_from([MODEL, WIDE]),
    data=st.data(),
    chunk_bytes=st.sampled_from([8, 64, 4 * 2**20]),
)
def test_what_is_written_is_read_back_equal(tmp_path_factory, model, data, chunk_bytes):
    samples = data.draw(st.lists(stored_samples(model), max_size=4))
    path = write_store(tmp_path_factory.mktemp("s") / "x.eqr", samples, model=model, chunk_bytes=chunk_bytes)
    routes = open_store(path, verify="all")
    assert routes.model == model
    assert routes.layer_numbers == model.layer_numbers
    found = [comparable(s, model.experts) for s in routes]
    assert found == [comparable(s, model.experts) for s in samples]
    assert path.stat().st_size % 8 == 0


@pytest.mark.parametrize(("model", "dtype"), [(MODEL, np.uint8), (WIDE, np.uint16)], ids=["9 experts", "300 experts"])
def test_ids_take_the_smallest_dtype(tmp_path, model, dtype):
    path = write_store(tmp_path / "x.eqr", [make_sample(model=model)], model=model)
    assert open_store(path).samples[0].ids_TLK.dtype == dtype


def test_reading_maps_the_file_instead_of_copying(tmp_path):
    path = write_store(tmp_path / "x.eqr", [make_sample(rows=50)])
    samples = open_store(path).samples
    first, again = samples[0].ids_TLK, samples[0].ids_TLK
    assert np.shares_memory(first, again)
    assert not first.flags.owndata and not first.flags.writeable


def test_the_samples_are_a_sequence(tmp_path):
    given = [make_sample(name, seed=i) for i, name in enumerate("abcd")]
    routes = open_store(write_store(tmp_path / "x.eqr", given))
    assert [s.name for s in routes.samples[1:3]] == ["b", "c"]
    assert routes.samples[-1].name == "d"
    with pytest.raises(IndexError):
        routes.samples[4]
    assert routes == open_store(tmp_path / "x.eqr")
    assert routes == Routes.of(given, model=MODEL)
    assert routes != Routes.of(given[:3], model=MODEL)


def test_a_store_can_hold_some_layers_of_the_model(tmp_path):
    path = write_store(tmp_path / "x.eqr", [make_sample(layers=1)], layer_numbers=(2,))
    assert open_store(path).layer_numbers == (2,)


def test_the_bytes_are_those_of_the_spec(tmp_path):
    """Built by hand from the module docstring, not by the writer."""
    ids = np.array([[[1, 2, 3], [4, 5, 6]]], dtype=np.uint8)
    text = json.dumps({"model": MODEL.figures(), "layer_numbers": [1, 2], "dtype": "|u1", "chunk_bytes": 8}).encode()
    text += b" " * (-len(text) % 8)
    head = struct.pack("<8sIII", b"EQROUTES", 1, len(text), 0)
    data = head + struct.pack("<I", zlib.crc32(head + text)) + text
    meta = b'{"name":"s","segments":[[0,1,"v7"]]}'
    meta += b" " * (-len(meta) % 8)
    parts = [ids.tobytes() + bytes(2), bytes([0b10000000]) + bytes(7), struct.pack("<q", 11), struct.pack("<q", 12)]
    table = struct.pack("<4I", *map(zlib.crc32, parts))
    record = struct.pack("<8sQQQIII", b"EQSAMPLE", 0, 1, 2, 1 + 4, len(meta), 4)
    data += record + struct.pack("<I", zlib.crc32(record + meta + table)) + meta + table + b"".join(parts)
    end = struct.pack("<8sQI", b"EQSTOEND", 1, 0)
    data += end + struct.pack("<I", zlib.crc32(end))
    path = tmp_path / "x.eqr"
    path.write_bytes(data)
    (sample,) = open_store(path, verify="all").samples
    assert (sample.name, sample.num_tokens) == ("s", 2)
    assert sample.ids_TLK.tolist() == ids.tolist()
    assert sample.known_TL.tolist() == [[True, False]]
    assert sample.tokens_T.tolist() == [11, 12]
    assert sample.segments == (Segment(start=0, stop=1, weight_version="v7"),)


def boundaries(path):
    """Offsets at which 0, 1, 2, ... samples are whole."""
    entries = open_store(path).samples._found
    return [entries[0].offset, *(e.stop for e in entries)]


def test_a_file_cut_at_any_byte_is_refused_and_its_whole_samples_recovered(tmp_path):
    given = [make_sample("a", 2), make_full_sample("b", 3), make_sample("c", 0)]
    whole = write_store(tmp_path / "whole.eqr", given, chunk_bytes=8)
    data, edges = whole.read_bytes(), boundaries(whole)
    path = tmp_path / "cut.eqr"
    for size in range(len(data)):
        path.write_bytes(data[:size])
        if size < edges[0]:
            with pytest.raises(RoutesError, match=r"cut\.eqr"):
                open_store(path, recover=True)
            continue
        kept = sum(edge <= size for edge in edges) - 1
        with pytest.raises(RoutesError, match=f"sample {kept} "):
            open_store(path)
        recovered = open_store(path, recover=True)
        assert [comparable(s, 9) for s in recovered] == [comparable(s, 9) for s in given[:kept]], size


def test_a_cut_sample_whose_header_is_whole_is_named(tmp_path):
    path = write_store(tmp_path / "x.eqr", [make_sample("first"), make_sample("second", 40)])
    os.truncate(path, path.stat().st_size - 60)
    with pytest.raises(RoutesError, match=r"sample 1 .*'second' is cut off.*recover=True reads the 1 samples"):
        open_store(path)


@pytest.mark.parametrize("bit", [0, 7])
def test_a_flipped_bit_anywhere_is_refused(tmp_path, bit):
    given = [make_sample("a", 2), make_full_sample("b", 3)]
    data = write_store(tmp_path / "whole.eqr", given, chunk_bytes=16).read_bytes()
    path = tmp_path / "flipped.eqr"
    edges = boundaries(tmp_path / "whole.eqr")
    for at in range(len(data)):
        damaged = bytearray(data)
        damaged[at] ^= 1 << bit
        path.write_bytes(damaged)
        with pytest.raises(RoutesError, match=r"flipped\.eqr") as caught:
            open_store(path, verify="all")
        if edges[0] <= at < edges[-1]:
            assert f"sample {sum(edge <= at for edge in edges) - 1} " in str(caught.value), at


@pytest.mark.parametrize(
    ("kept", "words"),
    [
        ([0, 1], r"sample 2: the end mark counts 3 samples"),
        ([0, 1, 2, 3], r"sample 4: the end mark counts 3 samples"),
        ([1, 0, 2], r"sample 0 .*: its header says sample 1.*records are mixed up"),
        ([0, 2], r"sample 1 .*: its header says sample 2.*records are mixed up"),
    ],
    ids=["last lost", "one too many", "swapped", "one lost"],
)
def test_whole_samples_that_are_not_all_or_not_in_order_are_refused(tmp_path, kept, words):
    samples = [make_sample(name, seed=seed) for seed, name in enumerate("abcd")]
    path, longer = (write_store(tmp_path / f"{count}.eqr", samples[:count]) for count in (3, 4))
    found, data = store.map_store(longer).found, longer.read_bytes()
    head, end = data[: found[0].offset], path.read_bytes()[store.map_store(path).end :]
    path.write_bytes(head + b"".join(data[found[at].offset : found[at].stop] for at in kept) + end)
    with pytest.raises(RoutesError, match=words):
        open_store(path)


def test_a_damaged_payload_is_found_when_its_sample_is_first_read(tmp_path):
    path = write_store(tmp_path / "x.eqr", [make_sample("a"), make_sample("b"), make_sample("c")])
    entry = open_store(path).samples._found[1]
    data = bytearray(path.read_bytes())
    data[entry.start + 3] ^= 4
    path.write_bytes(data)
    samples = open_store(path).samples
    assert samples[0] == Routes.of([make_sample("a")], model=MODEL).samples[0]
    for _ in range(2):
        with pytest.raises(RoutesError, match=r"sample 1 'b': bytes .* wrong checksum"):
            samples[1]
    assert samples[2].name == "c"
    with pytest.raises(RoutesError, match="sample 1 'b'"):
        open_store(path, verify="all")


def test_an_id_outside_the_model_is_refused_even_with_a_right_checksum(tmp_path):
    path = write_store(tmp_path / "x.eqr", [make_sample("a")])
    foreign = MODEL.replace(experts=12)
    write_store(tmp_path / "y.eqr", [make_sample("a", model=foreign, seed=3)], model=foreign)
    header = open_store(path).samples._found[0].offset
    other = open_store(tmp_path / "y.eqr").samples._found[0].offset
    path.write_bytes(path.read_bytes()[:header] + (tmp_path / "y.eqr").read_bytes()[other:])
    with pytest.raises(RoutesError, match=r"sample 0 'a': .* the model has experts 0\.\.8"):
        open_store(path).samples[0]


def test_recovery_drops_last_samples_whose_payload_never_reached_the_disk(tmp_path, caplog):
    path = write_store(tmp_path / "x.eqr", [make_sample("a"), make_sample("b", 30), make_sample("c", 9)])
    data = bytearray(path.read_bytes())
    lost = open_store(path).samples._found[1:]
    for entry in lost:
        data[entry.start : entry.stop] = bytes(entry.stop - entry.start)
    path.write_bytes(data[: lost[-1].stop])
    assert [s.name for s in open_store(path, recover=True)] == ["a"]
    assert "recovered the 1 samples before it" in caplog.text
    with StoreWriter(path, model=MODEL, recover=True) as writer:
        writer.append(make_sample("d"))
    assert [s.name for s in open_store(path, verify="all")] == ["a", "d"], "written where the lost ones were"


def test_appending_continues_a_store(tmp_path):
    path = write_store(tmp_path / "x.eqr", [make_sample("a")])
    with StoreWriter(path, model=MODEL.replace(name="same figures"), sync=True) as writer:
        assert len(writer) == 1
        writer.append(make_sample("b", 7))
    assert [(s.name, s.num_rows) for s in open_store(path, verify="all")] == [("a", 4), ("b", 7)]


def test_appending_after_a_crash_needs_recover_and_then_continues(tmp_path):
    path = write_store(tmp_path / "x.eqr", [make_sample("a"), make_sample("b")])
    os.truncate(path, path.stat().st_size - 40)
    before = path.read_bytes()
    with pytest.raises(RoutesError, match="recover=True"):
        StoreWriter(path, model=MODEL)
    assert path.read_bytes() == before
    with StoreWriter(path, model=MODEL, recover=True) as writer:
        writer.append(make_sample("c"))
    assert [s.name for s in open_store(path, verify="all")] == ["a", "c"]


@pytest.mark.parametrize(
    "other",
    [{"model": MODEL.replace(experts=8)}, {"model": MODEL, "layer_numbers": (1,)}],
    ids=["other experts", "other layers"],
)
def test_appending_to_another_models_store_is_refused_and_leaves_it(tmp_path, other):
    path = write_store(tmp_path / "x.eqr", [make_sample("a")])
    before = path.read_bytes()
    with pytest.raises(RoutesError, match=r"x\.eqr holds routes of 'tiny', layers \(1, 2\)"):
        StoreWriter(path, **other)
    assert path.read_bytes() == before


def test_a_sample_that_does_not_fit_is_refused_and_the_store_goes_on(tmp_path):
    path = tmp_path / "x.eqr"
    with StoreWriter(path, model=MODEL) as writer:
        writer.append(make_sample("a"))
        with pytest.raises(RoutesError, match=r"sample 'bad'.*1 layers and top-2"):
            writer.append(make_sample("bad", model=WIDE))
        writer.append(make_sample("b"))
    assert [s.name for s in open_store(path)] == ["a", "b"]


def test_a_writer_left_by_an_error_leaves_no_end_mark(tmp_path):
    path = tmp_path / "x.eqr"
    with pytest.raises(KeyError), StoreWriter(path, model=MODEL) as writer:
        writer.append(make_sample("a"))
        raise KeyError("the rollout failed")
    with pytest.raises(RoutesError, match=r"sample 1 .*without an end mark"):
        open_store(path)
    assert [s.name for s in open_store(path, recover=True)] == ["a"]


WRITE_UNTIL_KILLED = """
import sys
import numpy as np
from equipoise.core import ModelShape, SampleRoutes
from equipoise.routes.store import StoreWriter

model = ModelShape(name="m", experts=9, top_k=3, layer_numbers=(1, 2), hidden_layers=4, hidden=8, expert_width=4)
with StoreWriter(sys.argv[1], model=model) as writer:
    for i in range(10**6):
        ids = np.full((1 + i % 5000, 2, 3), i % 9)
        writer.append(SampleRoutes(name=f"s{i}", ids_TLK=ids, num_tokens=len(ids)))
        sys.stdout.write(f"{i}\\n")
        sys.stdout.flush()
"""


def test_a_killed_writer_leaves_every_earlier_sample(tmp_path):
    path = tmp_path / "x.eqr"
    child = subprocess.Popen([sys.executable, "-c", WRITE_UNTIL_KILLED, path], stdout=subprocess.PIPE)
    seen = [int(child.stdout.readline()) for _ in range(200)]
    child.send_signal(signal.SIGKILL)
    seen += [int(line) for line in child.communicate()[0].splitlines()]
    assert child.returncode == -signal.SIGKILL
    with pytest.raises(RoutesError):
        open_store(path)
    samples = open_store(path, recover=True).samples
    assert len(samples) >= seen[-1] + 1
    for i, sample in enumerate(samples):
        assert (sample.name, sample.num_rows, set(sample.ids_TLK.ravel().tolist())) == (f"s{i}", 1 + i % 5000, {i % 9})


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200), st.sampled_from([b"", b"EQROUTES", b"EQROUTES\1\0\0\0"]))
def test_foreign_bytes_give_our_error_only(tmp_path_factory, data, start):
    path = tmp_path_factory.mktemp("f") / "x.eqr"
    path.write_bytes(start + data)
    for recover in (False, True):
        with pytest.raises(RoutesError, match=r"x\.eqr"):
            open_store(path, recover=recover)


def test_what_cannot_be_opened_is_said(tmp_path):
    with pytest.raises(RoutesError, match="cannot be read"):
        open_store(tmp_path / "absent.eqr")
    with pytest.raises(RoutesError, match="cannot be written"):
        StoreWriter(tmp_path / "no" / "folder.eqr", model=MODEL)
    with pytest.raises(RoutesError, match="multiple of 8"):
        StoreWriter(tmp_path / "x.eqr", model=MODEL, chunk_bytes=12)
    with pytest.raises(RoutesError, match="verify is 'some'"):
        open_store(write_store(tmp_path / "y.eqr", []), verify="some")


@pytest.mark.parametrize("version", [0, 2])
def test_a_store_of_another_version_is_refused(tmp_path, version):
    path = write_store(tmp_path / "x.eqr", [make_sample()])
    data = bytearray(path.read_bytes())
    magic, _, *rest = store.FILE_HEAD.unpack_from(data)
    store.FILE_HEAD.pack_into(data, 0, magic, version, *rest)
    path.write_bytes(data)
    with pytest.raises(RoutesError, match=f"a native store of version {version}; this reader knows version 1"):
        open_store(path)


FORMAT = store.FORMATS[0]


def test_the_format_is_known_by_content(tmp_path):
    path = write_store(tmp_path / "x.anything", [])
    other = tmp_path / "y.eqr"
    other.write_bytes(b"EQROUT")
    assert FORMAT.matches(Source.of(path))
    assert not FORMAT.matches(Source.of(other))
    assert not FORMAT.matches(Source.of([1, 2]))
    assert not FORMAT.matches(Source.of(tmp_path))


def test_the_format_yields_one_recording_per_segment_with_unknown_rows_as_minus_one(tmp_path):
    sample = make_full_sample(rows=5)
    path = write_store(tmp_path / "x.eqr", [sample, make_sample("plain")])
    first, second, plain = FORMAT.read(Source.of(path), MODEL)
    assert [(r.name, r.start, r.num_tokens, r.weight_version) for r in (first, second, plain)] == [
        ("full", 0, 2, "v1"),
        ("full", 2, 5, "v2"),
        ("plain", 0, 5, ""),
    ]
    rows = np.concatenate([first.rows, second.rows])
    assert np.array_equal(rows, np.where(sample.known_TL[:, :, None], sample.ids_TLK, -1))
    assert second.padding.tolist() == [False, False, True]
    assert first.tokens.tolist() == sample.tokens_T[:2].tolist()
    assert plain.layer_numbers == (1, 2)
    with pytest.raises(RoutesError, match="9 experts, top-3"):
        next(FORMAT.read(Source.of(path), WIDE))


def test_writing_a_store_anew_replaces_the_file_only_when_complete(tmp_path):
    path = write_store(tmp_path / "x.eqr", [make_sample("a"), make_sample("b")])
    routes = open_store(path)
    write_routes(routes, path, format="equipoise")
    assert open_store(path, verify="all") == routes
    damaged = Routes(model=MODEL, samples=[make_sample("c"), make_sample("bad", model=WIDE)], layer_numbers=(1, 2))
    with pytest.raises(RoutesError, match="'bad'"):
        write_routes(damaged, path, format="equipoise")
    assert open_store(path, verify="all") == routes
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x.eqr"]

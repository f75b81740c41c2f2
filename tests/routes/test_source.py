"""Sources: containers are opened without running code, once, and what is wrong with them is said."""

import pickle
import sys
import zipfile

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.core import RoutesError
from equipoise.routes import source as source_module
from equipoise.routes.source import Source, integer_array, plain_array
from tests.routes.writers import write_npz, write_torch


class Bomb:
    """Unpickling this would raise SystemExit, which no except clause here catches."""

    def __reduce__(self):
        return (exit, (3,))


def test_a_missing_path_is_named(tmp_path):
    with pytest.raises(RoutesError, match=r"no dump at .*nowhere.jsonl"):
        Source.of(tmp_path / "nowhere.jsonl")


def test_lines_of_jsonl_are_records_and_blank_lines_are_not(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}\n\n[2]\n')
    assert list(Source.of(path).records()) == [("line 1", {"a": 1}), ("line 3", [2])]


def test_a_broken_line_is_named_and_earlier_lines_are_still_read(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}\n{"a": \n')
    records = Source.of(path).records()
    assert next(records) == ("line 1", {"a": 1})
    with pytest.raises(RoutesError, match="line 2 is not JSON"):
        next(records)


def test_an_error_of_the_caller_is_not_blamed_on_the_line(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("1\n")
    records = Source.of(path).records()
    next(records)
    with pytest.raises(ValueError, match="mine") as caught:
        records.throw(ValueError("mine"))
    assert not isinstance(caught.value, RoutesError)


def test_a_folder_gives_its_files_in_order_of_name(tmp_path):
    (tmp_path / "b.json").write_text("[1, 2]")
    (tmp_path / "a.json").write_text("0\n")
    (tmp_path / "notes.md").write_text("not a dump")
    assert [record for _, record in Source.of(tmp_path).records()] == [0, 1, 2]
    assert [place for place, _ in Source.of(tmp_path).records()] == [
        "a.json record 0",
        "b.json record 0",
        "b.json record 1",
    ]


def test_nothing_in_it_is_an_error(tmp_path):
    path = tmp_path / "empty.jsonl"
    path.write_text("\n")
    with pytest.raises(RoutesError, match="holds no record"):
        list(Source.of(path).nonempty_records())
    assert Source.of(path).first() is None


def test_opened_reads_a_whole_file_once(tmp_path, monkeypatch):
    path = tmp_path / "a.npz"
    write_npz({"x": np.arange(3)}, path)
    loads = []
    real = source_module._load
    monkeypatch.setattr(source_module, "_load", lambda *args: loads.append(args) or real(*args))
    source = Source.of(path).opened()
    for _ in range(3):
        assert source.first()["x"].tolist() == [0, 1, 2]
    assert len(loads) == 1


@pytest.mark.parametrize("suffix", [".pt", ".npy", ".npz"])
def test_no_code_in_a_file_is_run(tmp_path, suffix):
    path = tmp_path / f"bomb{suffix}"
    if suffix == ".pt":
        torch.save({"x": Bomb()}, path)
    elif suffix == ".npy":
        np.save(path, np.array([Bomb()], dtype=object))
    else:
        np.savez(path, x=np.array([Bomb()], dtype=object))
    with pytest.raises(RoutesError, match="cannot be read"):
        list(Source.of(path).records())


def test_a_bare_pickle_called_pt_is_refused(tmp_path):
    path = tmp_path / "a.pt"
    path.write_bytes(pickle.dumps(Bomb(), protocol=2))
    with pytest.raises(RoutesError, match=r"cannot be read as .pt"):
        list(Source.of(path).records())


def test_an_array_called_npz_is_refused(tmp_path):
    path = tmp_path / "a.npz"
    with path.open("wb") as file:
        np.save(file, np.arange(3))
    with pytest.raises(RoutesError, match="not a zip archive"):
        list(Source.of(path).records())


def test_a_zip_of_something_else_is_refused_or_plain(tmp_path):
    path = tmp_path / "a.npz"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("x.npy", b"\x93NUMPY\x01\x00\x10\x00{'descr': '<i8',\n")
    with pytest.raises(RoutesError, match=r"cannot be read as .npz"):
        list(Source.of(path).records())


def test_an_npy_header_that_asks_for_far_too_much_is_refused(tmp_path):
    header = b"{'descr': '<i8', 'fortran_order': False, 'shape': (1099511627776, 1099511627776), }"
    header += b" " * (64 - (10 + len(header) + 1) % 64) + b"\n"
    path = tmp_path / "a.npz"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("x.npy", b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header)
    with pytest.raises(RoutesError, match=r"cannot be read as .npz"):
        list(Source.of(path).records())


def test_without_torch_a_pt_file_says_what_it_needs(tmp_path, monkeypatch):
    path = tmp_path / "a.pt"
    write_torch({"x": np.arange(3)}, path)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(RoutesError, match=r"needs torch to be read; pip install .*or save it as .npz"):
        list(Source.of(path).records())


def test_an_unknown_suffix_lists_the_known_ones(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(b"1,2")
    with pytest.raises(RoutesError, match=r"suffix '.csv'; known: .eqr, .json, .jsonl"):
        list(Source.of(path).records())


@pytest.fixture(scope="module")
def good_bytes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("good")
    write_npz({"x": np.arange(6)}, folder / "a.npz")
    np.save(folder / "a.npy", np.arange(6))
    write_torch({"x": np.arange(6), "y": [1, "two"]}, folder / "a.pt")
    (folder / "a.json").write_text('{"x": [1, 2, 3]}')
    return {path.suffix: path.read_bytes() for path in folder.iterdir()}


@settings(max_examples=60, deadline=None)
@given(
    suffix=st.sampled_from([".npz", ".npy", ".pt", ".json"]),
    place=st.floats(0, 1, exclude_max=True),
    flip=st.integers(1, 255),
    is_cut=st.booleans(),
)
def test_a_damaged_file_gives_our_error_or_a_value(good_bytes, tmp_path_factory, suffix, place, flip, is_cut):
    raw = bytearray(good_bytes[suffix])
    at = int(place * len(raw))
    if is_cut:
        del raw[at:]
    else:
        raw[at] ^= flip
    path = tmp_path_factory.mktemp("bad") / f"a{suffix}"
    path.write_bytes(raw)
    try:
        list(Source.of(path).records())
    except RoutesError as error:
        assert str(path) in str(error)


@pytest.mark.parametrize(
    "value",
    [
        pytest.param([[1, 2], [3]], id="ragged"),
        pytest.param([[1.5]], id="float"),
        pytest.param([[True]], id="bool"),
        pytest.param([[float("nan")]], id="nan"),
        pytest.param([[10**30]], id="huge"),
        pytest.param([["1"]], id="text"),
        pytest.param([1, 2], id="too few axes"),
        pytest.param("12", id="a string"),
        pytest.param(None, id="nothing"),
        pytest.param(torch.ones(1, 1, dtype=torch.bfloat16), id="bfloat16 tensor"),
        pytest.param(np.zeros((1, 1), dtype="datetime64[s]"), id="dates"),
    ],
)
def test_only_integers_become_integer_arrays(value):
    with pytest.raises(RoutesError, match=r"^rows: expected an integer array of 2 axes"):
        integer_array("rows", value, ndim=2)


def test_lists_tensors_and_arrays_become_the_same_array():
    wanted = np.array([[1, 2], [3, 4]])
    for value in (wanted, wanted.tolist(), torch.from_numpy(wanted), [torch.tensor([1, 2]), torch.tensor([3, 4])]):
        assert np.array_equal(integer_array("rows", value, ndim=2), wanted)
    assert plain_array(object()) is None


def test_an_empty_list_is_an_empty_integer_array():
    assert integer_array("tokens", [], ndim=1).dtype.kind == "i"
    with pytest.raises(RoutesError):
        integer_array("tokens", np.zeros(0), ndim=1)


def test_text_too_long_for_a_path_is_told_where_it_belongs():
    with pytest.raises(
        RoutesError, match=r"no dump at 'nrlre1:A*': File name too long; to pass text, put it in a list"
    ):
        Source.of("nrlre1:" + "A" * 5000)


def test_a_file_that_may_not_be_read_is_named(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_text("{}\n")
    monkeypatch.setattr(source_module.os, "access", lambda path, mode: False)
    with pytest.raises(RoutesError, match=r"a.jsonl may not be read"):
        Source.of(tmp_path / "a.jsonl")


def test_lines_in_a_json_file_are_told_their_suffix(tmp_path):
    (tmp_path / "a.json").write_text('{"a": 1}\n{"a": 2}\n')
    with pytest.raises(RoutesError, match=r"several JSON values.*\.jsonl"):
        Source.of(tmp_path / "a.json").opened()


@pytest.mark.parametrize("value", [[False, 0], [[0, 1], [True, 2]]], ids=["flat", "nested"])
def test_a_bool_among_integers_is_refused(value):
    with pytest.raises(RoutesError, match="true or false in it"):
        integer_array("tokens", value, ndim=np.asarray(value).ndim)

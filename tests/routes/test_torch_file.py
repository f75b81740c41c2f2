"""Torch files: numpy arrays come back as they were, and nothing else that is pickled comes back at all."""

import warnings
import zipfile

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.core import RoutesError
from equipoise.routes.source import Source


class Bomb:
    """Unpickling this would raise SystemExit, which no except clause here catches."""

    def __reduce__(self):
        return (exit, (3,))


def load(path):
    return Source.of(path).opened().content


def saved(content, path):
    torch.save(content, path)
    return path


def with_pickle(path, target, change):
    """A copy of a torch file whose pickle went through `change`."""
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(target, "w") as new:
        for member in old.namelist():
            raw = old.read(member)
            new.writestr(member, change(raw) if member.endswith("data.pkl") else raw)
    return target


@pytest.mark.parametrize(
    "array",
    [
        pytest.param(np.arange(6, dtype=np.int32).reshape(1, 2, 3), id="int32"),
        pytest.param(np.asfortranarray(np.arange(6, dtype=np.uint16).reshape(2, 3)), id="fortran-order"),
        pytest.param(np.arange(6, dtype=">i8"), id="big-endian"),
        pytest.param(np.frombuffer(b"\1\2\3", dtype=np.uint8), id="read-only"),
        pytest.param(np.array([[True], [False]]), id="bool"),
        pytest.param(np.array(2.5), id="no-axis"),
        pytest.param(np.zeros((0, 4), dtype=np.int8), id="empty"),
    ],
)
def test_an_array_is_read_as_it_was_written(tmp_path, array):
    (found,) = load(saved([{"a": (array, 7)}], tmp_path / "a.pt"))
    assert found["a"][1] == 7
    assert found["a"][0].dtype == array.dtype and found["a"][0].shape == array.shape
    assert np.array_equal(found["a"][0], array)


def test_numbers_and_tensors_are_read_beside_arrays(tmp_path):
    found = load(saved({"a": np.float64(1.5), "b": np.int16(-3), "c": torch.arange(2)}, tmp_path / "a.pt"))
    assert (found["a"], found["b"], found["c"].tolist()) == (1.5, -3, [0, 1])


def test_a_file_made_with_numpy_1_is_read(tmp_path):
    path = saved({"a": np.arange(3)}, tmp_path / "a.pt")
    renamed = with_pickle(path, tmp_path / "b.pt", lambda raw: raw.replace(b"numpy._core.", b"numpy.core."))
    assert load(renamed)["a"].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    "content",
    [
        pytest.param({"a": Bomb()}, id="object"),
        pytest.param({"a": np.array([Bomb()], dtype=object)}, id="object-array"),
        pytest.param({"a": Bomb}, id="type"),
        pytest.param({"a": np.array([None], dtype=object)}, id="array-of-none"),
        pytest.param({"a": np.zeros(2, dtype=[("x", "i4")])}, id="structured"),
        pytest.param({"a": np.array(["text"])}, id="text"),
    ],
)
def test_any_other_pickled_thing_is_refused(tmp_path, content):
    with pytest.raises(RoutesError, match=r"a\.pt cannot be read as \.pt"):
        load(saved(content, tmp_path / "a.pt"))


@pytest.mark.parametrize("columns", [2, 4], ids=["too many", "too few"])
def test_bytes_that_do_not_fill_the_shape_are_refused(tmp_path, columns):
    path = saved({"a": np.arange(6, dtype=np.int8).reshape(2, 3)}, tmp_path / "a.pt")
    # K\x02K\x03 is the pickled (2, 3) of the shape.
    shape = b"K\x02K%c\x86" % columns
    other = with_pickle(path, tmp_path / "b.pt", lambda raw: raw.replace(b"K\x02K\x03\x86", shape))
    with pytest.raises(RoutesError, match=rf"6 bytes, not those of shape \(2, {columns}\) of int8"):
        load(other)


@settings(max_examples=100, deadline=None)
@given(place=st.integers(0, 400), flip=st.integers(1, 255))
def test_a_damaged_pickle_gives_our_error_or_numbers(tmp_path_factory, place, flip):
    folder = tmp_path_factory.mktemp("damaged")
    path = saved({"a": np.arange(6, dtype=np.int32).reshape(1, 2, 3)}, folder / "a.pt")

    def damage(raw):
        at = place % len(raw)
        return raw[:at] + bytes([raw[at] ^ flip]) + raw[at + 1 :]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of a pickle protocol it does not know
        try:
            found = load(with_pickle(path, folder / "b.pt", damage))
        except RoutesError:
            return
    for array in found.values() if isinstance(found, dict) else ():
        assert not isinstance(array, np.ndarray) or array.dtype.kind in "biuf"


def test_names_that_a_framework_allows_for_the_whole_process_change_nothing(tmp_path):
    allowed = [type(np.dtype(np.int64)), np.ndarray, Bomb]
    path, bomb = saved({"a": np.arange(3)}, tmp_path / "a.pt"), saved({"a": Bomb}, tmp_path / "b.pt")
    with torch.serialization.safe_globals(allowed):
        assert load(path)["a"].tolist() == [0, 1, 2]
        with pytest.raises(RoutesError, match="holds a pickled"):
            load(bomb)
        assert set(allowed) <= set(torch.serialization.get_safe_globals())

"""`LoadMatrix`: checked integers, padding inside the load, cuts that add up, and a file without pickles."""

import gc
import io
import zipfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.core import LoadMatrix, LoadsError
from equipoise.core.files import narrow, read_npz
from equipoise.core.window import LOADS_FORMAT as FORMAT


@st.composite
def matrices(draw, *, ranks=None):
    """Any matrix, with or without each optional part."""
    micro_steps, layers, experts = (draw(st.integers(1, 4)) for _ in range(3))
    shape = (micro_steps, layers, ranks or draw(st.integers(1, 4)), experts)
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    load = rng.integers(0, draw(st.sampled_from([1, 2, 300, 2**31, 2**40])), size=shape)
    return LoadMatrix(
        load,
        stage=draw(st.sampled_from(["recompute", "update"])),
        padding_MLRE=rng.integers(0, load + 1) if draw(st.booleans()) else None,
        coverage_MLR=rng.random(shape[:3]) if draw(st.booleans()) else None,
        filled_MLR=rng.integers(0, load.sum(axis=3) + 1) if draw(st.booleans()) else None,
        layer_numbers_L=np.arange(layers) * 2 + 3 if draw(st.booleans()) else None,
    )


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64])
def test_any_integer_dtype_is_kept_as_int64(dtype):
    loads = LoadMatrix(np.array([[[[1, 100]]]], dtype=dtype))
    assert loads.load_MLRE.dtype == np.int64
    assert loads.load_MLRE.tolist() == [[[[1, 100]]]]


def test_a_nested_list_is_enough():
    loads = LoadMatrix([[[[1, 2], [3, 4]]]])
    assert (loads.num_micro_steps, loads.num_layers, loads.num_ranks, loads.num_experts) == (1, 1, 2, 2)
    assert loads.total_MLE().tolist() == [[[4, 6]]]
    assert loads.stage == "update"


def test_kept_loads_cannot_be_written():
    with pytest.raises(ValueError, match="read-only"):
        LoadMatrix(np.zeros((1, 1, 1, 1), dtype=np.int64)).load_MLRE[0] = 1


ZERO = np.zeros((2, 1, 2, 3), dtype=np.int64)


@pytest.mark.parametrize(
    ("load", "options", "words"),
    [
        pytest.param(ZERO.astype(float), {}, "load_MLRE must hold integers", id="float"),
        pytest.param(ZERO > 0, {}, "load_MLRE must hold integers", id="bool"),
        pytest.param([[1, 2], [3]], {}, "load_MLRE cannot be made an array: .* inhomogeneous", id="unlike lengths"),
        pytest.param(ZERO, {"coverage_MLR": [[1.0], []]}, "coverage_MLR cannot be made an array", id="unlike shares"),
        pytest.param(ZERO[0], {}, "load_MLRE must have 4 axes", id="three-axes"),
        pytest.param(ZERO[:0], {}, "every axis needs at least one", id="empty"),
        pytest.param(np.array([[[[0, 0], [0, -3]]]]), {}, r"load_MLRE\[0, 0, 1, 1\] is -3", id="negative"),
        pytest.param(ZERO + 2**60, {}, r"adds up to 1.38e\+19 rows, and at most 2\^62 ", id="sum"),
        pytest.param(ZERO, {"stage": "train"}, "stage is 'train'; it must be one of recompute, update", id="stage"),
        pytest.param(ZERO, {"padding_MLRE": ZERO[:1]}, "padding_MLRE has shape", id="padding-shape"),
        pytest.param(ZERO, {"padding_MLRE": ZERO - 1}, "padding_MLRE.* is -1", id="padding-negative"),
        pytest.param(ZERO, {"padding_MLRE": ZERO + 1}, "is 1, more than the load it is part of, 0", id="padding-more"),
        pytest.param(ZERO, {"padding_MLRE": ZERO * 0.0}, "padding_MLRE must hold integers", id="padding-float"),
        pytest.param(ZERO, {"coverage_MLR": np.ones((2, 1))}, "coverage_MLR has shape", id="coverage-shape"),
        pytest.param(ZERO, {"coverage_MLR": np.full((2, 1, 2), 1.01)}, "from 0 to 1", id="coverage-above"),
        pytest.param(ZERO, {"coverage_MLR": np.full((2, 1, 2), -0.1)}, "from 0 to 1", id="coverage-below"),
        pytest.param(ZERO, {"coverage_MLR": np.full((2, 1, 2), np.nan)}, "without NaN", id="coverage-nan"),
        pytest.param(ZERO, {"coverage_MLR": np.full((2, 1, 2), "a")}, "from 0 to 1", id="coverage-text"),
        pytest.param(
            ZERO, {"filled_MLR": np.zeros((2, 1), dtype=int)}, "filled_MLR must have 3 axes", id="filled-axes"
        ),
        pytest.param(ZERO, {"filled_MLR": np.zeros((2, 2, 2), dtype=int)}, "filled_MLR has shape", id="filled-shape"),
        pytest.param(ZERO, {"filled_MLR": np.ones((2, 1, 2), dtype=int)}, "is 1, more than the load", id="filled-more"),
        pytest.param(ZERO, {"layer_numbers_L": [0, 1]}, "must be 1 ascending", id="numbers-too-many"),
        pytest.param(ZERO[:, [0, 0]], {"layer_numbers_L": [1, 1]}, "must be 2 ascending", id="numbers-repeated"),
    ],
)
def test_a_matrix_that_makes_no_sense_cannot_be_built(load, options, words):
    with pytest.raises(LoadsError, match=words):
        LoadMatrix(load, **options)


@settings(max_examples=60, deadline=None)
@given(loads=matrices())
def test_real_and_padding_rows_add_up(loads):
    real = loads.without_padding()
    padding = 0 if loads.padding_MLRE is None else loads.padding_MLRE
    np.testing.assert_array_equal(real.load_MLRE + padding, loads.load_MLRE)
    assert real.padding_MLRE is None
    if loads.padding_MLRE is not None:
        assert real.filled_MLR is None, "padding may be filled, and is gone"
    assert real.stage == loads.stage


@settings(max_examples=60, deadline=None)
@given(loads=matrices(), data=st.data())
def test_micro_steps_cut_every_part_alike(loads, data):
    cut = data.draw(st.integers(0, loads.num_micro_steps - 1))
    parts = [loads.micro_steps(m, m + 1) for m in range(loads.num_micro_steps)]
    np.testing.assert_array_equal(np.concatenate([p.load_MLRE for p in parts]), loads.load_MLRE)
    expected = LoadMatrix(
        loads.load_MLRE[[cut]],
        stage=loads.stage,
        padding_MLRE=None if loads.padding_MLRE is None else loads.padding_MLRE[[cut]],
        coverage_MLR=None if loads.coverage_MLR is None else loads.coverage_MLR[[cut]],
        filled_MLR=None if loads.filled_MLR is None else loads.filled_MLR[[cut]],
        layer_numbers_L=loads.layer_numbers_L,
    )
    assert parts[cut] == expected


def test_an_empty_cut_of_micro_steps_is_refused():
    with pytest.raises(LoadsError, match="every axis needs at least one"):
        LoadMatrix(ZERO).micro_steps(2, 2)


@settings(max_examples=60, deadline=None)
@given(loads=matrices(ranks=6), ep=st.sampled_from([1, 2, 3, 6]))
def test_groups_are_consecutive_ranks_and_lose_nothing(loads, ep):
    groups = loads.split_groups(ep)
    assert [g.num_ranks for g in groups] == [ep] * (6 // ep)
    for name in ("load_MLRE", "padding_MLRE", "coverage_MLR", "filled_MLR"):
        whole = getattr(loads, name)
        if whole is None:
            assert all(getattr(g, name) is None for g in groups)
        else:
            np.testing.assert_array_equal(np.concatenate([getattr(g, name) for g in groups], axis=2), whole)


@pytest.mark.parametrize("ep", [0, -2, 4, 5])
def test_ranks_that_do_not_divide_into_groups_are_refused(ep):
    with pytest.raises(LoadsError, match=f"6 ranks do not divide into EP groups of {ep}"):
        LoadMatrix(np.zeros((1, 1, 6, 1), dtype=int)).split_groups(ep)


@settings(max_examples=60, deadline=None)
@given(loads=matrices())
def test_load_of_save_is_the_same_matrix(loads, tmp_path_factory):
    path = tmp_path_factory.mktemp("loads") / "window.npz"
    loads.save(path)
    assert LoadMatrix.load(path) == loads


def test_saved_integers_are_in_the_narrowest_unsigned_dtype(tmp_path):
    path = tmp_path / "window.npz"
    LoadMatrix(ZERO + 300, padding_MLRE=ZERO + 3).save(path)
    with np.load(path) as file:
        assert (file["load_MLRE"].dtype, file["padding_MLRE"].dtype) == (np.uint16, np.uint8)


@pytest.mark.parametrize(
    ("top", "dtype"), [(0, np.uint8), (255, np.uint8), (256, np.uint16), (2**16, np.uint32), (2**32, np.uint64)]
)
def test_narrow_keeps_the_numbers(top, dtype):
    found = narrow(np.array([0, top], dtype=np.int64))
    assert found.dtype == dtype
    assert found.tolist() == [0, top]


def write_npz(path, **arrays):
    np.savez(path, **{"format": np.array(FORMAT), "stage": np.array("update"), "load_MLRE": ZERO, **arrays})


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        pytest.param({"load_MLRE": np.array([[[[1]]]], dtype=object)}, "cannot be read", id="pickled"),
        pytest.param({"format": np.array("equipoise-loads-9")}, "'equipoise-loads-9', expected", id="version"),
        pytest.param({"extra": ZERO}, "expected arrays", id="unknown-array"),
        pytest.param({"stage": np.array("train")}, "stage is 'train'", id="stage"),
        pytest.param({"load_MLRE": ZERO - 1}, "is -1", id="negative"),
    ],
)
def test_a_file_with_wrong_content_is_refused(tmp_path, arrays, words):
    path = tmp_path / "window.npz"
    write_npz(path, **arrays)
    with pytest.raises(LoadsError, match=words):
        LoadMatrix.load(path)


def test_a_file_without_its_loads_is_refused(tmp_path):
    path = tmp_path / "window.npz"
    np.savez(path, format=np.array(FORMAT), stage=np.array("update"))
    with pytest.raises(LoadsError, match="expected arrays"):
        LoadMatrix.load(path)


def test_a_missing_file_is_refused_by_its_path(tmp_path):
    with pytest.raises(LoadsError, match=r"no file at .*nowhere\.npz"):
        LoadMatrix.load(tmp_path / "nowhere.npz")


def test_a_bare_array_file_is_refused(tmp_path):
    path = tmp_path / "window.npy"
    np.save(path, ZERO)
    with pytest.raises(LoadsError, match=r"bare \.npy array"):
        LoadMatrix.load(path)


def test_a_folder_is_refused(tmp_path):
    with pytest.raises(LoadsError, match="cannot be read"):
        LoadMatrix.load(tmp_path)


def npz_bytes():
    buffer = io.BytesIO()
    np.savez_compressed(buffer, format=np.array(FORMAT), stage=np.array("update"), load_MLRE=ZERO + 7)
    return buffer.getvalue()


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_a_damaged_file_is_refused_or_reads_as_what_was_saved(data, tmp_path_factory):
    content = bytearray(npz_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        content[place] ^= data.draw(st.integers(1, 255))
    else:
        del content[place:]
    path = tmp_path_factory.mktemp("loads") / "window.npz"
    path.write_bytes(content)
    try:
        found = LoadMatrix.load(path)
    except LoadsError as error:
        assert str(path) in str(error)
    else:
        assert found == LoadMatrix(ZERO + 7)


@pytest.mark.filterwarnings("error")
def test_a_file_that_is_no_archive_is_closed_again(tmp_path):
    path = tmp_path / "torn.npz"
    path.write_bytes(b"PK\x03\x04 and nothing more")
    with pytest.raises(LoadsError, match="not a zip file"):
        read_npz(path, wanted=FORMAT, error=LoadsError)
    gc.collect()


def test_read_npz_never_unpickles(tmp_path):
    path = tmp_path / "evil.npz"
    with zipfile.ZipFile(path, "w") as archive:
        buffer = io.BytesIO()
        np.save(buffer, np.array([print], dtype=object), allow_pickle=True)
        archive.writestr("format.npy", buffer.getvalue())
    with pytest.raises(LoadsError, match="allow_pickle=False"):
        read_npz(path, wanted=FORMAT, error=LoadsError)


def test_a_folder_that_is_not_there_is_our_error(tmp_path):
    with pytest.raises(LoadsError, match=r"l\.npz cannot be written: No such file"):
        LoadMatrix(np.ones((1, 1, 1, 2), np.int64)).save(tmp_path / "nowhere" / "l.npz")

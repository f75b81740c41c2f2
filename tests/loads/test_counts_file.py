"""Histograms on disk: equal after reading, refused when damaged."""

import numpy as np
import pytest

from equipoise.core import ModelShape, RouteCounts, RoutesError
from equipoise.loads.count import load_counts, save_counts

MODEL = ModelShape.preset("olmoe", layers=2, experts=4, top_k=2)


def make_counts(*, optional=True):
    rng = np.random.default_rng(0)
    extra = {
        "padding_BLE": rng.integers(0, 300, size=(3, 2, 4)),
        "unknown_BL": rng.integers(0, 2, size=(3, 2)),
        "pair_LEE": rng.integers(0, 2**40, size=(2, 4, 4)),
    }
    return RouteCounts(
        model=MODEL,
        count_BLE=rng.integers(0, 2**33, size=(3, 2, 4)),
        tokens_B=np.array([1, 2, 3]),
        names=("a", "line 2\0", ""),
        layer_numbers=MODEL.layer_numbers,
        **(extra if optional else {}),
    )


@pytest.mark.parametrize("optional", [True, False], ids=["every array", "needed arrays"])
def test_counts_are_read_back_equal(tmp_path, optional):
    counts = make_counts(optional=optional)
    save_counts(counts, tmp_path / "c.npz")
    assert load_counts(tmp_path / "c.npz") == counts


@pytest.mark.parametrize("bit", [0, 3, 5])
def test_a_cut_or_damaged_file_gives_our_error_or_the_same_counts(tmp_path, bit):
    counts = make_counts()
    save_counts(counts, tmp_path / "c.npz")
    data = (tmp_path / "c.npz").read_bytes()
    path = tmp_path / "damaged.npz"
    for at in range(0, len(data), 3):
        path.write_bytes(data[:at])
        with pytest.raises(RoutesError, match="damaged"):
            load_counts(path)
        flipped = bytearray(data)
        flipped[at] ^= 1 << bit
        path.write_bytes(flipped)
        # Some bytes of a zip file, such as dates, say nothing about its content.
        try:
            assert load_counts(path) == counts
        except RoutesError as error:
            assert "damaged" in str(error)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": np.array("equipoise-loads-1")}, "says its format is 'equipoise-loads-1'"),
        ({"head": np.array("{")}, "not JSON"),
        ({"head": np.array("[]")}, "must hold an object"),
        ({"head": np.array("{}")}, "does not make sense"),
        ({"count_BLE": np.full((3, 2, 4), -1)}, "counts are unsigned"),
        ({"count_BLE": np.full((3, 2, 4), 0.5)}, "counts are unsigned"),
        ({"tokens_B": np.zeros(2, np.uint8)}, "2 lengths"),
        ({"more": np.zeros(2)}, "expected arrays"),
    ],
    ids=["format", "text", "list", "empty head", "negative", "float", "too short", "stranger"],
)
def test_wrong_content_is_named(tmp_path, change, message):
    path = tmp_path / "c.npz"
    save_counts(make_counts(), path)
    with np.load(path) as file:
        content = {**file, **change}
    np.savez(path, **content)
    with pytest.raises(RoutesError, match=message):
        load_counts(path)


def test_pickled_and_foreign_files_are_refused(tmp_path):
    path = tmp_path / "c.npz"
    np.savez(path, format=np.array("equipoise-counts-1"), head=np.array([{}], dtype=object))
    with pytest.raises(RoutesError, match=r"c\.npz"):
        load_counts(path)
    with pytest.raises(RoutesError, match="no file"):
        load_counts(tmp_path / "absent.npz")
    with pytest.raises(RoutesError, match="cannot be written"):
        save_counts(make_counts(), tmp_path / "no" / "folder.npz")

"""verl batches: fixtures built by hand from the spec, round trips, and what the reader refuses."""

import numpy as np
import pytest
import torch

from equipoise.core import ModelShape, Routes, RoutesError, SampleRoutes
from equipoise.routes.registry import detect, read_routes
from tests.routes.writers import write_dump

MODEL = ModelShape(name="tiny", experts=6, top_k=2, layer_numbers=(1, 2), hidden_layers=3, hidden=8, expert_width=4)
ROWS = [  # [T - 1, decoder layers, K]: layer 0 is dense
    [[[0, 0], [1, 2], [3, 4]], [[0, 0], [5, 0], [2, 1]]],
    [[[0, 0], [4, 3], [0, 1]], [[0, 0], [2, 5], [1, 0]], [[0, 0], [0, 5], [5, 4]], [[0, 0], [1, 3], [2, 0]]],
]
TOKENS = [[11, 12, 13], [21, 22, 23, 24, 25]]
WIDTH, STARTS = 8, (2, 1)
"""Columns of the batch, and the first column of each sample: prompts are padded on the left."""


def padded(*, kind=np.array):
    ids = np.zeros((2, WIDTH, 3, 2), dtype=np.int16)
    mask, tokens = np.zeros((2, WIDTH), dtype=np.int64), np.full((2, WIDTH), 99, dtype=np.int64)
    for b, (rows, start) in enumerate(zip(ROWS, STARTS, strict=True)):
        ids[b, start : start + len(rows)] = rows
        mask[b, start : start + len(rows) + 1] = 1
        tokens[b, start : start + len(rows) + 1] = TOKENS[b]
    return {"routed_experts": kind(ids), "attention_mask": kind(mask), "input_ids": kind(tokens)}


def jagged():
    rows = [torch.tensor([*rows, [[0, 0]] * 3], dtype=torch.int16) for rows in ROWS]
    tokens = [torch.tensor(t) for t in TOKENS]
    nested = {"routed_experts": rows, "input_ids": tokens}
    return {key: torch.nested.as_nested_tensor(parts, layout=torch.jagged) for key, parts in nested.items()}


def jagged_arrays():
    values = np.concatenate([np.array([*rows, [[0, 0]] * 3], dtype=np.int16) for rows in ROWS])
    return {"values": values, "offsets": np.array([0, 3, 8]), "input_ids": np.array(TOKENS[0] + TOKENS[1])}


def expected():
    samples = [
        SampleRoutes(
            name=f"row {b}",
            ids_TLK=np.array(rows)[:, 1:],
            num_tokens=len(rows) + 1,
            tokens_T=np.array(TOKENS[b]),
        )
        for b, rows in enumerate(ROWS)
    ]
    return Routes.of(samples, model=MODEL)


@pytest.mark.parametrize(
    ("batch", "form"),
    [
        pytest.param(padded(), "verl", id="padded arrays"),
        pytest.param(padded(kind=torch.tensor), "verl", id="padded tensors"),
        pytest.param(jagged(), "verl-jagged", id="nested tensors"),
        pytest.param(jagged_arrays(), "verl-jagged", id="values and offsets"),
    ],
)
def test_a_batch_made_by_hand_is_recognised_and_read(batch, form):
    assert detect(batch).name == form
    assert read_routes(batch, model=MODEL) == expected()


def test_files_of_hand_made_batches_are_read(tmp_path):
    np.savez(tmp_path / "a.npz", **padded())
    torch.save(padded(kind=torch.tensor), tmp_path / "a.pt")
    torch.save(jagged(), tmp_path / "b.pt")
    np.savez(tmp_path / "b.npz", **jagged_arrays())
    for path in tmp_path.iterdir():
        assert read_routes(path, model=MODEL) == expected(), path.name


def test_a_bare_nested_tensor_is_read_without_tokens():
    routes = read_routes(jagged()["routed_experts"], model=MODEL)
    assert [s.tokens_T for s in routes] == [None, None]
    assert np.array_equal(routes.samples[1].ids_TLK, np.array(ROWS[1])[:, 1:])


def test_a_batch_object_with_keys_and_a_data_proto_are_read():
    class TensorDictLike:
        def keys(self):
            return padded().keys()

        def __getitem__(self, key):
            return padded()[key]

    class DataProtoLike:
        batch = TensorDictLike()

    for batch in (TensorDictLike(), DataProtoLike()):
        assert detect(batch).name == "verl"
        assert read_routes(batch, model=MODEL) == expected()


def test_a_list_of_batches_names_samples_by_batch():
    routes = read_routes([padded(), padded()], model=MODEL)
    assert [s.name for s in routes] == ["row 0", "row 1", "record 1 row 0", "record 1 row 1"]


def test_moe_layers_only_are_read_too():
    batch = padded()
    batch["routed_experts"] = batch["routed_experts"][:, :, 1:]
    assert read_routes(batch, model=MODEL) == expected()


def test_a_recorded_last_row_is_kept():
    batch = padded()
    batch["routed_experts"][0, STARTS[0] + 2] = [[0, 0], [1, 5], [2, 3]]
    sample = read_routes(batch, model=MODEL).samples[0]
    assert sample.num_rows == 3
    assert sample.ids_TLK[2].tolist() == [[1, 5], [2, 3]]


def test_trailing_zero_rows_are_unknown_not_expert_0():
    batch = padded()
    batch["routed_experts"][1, STARTS[1] + 2 : STARTS[1] + 4] = 0
    sample = read_routes(batch, model=MODEL).samples[1]
    assert sample.known_TL.tolist() == [[True, True]] * 2 + [[False, False]] * 2


def test_with_top_1_trailing_zero_rows_are_unknown_too():
    ids = np.zeros((1, 6, 3, 1), dtype=np.int16)
    ids[0, 1, 1:], ids[0, 2, 1] = 4, 3
    batch = {"routed_experts": ids, "attention_mask": np.array([[1, 1, 1, 1, 1, 0]])}
    sample = read_routes(batch, model=MODEL.replace(top_k=1)).samples[0]
    # Row 0 is a fair choice of expert 0; row 3 is filler behind the last recorded row, row 4 the placeholder.
    assert sample.known_TL.tolist() == [[True, True]] * 3 + [[False, False]]
    assert sample.ids_TLK[:3, :, 0].tolist() == [[0, 0], [4, 4], [3, 0]]


def test_a_row_without_tokens_is_an_empty_sample():
    batch = padded()
    batch["attention_mask"][0] = 0
    batch["routed_experts"][0] = 0
    sample = read_routes(batch, model=MODEL).samples[0]
    assert (sample.num_tokens, sample.num_rows) == (0, 0)


def break_mask_shape(batch):
    batch["attention_mask"] = batch["attention_mask"][:, :-1]


def break_mask_values(batch):
    batch["attention_mask"][0, 0] = 2


def break_mask_hole(batch):
    batch["attention_mask"][1, 3] = 0


def shift_mask(batch):
    batch["attention_mask"] = np.roll(batch["attention_mask"], 1, axis=1)


def drop_mask(batch):
    del batch["attention_mask"]


def break_tokens(batch):
    batch["input_ids"] = batch["input_ids"][:1]


def make_floats(batch):
    batch["routed_experts"] = batch["routed_experts"].astype(np.float32)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        pytest.param(break_mask_shape, r"attention_mask has shape \[2, 7\]; routed_experts needs \[2, 8\]", id="shape"),
        pytest.param(break_mask_values, "attention_mask must hold 0 and 1", id="mask of 2"),
        pytest.param(break_mask_hole, "row 1: attention_mask has a hole at column 3", id="hole"),
        pytest.param(shift_mask, "row 0: column 2 holds ids outside the attention mask", id="shifted mask"),
        pytest.param(drop_mask, "no 'attention_mask'", id="no mask"),
        pytest.param(break_tokens, "input_ids has shape", id="tokens"),
        pytest.param(make_floats, "expected an integer array of 4 axes, got float32", id="floats"),
    ],
)
def test_a_broken_padded_batch_is_refused(damage, words):
    batch = padded()
    damage(batch)
    with pytest.raises(RoutesError, match=words):
        read_routes(batch, model=MODEL, format="verl")


def test_a_batch_without_layers_is_refused():
    batch = padded()
    batch["routed_experts"] = batch["routed_experts"][:, :, :0]
    with pytest.raises(RoutesError, match="0 layers on the wire"):
        read_routes(batch, model=MODEL, format="verl")


def test_a_jagged_tensor_with_holes_is_refused():
    rows = jagged()["routed_experts"]
    holes = torch.nested.nested_tensor_from_jagged(rows.values(), rows.offsets(), lengths=torch.tensor([2, 5]))
    with pytest.raises(RoutesError, match="holes"):
        read_routes(holes, model=MODEL, format="verl-jagged")


@pytest.mark.parametrize("offsets", [[], [0, 3], [1, 8], [0, 5, 3, 8], [0, 9]])
def test_offsets_that_do_not_tile_the_values_are_refused(offsets):
    batch = jagged_arrays() | {"offsets": np.array(offsets, dtype=np.int64)}
    with pytest.raises(RoutesError, match="offsets must ascend from 0 to the 8 rows"):
        read_routes(batch, model=MODEL, format="verl-jagged")


def test_jagged_tokens_of_other_lengths_are_refused():
    batch = jagged()
    batch["input_ids"] = torch.nested.as_nested_tensor([torch.arange(4), torch.arange(4)], layout=torch.jagged)
    with pytest.raises(RoutesError, match="samples of different length"):
        read_routes(batch, model=MODEL)


def awkward():
    """Routes with unknown rows, an empty sample, one token, and a recorded last row."""
    rng = np.random.default_rng(1)
    samples = []
    for b, (tokens, rows) in enumerate([(6, 5), (0, 0), (1, 0), (4, 4)]):
        ids = rng.permuted(np.tile(np.arange(6), (rows, 2, 1)), axis=2)[..., :2]
        known = np.ones((rows, 2), dtype=bool)
        if b == 0:
            known[2, 1] = known[4, 0] = False
            ids[~known] = 0
        samples.append(
            SampleRoutes(name=f"row {b}", ids_TLK=ids, num_tokens=tokens, known_TL=None if known.all() else known)
        )
    return Routes.of(samples, model=MODEL)


@pytest.mark.parametrize("suffix", [".npz", ".pt"])
@pytest.mark.parametrize("form", ["verl", "verl-jagged"])
@pytest.mark.parametrize("routes", [pytest.param(expected(), id="good"), pytest.param(awkward(), id="awkward")])
def test_write_read_equal(tmp_path, form, suffix, routes):
    path = tmp_path / f"a{suffix}"
    write_dump(routes, path, format=form)
    assert detect(path).name == form
    assert read_routes(path, model=MODEL) == routes


def test_the_written_padded_batch_is_what_verl_expects(tmp_path):
    write_dump(awkward(), tmp_path / "a.npz", format="verl")
    with np.load(tmp_path / "a.npz") as file:
        ids, mask = file["routed_experts"], file["attention_mask"]
    assert ids.dtype == np.int16
    assert ids.shape == (4, 6, 3, 2)
    assert mask.sum(axis=1).tolist() == [6, 0, 1, 4]
    assert not ids[0, 5].any()
    assert ids[0, 2].tolist()[2] == [-1, -1]
    assert not ids[:, :, 0].any()


def test_no_sample_at_all(tmp_path):
    nothing = Routes.of([], model=MODEL)
    write_dump(nothing, tmp_path / "a.npz", format="verl-jagged")
    assert read_routes(tmp_path / "a.npz", model=MODEL) == nothing
    with pytest.raises(RoutesError, match="at least one sample"):
        write_dump(nothing, tmp_path / "a.pt", format="verl-jagged")

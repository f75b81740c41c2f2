"""Megatron-Core traces and recorded data: hand-made fixtures, round trips, and the traps of both forms."""

import json

import numpy as np
import pytest
import torch

from equipoise.core import ModelShape, Routes, RoutesError, SampleRoutes
from equipoise.routes.registry import detect, read_routes, stream_recordings
from tests.routes.writers import write_dump

MODEL = ModelShape(name="tiny", experts=6, top_k=2, layer_numbers=(1, 2), hidden_layers=3, hidden=8, expert_width=4)
IDS = {1: [[1, 2], [5, 0], [3, 1]], 2: [[3, 4], [2, 1], [0, 5]]}
"""[T, K] ids of one micro-batch, by layer."""
IDS_TLK = np.stack([IDS[1], IDS[2]], axis=1)


def line(layer, ids, *, step=0, rank=0, **more):
    """One record as RouterTracer writes it."""
    return {
        "step": step,
        "stage": "pre_dispatch",
        "block": "decoder",
        "layer": layer,
        "rank": rank,
        "num_tokens": len(ids),
        "topk": 2,
        "top_indices": ids,
        **more,
    }


def micro_batch(*, step=0, rank=0):
    return [line(layer, ids, step=step, rank=rank) for layer, ids in IDS.items()]


def write_lines(path, lines):
    path.write_text("".join(json.dumps(record) + "\n" for record in lines))
    return path


def ids_of(routes):
    return [sample.ids_TLK.tolist() for sample in routes]


def names_of(routes):
    return [sample.name for sample in routes]


def test_a_hand_made_trace_is_recognised_and_read(tmp_path):
    path = write_lines(tmp_path / "router_trace_rank0.jsonl", micro_batch(step=4))
    assert detect(path).name == "megatron-trace"
    routes = read_routes(path, model=MODEL)
    assert names_of(routes) == ["rank 0 step 4 micro-batch 0"]
    assert ids_of(routes) == [IDS_TLK.tolist()]
    assert routes.samples[0].num_tokens == 3


def test_records_are_matched_by_layer_number_not_by_order(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", micro_batch()[::-1])
    assert ids_of(read_routes(path, model=MODEL)) == [IDS_TLK.tolist()]


def test_a_layer_that_comes_again_begins_the_next_micro_batch(tmp_path):
    other = [line(1, [[4, 5]]), line(2, [[2, 3]])]
    path = write_lines(tmp_path / "a.jsonl", [*micro_batch(), *other, *micro_batch(step=1)])
    routes = read_routes(path, model=MODEL)
    assert names_of(routes) == [
        f"rank 0 {name}" for name in ("step 0 micro-batch 0", "step 0 micro-batch 1", "step 1 micro-batch 0")
    ]
    assert ids_of(routes) == [IDS_TLK.tolist(), [[[4, 5], [2, 3]]], IDS_TLK.tolist()]


def test_a_folder_gives_all_ranks_and_skips_side_files(tmp_path):
    for rank in (0, 1):
        write_lines(tmp_path / f"router_trace_rank{rank}.jsonl", micro_batch(rank=rank))
    (tmp_path / "logits_rank0.bin").write_bytes(b"\0" * 8)
    torch.save({("decoder", None, 1): {"topk": 2}}, tmp_path / "router_state_rank0.pt")
    assert detect(tmp_path).name == "megatron-trace"
    assert names_of(read_routes(tmp_path, model=MODEL)) == [f"rank {r} step 0 micro-batch 0" for r in (0, 1)]


def test_mtp_records_are_skipped(tmp_path):
    mtp = line(1, [[0, 1]] * 3, block="mtp", mtp_idx=0)
    path = write_lines(tmp_path / "a.jsonl", [*micro_batch(), mtp])
    assert ids_of(read_routes(path, model=MODEL)) == [IDS_TLK.tolist()]


def test_a_pipeline_stage_counted_from_0_is_refused_not_misread(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [line(1, IDS[1])])
    assert [r.layer_numbers for r in stream_recordings(path, model=MODEL)] == [None]
    with pytest.raises(RoutesError, match="1 layers on the wire; 'tiny' has 3 decoder layers, 2 of them MoE"):
        read_routes(path, model=MODEL)


def test_a_micro_batch_without_tokens_is_read(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [line(1, []), line(2, [])])
    assert read_routes(path, model=MODEL).samples[0].ids_TLK.shape == (0, 2, 2)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        pytest.param({"num_tokens": 4}, "num_tokens is 4, top_indices has 3; was the line cut", id="fewer rows"),
        pytest.param({"topk": 8}, "topk is 8, top_indices has 2", id="other topk"),
        pytest.param({"layer": "1"}, "layer must be a whole number", id="layer as text"),
        pytest.param({"step": -1}, "step is -1", id="negative step"),
        pytest.param({"step": True}, "step must be a whole number", id="bool step"),
        pytest.param({"top_indices": [[1, 2], [3]]}, "expected an integer array of 2 axes", id="ragged"),
        pytest.param({"top_indices": [[1, float("nan")]] * 3}, "expected an integer array", id="nan"),
        pytest.param({"top_indices": [[1, 10**40]] * 3}, "expected an integer array", id="huge"),
        pytest.param({"top_indices": None}, "got a NoneType", id="none"),
        pytest.param({"top_indices": [[9, 1]] * 3}, "layer 1 holds expert 9", id="id outside"),
    ],
)
def test_a_broken_record_is_named(tmp_path, changes, words):
    records = micro_batch()
    records[0].update(changes)
    path = write_lines(tmp_path / "a.jsonl", records)
    with pytest.raises(RoutesError, match=words):
        read_routes(path, model=MODEL, format="megatron-trace")


def test_layers_with_different_rows_are_refused(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [line(1, IDS[1]), line(2, IDS[2][:2])])
    with pytest.raises(RoutesError, match="layer 2 has 2 rows of 2 ids, layer 1 has 3 of 2"):
        read_routes(path, model=MODEL)


@pytest.mark.parametrize("key", ["step", "layer", "top_indices"])
def test_a_missing_field_is_named(tmp_path, key):
    records = micro_batch()
    del records[1][key]
    path = write_lines(tmp_path / "a.jsonl", records)
    with pytest.raises(RoutesError, match=f"line 2: no '{key}'"):
        read_routes(path, model=MODEL)


def test_an_empty_folder_is_refused_by_name(tmp_path):
    with pytest.raises(RoutesError, match=r"holds no .jsonl file"):
        read_routes(tmp_path, model=MODEL, format="megatron-trace")


# megatron-replay


def recorded(kind=torch.tensor):
    return [kind(IDS[1]), kind(IDS[2])]


@pytest.mark.parametrize(
    ("data", "count"),
    [
        pytest.param(recorded(), 1, id="one micro-batch"),
        pytest.param(recorded(np.array), 1, id="arrays"),
        pytest.param([recorded(), recorded()], 2, id="two micro-batches"),
        pytest.param({2: torch.tensor(IDS[2]), 1: torch.tensor(IDS[1])}, 1, id="layers by number"),
        pytest.param([{1: torch.tensor(IDS[1]), 2: torch.tensor(IDS[2])}] * 2, 2, id="two, by number"),
        pytest.param({"layer_2": np.array(IDS[2]), "layer_1": np.array(IDS[1])}, 1, id="layers by name"),
        pytest.param(
            {f"micro_{m}.layer_{n}": np.array(IDS[n]) for n in (2, 1) for m in (1, 0)}, 2, id="micro-batches by name"
        ),
    ],
)
def test_recorded_data_is_recognised_and_read(data, count):
    assert detect(data).name == "megatron-replay"
    routes = read_routes(data, model=MODEL)
    assert names_of(routes) == [f"micro-batch {m}" for m in range(count)]
    assert ids_of(routes) == [IDS_TLK.tolist()] * count


def test_a_saved_list_is_recognised_and_read(tmp_path):
    torch.save(recorded(), tmp_path / "a.pt")
    assert detect(tmp_path / "a.pt").name == "megatron-replay"
    assert ids_of(read_routes(tmp_path / "a.pt", model=MODEL)) == [IDS_TLK.tolist()]


def test_a_router_that_did_not_run_is_unknown_not_expert_0():
    sample = read_routes([torch.tensor(IDS[1]), None], model=MODEL).samples[0]
    assert sample.known_TL.tolist() == [[True, False]] * 3


def test_named_layers_may_be_one_stage(tmp_path):
    routes = read_routes({2: torch.tensor(IDS[2])}, model=MODEL)
    assert routes.layer_numbers == (2,)
    for suffix in (".npz", ".pt"):
        write_dump(routes, tmp_path / f"a{suffix}", format="megatron-replay")
        assert read_routes(tmp_path / f"a{suffix}", model=MODEL) == routes


def test_unnamed_layers_of_one_stage_are_refused():
    with pytest.raises(RoutesError, match="1 layers on the wire"):
        read_routes([torch.tensor(IDS[1])], model=MODEL)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        pytest.param([None, None], "no router recorded anything", id="all none"),
        pytest.param([[torch.tensor(IDS[1]), torch.tensor(IDS[2][:1])]], "layer 1 has 1 rows", id="rows differ"),
        pytest.param([[torch.tensor([[0.5]])]], "expected an integer array of 2 axes, got float", id="floats"),
        pytest.param({"layer_x": np.array(IDS[1])}, "'layer_x' names no layer", id="key"),
        pytest.param({"micro_1.layer_1": np.array(IDS[1])}, "numbered from 0 without gaps", id="gap"),
        pytest.param({9: np.array(IDS[1])}, "names layer 9", id="layer outside"),
        pytest.param([[]], "no router recorded anything", id="empty list"),
        pytest.param([3], "got a int", id="number"),
    ],
)
def test_broken_recorded_data_is_refused(data, words):
    with pytest.raises(RoutesError, match=words):
        read_routes(data, model=MODEL, format="megatron-replay")


@pytest.mark.parametrize(
    ("form", "suffix"), [("megatron-trace", ".jsonl"), ("megatron-replay", ".pt"), ("megatron-replay", ".npz")]
)
def test_write_read_equal_ids_and_masks(tmp_path, form, suffix):
    known = np.array([[True, True], [False, True], [True, False]])
    masked = np.where(known[:, :, None], IDS_TLK, 0)
    samples = [
        SampleRoutes(name="a", ids_TLK=IDS_TLK, num_tokens=3),
        SampleRoutes(name="b", ids_TLK=masked, num_tokens=4, known_TL=known),
        SampleRoutes(name="c", ids_TLK=IDS_TLK[:0], num_tokens=0),
    ]
    path = tmp_path / f"a{suffix}"
    write_dump(Routes.of(samples, model=MODEL), path, format=form)
    assert detect(path).name == form
    back = read_routes(path, model=MODEL)
    assert ids_of(back) == [IDS_TLK.tolist(), masked.tolist(), []]
    assert back.samples[0].known_TL is None
    assert back.samples[1].known_TL.tolist() == known.tolist()


@pytest.mark.parametrize(("form", "suffix"), [("megatron-trace", ".jsonl"), ("megatron-replay", ".npz")])
def test_nothing_cannot_be_written(tmp_path, form, suffix):
    with pytest.raises(RoutesError, match="no sample to write"):
        write_dump(Routes.of([], model=MODEL), tmp_path / f"a{suffix}", format=form)

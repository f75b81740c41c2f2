"""Trainer forms under fuzz: any input gives routes that were really there, or `RoutesError`, and nothing else."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from equipoise.core import ModelShape, Routes, RoutesError, SampleRoutes
from equipoise.routes.registry import detect, read_routes
from tests.routes.writers import SUFFIXES, write_dump

MODEL = ModelShape(name="tiny", experts=6, top_k=2, layer_numbers=(1, 2), hidden_layers=3, hidden=8, expert_width=4)
TRAINERS = ["verl", "verl-jagged", "slime", "megatron-trace", "megatron-replay"]
KEYS = [
    *("routed_experts", "attention_mask", "input_ids", "values", "offsets", "samples", "tokens", "index"),
    *("rollout_routed_experts", "weight_versions", "metadata", "step", "layer", "rank", "top_indices", "topk"),
    *("num_tokens", "block", "layer_1", "micro_0.layer_2"),
]

arrays = hnp.arrays(
    dtype=st.sampled_from([np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint64, np.float32, np.bool_]),
    shape=hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=3),
)
integers = st.one_of(st.integers(-3, 8), st.integers(), st.just(10**30))
tensors = arrays.map(lambda array: torch.from_numpy(np.array(array)))
leaves = st.one_of(st.none(), st.booleans(), integers, st.floats(), st.text(max_size=4), arrays, tensors)
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.one_of(st.sampled_from(KEYS), st.integers(-1, 3)), inner, max_size=4),
    ),
    max_leaves=12,
)


def check_routes(routes):
    """Whatever was read is whole: every known id is an expert, every mask fits."""
    for sample in routes:
        sample.check_ids(MODEL.experts)
        assert sample.ids_TLK.shape[2] == MODEL.top_k
        assert sample.num_rows <= sample.num_tokens


def read_or_refuse(dump, **how):
    try:
        check_routes(read_routes(dump, model=MODEL, **how))
    except RoutesError as error:
        assert str(error)


@settings(max_examples=80, deadline=None)
@given(form=st.sampled_from(TRAINERS), dump=values)
def test_any_object_under_any_name(form, dump):
    if isinstance(dump, str):
        dump = [dump]
    read_or_refuse(dump, format=form)


@settings(max_examples=60, deadline=None)
@given(dump=values)
def test_any_object_by_content(dump):
    if isinstance(dump, str):
        dump = [dump]
    try:
        detect(dump)
    except RoutesError:
        return
    read_or_refuse(dump)


batches = st.fixed_dictionaries(
    {
        "routed_experts": hnp.arrays(np.int16, st.tuples(*[st.integers(0, 3)] * 4), elements=st.integers(-2, 7)),
        "attention_mask": hnp.arrays(np.int64, st.tuples(*[st.integers(0, 3)] * 2), elements=st.integers(0, 2)),
    },
    optional={"input_ids": arrays, "values": arrays, "offsets": arrays},
)


@settings(max_examples=80, deadline=None)
@given(batch=batches)
def test_nearly_right_verl_batches(batch):
    read_or_refuse(batch, format="verl")


@settings(max_examples=80, deadline=None)
@given(
    values=hnp.arrays(np.int16, st.tuples(st.integers(0, 6), st.integers(0, 3), st.integers(0, 3))),
    offsets=st.lists(integers, max_size=5),
)
def test_nearly_right_jagged_batches(values, offsets):
    read_or_refuse({"values": values, "offsets": offsets}, format="verl-jagged")


@settings(max_examples=80, deadline=None)
@given(
    tokens=st.one_of(st.lists(integers, max_size=5), arrays),
    rows=st.one_of(values, hnp.arrays(np.int32, st.tuples(*[st.integers(0, 3)] * 3), elements=st.integers(-2, 7))),
    more=values,
)
def test_nearly_right_slime_samples(tokens, rows, more):
    sample = {"tokens": tokens, "rollout_routed_experts": rows, "weight_versions": more, "index": more}
    read_or_refuse([sample], format="slime")
    read_or_refuse({"samples": [sample]}, format="slime")
    read_or_refuse({"tokens": [tokens], "rollout_routed_experts": [rows]}, format="slime")


json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), integers, st.floats(), st.text(max_size=3)),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=8,
)
trace_lines = st.fixed_dictionaries(
    {"step": st.one_of(st.integers(0, 2), json_values), "layer": st.one_of(st.integers(0, 3), json_values)},
    optional={
        "top_indices": st.one_of(st.lists(st.lists(integers, min_size=2, max_size=2), max_size=3), json_values),
        "rank": json_values,
        "topk": json_values,
        "num_tokens": json_values,
        "block": json_values,
    },
)


@settings(max_examples=80, deadline=None)
@given(lines=st.lists(trace_lines, max_size=4))
def test_nearly_right_trace_lines(tmp_path_factory, lines):
    path = tmp_path_factory.mktemp("trace") / "a.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    read_or_refuse(path, format="megatron-trace")


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A good file of each trainer form and suffix."""
    folder = tmp_path_factory.mktemp("written")
    ids = np.array([[[1, 2], [3, 4]], [[5, 0], [2, 1]]])
    samples = [SampleRoutes(name=f"row {b}", ids_TLK=ids, num_tokens=3, tokens_T=np.arange(3)) for b in range(2)]
    files = []
    for name in TRAINERS:
        for suffix in SUFFIXES[name]:
            path = folder / f"{name}{suffix}"
            write_dump(Routes.of(samples, model=MODEL), path, format=name)
            files.append(path)
    return files


@settings(max_examples=100, deadline=None)
@given(
    which=st.integers(0, 100),
    place=st.floats(0, 1, exclude_max=True),
    flip=st.integers(0, 255),
    is_named=st.booleans(),
)
def test_truncated_and_flipped_files(written, tmp_path_factory, which, place, flip, is_named):
    good = written[which % len(written)]
    raw = good.read_bytes()
    at = int(place * len(raw))
    damaged = raw[:at] if flip == 0 else raw[:at] + bytes([raw[at] ^ flip]) + raw[at + 1 :]
    path = tmp_path_factory.mktemp("damaged") / good.name
    path.write_bytes(damaged)
    read_or_refuse(path, **({"format": good.stem} if is_named else {}))

"""slime samples: hand-made dumps of its three containers, round trips, and what the reader refuses."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from equipoise.core import ModelShape, Routes, RoutesError, SampleRoutes, Segment
from equipoise.routes.registry import detect, read_routes
from tests.routes.writers import write_dump

MODEL = ModelShape(name="tiny", experts=6, top_k=2, layer_numbers=(1, 2), hidden_layers=3, hidden=8, expert_width=4)
ROWS = (
    [[[0, 0], [1, 2], [3, 4]], [[0, 0], [5, 0], [2, 1]]],
    [[[0, 0], [4, 3], [0, 1]]],
)
TOKENS = ([11, 12, 13], [21, 22])


def samples(**changes):
    """The samples of a debug dump, as `Sample.to_dict` writes them."""
    return [
        {
            "group_index": 0,
            "index": i,
            "prompt": "hi",
            "tokens": list(TOKENS[i]),
            "response_length": 1,
            "status": "completed",
            "reward": 1.0,
            "weight_versions": ["3"],
            "rollout_routed_experts": torch.tensor(ROWS[i], dtype=torch.int32),
            "metadata": {},
            **changes,
        }
        for i in range(2)
    ]


def expected(*, version="3", names=("sample 0", "sample 1")):
    made = [
        SampleRoutes(
            name=names[i],
            ids_TLK=np.array(ROWS[i])[:, 1:],
            num_tokens=len(TOKENS[i]),
            tokens_T=np.array(TOKENS[i]),
            segments=(Segment(start=0, stop=len(ROWS[i]), weight_version=version),) if version else (),
        )
        for i in range(2)
    ]
    return Routes.of(made, model=MODEL)


def test_a_debug_dump_is_recognised_and_read(tmp_path):
    path = tmp_path / "7.pt"
    torch.save({"rollout_id": 7, "samples": samples()}, path)
    assert detect(path).name == "slime"
    assert read_routes(path, model=MODEL) == expected()


def test_a_list_of_dicts_and_of_objects_gives_the_same():
    assert read_routes(samples(), model=MODEL) == expected()
    objects = [SimpleNamespace(**sample) for sample in samples()]
    assert detect(objects).name == "slime"
    assert read_routes(objects, model=MODEL) == expected()


@pytest.mark.parametrize("as_tensors", [True, False])
def test_the_training_form_gives_the_same(as_tensors):
    kind = torch.tensor if as_tensors else list
    data = {"tokens": [kind(t) for t in TOKENS], "rollout_routed_experts": [kind(r) for r in ROWS]}
    assert detect(data).name == "slime"
    assert read_routes(data, model=MODEL) == expected(version="")


def test_nested_lists_are_read_as_tensors_are():
    data = samples()
    for i, sample in enumerate(data):
        sample["rollout_routed_experts"] = ROWS[i]
    assert read_routes(data, model=MODEL) == expected()


def test_a_sample_without_capture_is_unknown_and_leaves_its_neighbour_alone():
    data = samples()
    data[0]["rollout_routed_experts"] = None
    first, second = read_routes(data, model=MODEL)
    assert first.known_TL.tolist() == [[False, False]] * 2
    assert second == expected().samples[1]


def test_different_weight_versions_are_all_named():
    sample = read_routes(samples(weight_versions=["3", "3", "4"]), model=MODEL).samples[0]
    assert [s.weight_version for s in sample.segments] == ["3,4"]


def test_samples_that_share_an_index_stay_apart():
    assert [s.name for s in read_routes(samples(index=5), model=MODEL)] == ["sample 5", "sample 5 (record 1)"]


def test_without_an_index_the_place_is_the_name():
    assert [s.name for s in read_routes(samples(index=None), model=MODEL)] == ["record 0", "record 1"]


def test_the_dump_slime_makes_holds_numpy_arrays(tmp_path):
    data = samples()
    for sample, rows in zip(data, ROWS, strict=True):
        sample["rollout_routed_experts"] = np.frombuffer(np.array(rows, np.int32).tobytes(), np.int32).reshape(
            np.shape(rows)
        )
    torch.save({"rollout_id": 7, "samples": data}, tmp_path / "a.pt")
    assert read_routes(tmp_path / "a.pt", model=MODEL) == read_routes(samples(), model=MODEL)


def test_any_other_pickled_object_is_refused(tmp_path):
    data = samples()
    data[0]["metadata"] = {"where": tmp_path}
    torch.save({"samples": data}, tmp_path / "a.pt")
    with pytest.raises(RoutesError, match=r"cannot be read as .pt"):
        read_routes(tmp_path / "a.pt", model=MODEL)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        pytest.param({"rollout_routed_experts": [[1, 2]]}, "expected an integer array of 3 axes", id="axes"),
        pytest.param({"rollout_routed_experts": [[[0.5]]]}, "expected an integer array", id="floats"),
        pytest.param({"tokens": "ab"}, "tokens: expected an integer array of 1 axes, got a str", id="tokens"),
        pytest.param({"tokens": [1]}, "2 rows for 1 tokens", id="more rows than tokens"),
        pytest.param({"tokens": [1] * 9}, "2 rows for 9 tokens", id="far fewer rows"),
        pytest.param({"weight_versions": "3"}, "weight_versions must be a list", id="versions"),
    ],
)
def test_a_broken_sample_is_refused(changes, words):
    with pytest.raises(RoutesError, match=words):
        read_routes(samples(**changes), model=MODEL, format="slime")


@pytest.mark.parametrize(
    "dump",
    [
        pytest.param({"samples": 3}, id="samples is no list"),
        pytest.param({"samples": [3]}, id="sample is no dict"),
        pytest.param({"tokens": [[1, 2]], "rollout_routed_experts": []}, id="fewer routes"),
        pytest.param({"tokens": [[1, 2]], "rollout_routed_experts": None}, id="no routes"),
        pytest.param({"tokens": [1, 2]}, id="no key"),
        pytest.param([], id="nothing"),
    ],
)
def test_a_broken_container_is_refused(dump):
    with pytest.raises(RoutesError):
        read_routes(dump, model=MODEL, format="slime")


def test_write_read_equal(tmp_path):
    known = np.array([[True, False], [True, True]])
    ids = np.where(known[:, :, None], np.array(ROWS[0])[:, 1:], 0)
    awkward = [
        *expected(names=("first", "second")).samples,
        SampleRoutes(name="masked", ids_TLK=ids, num_tokens=2, known_TL=known),
        SampleRoutes(name="empty", ids_TLK=ids[:0], num_tokens=0, tokens_T=np.zeros(0, dtype=np.int64)),
        SampleRoutes(name="one", ids_TLK=ids[:0], num_tokens=1, tokens_T=np.array([8])),
    ]
    routes = Routes.of(awkward, model=MODEL)
    write_dump(routes, tmp_path / "a.pt", format="slime")
    assert detect(tmp_path / "a.pt").name == "slime"
    assert read_routes(tmp_path / "a.pt", model=MODEL) == routes


def test_the_written_dump_is_what_slime_loads(tmp_path):
    write_dump(expected(), tmp_path / "a.pt", format="slime")
    data = torch.load(tmp_path / "a.pt", weights_only=True)
    first = data["samples"][0]
    assert first["tokens"] == TOKENS[0]
    assert first["rollout_routed_experts"].dtype == torch.int32
    assert first["rollout_routed_experts"].tolist() == ROWS[0]
    assert first["weight_versions"] == ["3"]

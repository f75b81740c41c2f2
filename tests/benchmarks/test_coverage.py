"""What the study of incomplete routes leaves out, and what it estimates."""

import numpy as np
import pytest

from benchmarks.coverage import FOLDER, Judge, Recorded, by_source, nothing_of, row_of
from equipoise.core import LoadMatrix
from tests.sim.steps import MODEL, cluster_of, skewed_loads


@pytest.fixture(scope="module")
def law():
    if not FOLDER.is_dir():
        pytest.skip(f"no traces at {FOLDER}")
    return Recorded.of("DeepSeek-V2-Lite, law", 8, 0)


@pytest.mark.parametrize("share", [0.9, 0.5])
def test_what_is_left_out_is_unknown_and_what_is_left_is_as_recorded(law, share):
    whole, top_k = law.loads(), law.counts.model.top_k
    for known_BLE in (law.without_samples(share, 0), law.without_prompts(share)):
        assert (known_BLE <= law.counts.count_BLE).all()
        tokens_B = known_BLE[:, 0].sum(axis=1) // top_k
        assert share - 0.02 <= tokens_B.sum() / law.counts.tokens_B.sum() <= share
        known = law.loads(known_BLE)
        assert (known.load_MLRE <= whole.load_MLRE).all()
        rows_MLR, all_MLR = known.load_MLRE.sum(axis=3), whole.load_MLRE.sum(axis=3)
        # Rows are rounded one by one after they are multiplied.
        assert np.allclose(known.coverage_MLR, rows_MLR / np.maximum(all_MLR, 1), atol=0.01)
    assert set(np.unique(law.without_samples(share, 0).sum(axis=(1, 2)) == 0)) == {False, True}
    assert (law.without_prompts(share).sum(axis=2) > 0).all(), "every sample keeps its end"


def test_the_other_estimate_scales_each_source_by_itself():
    load = np.array([[[[10, 0], [0, 6]]], [[[30, 4], [0, 0]]]])
    coverage = np.array([[[0.5, 1.0]], [[1.0, 0.0]]])
    assert by_source(LoadMatrix(load, coverage_MLR=coverage)).load_MLRE.tolist() == [
        [[[20, 0], [0, 6]]],
        [[[30, 4], [0, 6]]],
    ]


def test_a_plan_is_judged_by_the_rows_that_come():
    live, other = skewed_loads(1), skewed_loads(2)
    judge = Judge(live, MODEL, cluster_of())
    right, wrong = judge.row(judge.plan(live)), judge.row(judge.plan(other))
    assert right["kept"] == pytest.approx(100) and right["promised"] == pytest.approx(right["over_static"])
    assert wrong["kept"] < 50 and wrong["promised"] > wrong["over_static"]
    blind = judge.row(judge.plan(nothing_of(live)))
    assert blind["kept"] == pytest.approx(0) and blind["promised"] == 1.0
    both = row_of("samples", 0.5, "window", [right, wrong])
    assert (both["kept_least"], both["kept_most"]) == (wrong["kept"], right["kept"])

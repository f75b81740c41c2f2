"""Validation: errors at three levels by hand, and the committed figures remade."""

import json

import numpy as np
import pytest

from benchmarks import validate
from benchmarks.results import ROOT, format_table
from benchmarks.validate import Compared, compare_case, limits_of, predict_MLR, rows_of
from equipoise.core import Cluster, ModelShape
from equipoise.cost import CostModel, Profile

REPORTS = ROOT / "benchmarks" / "reports"
CLUSTER, PROFILE = Cluster.preset("h200"), Profile.read("h200")


def compared(predicted, measured, **changed):
    """Two layers of two ranks, from made-up nanoseconds."""
    facts = {"case": "c", "variant": "static", "stage": "update", "is_visited": True}
    arrays = {"predicted_MLR": np.array([predicted], float), "measured_MLR": np.array([measured], float)}
    return Compared(**{**facts, **arrays, "predicted_sent": 0.0, "measured_sent": 0.0, **changed})


def test_errors_at_the_levels_of_rank_layer_and_run():
    one = compared([[110, 50], [90, 200]], [[100, 100], [100, 160]], predicted_sent=10.0, measured_sent=20.0)
    assert one.errors("rank") == pytest.approx([0.1, -0.5, -0.1, 0.25])
    assert one.errors("layer") == pytest.approx([120 / 120 - 1, 210 / 180 - 1])
    assert one.errors("run") == pytest.approx([330 / 300 - 1])


def test_a_prediction_is_compute_by_rows_and_slots_and_one_add_per_return():
    cost = CostModel.of(CLUSTER, ModelShape.preset("glm-4.5-air"), profile=PROFILE)
    variant = {"rows_MLR": [[[1000, 0]]], "busy_MLR": [[[3, 0]]], "added_MLR": [[[2, 1]]]}
    add_ns = cost.tables(1).add_ns
    assert predict_MLR(variant, cost, 2).tolist() == [[[cost.compute_ns(1000, 3) + 2 * add_ns, add_ns]]]


def test_what_is_not_priced_is_left_out_and_what_is_not_judged_is_listed_apart():
    variant = {key: [[[4000, 4000]]] for key in ("rows_MLR", "forward_ns_MLR", "update_ns_MLR")}
    variant |= {"busy_MLR": [[[2, 2]]], "added_MLR": [[[0, 0]]]}
    names = ("static", "balanced, even", "equipoise, two calls")
    case = {"name": "c", "model": "olmoe", "tokens": 100, "top_k": 8, "sent_ns": [1000, 2000]}
    parts = list(compare_case({**case, "variants": dict.fromkeys(names, variant)}, PROFILE, CLUSTER))
    assert [(part.variant, part.stage) for part in parts] == [
        *(("static", "forward"), ("balanced, even", "forward"), ("static", "update"), ("balanced, even", "update"))
    ]
    assert not any(part.is_visited for part in parts)
    rows = rows_of(parts)
    words = [row["case"] for row in rows]
    assert words == ["c", "c", "balanced, even (not judged)", "balanced, even (not judged)", "all, other shapes", "all"]
    assert rows[-1]["policies"] == 2


def test_the_limit_is_on_the_mean_over_everything_judged():
    rows = rows_of([compared([[104, 104]], [[100, 100]]), compared([[92, 92]], [[100, 100]], case="d")])
    assert rows[-1]["rank mean"] == 6.0 and rows[-1]["rank worst"] == -8.0
    assert not any(limit.holds for limit in limits_of(rows))


def test_the_committed_errors_are_what_the_command_makes(tmp_path, monkeypatch, capsys):
    replay = REPORTS / "rank_replay_h200_202611.json"
    monkeypatch.setattr("sys.argv", ["validate", str(replay), "-o", str(tmp_path / "made.json")])
    assert validate.main() == 0
    made, filed = (
        json.loads(path.read_text()) for path in (tmp_path / "made.json", REPORTS / "validation_h200_202611.json")
    )
    assert made == filed
    text = (REPORTS / "validation_h200_202611.md").read_text()
    assert format_table(filed["rows"]) in text
    total = filed["rows"][-1]
    assert all(
        f"| {total[f'{level} mean']} % | {total[f'{level} worst']:+} % |" in text for level in ("rank", "layer", "run")
    )
    assert "holds: mean error" in capsys.readouterr().out


def test_the_guide_quotes_the_committed_error_and_the_effect_of_uneven_groups():
    text = (ROOT / "docs" / "calibrate.md").read_text()
    total = json.loads((REPORTS / "validation_h200_202611.json").read_text())["rows"][-1]
    assert f"mean error\n{total['run mean']} %, worst {total['run worst']} %" in text
    profile = json.loads((ROOT / "equipoise" / "cost" / "profiles" / "h200.json").read_text())
    for table in profile["compute"]:
        at = table["slots"].index(8), table["rows"].index(65536)
        more = [
            table[key][at[0]][at[1]] / table[f"even_{key}"][at[0]][at[1]] - 1 for key in ("forward_ns", "update_ns")
        ]
        assert (
            f"| {table['hidden']} x {table['expert_width']} | {more[0]:+.1%} | {more[1]:+.1%} |".replace("%", " %")
            in text
        )

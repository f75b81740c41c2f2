"""The memory forecast: the right place, the right bytes, a verdict, and only fixes that fit."""

import numpy as np
import pytest

from equipoise.core import LoadMatrix, LoadsError, ModelShape
from equipoise.loads.forecast import GIB, Place, forecast_memory, row_bytes

MODEL = ModelShape(name="tiny", experts=8, top_k=2, layer_numbers=(1, 3), hidden_layers=4, hidden=100, expert_width=10)


def matrix(load_MLE: list, *, stage: str = "update", **options) -> LoadMatrix:
    """Loads with all rows at one of two source ranks."""
    load = np.zeros((len(load_MLE), len(load_MLE[0]), 2, 8), dtype=np.int64)
    load[:, :, 0] = load_MLE
    return LoadMatrix(load, stage=stage, **options)


def gib(count: int) -> float:
    return count / GIB


def test_bytes_of_a_row_follow_the_stated_formula():
    assert row_bytes("recompute", MODEL) == (2 * 100 + 3 * 10) * 2
    assert row_bytes("update", MODEL) == (3 * 100 + 6 * 10) * 2


def test_the_peak_names_window_micro_step_layer_and_rank():
    flat = [[1] * 8, [1] * 8]
    hot = [[1] * 8, [1, 1, 1, 1, 1, 90, 1, 1]]
    windows = [
        matrix([flat], stage="recompute", layer_numbers_L=np.array([1, 3])),
        matrix([flat, hot], layer_numbers_L=np.array([1, 3])),
    ]
    forecast = forecast_memory(windows, MODEL, activations="recomputed")
    assert forecast.place == Place(window=1, stage="update", micro_step=1, layer=3, rank=1)
    assert forecast.peak_rows == 93
    assert forecast.peak_bytes == 93 * row_bytes("update", MODEL)
    assert forecast.rows_R == (4, 93)
    assert forecast.bytes_R == (4 * row_bytes("update", MODEL), 93 * row_bytes("update", MODEL))
    assert forecast.fits is None


def test_the_peak_is_in_bytes_so_an_update_can_outweigh_more_rows_in_recompute():
    recompute = matrix([[[12, 0, 0, 0, 0, 0, 0, 0]]], stage="recompute")
    update = matrix([[[10, 0, 0, 0, 0, 0, 0, 0]]])
    forecast = forecast_memory([recompute, update], MODEL)
    assert (forecast.place.stage, forecast.peak_rows) == ("update", 10)
    assert forecast.rows_R[0] == 12


def test_kept_activations_of_the_other_layers_are_added():
    window = matrix([[[10, 0, 0, 0, 0, 0, 0, 0], [4, 0, 0, 0, 0, 0, 0, 0]]])
    kept = forecast_memory([window], MODEL, activations="kept")
    assert kept.peak_bytes == 10 * row_bytes("update", MODEL) + 4 * (100 + 3 * 10) * 2


def test_activations_are_kept_unless_said_and_recomputing_them_is_a_fix():
    window = matrix([[[10] * 8, [10] * 8]])
    need = 40 * row_bytes("update", MODEL)
    assert forecast_memory([window], MODEL).activations == "kept"
    assert "recomputed activations" in {f.name for f in forecast_memory([window], MODEL, limit_gib=gib(need)).fixes}
    tight = forecast_memory([window], MODEL, limit_gib=gib(need - 1))
    assert "recomputed activations" not in {fix.name for fix in tight.fixes}
    recomputed = forecast_memory([window], MODEL, limit_gib=gib(need - 1), activations="recomputed")
    assert (recomputed.peak_bytes, recomputed.fits) == (need, False)
    assert "recomputed activations" not in {fix.name for fix in recomputed.fixes}


def test_padding_rows_are_received():
    load = np.zeros((1, 1, 2, 8), dtype=np.int64)
    load[0, 0, 1, 0] = 7
    padded = LoadMatrix(load, padding_MLRE=load)
    assert forecast_memory([padded], MODEL).peak_rows == 7


def test_the_verdict_turns_exactly_at_the_limit():
    window = matrix([[[10, 0, 0, 0, 0, 0, 0, 0]]])
    need = 10 * row_bytes("update", MODEL)
    assert forecast_memory([window], MODEL, limit_gib=gib(need)).fits is True
    tight = forecast_memory([window], MODEL, limit_gib=gib(need - 1))
    assert tight.fits is False
    assert forecast_memory([window], MODEL, limit_gib=gib(need)).fixes == ()


def test_balance_is_the_cheapest_fix_where_the_mean_fits():
    window = matrix([[[10, 0, 0, 0, 0, 0, 0, 0]]])
    forecast = forecast_memory([window], MODEL, limit_gib=gib(6 * row_bytes("update", MODEL)))
    assert forecast.fixes[0].name == "balance"
    assert forecast.fixes[0].peak_bytes == 5 * row_bytes("update", MODEL)


def test_smaller_micro_steps_are_offered_where_balance_is_not_enough():
    window = matrix([[[10] * 8]])
    forecast = forecast_memory([window], MODEL, limit_gib=gib(15 * row_bytes("update", MODEL)))
    assert forecast.fixes[0].name == "smaller micro-step"
    assert "into 3" in forecast.fixes[0].message
    assert all(fix.peak_bytes <= forecast.limit_bytes for fix in forecast.fixes)


def test_the_smallest_larger_ep_that_is_enough_is_offered():
    window = matrix([[[10] * 8]])
    # Level at every width: each of 4 or 8 ranks still receives 40 rows, and holds 2 or 3 experts less.
    need = 40 * row_bytes("update", MODEL)
    for limit, held in ((need - 1, 2), (need - 2 * MODEL.expert_bytes - 1, 1)):
        (wider,) = [f for f in forecast_memory([window], MODEL, limit_gib=gib(limit)).fixes if f.name == "larger EP"]
        assert wider.peak_bytes == need - MODEL.expert_bytes * (4 - held)


def test_a_larger_ep_receives_by_its_own_skew():
    window = matrix([[[20, 0, 0, 0, 20, 0, 0, 0]]])
    # At EP 2 both ranks receive 20 rows; at EP 4, with twice the tokens, the busiest receives 40.
    limit = 20 * row_bytes("update", MODEL) - 1
    assert 40 * row_bytes("update", MODEL) - 2 * MODEL.expert_bytes > limit
    fixes = forecast_memory([window], MODEL, limit_gib=gib(limit)).fixes
    assert [fix.name for fix in fixes] == ["smaller micro-step"]


def test_nothing_to_forecast_and_impossible_limits_are_refused():
    with pytest.raises(LoadsError, match="no windows"):
        forecast_memory([], MODEL)
    for limit in (0, -1, float("nan"), float("inf")):
        with pytest.raises(LoadsError, match="memory limit"):
            forecast_memory([matrix([[[1] * 8]])], MODEL, limit_gib=limit)

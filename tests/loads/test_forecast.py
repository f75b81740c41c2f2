"""The memory forecast: the right place, the right bytes, a verdict, and only fixes that fit."""

import numpy as np
import pytest

from equipoise.core import LoadMatrix, LoadsError, ModelShape
from equipoise.loads import WindowRows, window_memory
from equipoise.loads.forecast import GIB, Place, forecast_memory

MODEL = ModelShape(name="tiny", experts=8, top_k=2, layer_numbers=(1, 3), hidden_layers=4, hidden=100, expert_width=10)


def matrix(load_MLE: list, *, stage: str = "update", **options) -> LoadMatrix:
    """Loads with all rows at one of two source ranks."""
    load = np.zeros((len(load_MLE), len(load_MLE[0]), 2, 8), dtype=np.int64)
    load[:, :, 0] = load_MLE
    return LoadMatrix(load, stage=stage, **options)


def gib(count: int) -> float:
    return count / GIB


def peaks(window: LoadMatrix, activations: str = "kept", *, times: int = 1, ep: int | None = None) -> list[int]:
    """Peak of each rank, by the memory model."""
    rows = WindowRows.at_owners(window, ep=ep).scaled(times)
    return window_memory(rows, MODEL, activations=activations).peak_R.tolist()


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
    assert forecast.rows_R == (4, 93)
    assert forecast.bytes_R == tuple(peaks(windows[1], "recomputed"))
    # Input, output's gradient and input's gradient, with gate, up, activation and theirs; gradients of 4 experts; and
    # rank 1 has no tokens of its own. Every row has two numbers of 8 bytes that say where it goes.
    assert forecast.peak_bytes == 93 * (3 * 100 + 6 * 10) * 2 + 4 * MODEL.expert_bytes + 93 * 16
    assert forecast.peak_bytes == sum(forecast.parts.values()) == forecast.bytes_R[1]
    assert forecast.fits is None


def test_the_peak_is_in_bytes_so_an_update_can_outweigh_more_rows_in_recompute():
    recompute = matrix([[[12, 0, 0, 0, 0, 0, 0, 0]]], stage="recompute")
    update = matrix([[[10, 0, 0, 0, 0, 0, 0, 0]]])
    forecast = forecast_memory([recompute, update], MODEL)
    assert (forecast.place.stage, forecast.peak_rows) == ("update", 10)
    assert forecast.rows_R[0] == 12


def test_kept_activations_of_the_layers_before_are_added():
    window = matrix([[[0, 0, 0, 0, 4, 0, 0, 0], [0, 0, 0, 0, 10, 0, 0, 0]]])
    first, both = matrix([[[0, 0, 0, 0, 10, 0, 0, 0]]]), forecast_memory([window], MODEL, activations="kept")
    # Rank 1 keeps input, gate and up of the layer before, and its tables.
    assert both.place.layer == 1 and both.bytes_R[1] == peaks(first)[1] + 4 * ((100 + 2 * 10) * 2 + 16)


def test_activations_are_kept_unless_said_and_recomputing_them_is_a_fix():
    window = matrix([[[10] * 8, [10] * 8]])
    need, again = (max(peaks(window, way)) for way in ("kept", "recomputed"))
    assert again < need == forecast_memory([window], MODEL).peak_bytes
    assert forecast_memory([window], MODEL).activations == "kept"
    assert "recomputed activations" in {f.name for f in forecast_memory([window], MODEL, limit_gib=gib(again)).fixes}
    tight = forecast_memory([window], MODEL, limit_gib=gib(again - 1))
    assert "recomputed activations" not in {fix.name for fix in tight.fixes}
    recomputed = forecast_memory([window], MODEL, limit_gib=gib(again - 1), activations="recomputed")
    assert (recomputed.peak_bytes, recomputed.fits) == (again, False)
    assert "recomputed activations" not in {fix.name for fix in recomputed.fixes}


def test_padding_rows_are_received():
    load = np.zeros((1, 1, 2, 8), dtype=np.int64)
    load[0, 0, 1, 0] = 7
    padded = LoadMatrix(load, padding_MLRE=load)
    assert forecast_memory([padded], MODEL).peak_rows == 7


def test_the_verdict_turns_exactly_at_the_limit():
    window = matrix([[[10, 0, 0, 0, 0, 0, 0, 0]]])
    need = max(peaks(window))
    assert forecast_memory([window], MODEL, limit_gib=gib(need)).fits is True
    tight = forecast_memory([window], MODEL, limit_gib=gib(need - 1))
    assert tight.fits is False
    assert forecast_memory([window], MODEL, limit_gib=gib(need)).fixes == ()


def test_balance_is_the_cheapest_fix_where_the_mean_fits():
    window = matrix([[[40, 0, 0, 0, 0, 0, 0, 0]]])
    level = window_memory(WindowRows.at_owners(window).levelled(), MODEL).peak_R.max()
    forecast = forecast_memory([window], MODEL, limit_gib=gib(int(level)))
    assert (forecast.fixes[0].name, forecast.fixes[0].peak_bytes) == ("balance", level)
    tighter = forecast_memory([window], MODEL, limit_gib=gib(int(level) - 1))
    assert "balance" not in {fix.name for fix in tighter.fixes}


def test_smaller_micro_steps_are_offered_where_balance_is_not_enough():
    window = matrix([[[10] * 8]])
    gradients = 4 * MODEL.expert_bytes
    limit = gradients + (max(peaks(window)) - gradients) * 2 // 5
    forecast = forecast_memory([window], MODEL, limit_gib=gib(limit))
    assert forecast.fixes[0].name == "smaller micro-step"
    assert "into 3 (a token budget of 1/3)" in forecast.fixes[0].message
    assert all(fix.peak_bytes <= forecast.limit_bytes for fix in forecast.fixes)
    # Gradients of experts do not shrink with the micro-step.
    hopeless = forecast_memory([window], MODEL, limit_gib=gib(gradients))
    assert "smaller micro-step" not in {fix.name for fix in hopeless.fixes}


def test_the_smallest_larger_ep_that_is_enough_is_offered():
    window = matrix([[[10] * 8]])
    need = max(peaks(window))
    # Level at every width: each of 4 or 8 ranks still receives 40 rows, and holds 2 or 3 experts less.
    left = {
        wider: max(peaks(window, times=wider // 2, ep=wider)) - MODEL.expert_bytes * (4 - 8 // wider)
        for wider in (4, 8)
    }
    assert left[8] < left[4] < need
    for limit, wider in ((left[4], 4), (left[4] - 1, 8)):
        (found,) = [f for f in forecast_memory([window], MODEL, limit_gib=gib(limit)).fixes if f.name == "larger EP"]
        assert f"over EP {wider}" in found.message and found.peak_bytes == left[wider]


def test_a_larger_ep_receives_by_its_own_skew():
    window = matrix([[[200, 0, 0, 0, 200, 0, 0, 0]]])
    # At EP 2 both ranks receive 200 rows; at EP 4, with twice the tokens, the busiest receives 400.
    assert max(peaks(window, times=2, ep=4)) - 2 * MODEL.expert_bytes > max(peaks(window))
    fixes = forecast_memory([window], MODEL, limit_gib=gib(max(peaks(window)) - 1)).fixes
    assert "larger EP" not in {fix.name for fix in fixes} and "smaller micro-step" in {fix.name for fix in fixes}


def test_nothing_to_forecast_and_impossible_limits_are_refused():
    with pytest.raises(LoadsError, match="no windows"):
        forecast_memory([], MODEL)
    for limit in (0, -1, float("nan"), float("inf")):
        with pytest.raises(LoadsError, match="memory limit"):
            forecast_memory([matrix([[[1] * 8]])], MODEL, limit_gib=limit)

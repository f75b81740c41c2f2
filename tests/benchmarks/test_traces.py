"""Loads from traces: no row is lost by cutting, dealing, stacking or joining."""

import numpy as np
import pytest

from benchmarks.traces import Trace, joined, read_traces, scaled, stacked
from equipoise.core import ModelShape


def small_trace():
    rng = np.random.default_rng(0)
    ids_TLK = np.stack([rng.permuted(np.tile(np.arange(8), (4, 1)), axis=1)[:, :2] for _ in range(50)])
    model = ModelShape.preset("qwen3-30b-a3b", experts=8, layers=4, top_k=2)
    return Trace(name="small", model=model, ids_TLK=ids_TLK.astype(np.uint8))


def test_tokens_are_cut_in_file_order_and_dealt_round_robin():
    trace = small_trace()
    loads = trace.loads(3, tokens=16)
    assert loads.load_MLRE.shape == (3, 4, 3, 8)
    for m, layer, rank in np.ndindex(3, 4, 3):
        tokens = trace.ids_TLK[m * 16 : (m + 1) * 16][rank::3]
        assert loads.load_MLRE[m, layer, rank].tolist() == np.bincount(tokens[:, layer].ravel(), minlength=8).tolist()


def test_a_stacked_layer_keeps_every_experts_load():
    trace = small_trace()
    wide = stacked(trace, 16)
    assert (wide.model.experts, wide.model.layers, wide.model.top_k) == (16, 2, 4)
    narrow, broad = trace.loads(2, tokens=25), wide.loads(2, tokens=25)
    for layer in range(2):
        parts = narrow.load_MLRE[:, 2 * layer : 2 * layer + 2].sum(axis=2).transpose(0, 1, 2).reshape(2, 16)
        assert np.array_equal(np.sort(parts, axis=1), np.sort(broad.load_MLRE[:, layer].sum(axis=1), axis=1))


def test_joined_and_scaled_windows_keep_order_and_pattern():
    loads = small_trace().loads(2, tokens=25)
    twice = joined([loads, scaled(loads, 3)])
    assert np.array_equal(twice.load_MLRE[:2], loads.load_MLRE)
    assert np.array_equal(twice.load_MLRE[2:], 3 * loads.load_MLRE)


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(SystemExit, match="no traces at"):
        read_traces(tmp_path / "nowhere")

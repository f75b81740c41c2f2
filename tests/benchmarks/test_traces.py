"""Loads from traces: no row is lost by cutting, dealing, stacking or joining."""

import numpy as np
import pytest

from benchmarks.traces import FOLDER, Trace, joined, read_traces, scaled, stacked
from equipoise.core import ModelShape
from equipoise.cost.links import tokens_to


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


@pytest.mark.skipif(not FOLDER.is_dir(), reason="the real routing traces are not beside the project (../shared/data)")
@pytest.mark.parametrize("nodes", [2, 4])
def test_recorded_tokens_cross_to_a_node_about_as_often_as_chance_says(nodes):
    """Sources of 512 tokens, experts on random nodes: how far off chance is, in the mean of sources and nodes."""
    rng = np.random.default_rng(0)
    for trace in read_traces():
        experts, (_, layers, top_k) = trace.model.experts, trace.ids_TLK.shape
        node_E = rng.permutation(experts) * nodes // experts
        node_BTLK = node_E[trace.ids_TLK[: len(trace.ids_TLK) // 512 * 512]].reshape(-1, 512, layers, top_k)[:40]
        errors = []
        for node in range(nodes):
            is_there_BTLK = node_BTLK == node
            came_BL, rows_BL = is_there_BTLK.any(axis=3).sum(axis=1), is_there_BTLK.sum(axis=(1, 3))
            said_BL = np.array([[tokens_to(rows, 512 * top_k, top_k) for rows in rows_L] for rows_L in rows_BL])
            errors.append(np.abs(said_BL / np.maximum(1, came_BL) - 1).mean())
        assert np.mean(errors) < 0.1, trace.name

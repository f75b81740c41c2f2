"""What people see of an analysis: nothing rounded up to good, nothing shown twice, no fix that is not one."""

import io

import numpy as np
import pytest
from rich.console import Console

from equipoise.cli.output import BLOCKS, show_analysis, sparkline
from equipoise.core import Cluster, LoadMatrix, ModelShape
from equipoise.sim import analyze_loads

MODEL = ModelShape.preset("olmoe", layers=2)
CLUSTER = Cluster.preset("h100", ep=8)


def drawn(windows, **options) -> str:
    console = Console(file=io.StringIO(), width=80, highlight=False, markup=False)
    show_analysis(analyze_loads(windows, model=MODEL, cluster=CLUSTER, **options), console, source="here")
    return console.file.getvalue()


def hot_load(rows: int = 1000) -> np.ndarray:
    load = np.ones((1, 2, 8, 64), dtype=np.int64)
    load[0, 1, :, 5] = rows
    return load


def test_bars_run_from_low_to_high_and_stay_inside():
    assert sparkline([0, 1, 2], low=0, high=2) == BLOCKS[0] + BLOCKS[4] + BLOCKS[7]
    assert sparkline([-5, 99], low=0, high=2) == BLOCKS[0] + BLOCKS[7]
    assert sparkline([3, 3], low=3, high=3) == BLOCKS[0] * 2


def test_stages_with_the_same_micro_steps_are_drawn_once():
    load = hot_load()
    alike = drawn([LoadMatrix(load, stage="recompute"), LoadMatrix(load)])
    assert alike.count("Skew by layer") == 1 and "both stages alike" in alike
    apart = drawn([LoadMatrix(load, stage="recompute"), LoadMatrix(hot_load(9))])
    assert "Skew by layer, recompute" in apart and "Skew by layer, update" in apart


def test_the_worst_skew_stands_in_the_table():
    text = drawn([LoadMatrix(hot_load())])
    # Rank 0 owns experts 0..7: 8 x (1000 + 7) rows against 8 x 8 on the seven others.
    worst = 8 * 1007 / ((8 * 1007 + 7 * 64) / 8)
    assert f"{worst:.2f}" in text


def test_coverage_is_never_rounded_up_to_all():
    coverage = np.full((1, 2, 8), 0.99999)
    assert "routes known: 99.9 %" in drawn([LoadMatrix(hot_load(), coverage_MLR=coverage)])
    assert "routes known: 100 %" in drawn([LoadMatrix(hot_load())])


def test_skew_without_padding_is_shown_where_there_is_padding():
    load = hot_load()
    padding = np.where(load > 1, load - 1, 0)
    text = drawn([LoadMatrix(load, padding_MLRE=padding)])
    (row,) = [line.split() for line in text.splitlines() if line.strip().startswith("> 8")]
    assert row[-1] == "1.00" and float(row[2]) > 4
    assert "without padding" not in drawn([LoadMatrix(load)])


@pytest.mark.parametrize(
    ("limit", "words"),
    [(None, "no limit given"), (1.0, "fits into 1 GiB"), (0.1, "does not fit into 0.1 GiB")],
)
def test_the_verdict_is_said_in_words(limit, words):
    text = drawn([LoadMatrix(hot_load())], memory_gib=limit)
    assert words in text
    assert ("balance the experts" in text) == (limit == 0.1)
    assert "update window 0, micro-step 0, layer 1, rank 0" in text

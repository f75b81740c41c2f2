"""What people see of predicted seconds: the answer in figures, whose they are, and "not worth it here"."""

import io
import re

import numpy as np
import pytest
from rich.console import Console

from equipoise.cli.output import analysis_answer, seconds_notes, seconds_table, seconds_unit
from equipoise.core import Cluster, LoadMatrix, ModelShape
from equipoise.core.options import replica_bytes
from equipoise.sim import analyze_loads

MODEL = ModelShape.preset("olmoe", layers=2)


def analyzed(loads: LoadMatrix, *, cluster: str = "h100", slots: int | None = 1):
    return analyze_loads([loads], model=MODEL, cluster=Cluster.preset(cluster, ep=8), slots=slots)


def drawn(*parts, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False, markup=False)
    for part in parts:
        console.print(part)
    return console.file.getvalue()


def hot_loads(micro_steps: int = 4) -> LoadMatrix:
    load = np.random.default_rng(0).integers(20, 60, (micro_steps, 2, 8, 64))
    load[:, :, :, 5] += 2000
    return LoadMatrix(load)


def figures(line: str) -> list[float]:
    return [float(x) for x in re.findall(r"-?\d+\.\d+", line)]


def test_the_answer_names_lost_saved_memory_and_skew():
    analysis = analyzed(hot_loads())
    text, seconds = drawn(analysis_answer(analysis)), analysis.seconds
    lost, plan, skews = text.strip().splitlines()
    assert f"{seconds.share(seconds.lost_seconds):.1%}" in lost and f"{seconds.lost_seconds * 1e3:.1f} ms" in lost
    assert f"saves {seconds.saved_seconds * 1e3:.1f} ms" in plan
    assert f"with 1 replica slot, {2 * replica_bytes(MODEL, 'update') / 2**20:.0f} MiB per GPU" in plan
    before, after = figures(skews)
    assert before == pytest.approx(analysis.stages["update"].skew.mean, abs=0.01) and 1 <= after < before


def test_columns_add_up_to_the_step():
    analysis = analyzed(hot_loads())
    lines = drawn(seconds_table(analysis)).splitlines()
    compute, exchange, moved, total = (
        figures(next(line for line in lines if part in line)) for part in ("compute", "all-to-all", "transfers", "step")
    )
    assert compute[0] + exchange[0] == pytest.approx(total[0], abs=0.02)
    assert compute[4] + exchange[4] + moved[0] == pytest.approx(total[4], abs=0.03)
    assert total[0] - total[4] == pytest.approx(total[5], abs=0.02)
    assert total[0] == pytest.approx(analysis.seconds.now.total * 1e3, abs=0.01)


def test_small_steps_are_in_milliseconds_and_long_ones_in_seconds():
    assert seconds_unit(analyzed(hot_loads(), slots=None)) == "milliseconds"
    assert seconds_unit(analyzed(LoadMatrix(hot_loads(64).load_MLRE * 40), slots=None)) == "seconds"


def test_level_loads_are_not_worth_it():
    level = analyzed(LoadMatrix(np.full((2, 2, 8, 64), 50, dtype=np.int64)))
    assert "not worth it here: saves 0.0 ms, 0.0%, less than 1%" in drawn(analysis_answer(level))
    assert "-0.00" not in drawn(seconds_table(level))
    assert "not worth it" not in drawn(analysis_answer(analyzed(hot_loads())))


@pytest.mark.parametrize(
    ("cluster", "words"),
    [("h200", "NVIDIA H200, measured"), ("h100", "derived from an H200's measured figures"), ("a100", "derived from")],
)
def test_notes_say_whose_figures_they_are(cluster, words):
    assert words in drawn(seconds_notes(analyzed(hot_loads(), cluster=cluster, slots=None)))


def test_notes_say_what_is_assumed_estimated_and_left_out():
    loads = hot_loads()
    text = drawn(seconds_notes(analyzed(loads)), width=100)
    for words in ("assumed share", "pulls, returns, publish", "attention, optimizer, rollout"):
        assert words in text
    assert "estimated" not in text
    half = LoadMatrix(loads.load_MLRE, coverage_MLR=np.full((4, 2, 8), 0.5))
    assert "50.0% of the rows" in drawn(seconds_notes(analyzed(half)))


def test_placement_alone_takes_no_memory():
    assert "placement alone, no memory taken" in drawn(analysis_answer(analyzed(hot_loads(), slots=0)), width=120)


@pytest.mark.parametrize("slots", [None, 1])
def test_everything_fits_into_80_columns(slots):
    analysis = analyzed(LoadMatrix(hot_loads(64).load_MLRE * 40), slots=slots)
    text = drawn(analysis_answer(analysis), seconds_table(analysis), seconds_notes(analysis))
    assert chr(0x2026) not in text
    assert ("planned" in text) == (slots is not None)
    assert max(map(len, text.splitlines())) <= 80

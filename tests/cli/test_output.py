"""What users see: tables whose numbers are whole at 80 columns, and a standard output that is closed or full."""

import errno
import io
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from equipoise.cli.output import (
    BLOCKS,
    analysis_answer,
    build_table,
    guarded,
    seconds_notes,
    seconds_table,
    seconds_unit,
    show_analysis,
    sparkline,
)
from equipoise.core import Cluster, LoadMatrix, ModelShape
from equipoise.core.options import replica_bytes
from equipoise.sim import analyze_loads

VERB = [sys.executable, "-c", "from equipoise.cli import main; main()", "convert", "--formats"]
MODEL = ModelShape.preset("olmoe", layers=2)
CLUSTER = Cluster.preset("h100", ep=8)
FULL = Path("/dev/full")
# What is refused is noticed when it is written, or when it leaves a buffer.
buffering = pytest.mark.parametrize(
    "environment", [os.environ | {"PYTHONUNBUFFERED": value} for value in ("", "1")], ids=["buffered", "unbuffered"]
)


@buffering
def test_a_reader_that_has_gone_is_no_error(environment):
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(VERB, stdout=writer, stderr=subprocess.PIPE, text=True, env=environment)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


@buffering
@pytest.mark.skipif(not FULL.exists(), reason="no device that is always full")
def test_a_full_disk_is_one_line_and_exit_code_2(environment):
    with FULL.open("w") as full:
        done = subprocess.run(VERB, stdout=full, stderr=subprocess.PIPE, text=True, env=environment)
    assert done.returncode == 2
    assert done.stderr == "equipoise: standard output cannot be written: No space left on device\n"


def test_another_pipe_that_broke_is_not_taken_for_a_reader():
    def verb() -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    with pytest.raises(BrokenPipeError):
        guarded(verb)()


def shown(windows, **options) -> str:
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
    alike = shown([LoadMatrix(load, stage="recompute"), LoadMatrix(load)])
    assert alike.count("Skew by layer") == 1 and "both stages alike" in alike
    apart = shown([LoadMatrix(load, stage="recompute"), LoadMatrix(hot_load(9))])
    assert "Skew by layer, log-prob" in apart and "Skew by layer, update" in apart


def test_the_worst_skew_stands_in_the_table():
    text = shown([LoadMatrix(hot_load())])
    # Rank 0 owns experts 0..7: 8 x (1000 + 7) rows against 8 x 8 on the seven others.
    worst = 8 * 1007 / ((8 * 1007 + 7 * 64) / 8)
    assert f"{worst:.2f}" in text


def test_coverage_is_never_rounded_up_to_all():
    coverage = np.full((1, 2, 8), 0.99999)
    assert "routes known: 99.9 %" in shown([LoadMatrix(hot_load(), coverage_MLR=coverage)])


def test_rows_that_no_route_says_are_named_beside_coverage():
    load = hot_load()
    filled = load.sum(axis=3) // 4
    text = " ".join(shown([LoadMatrix(load, filled_MLR=filled)]).split())
    assert f"routes known: 100 %, {filled.sum() / load.sum():.2%} of the rows filled" in text
    assert "filled" not in shown([LoadMatrix(load)])
    assert "routes known: 100 %" in shown([LoadMatrix(hot_load())])


def test_skew_without_padding_is_shown_where_there_is_padding():
    load = hot_load()
    padding = np.where(load > 1, load - 1, 0)
    text = shown([LoadMatrix(load, padding_MLRE=padding)])
    (row,) = [line.split() for line in text.splitlines() if line.strip().startswith("> 8")]
    assert row[-1] == "1.00" and float(row[2]) > 4
    assert "without padding" not in shown([LoadMatrix(load)])


@pytest.mark.parametrize(
    ("limit", "words"),
    [(None, "no limit given"), (1.0, "fits into 1 GiB"), (0.15, "does not fit into 0.15 GiB")],
)
def test_the_verdict_is_said_in_words(limit, words):
    text = shown([LoadMatrix(hot_load())], memory_gib=limit)
    assert words in text
    assert ("balance the experts" in text) == (limit == 0.15)
    assert "update window 0, micro-step 0, layer 1, rank 0" in text


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
    lost, plan, rows, skews = text.strip().splitlines()
    assert f"{seconds.share(seconds.lost_seconds):.1%}" in lost and f"{seconds.lost_seconds * 1e3:.1f} ms" in lost
    assert f"saves {seconds.saved_seconds * 1e3:.1f} ms" in plan
    held = 2 * replica_bytes(MODEL, "update") + 4 * MODEL.expert_bytes
    assert f"with 1 replica slot, {held / 2**20:.0f} MiB per GPU" in plan
    assert f"{analysis.trial.row_page_bytes / 2**20:.0f} MiB more per GPU" in rows
    before, after = figures(skews)
    assert before == pytest.approx(analysis.stages["update"].skew.mean, abs=0.01) and 1 <= after < before


@pytest.mark.parametrize(("less_s", "is_more"), [(0.0, False), (-0.1, True)])
def test_what_is_saved_beyond_what_is_lost_is_said_apart(less_s, is_more):
    analysis = analyzed(hot_loads())
    first = analysis.stages["update"].seconds
    compute = first.balanced.compute * (1 + less_s)
    planned = replace(first.balanced, compute=compute)
    stage = replace(analysis.stages["update"], seconds=replace(first, planned=planned))
    text = " ".join(drawn(analysis_answer(replace(analysis, stages={"update": stage})), width=200).split())
    share = (first.balanced.compute - compute) / first.now.total
    assert (f"(all that is lost, and {share:.1%} beyond it)" in text) is is_more


@pytest.mark.parametrize("schedule", ["", "Each rank forwards at most 99 tokens."])
def test_the_schedule_is_said_before_the_answer(schedule):
    console = Console(file=io.StringIO(), width=80)
    show_analysis(replace(analyzed(hot_loads()), schedule=schedule), console, source="here")
    assert console.file.getvalue().splitlines()[3] == schedule


def test_columns_add_up_to_the_step():
    analysis = analyzed(hot_loads())
    lines = drawn(seconds_table(analysis, width=80)).splitlines()
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
    assert "-0.00" not in drawn(seconds_table(level, width=80))
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


def test_placement_alone_takes_boxes_for_experts_that_move():
    held = f"with placement alone, {4 * MODEL.expert_bytes / 2**20:.0f} MiB per GPU"
    assert held in drawn(analysis_answer(analyzed(hot_loads(), slots=0)), width=120)


@pytest.mark.parametrize("slots", [None, 1])
@pytest.mark.parametrize("width", [80, 50])
def test_everything_fits_into_80_and_50_columns_with_every_number_whole(slots, width):
    analysis = analyzed(LoadMatrix(hot_loads(64).load_MLRE * 40), slots=slots)
    table = drawn(seconds_table(analysis, width=width), width=width)
    text = drawn(analysis_answer(analysis), seconds_notes(analysis), width=width) + table
    assert chr(0x2026) not in text
    assert ("planned" in text) == (slots is not None)
    assert max(map(len, text.splitlines())) <= width
    wide = drawn(seconds_table(analysis, width=200), width=200)
    assert sorted(re.findall(r"\S*\d\S*", table)) == sorted(re.findall(r"\S*\d\S*", wide))


def test_a_table_that_is_too_wide_folds_text_and_numbers_and_cuts_none():
    rows = [("a name with several words", "1234567890.12", "-0.123456789")] * 2
    text = drawn(build_table(["what it is", "before", "after"], rows, title="wide"), width=24)
    assert chr(0x2026) not in text and max(map(len, text.splitlines())) <= 24
    cells = "".join(text.split())
    assert all(cells.count(digit) == 2 * "".join(rows[0]).count(digit) for digit in "0123456789")

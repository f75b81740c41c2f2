"""`equipoise analyze`: the same figures from every kind of dump, a verdict as exit code, a table people can read."""

import json

import numpy as np
import pytest

from equipoise.core import Cluster, LoadMatrix, ModelShape, Routes, SampleRoutes, Schedule
from equipoise.loads import (
    count_loads,
    count_routes,
    count_step,
    generate_routes,
    longest_first,
    save_counts,
    skew,
    slice_context,
    slice_sequence,
    step_schedules,
    write_schedules,
)
from equipoise.planner import PlanOptions, plan_step
from equipoise.routes import write_routes

MODEL = ModelShape.preset("olmoe")


@pytest.fixture(scope="module")
def routes():
    return generate_routes(MODEL, samples=12, mean_tokens=80, seed=1)


@pytest.fixture
def store(routes, tmp_path):
    write_routes(routes, tmp_path / "routes.eqr", format="equipoise")
    return tmp_path / "routes.eqr"


def tokens_of(routes) -> np.ndarray:
    return np.array([sample.num_tokens for sample in routes])


def test_figures_are_those_of_the_rooms_below(equipoise, routes, store):
    outcome = equipoise("analyze", store, "--ep", "4", "--mini-batches", "2", "--schedule", "samples:1", "--json")
    recompute, *update = count_step(
        routes, step_schedules(tokens_of(routes), ranks=4, mini_batches=2, samples_per_micro_step=1)
    )
    assert outcome.code == 0
    stages = outcome.document["stages"]
    assert stages["recompute"]["skew"] == skew(recompute).to_dict()
    assert stages["update"]["skew"] == skew(update).to_dict()
    assert stages["update"]["widths"]["32"] == skew(update, ep=32).dispatched.to_dict()
    assert outcome.document["rows"] == 2 * recompute.load_MLRE.sum()
    assert outcome.document["coverage"] == 1.0


def test_every_kind_of_dump_gives_the_same_document(equipoise, routes, store, tmp_path):
    write_routes(routes, tmp_path / "rollouts.jsonl", format="vllm-http")
    save_counts(count_routes(routes), tmp_path / "counts.npz")
    from_store = equipoise("analyze", store, "--json").document
    assert equipoise("analyze", tmp_path / "counts.npz", "--json").document == from_store
    assert equipoise("analyze", tmp_path / "rollouts.jsonl", "--model", "olmoe", "--json").document == from_store


def test_loads_of_one_window_can_be_analysed(equipoise, routes, tmp_path):
    (window,) = step_schedules(tokens_of(routes), ranks=8, token_budget=300, recompute=False)
    loads = count_loads(routes, window)
    loads.save(tmp_path / "loads.npz")
    outcome = equipoise("analyze", tmp_path / "loads.npz", "--model", "olmoe", "--json")
    assert outcome.document["stages"] == {"update": outcome.document["stages"]["update"]}
    assert outcome.document["stages"]["update"]["skew"] == skew(loads).to_dict()
    assert "add --model" in equipoise("analyze", tmp_path / "loads.npz").err
    refused = equipoise("analyze", tmp_path / "loads.npz", "--model", "olmoe", "--schedule", "tokens:99")
    assert (refused.code, "scheduled already" in refused.err) == (2, True)


def test_histograms_of_another_model_are_refused(equipoise, routes, tmp_path):
    save_counts(count_routes(routes), tmp_path / "counts.npz")
    outcome = equipoise("analyze", tmp_path / "counts.npz", "--model", "mixtral-8x7b")
    assert outcome.code == 2
    assert "holds histograms of 'olmoe': experts is 64, not 8" in outcome.err


def test_slices_are_counted_from_the_routes(equipoise, routes, store):
    outcome = equipoise(
        "analyze", store, "--cp", "2", "--sp", "2", "--schedule", "samples:1", "--no-recompute", "--json"
    )
    (window,) = step_schedules(tokens_of(routes), ranks=2, samples_per_micro_step=1, recompute=False)
    loads = count_loads(routes, slice_sequence(slice_context(window, 2), 2))
    assert outcome.document["stages"]["update"]["skew"] == skew(loads).to_dict()
    assert outcome.document["padding"] == pytest.approx(loads.padding_MLRE.sum() / loads.load_MLRE.sum())


def test_the_longest_micro_step_can_run_first(equipoise, routes, store, tmp_path):
    (window,) = step_schedules(tokens_of(routes), ranks=2, samples_per_micro_step=1, recompute=False)
    write_schedules([window], tmp_path / "schedule.json")
    ordered = count_loads(routes, longest_first(window)).load_MLRE
    assert not np.array_equal(ordered, count_loads(routes, window).load_MLRE), "the order given must be another one"
    for way in (("--no-recompute", "--schedule", "samples:1"), ("--schedule", tmp_path / "schedule.json")):
        given = (
            "convert",
            store,
            "--to",
            "loads",
            "-o",
            tmp_path / "loads.npz",
            "--ep",
            "2",
            "--force",
            "--longest-first",
        )
        assert equipoise(*given, *way).code == 0
        assert np.array_equal(LoadMatrix.load(tmp_path / "loads.npz").load_MLRE, ordered)


def test_histograms_are_not_cut(equipoise, routes, tmp_path):
    save_counts(count_routes(routes), tmp_path / "counts.npz")
    for given in ((tmp_path / "counts.npz",), ("--demo", "--model", "olmoe")):
        refused = equipoise("analyze", *given, "--cp", "2")
        assert (refused.code, "--cp 2 and --sp 1 cut samples, and histograms hold them whole" in refused.err) == (
            2,
            True,
        )


def test_a_trainers_own_schedule_is_used(equipoise, routes, store, tmp_path):
    schedule = Schedule.of([(3, 0, 20, 0, 0), (5, 2, 9, 1, 7)], ranks=8)
    write_schedules([schedule], tmp_path / "step.json")
    outcome = equipoise("analyze", store, "--schedule", tmp_path / "step.json", "--json")
    assert outcome.document["rows"] == 27 * MODEL.top_k * MODEL.layers
    assert outcome.document["micro_steps"] == 2
    for options, words in (
        (["--ep", "4"], "schedules 8 ranks, --ep 4 x --groups 1 are 4; give the ranks"),
        (["--cp", "2"], "leave --mini-batches, --cp"),
    ):
        refused = equipoise("analyze", store, "--schedule", tmp_path / "step.json", *options)
        assert (refused.code, words in refused.err) == (2, True)


def test_recorded_last_tokens_are_forwarded_from_histograms(equipoise, tmp_path):
    ids = np.arange(8).reshape(1, 1, 8).repeat(6, axis=0).repeat(MODEL.layers, axis=1)
    full = Routes.of([SampleRoutes(name="full", ids_TLK=ids, num_tokens=6)], model=MODEL)
    save_counts(count_routes(full), tmp_path / "counts.npz")
    outcome = equipoise("analyze", tmp_path / "counts.npz", "--no-recompute", "--json")
    assert outcome.document["rows"] == 6 * MODEL.top_k * MODEL.layers


@pytest.mark.parametrize("slots", [0, 2])
def test_the_plan_is_the_planners_with_as_many_slots_as_asked_for(equipoise, routes, store, slots):
    outcome = equipoise(
        "analyze", store, "--ep", "4", "--cluster", "h200", "--slots", slots, "--schedule", "samples:1", "--json"
    )
    windows = count_step(routes, step_schedules(tokens_of(routes), ranks=4, samples_per_micro_step=1))
    options = PlanOptions(sends="tokens")
    plans = plan_step(windows, cluster=Cluster.preset("h200", ep=4), model=MODEL, slots=slots, options=options)
    document = outcome.document
    assert document["plan"]["slots"] == slots
    assert document["plan"]["buffer_bytes"] == max(slots * (2 * 2 + 4), 4) * MODEL.expert_bytes
    assert document["seconds"]["now"]["total"] == pytest.approx(sum(p.static_seconds for p in plans))
    assert document["seconds"]["planned"]["total"] == pytest.approx(sum(p.seconds.total for p in plans))
    assert document["profile"] == {"device": "NVIDIA H200", "kind": "measured"}


def test_the_plan_can_be_left_out(equipoise, store):
    document = equipoise("analyze", store, "--no-plan", "--json").document
    assert (document["plan"], document["no_plan"], document["seconds"]["saved"]) == (None, "not asked for", None)
    assert "none tried: not asked for" in equipoise("analyze", store, "--no-plan").out


def test_loads_of_other_source_ranks_keep_their_skew_and_say_why_there_is_no_plan(equipoise, tmp_path):
    loads = LoadMatrix(np.random.default_rng(0).integers(0, 90, (2, 16, 4, 64)))
    loads.save(tmp_path / "loads.npz")
    outcome = equipoise("analyze", tmp_path / "loads.npz", "--model", "olmoe")
    assert outcome.code == 0
    assert "none tried: the loads have 4 source ranks" in outcome.out
    assert "not priced: source ranks are not the ranks of the EP group" in outcome.out
    assert f"{skew(loads, ep=8).mean:.2f}" in outcome.out


@pytest.mark.parametrize(("limit", "code", "words"), [("0.000001", 1, "does not fit"), ("100", 0, "fits into 100 GiB")])
def test_the_memory_verdict_is_the_exit_code(equipoise, store, limit, code, words):
    outcome = equipoise("analyze", store, "--memory-gib", limit)
    assert outcome.code == code
    assert words in outcome.out


def test_recomputed_activations_take_less_memory(equipoise, store):
    kept = equipoise("analyze", store, "--no-plan", "--json").document["memory"]
    recomputed = equipoise("analyze", store, "--no-plan", "--activations", "recomputed", "--json").document["memory"]
    assert (kept["activations"], recomputed["activations"]) == ("kept", "recomputed")
    assert kept["peak_bytes"] > recomputed["peak_bytes"]
    assert "GiB, activations kept" in equipoise("analyze", store, "--no-plan").out


def test_the_document_is_written_even_if_the_verdict_is_bad(equipoise, store, tmp_path):
    outcome = equipoise("analyze", store, "--memory-gib", "0.001", "-o", tmp_path / "a.json", "--json")
    assert outcome.code == 1
    assert json.loads((tmp_path / "a.json").read_text()) == outcome.document
    assert outcome.document["memory"]["fixes"]
    assert len(outcome.out.splitlines()) == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        pytest.param(["--schedule", "samples"], "--schedule is 'samples'; write samples:N", id="schedule"),
        pytest.param(["--schedule", "tokens:-5"], "--schedule is 'tokens:-5'", id="negative budget"),
        pytest.param(["--schedule", "tokens:3"], "the token budget is 3", id="tiny budget"),
        pytest.param(["--schedule", "absent.json"], "no schedule at absent.json", id="absent schedule"),
        pytest.param(["--cp", "3"], "does not divide the EP group of 8 ranks", id="cp"),
        pytest.param(["--cp", "0"], "--cp is 0; it must be from 1 to 65536", id="no cp"),
        pytest.param(["--ep", "3"], "64 experts of 'olmoe' do not divide by 3 ranks", id="ep"),
        pytest.param(["--ep", "0"], "--ep is 0", id="no ep"),
        pytest.param(["--ep", "-8"], "--ep is -8; it must be from 1 to 65536", id="negative ep"),
        # A group is laid out rank by rank: without a limit this one would take all memory.
        pytest.param(["--ep", "99999999999"], "--ep is 99999999999; it must be from 1", id="absurd ep"),
        pytest.param(["-o", "absent/x.json"], "there is no folder absent; make it first", id="no folder"),
        pytest.param(["--report", "."], ". cannot be written: it is a folder", id="page is a folder"),
        pytest.param(["--cluster", "abacus"], "no cluster preset 'abacus'", id="cluster"),
        pytest.param(["--memory-gib", "-1"], "memory limit is -1", id="memory"),
        pytest.param(["--slots", "-1"], "--slots is -1; it must be 0", id="slots"),
        pytest.param(["--slots", "0", "--no-plan"], "--no-plan makes --slots 0 void", id="slots of no plan"),
        pytest.param(["--mini-batches", "99"], "--mini-batches is 99; it must be from 1 to", id="mini-batches"),
        pytest.param(["--mini-batches", "0"], "--mini-batches is 0; it must be at least 1", id="no mini-batch"),
        pytest.param(["--schedule", "tokens:0"], "--schedule is 'tokens:0'; write samples:N", id="no tokens"),
        pytest.param(["--schedule", "samples:0"], "--schedule is 'samples:0'; write samples:N", id="no samples"),
        pytest.param(["--ranks-per-node", "0"], "--ranks-per-node is 0; it must be at least 1", id="empty nodes"),
        pytest.param(["--model", "mixtral-8x7b"], "holds routes of 'olmoe'", id="another model"),
    ],
)
def test_bad_input_is_one_line_that_names_it(equipoise, store, options, words):
    outcome = equipoise("analyze", store, *options)
    assert (outcome.code, outcome.out) == (2, "")
    assert words in outcome.err
    assert outcome.err.count("\n") == 1


@pytest.mark.parametrize("options", [("--ep", "3"), ("--cp", "3"), ("--schedule", "samples"), ("--schedule", "x.json")])
def test_a_packing_that_cannot_be_is_refused_before_the_dump_is_read(equipoise, store, monkeypatch, options):
    monkeypatch.setattr("equipoise.cli.step_loads.count_dump", lambda *_: pytest.fail("read"))
    assert equipoise("analyze", store, *options).code == 2


def test_without_a_dump_the_demo_is_pointed_to(equipoise, store):
    for arguments in ([], [store, "--demo"]):
        outcome = equipoise("analyze", *arguments)
        assert outcome.code == 2
        assert "--demo" in outcome.err


@pytest.mark.parametrize("columns", [50, 80])
def test_the_demo_ends_with_a_table_that_fits_the_terminal(equipoise, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    outcome = equipoise("analyze", "--demo")
    assert outcome.code == 0
    for words in (
        "qwen3-30b-a3b on h100, EP 8",
        "Skew by layer",
        "balanced",
        "planned",
        "verdict",
        "all predicted",
        "derived from",
    ):
        assert words in " ".join(outcome.out.split())
    assert max(len(line) for line in outcome.out.splitlines()) <= columns
    # Of the table of EP widths, whose rows have a width and four figures.
    rows = [line.split() for line in outcome.out.splitlines()]
    assert [row[0] for row in rows if len(row) == 5 and row[0] in ("16", "32", "64")] == ["16", "32", "64"]


def test_a_damaged_npz_is_our_error_wherever_it_is_cut_or_flipped(equipoise, tmp_path):
    LoadMatrix(np.ones((1, 2, 8, 64), dtype=np.int64)).save(tmp_path / "loads.npz")
    content = (tmp_path / "loads.npz").read_bytes()
    path = tmp_path / "hurt.npz"
    for place in range(0, len(content), 37):
        for hurt in (content[:place], content[:place] + bytes([content[place] ^ 255]) + content[place + 1 :]):
            path.write_bytes(hurt)
            outcome = equipoise("analyze", path, "--model", "olmoe", "--json")
            # A flipped time stamp in the zip directory harms nothing.
            assert outcome.code == 0 or (outcome.code == 2 and "hurt.npz" in outcome.err)

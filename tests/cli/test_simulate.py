"""`equipoise simulate`: the figures of the room below, sweeps as words, and what users get wrong."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from equipoise.cli import step_loads
from equipoise.cli.simulate import split_arguments
from equipoise.core import Cluster, InfeasiblePlanError, LoadMatrix, ModelShape, Routes, RoutesError, SampleRoutes
from equipoise.loads import count_step, generate_routes, step_schedules
from equipoise.routes import write_routes
from equipoise.sim import StepSetting, simulate

MODEL = ModelShape.preset("olmoe", layers=3)


@pytest.fixture(scope="module")
def routes():
    return generate_routes(MODEL, samples=16, mean_tokens=200, seed=1)


@pytest.fixture
def store(routes, tmp_path):
    write_routes(routes, tmp_path / "routes.eqr", format="equipoise")
    return tmp_path / "routes.eqr"


def test_figures_are_those_of_the_room_below(equipoise, routes, store):
    tokens_B = np.array([sample.num_tokens for sample in routes])
    windows = count_step(routes, step_schedules(tokens_B, ranks=4, samples_per_micro_step=1))
    given = ("--ep", 4, "--ranks-per-node", 2, "--schedule", "samples:1", "--rollout-s", 9, "--no-break-even", "--json")
    found = equipoise("simulate", store, "--policies", "static,equipoise", *given)
    assert found.code == 0, found.err
    cluster = Cluster.preset("h100", ep=4, ranks_per_node=2)
    setting = StepSetting(rollout_s=9.0, sends="tokens")
    expected = simulate(windows, ["static", "equipoise"], cluster=cluster, model=MODEL, setting=setting)
    assert found.document["policies"] == json.loads(json.dumps(expected.to_dict()))["policies"]
    assert found.document["sweep"] is None


def test_replicas_of_recompute_may_cross_nodes_in_the_step_and_in_its_sweep(equipoise, tmp_path):
    load = np.random.default_rng(3).integers(0, 500, size=(2, 16, 8, 64))
    load[..., 5] = 20_000
    LoadMatrix(load, stage="recompute").save(tmp_path / "hot.npz")
    given = ("--model", "olmoe", "--ep", 8, "--ranks-per-node", 4, "--policies", "equipoise", "--no-break-even")
    inside, across = (
        equipoise("simulate", tmp_path / "hot.npz", *given, "--sweep", "slots=1", "--json", *options)
        for options in ((), ("--cross-node",))
    )
    assert inside.code == across.code == 0, across.err
    for seconds in (_step_seconds, _swept_seconds):
        assert seconds(across.document) < 0.9 * seconds(inside.document)
    told = [any("may be in any node" in note for note in found.document["notes"]) for found in (inside, across)]
    assert told == [found.document["setting"]["cross_node"] for found in (inside, across)] == [False, True]


def _step_seconds(document):
    return document["policies"][0]["seconds"]["compute"]


def _swept_seconds(document):
    return document["sweep"]["points"][0]["seconds"]["equipoise"]


def test_a_sweep_is_words_after_the_option(equipoise, store, tmp_path):
    out = tmp_path / "sim.json"
    given = ("--policies", "static,equipoise,balanced", "--ep", 4, "-o", out)
    found = equipoise("simulate", store, *given, "--sweep", "ep=2,4", "slots=0,1", "micro=1,2")
    assert found.code == 0, found.err
    document = json.loads(out.read_text())
    assert document["format"] == "equipoise-simulation-1"
    assert [(p["ep"], p["slots"], p["micro"]) for p in document["sweep"]["points"]] == [
        (ep, slots, micro) for ep in (2, 4) for micro in (1, 2) for slots in (0, 1)
    ]
    assert len(document["sweep"]["break_even"]["curves"]) == 3
    for words in ("Sweep", "Break-even", "Policies", "no cluster was run", f"Written: {out}"):
        assert words in found.out


@pytest.fixture
def save_loads(tmp_path):
    """Save loads of four ranks of the model, all entries alike; name their file."""

    def save(rows: int = 100, *, ranks: int = 4) -> Path:
        path = tmp_path / f"loads-{rows}-{ranks}.npz"
        LoadMatrix(np.full((2, MODEL.layers, ranks, MODEL.experts), rows), stage="update").save(path)
        return path

    return save


def test_counted_pairs_are_priced(equipoise, tmp_path):
    """Every token has all its experts in one half of them, which is one node: it crosses half as often as by chance."""
    rng = np.random.default_rng(0)
    half_BTL = rng.integers(0, 2, size=(8, 200, 3, 1)) * 32
    ids = half_BTL + np.argsort(rng.random((8, 200, 3, 32)), axis=3)[..., :8]
    samples = [SampleRoutes(ids_TLK=one.astype(np.uint8), num_tokens=200, name=f"{b}") for b, one in enumerate(ids)]
    write_routes(Routes.of(samples, model=MODEL, layer_numbers=(0, 1, 2)), tmp_path / "routes.eqr", format="equipoise")
    found = {}
    for name, options in (("plain", ()), ("pairs", ("--pairs",))):
        counted = equipoise(
            "convert", tmp_path / "routes.eqr", "--to", "counts", "-o", tmp_path / f"{name}.npz", *options
        )
        assert counted.code == 0, counted.err
        given = ("--ep", 4, "--ranks-per-node", 2, "--policies", "static,balanced", "--sends", "tokens")
        found[name] = equipoise(
            "simulate", tmp_path / f"{name}.npz", *given, "--network-gbit", 10, "--sweep", "slots=0", "--json"
        ).document
    told = {name: any("counted pairs" in note for note in document["notes"]) for name, document in found.items()}
    assert told == {"plain": False, "pairs": True}
    for policy in (0, 1):
        plain, pairs = (found[name]["policies"][policy]["seconds"]["all_to_all_across"] for name in ("plain", "pairs"))
        assert 0.4 * plain < pairs < 0.7 * plain, "of balanced, too: tokens choose alike"
    swept = {name: document["sweep"]["points"][0]["seconds"]["static"] for name, document in found.items()}
    assert swept["pairs"] < swept["plain"]


def test_a_dump_is_read_once_for_all_widths_of_a_sweep(equipoise, store, monkeypatch):
    reads = []
    counted = step_loads.count_dump
    monkeypatch.setattr(step_loads, "count_dump", lambda *given: (reads.append(given), counted(*given))[1])
    given = ("--policies", "static", "--ep", 4, "--no-break-even", "--json")
    found = equipoise("simulate", store, *given, "--sweep", "ep=2,4,8")
    assert [point["ep"] for point in found.document["sweep"]["points"]] == [2, 4, 8], found.err
    assert len(reads) == 1


@pytest.mark.parametrize("part", ["sweep_points", "break_even_curves"])
def test_an_interrupt_beside_the_step_keeps_the_step(equipoise, store, tmp_path, monkeypatch, part):
    def interrupt(*_args, **_options):
        raise KeyboardInterrupt

    monkeypatch.setattr(f"equipoise.sim.sweep.{part}", interrupt)
    out = tmp_path / "sim.json"
    found = equipoise("simulate", store, "--policies", "static", "--ep", 4, "--sweep", "slots=0", "-o", out)
    assert found.code == 130
    document = json.loads(out.read_text())
    assert document["policies"][0]["seconds"]["compute"] > 0
    cut = ["Sweep left out: interrupted."] if part == "sweep_points" else []
    assert [note for note in document["notes"] if "interrupted" in note] == [*cut, "Break-even left out: interrupted."]
    assert (document["sweep"] is None) == (part == "sweep_points")
    assert "interrupted" in found.out


def test_a_dump_may_hold_some_of_the_models_layers(equipoise, tmp_path):
    few = generate_routes(MODEL, samples=8, mean_tokens=200, seed=1)
    parts = [replace(sample, ids_TLK=sample.ids_TLK[:, :2]) for sample in few]
    write_routes(Routes.of(parts, model=MODEL, layer_numbers=(0, 1)), tmp_path / "few.eqr", format="equipoise")
    found = equipoise("simulate", tmp_path / "few.eqr", "--ep", 4, "--policies", "static", "--no-break-even", "--json")
    assert found.code == 0, found.err
    assert found.document["model"]["layers"] == 2


def test_a_sweep_has_the_slots_of_the_step_unless_it_sweeps_them(equipoise, save_loads):
    given = ("--model", "olmoe", "--ep", 4, "--policies", "equipoise", "--slots", 2, "--no-break-even", "--json")
    for axis, expected in (("ep=2,4", [2, 2]), ("slots=0,1", [0, 1])):
        found = equipoise("simulate", save_loads(), *given, "--sweep", axis)
        assert found.code == 0, found.err
        assert [point["slots"] for point in found.document["sweep"]["points"]] == expected


def test_a_sweep_may_have_a_group_of_one_rank_that_has_no_use_for_slots(equipoise, save_loads):
    given = ("--model", "olmoe", "--ep", 4, "--policies", "static", "--no-break-even", "--json")
    found = equipoise("simulate", save_loads(), *given, "--sweep", "ep=1,4")
    assert found.code == 0, found.err
    assert found.document["sweep"]["points"][0]["saved_share"] == 0


@pytest.fixture
def unsimulated(monkeypatch):
    """No step may be simulated."""

    def simulate_nothing(*_: object, **__: object) -> None:
        raise AssertionError("a step was simulated before all was checked")

    monkeypatch.setattr("equipoise.sim.simulate", simulate_nothing)


@pytest.mark.parametrize(
    ("axis", "rows", "words"),
    [
        ("ep=4,8", 100, "loads of 4 source ranks, which do not fill EP groups of 8"),
        ("ep=3", 100, "do not divide by 3 ranks"),
        ("micro=1", 100, "scheduled already: --sweep micro=1 cannot pack them again"),
        ("micro=2", 100, "scheduled already: --sweep micro=2 cannot pack them again"),
        ("slots=0,99", 100, "--slots is 99"),
        ("tokens=1024", 0, "window 0 (update) has no row, and tokens= multiplies rows; leave that axis out"),
    ],
)
def test_a_sweep_that_loads_cannot_have_is_refused_before_the_step_is_simulated(
    equipoise, save_loads, unsimulated, axis, rows, words
):
    found = equipoise("simulate", save_loads(rows), "--model", "olmoe", "--ep", 4, "--sweep", axis)
    assert (found.code, found.out) == (2, "")
    assert words in found.err
    assert "Traceback" not in found.err


@pytest.mark.parametrize(
    ("options", "axis", "words"),
    [((), "ep=4,7", "do not divide by 7 ranks"), (("--cp", 2), "ep=1", "--cp 2 x --sp 1 does not divide")],
)
def test_a_sweep_that_samples_cannot_have_is_refused_before_the_step_is_simulated(
    equipoise, store, unsimulated, options, axis, words
):
    found = equipoise("simulate", store, "--ep", 4, *options, "--sweep", axis)
    assert (found.code, found.out) == (2, "")
    assert words in found.err


def test_loads_of_a_wider_group_are_cut_for_a_sweep(equipoise, save_loads):
    given = ("--model", "olmoe", "--policies", "static", "--no-break-even", "--json")
    found = equipoise("simulate", save_loads(ranks=8), "--ep", 4, *given, "--sweep", "ep=2,8")
    assert found.code == 0, found.err
    assert found.document["windows"][0]["groups"] == 2
    assert [point["ep"] for point in found.document["sweep"]["points"]] == [2, 8]


def test_a_step_without_rows_has_no_break_even_and_says_so(equipoise, save_loads):
    found = equipoise("simulate", save_loads(0), "--model", "olmoe", "--ep", 4, "--json")
    assert found.code == 0, found.err
    assert found.document["sweep"] is None
    assert found.document["notes"][-1].startswith("Break-even left out: ")
    without = equipoise("simulate", save_loads(0), "--model", "olmoe", "--ep", 4, "--no-break-even")
    assert "Break-even" not in without.out


def test_the_timeline_is_of_the_window_micro_step_and_layers_asked_for(equipoise, store):
    given = ("--ep", 4, "--schedule", "samples:1", "--policies", "equipoise", "--no-break-even", "--json")
    shown = ("--timeline-layers", 2, "--shown-window", 1, "--shown-micro-step", 3)
    found = equipoise("simulate", store, *given, *shown, "--sweep", "micro=4")
    assert found.code == 0, found.err
    assert found.document["shown"] == {"window": 1, "micro_step": 3, "group": 0}
    names = {event["name"] for event in found.document["policies"][0]["timeline"]}
    # The second window is the update: it has a backward pass.
    assert {"experts 1", "experts backward 1"} <= names
    assert "experts 2" not in names
    none = equipoise("simulate", store, *given, "--timeline-layers", 0)
    assert none.document["policies"][0]["timeline"] == []


def test_the_demo_needs_no_input(equipoise):
    found = equipoise("simulate", "--demo", "--model", "olmoe", "--policies", "static", "--no-break-even")
    assert found.code == 0, found.err
    assert "a generated step: olmoe" in found.out


def test_words_are_a_dump_and_axes():
    assert split_arguments(["dump.jsonl", "slots=0,2"], ["ep=8,16"]) == (
        Path("dump.jsonl"),
        {"ep": (8, 16), "slots": (0, 2)},
    )
    assert split_arguments(["slots=0"], ["ep=8 tokens=10,20"]) == (
        None,
        {"ep": (8,), "tokens": (10, 20), "slots": (0,)},
    )
    # A file may have an equals sign in its name.
    assert split_arguments(["run=3.jsonl"], []) == (Path("run=3.jsonl"), {})


@pytest.mark.parametrize(
    ("words", "sweep", "error", "message"),
    [
        (["a", "b"], [], RoutesError, "one dump, not 2: a, b"),
        (["a", "ep=8"], [], InfeasiblePlanError, "write --sweep ep=8"),
        ([], ["ep=eight"], InfeasiblePlanError, "whole numbers"),
        ([], ["width=8"], InfeasiblePlanError, "no axis 'width'"),
        ([], ["ep="], InfeasiblePlanError, "whole numbers"),
        (["ep=16"], ["ep=8"], InfeasiblePlanError, "names the axis ep twice"),
        ([], ["slots=1,1"], InfeasiblePlanError, "'slots' has a value twice: 1, 1"),
        ([], ["tokens=99999999999999999999"], InfeasiblePlanError, "must be from 1 to 16777216"),
    ],
)
def test_words_that_make_no_sense_are_named(words, sweep, error, message):
    with pytest.raises(error, match=message):
        split_arguments(words, sweep)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((), "a DUMP, or --demo"),
        (("--demo", "--policies", "static,magic"), "no policy 'magic'"),
        (("--demo", "--ep", "7"), "do not divide by 7 ranks"),
        (("--demo", "--cluster", "abacus"), "no cluster preset 'abacus'"),
        (("--demo", "--rollout-s", "-1"), "equipoise: --rollout-s is -1.0; it must be a number of seconds, at least 0"),
        (("--demo", "--other-s", "nan"), "equipoise: --other-s is nan; it must be a number of seconds"),
        (("--demo", "--planning-s", "inf"), "equipoise: --planning-s is inf; it must be a number of seconds"),
        (("--demo", "--pipeline-stages", "0"), "equipoise: --pipeline-stages is 0; it must be"),
        (("--demo", "--timeline-layers", "-1"), "equipoise: --timeline-layers is -1; it must be"),
        (("--demo", "--shown-window", "2"), "equipoise: --shown-window is 2; it must be from 0 to 1"),
        (("--demo", "--shown-group", "1"), "equipoise: --shown-group is 1; it must be from 0 to 0"),
        (
            ("--demo", "--ep", "16", "--schedule", "samples:1", "--shown-micro-step", "16"),
            "equipoise: --shown-micro-step is 16; it must be from 0 to 15",
        ),
        (("--demo", "--policies", "static,static"), "named twice"),
        (("--demo", "--waves", "0"), "equipoise: --waves is 0; it must be from 1 to 8"),
        (("--demo", "--policies", "static", "--history", "l.npz"), "--history l.npz is for the policy eplb-history"),
    ],
)
def test_what_users_get_wrong_is_one_message(equipoise, options, words):
    found = equipoise("simulate", *options, "--model", "olmoe", "--no-break-even")
    assert found.code == 2
    assert words in found.err
    assert "Traceback" not in found.err


def test_a_page_without_a_place_is_refused_before_anything_is_simulated(equipoise, tmp_path):
    found = equipoise("simulate", "--demo", "--report", tmp_path / "absent" / "page.html")
    assert (found.code, found.out) == (2, "")
    assert "absent; make it first" in found.err

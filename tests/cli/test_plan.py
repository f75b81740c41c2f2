"""`convert --to loads` and `plan`: from a dump to loads, from loads to a plan that can be read back and explained."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest

import equipoise as eq
from equipoise.cli.step_loads import read_pairs
from equipoise.core.options import replica_bytes
from equipoise.core.plan import explain
from equipoise.cost import Profile
from equipoise.loads import (
    count_loads,
    count_routes,
    generate_routes,
    load_counts,
    plan_memory,
    save_counts,
    slice_context,
    step_schedules,
    write_schedules,
)
from equipoise.routes import write_routes
from equipoise.sim.summary import CROSSING

MODEL = eq.ModelShape.preset("olmoe", layers=2)


@pytest.fixture
def loads_file(tmp_path):
    """Loads of one window of OLMoE, 8 ranks, skewed."""
    rng = np.random.default_rng(3)
    heat_E = rng.integers(1, 10, size=64) ** 2
    load = rng.integers(50, 150, size=(3, 16, 8, 64)) * heat_E
    path = tmp_path / "loads.npz"
    eq.LoadMatrix(load).save(path)
    return path


ARGUMENTS = ["--model", "olmoe", "--cluster", "h200", "--nodes", "2", "--ranks-per-node", "4"]


def test_the_plan_that_is_written_is_the_planners(equipoise, loads_file, tmp_path):
    outcome = equipoise("plan", loads_file, *ARGUMENTS, "--slots", "2", "-o", tmp_path / "plan.npz", "--json")
    assert outcome.code == 0
    assert len(outcome.out.splitlines()) == 1
    cluster = eq.Cluster.preset("h200", nodes=2, ranks_per_node=4)
    given = {"cluster": cluster, "model": eq.ModelShape.preset("olmoe"), "options": eq.PlanOptions(sends="tokens")}
    wanted = eq.plan(eq.LoadMatrix.load(loads_file), slots=2, **given)
    assert eq.Plan.load(tmp_path / "plan.npz") == wanted
    found = outcome.document
    assert found["digest"] == wanted.digest()
    assert found["saved_seconds"] == wanted.saved_seconds > 0
    assert found["seconds"]["total"] == wanted.seconds.total
    assert found["bytes"]["total"] == wanted.bytes.total
    assert found["skew_before"] > found["skew_after"] >= 1
    held = 2 * 2 * replica_bytes(wanted.model, wanted.loads.stage) + 2 * 4 * wanted.model.expert_bytes
    # Rows between nodes are exchanged, so that there is no page.
    assert found["slot_bytes_per_rank"] == held and found["row_page_bytes"] == 0
    memory = plan_memory(wanted)
    assert found["memory"]["rank_peak_bytes"] == memory.peak_R.tolist()
    assert found["memory"]["peak_bytes"] == memory.peak_R.max() == sum(found["memory"]["parts"].values())
    assert found["rank_capacity_factor"] == eq.Capacities.of(wanted).rank_factor() > 1


def test_a_plan_in_waves_says_how_many_and_what_they_save(equipoise, tmp_path):
    load = np.random.default_rng(0).integers(3000, 3300, size=(2, 16, 8, 64))
    eq.LoadMatrix(load).save(tmp_path / "even.npz")
    given = ["plan", tmp_path / "even.npz", *ARGUMENTS, "--sends", "rows"]
    one, two, best = (equipoise(*given, "--waves", waves, "--json").document for waves in ("1", "2", "auto"))
    assert (one["waves"], two["waves"]) == (1, 2) and best["waves"] in (2, 3, 4)
    assert one["one_wave_seconds"] == two["one_wave_seconds"] == one["seconds"]["total"]
    assert best["seconds"]["total"] <= two["seconds"]["total"] < one["seconds"]["total"]
    shown = " ".join(equipoise(*given, "--waves", "2").out.split())
    saved = 1e3 * (one["seconds"]["total"] - two["seconds"]["total"])
    assert f"waves 2, which save {saved:.3f} ms of that; never run on a GPU" in shown


def test_where_routes_are_unknown_the_summary_says_what_a_wrong_plan_can_cost(equipoise, loads_file):
    loads = eq.LoadMatrix.load(loads_file)
    assert "if wrong" not in equipoise("plan", loads_file, *ARGUMENTS).out
    eq.LoadMatrix(loads.load_MLRE, coverage_MLR=np.full((3, 16, 8), 0.75)).save(loads_file)
    out = " ".join(equipoise("plan", loads_file, *ARGUMENTS).out.split())
    assert "estimated 25.0% of the rows" in out
    [(factor, rows, transfers)] = re.findall(
        r"at most (\d+) times .* and ([\d,]+) more on a rank, and ([\d.]+) ms", out
    )
    assert 2 <= int(factor) <= 8 and int(rows.replace(",", "")) > 0 and float(transfers) > 0


def test_a_rank_without_tokens_has_no_capacity_factor_and_a_plan(equipoise, loads_file):
    load = eq.LoadMatrix.load(loads_file).load_MLRE.copy()
    load[0, :, 3] = 0
    eq.LoadMatrix(load).save(loads_file)
    outcome = equipoise("plan", loads_file, *ARGUMENTS, "--json")
    assert outcome.code == 0, outcome.err
    assert outcome.document["rank_capacity_factor"] is None


def test_replicas_cross_nodes_only_where_allowed(equipoise, tmp_path):
    load = np.random.default_rng(3).integers(0, 500, size=(2, 16, 8, 64))
    load[..., 5] = 20_000
    path = tmp_path / "hot.npz"
    eq.LoadMatrix(load, stage="recompute").save(path)
    found = {}
    for name, options in {"inside": [], "across": ["--cross-node"]}.items():
        assert equipoise("plan", path, *ARGUMENTS, *options, "-o", tmp_path / f"{name}.npz").code == 0
        found[name] = eq.Plan.load(tmp_path / f"{name}.npz")
    assert (found["inside"].cross_node, found["across"].cross_node) == (False, True)
    assert found["across"].seconds.total < found["inside"].seconds.total


def test_a_plan_can_be_made_for_engines_that_send_tokens_once_per_node(equipoise, loads_file, tmp_path):
    assert equipoise("plan", loads_file, *ARGUMENTS, "--sends", "tokens", "-o", tmp_path / "plan.npz").code == 0
    given = {"cluster": eq.Cluster.preset("h200", nodes=2, ranks_per_node=4), "model": eq.ModelShape.preset("olmoe")}
    loads = eq.LoadMatrix.load(loads_file)
    rows, tokens = (eq.plan(loads, options=eq.PlanOptions(sends=sends), **given) for sends in ("rows", "tokens"))
    assert eq.Plan.load(tmp_path / "plan.npz") == tokens
    assert tokens.seconds.all_to_all < rows.seconds.all_to_all
    assert tokens.bytes.all_to_all_across < rows.bytes.all_to_all_across


def test_the_summary_names_what_is_saved_moved_and_kept(equipoise, loads_file, tmp_path):
    outcome = equipoise("plan", loads_file, *ARGUMENTS, "-o", tmp_path / "plan.npz")
    assert outcome.code == 0
    for words in ("now", "planned", "saved", "experts displaced", "MiB per rank (replica slots: 1)"):
        assert words in outcome.out
    for words in ("compute, busiest rank", "all-to-all", "rows, across nodes", f"Written: {tmp_path / 'plan.npz'}"):
        assert words in outcome.out
    assert "not worth it here" not in outcome.out


def test_a_plan_that_saves_nothing_says_so_and_is_no_failure(equipoise, tmp_path):
    path = tmp_path / "even.npz"
    eq.LoadMatrix(np.full((2, 16, 8, 64), 100)).save(path)
    outcome = equipoise("plan", path, *ARGUMENTS)
    assert outcome.code == 0
    assert "0.000 ms, 0.0%: not worth it here" in outcome.out
    assert "0 of 1,024 experts displaced" in outcome.out


def test_explain_shows_one_decision_and_what_binds(equipoise, loads_file, monkeypatch):
    outcome = equipoise("plan", loads_file, *ARGUMENTS, "--objective", "skew", "--explain", "1,15")
    cluster = eq.Cluster.preset("h200", nodes=2, ranks_per_node=4)
    model = eq.ModelShape.preset("olmoe")
    options = eq.PlanOptions(sends="tokens")
    wanted = eq.plan(eq.LoadMatrix.load(loads_file), cluster=cluster, model=model, objective="skew", options=options)
    assert outcome.code == 0
    assumed = Profile.read("h200").say_assumed(2)
    assert outcome.out.rstrip("\n") == f"{explain(wanted, 1, 15)}\n{CROSSING['tokens']}\n{assumed}"
    assert f"What binds: {wanted.explain(1, 15).binds}" in outcome.out
    monkeypatch.setenv("COLUMNS", "50")
    narrow = equipoise("plan", loads_file, *ARGUMENTS, "--objective", "skew", "--explain", "1,15").out
    assert max(map(len, narrow.splitlines())) <= 50 and narrow.split() == outcome.out.replace("  replicas", "").split()
    listed = equipoise("plan", loads_file, *ARGUMENTS, "--objective", "skew", "--explain", "1,15", "--json").document
    assert listed["explanation"]["binds"] == wanted.explain(1, 15).binds
    assert listed["explanation"]["rows_planned"] == wanted.rank_load_MLR[1, 15].tolist()


@pytest.mark.parametrize("experts", [64, 4])
def test_without_a_model_the_size_of_experts_is_assumed_and_said(equipoise, tmp_path, experts):
    path = tmp_path / "loads.npz"
    eq.LoadMatrix(np.random.default_rng(1).integers(0, 900, size=(2, 3, 4, experts))).save(path)
    outcome = equipoise("plan", path, "--cluster", "h200", "--slots", 1, "-o", tmp_path / "plan.npz")
    assert outcome.code == 0, outcome.err
    assert "No --model was given: seconds are those of experts of qwen3-30b-a3b's size." in outcome.out
    shape = eq.Plan.load(tmp_path / "plan.npz").model
    wanted = eq.ModelShape.preset("qwen3-30b-a3b")
    assert (shape.layers, shape.experts, shape.expert_bytes) == (3, experts, wanted.expert_bytes)
    named = equipoise("plan", path, "--cluster", "h200", "--model", "qwen3-30b-a3b")
    assert "No --model" not in named.out + named.err


@pytest.mark.parametrize("policy", ["static", "eplb-oracle", "reactive", "balanced"])
def test_baselines_can_be_planned(equipoise, loads_file, policy):
    document = equipoise("plan", loads_file, *ARGUMENTS, "--policy", policy, "--json").document
    assert document["policy"] == policy
    if policy == "static":
        assert document["saved_seconds"] == 0
        assert document["skew_after"] == document["skew_before"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--explain", "3"], "--explain is '3'; write the micro-step and the layer index"),
        (["--explain", "9,0"], "micro-steps 0..2"),
        (["--policy", "juggle"], "no policy 'juggle'; known: equipoise, static"),
        (
            ["--nodes", "1", "--ranks-per-node", "4"],
            "ep is 8, more than the 4 ranks of 1 node; give 2 nodes, or leave nodes out",
        ),
        (["--slots", "-1"], "slots is -1"),
        (["--waves", "many"], "--waves is 'many'; write a number from 1 to 8, or auto"),
        (["--waves", "9"], "--waves is 9; it must be from 1 to 8"),
        (["--policy", "eplb-history"], "add --history"),
        (["--history", "absent.npz"], "--history absent.npz is for the policy eplb-history"),
        (["--cluster", "abacus"], "no cluster preset 'abacus'"),
        (["--model", "qwen3-30b-a3b"], "loads have 16 layers of 64 experts, 'qwen3-30b-a3b' has 48 of 128"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes_are_one_line_and_exit_code_2(equipoise, loads_file, arguments, words):
    outcome = equipoise("plan", loads_file, *ARGUMENTS, *arguments)
    assert outcome.code == 2
    assert words in outcome.err
    assert outcome.err.count("\n") == 1


@pytest.mark.parametrize("verb", ["plan", "analyze", "simulate"])
def test_loads_are_taken_as_a_named_models_only_where_they_can_be(equipoise, tmp_path, verb):
    def save(layers, experts, numbers=None):
        load = np.full((1, layers, 8, experts), 100)
        eq.LoadMatrix(load, layer_numbers_L=numbers).save(tmp_path / "loads.npz")
        options = {"simulate": ("--ep", 8, "--policies", "static", "--no-break-even")}.get(verb, ())
        return equipoise(verb, tmp_path / "loads.npz", "--model", "olmoe", *options)

    whole, part = save(16, 64), save(4, 64, np.arange(8, 12))
    assert (whole.code, whole.err) == (0, "")
    assert part.code == 0
    assert "loads.npz has loads of 4 MoE layers, olmoe has 16: experts are priced as that model's" in part.err
    assert part.err.count("\n") == 1
    for given, words in (
        ((16, 128), "loads have 16 layers of 128 experts, 'olmoe' has 16 of 64; name the model"),
        ((17, 64), "loads have 17 layers of 64 experts, 'olmoe' has 16 of 64; name the model"),
        ((2, 64, np.array([0, 40])), "'olmoe' has 16 of 64 and no MoE layer 40; name the model"),
    ):
        refused = save(*given)
        assert (refused.code, refused.out) == (2, "")
        assert words in refused.err and "--model" in refused.err


@pytest.fixture
def counted(tmp_path):
    """Counts with pairs, and loads of them on 8 ranks."""
    routes = generate_routes(eq.ModelShape.preset("olmoe"), samples=16, mean_tokens=300, seed=3)
    save_counts(count_routes(routes, pairs=True), tmp_path / "counts.npz")
    save_counts(count_routes(routes), tmp_path / "bare.npz")
    tokens_B = np.array([sample.num_tokens for sample in routes])
    (window,) = step_schedules(tokens_B, ranks=8, samples_per_micro_step=1, recompute=False)
    count_loads(routes, window).save(tmp_path / "loads.npz")
    return tmp_path


def test_pairs_of_a_counts_file_go_to_the_planner_and_are_named(equipoise, counted):
    """Every token has all experts in one half of them; generated ones choose independently: pairs change nothing."""
    given = ("plan", counted / "loads.npz", *ARGUMENTS, "--sends", "tokens")
    counts, half_E = load_counts(counted / "counts.npz"), np.arange(64) // 32
    pair_EE = np.where(np.eye(64, dtype=bool), 1000, np.where(half_E[:, None] == half_E, 225, 0))
    save_counts(replace(counts, pair_LEE=np.tile(pair_EE, (16, 1, 1))), counted / "counts.npz")
    found = equipoise(*given, "--pairs", counted / "counts.npz", "--json").document
    wanted = eq.plan(
        eq.LoadMatrix.load(counted / "loads.npz"),
        cluster=eq.Cluster.preset("h200", nodes=2, ranks_per_node=4),
        model=eq.ModelShape.preset("olmoe"),
        options=eq.PlanOptions(sends="tokens"),
        pair_LEE=load_counts(counted / "counts.npz").pair_LEE,
    )
    blind = equipoise(*given, "--json").document
    assert found["digest"] == wanted.digest() != blind["digest"]
    assert (found["pairs"], blind["pairs"]) == (str(counted / "counts.npz"), None)
    assert "the pairs of" in equipoise(*given, "--pairs", counted / "counts.npz").out


def test_pairs_of_the_loads_own_layers_are_taken(counted):
    counts = load_counts(counted / "counts.npz")
    part = eq.LoadMatrix(np.ones((1, 2, 8, 64), dtype=np.int64), layer_numbers_L=np.array([3, 9]))
    assert np.array_equal(read_pairs(counted / "counts.npz", part), counts.pair_LEE[[3, 9]])
    other = eq.LoadMatrix(np.ones((1, 2, 8, 64), dtype=np.int64), layer_numbers_L=np.array([3, 16]))
    with pytest.raises(eq.RoutesError, match="pairs of 16 layers of 64 experts of 'olmoe', the loads have 2 of 64"):
        read_pairs(counted / "counts.npz", other)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("bare.npz", ("--sends", "tokens"), "bare.npz holds no pairs; count the dump again: equipoise convert"),
        ("counts.npz", ("--sends", "rows"), "needs --sends tokens"),
        ("counts.npz", ("--sends", "tokens", "--policy", "lplb"), "needs --policy equipoise"),
    ],
)
def test_pairs_that_change_nothing_are_refused(equipoise, counted, name, options, words):
    outcome = equipoise("plan", counted / "loads.npz", *ARGUMENTS, "--pairs", counted / name, *options)
    assert outcome.code == 2
    assert words in outcome.err


def test_nothing_is_overwritten_and_foreign_files_are_refused(equipoise, loads_file, tmp_path):
    taken = tmp_path / "plan.npz"
    taken.write_text("precious")
    assert "already exists" in equipoise("plan", loads_file, *ARGUMENTS, "-o", taken).err
    assert taken.read_text() == "precious"
    outcome = equipoise("plan", taken, *ARGUMENTS)
    assert (outcome.code, "equipoise-loads-1 file (.npz): it is another kind" in outcome.err) == (2, True)
    (tmp_path / "rollouts.jsonl").write_text("{}\n")
    outcome = equipoise("plan", tmp_path / "rollouts.jsonl", *ARGUMENTS)
    assert outcome.code == 2 and "holds no loads; make them first: equipoise convert" in outcome.err


def test_loads_writes_one_file_per_window_which_plan_takes(equipoise, tmp_path):
    dump = tmp_path / "routes.eqr"
    write_routes(generate_routes(MODEL, samples=16, mean_tokens=40, seed=1), dump, format="equipoise")
    outcome = equipoise(
        "convert", dump, "--to", "loads", "--ep", "4", "--mini-batches", "2", "-o", tmp_path / "loads.npz", "--json"
    )
    assert outcome.code == 0
    paths = [window["out"] for window in outcome.document["windows"]]
    assert paths == [str(tmp_path / f"loads-{name}.npz") for name in ("0-recompute", "1-update", "2-update")]
    windows = [eq.LoadMatrix.load(path) for path in paths]
    assert [window.stage for window in windows] == ["recompute", "update", "update"]
    assert windows[0].load_MLRE.sum() == windows[1].load_MLRE.sum() + windows[2].load_MLRE.sum() > 0
    assert [w["rows"] for w in outcome.document["windows"]] == [int(w.load_MLRE.sum()) for w in windows]
    again = equipoise(
        "convert", dump, "--to", "loads", "--ep", "4", "--mini-batches", "2", "-o", tmp_path / "loads.npz"
    )
    assert (again.code, "already exists" in again.err) == (2, True)


@pytest.mark.parametrize("verb", ["analyze", "simulate"])
def test_the_name_given_to_convert_stands_for_all_its_windows(equipoise, tmp_path, verb):
    dump, loads = tmp_path / "routes.eqr", tmp_path / "loads.npz"
    write_routes(generate_routes(MODEL, samples=16, mean_tokens=40, seed=1), dump, format="equipoise")
    schedule = ("--ep", "4", "--mini-batches", "2")
    assert equipoise("convert", dump, "--to", "loads", *schedule, "-o", loads).code == 0
    (tmp_path / "loads-3-other.npz").touch()
    options = ("--policies", "static", "--no-break-even") if verb == "simulate" else ("--no-plan",)
    of_samples = equipoise(verb, dump, *schedule, *options, "--json").document
    of_loads = equipoise(verb, loads, "--model", "olmoe", "--ep", "4", *options, "--json").document
    key = "windows" if verb == "simulate" else "stages"
    assert of_loads[key] == of_samples[key]


def test_loads_are_not_scheduled_again(equipoise, loads_file, tmp_path):
    outcome = equipoise("convert", loads_file, "--to", "loads", "--model", "olmoe", "-o", tmp_path / "again.npz")
    assert (outcome.code, "holds loads, which are scheduled already" in outcome.err) == (2, True)
    assert not (tmp_path / "again.npz").exists()


def test_loads_of_one_window_keep_the_name(equipoise, tmp_path):
    dump = tmp_path / "routes.eqr"
    write_routes(generate_routes(MODEL, samples=8, mean_tokens=40, seed=1), dump, format="equipoise")
    outcome = equipoise("convert", dump, "--to", "loads", "--ep", "4", "--no-recompute", "-o", tmp_path / "loads.npz")
    assert outcome.code == 0
    assert "update, 1 micro-step, 2 layers, 4 ranks" in outcome.out
    short = equipoise(
        "convert",
        dump,
        "--to",
        "loads",
        "--ep",
        "4",
        "--schedule",
        "samples:1",
        "--no-recompute",
        "-o",
        tmp_path / "1.npz",
    )
    assert "update, 2 micro-steps, 2 layers, 4 ranks" in short.out
    assert eq.LoadMatrix.load(tmp_path / "loads.npz").num_ranks == 4


def test_loads_of_shared_samples_are_counted_from_the_routes(equipoise, tmp_path):
    routes = generate_routes(MODEL, samples=8, mean_tokens=40, seed=1)
    write_routes(routes, tmp_path / "routes.eqr", format="equipoise")
    given = ("--ep", "4", "--cp", "2", "--schedule", "samples:1", "--no-recompute", "-o", tmp_path / "loads.npz")
    assert equipoise("convert", tmp_path / "routes.eqr", "--to", "loads", *given).code == 0
    tokens_B = np.array([sample.num_tokens for sample in routes])
    (window,) = step_schedules(tokens_B, ranks=2, samples_per_micro_step=1, recompute=False)
    assert eq.LoadMatrix.load(tmp_path / "loads.npz") == count_loads(routes, slice_context(window, 2))


def test_groups_side_by_side_share_the_samples_of_a_step(equipoise, tmp_path):
    model = MODEL.replace(experts=4, top_k=2)
    routes = generate_routes(model, samples=16, mean_tokens=40, seed=1)
    write_routes(routes, tmp_path / "routes.eqr", format="equipoise")
    given = ("--schedule", "samples:1", "--no-recompute", "-o", tmp_path / "loads.npz")
    assert (
        "4 experts of 'olmoe' do not divide by 8 ranks"
        in equipoise("convert", tmp_path / "routes.eqr", "--to", "loads", *given).err
    )
    groups = ("--ep", 4, "--groups", 2)
    assert equipoise("convert", tmp_path / "routes.eqr", "--to", "loads", *groups, *given).code == 0
    tokens_B = np.array([sample.num_tokens for sample in routes])
    (window,) = step_schedules(tokens_B, ranks=8, samples_per_micro_step=1, recompute=False)
    loads = count_loads(routes, window, ep=4)
    # A file each: a plan takes all ranks of a file for one group.
    for g, group in enumerate(loads.split_groups(4)):
        assert eq.LoadMatrix.load(tmp_path / f"loads-group{g}.npz") == group
    assert "4 ranks" in equipoise("plan", tmp_path / "loads-group1.npz").out
    options = ("--schedule", "samples:1", "--no-recompute", "--policies", "static", "--no-break-even", "--json")
    found = equipoise("simulate", tmp_path / "routes.eqr", *groups, *options).document
    setting = eq.StepSetting(sends="tokens")
    wanted = eq.simulate([loads], "static", cluster=eq.Cluster.preset("h100", ep=4), model=model, setting=setting)
    assert found["windows"][0]["groups"] == 2
    assert found["policies"] == json.loads(json.dumps(wanted.to_dict()))["policies"]


def test_a_trainers_schedule_is_of_the_ranks_of_all_groups(equipoise, tmp_path):
    routes = generate_routes(MODEL, samples=8, mean_tokens=40, seed=1)
    write_routes(routes, tmp_path / "routes.eqr", format="equipoise")
    tokens_B = np.array([sample.num_tokens for sample in routes])
    step = step_schedules(tokens_B, ranks=8, samples_per_micro_step=1, recompute=False)
    write_schedules(step, tmp_path / "step.json")
    given = (
        "convert",
        tmp_path / "routes.eqr",
        "--to",
        "loads",
        "--schedule",
        tmp_path / "step.json",
        "-o",
        tmp_path / "loads.npz",
    )
    assert "schedules 8 ranks, --ep 4 x --groups 1 are 4" in equipoise(*given, "--ep", 4).err
    assert equipoise(*given, "--ep", 4, "--groups", 2).code == 0
    found = [eq.LoadMatrix.load(tmp_path / f"loads-group{g}.npz") for g in (0, 1)]
    assert found == list(count_loads(routes, step[0], ep=4).split_groups(4))


def test_more_ranks_than_can_be_counted_are_refused(equipoise):
    outcome = equipoise("analyze", "--demo", "--ep", 128, "--groups", 1024)
    assert (outcome.code, outcome.err) == (2, "equipoise: --ep x --groups is 131072; it must be from 1 to 65536\n")


def test_a_plan_is_made_of_the_update_window_that_convert_wrote_under_the_name(equipoise, tmp_path):
    loads = eq.LoadMatrix(np.ones((1, 2, 4, 8), dtype=np.int64))
    loads.save(tmp_path / "loads-1-update.npz")
    found = equipoise("plan", tmp_path / "loads.npz", "--model", "qwen3-30b-a3b", "--policy", "static", "--json")
    assert "8 experts" in found.err, "the window is found, and is another model's"
    loads.save(tmp_path / "loads-2-update.npz")
    found = equipoise("plan", tmp_path / "loads.npz", "--policy", "static", "--json")
    assert "several windows were written beside it; give one of loads-1-update.npz, loads-2-update.npz" in found.err


def test_a_placement_is_written_for_an_engine_and_planned_from_again(equipoise, loads_file, tmp_path):
    path = tmp_path / "experts.json"
    asked = ("plan", loads_file, *ARGUMENTS, "--slots", "0", "--policy", "lpt", "--json")
    first = equipoise(*asked, "--placement", f"sglang={path}")
    assert first.code == 0 and len(json.loads(path.read_text())["physical_to_logical_map"]) == 16
    again = equipoise("plan", loads_file, *ARGUMENTS, "--policy", path, "--json")
    assert (
        again.code == 0 and again.document["skew_after"] == first.document["skew_after"] < first.document["skew_before"]
    )
    assert equipoise(*asked, "--placement", f"sglang={path}").code == 2, "nothing is overwritten"
    refused = equipoise("plan", loads_file, *ARGUMENTS, "--slots", "2", "--placement", f"sglang={tmp_path / 'x.json'}")
    assert refused.code == 2 and "plan with slots=0" in " ".join(refused.err.split())
    assert "write sglang=FILE" in equipoise(*asked, "--placement", "experts.json").err


def test_a_limit_on_memory_is_kept_or_refused_with_the_numbers(equipoise, loads_file):
    free = equipoise("plan", loads_file, *ARGUMENTS, "--json").document["memory"]
    gib = free["peak_bytes"] / 2**30
    roomy = equipoise("plan", loads_file, *ARGUMENTS, "--memory-gib", gib + 1e-6, "--json")
    assert roomy.code == 0 and roomy.document["memory"] == free
    tight = equipoise("plan", loads_file, *ARGUMENTS, "--memory-gib", gib / 4)
    place = f"micro-step {free['place']['micro_step']}, layer {free['place']['layer']}: rank"
    assert tight.code == 2 and place in tight.err
    assert f"the limit is {gib / 4:.3g} GiB; cheapest remedy: cut every micro-step into" in tight.err
    again = equipoise("plan", loads_file, *ARGUMENTS, "--activations", "recomputed", "--json").document["memory"]
    assert again["peak_bytes"] < free["peak_bytes"]
    wrong = equipoise("plan", loads_file, *ARGUMENTS, "--memory-gib", "0")
    assert wrong.code == 2 and "the memory limit is 0.0 GiB; it must be above 0" in wrong.err
    placed = equipoise("plan", loads_file, *ARGUMENTS, "--policy", "experts.json", "--memory-gib", "1")
    assert placed.code == 2 and "experts.json is a placement: leave one of them out" in placed.err

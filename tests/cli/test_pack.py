"""`pack`, and `--pack` of `simulate`: one schedule, in a file or at once; what cannot be packed is refused."""

import pytest

from equipoise.core import ModelShape
from equipoise.loads import PackingLimits, generate_counts, generate_routes, read_schedules, save_counts, step_schedules
from equipoise.routes import write_routes

MODEL = ModelShape.preset("olmoe", layers=2)
SCHEDULE = ["--ep", "4", "--schedule", "tokens:2000", "--mini-batches", "2"]
NODES = ["--ranks-per-node", "2"]


@pytest.fixture
def counts(tmp_path):
    path = tmp_path / "counts.npz"
    save_counts(generate_counts(MODEL, samples=48, mean_tokens=200, domains=2, seed=1), path)
    return path


def test_the_file_is_a_schedule_of_the_same_samples_within_the_limits(equipoise, counts, tmp_path):
    out = tmp_path / "schedule.json"
    outcome = equipoise("pack", counts, *SCHEDULE, *NODES, "-o", out, "--json")
    assert outcome.code == 0, outcome.err
    tokens_B = generate_counts(MODEL, samples=48, mean_tokens=200, domains=2, seed=1).tokens_B
    given = step_schedules(tokens_B, ranks=4, mini_batches=2, token_budget=2000)
    packed = read_schedules(out)
    assert [w.stage for w in packed] == ["recompute", "update", "update"]
    for before, after, shown in zip(given, packed, outcome.document["windows"], strict=True):
        assert sorted(before.pieces[:, 0]) == sorted(after.pieces[:, 0])
        assert PackingLimits.of(before).exceeded(after) == ()
        assert shown["crossing"] < 0.9 * shown["given_crossing"]
        assert shown["limits"] == PackingLimits.of(after)._asdict()
    again = equipoise("pack", counts, *SCHEDULE, *NODES, "-o", out)
    assert again.code == 2 and "already exists" in again.err
    text = equipoise("pack", counts, *SCHEDULE, *NODES, "-o", out, "--force")
    assert text.code == 0 and "regrouped" in text.out and f"Written: {out}" in text.out.replace("\n", "")


def test_simulate_packs_at_once_as_the_file_says(equipoise, tmp_path):
    """From routes: a schedule file may cut samples, so that histograms are not enough for it."""
    dump, out = tmp_path / "routes.eqr", tmp_path / "schedule.json"
    write_routes(generate_routes(MODEL, samples=32, mean_tokens=60, domains=2, seed=2), dump, format="equipoise")
    rule = ["--ep", "4", "--schedule", "tokens:800"]
    assert equipoise("pack", dump, *rule, *NODES, "-o", out).code == 0
    options = [*NODES, "--policies", "static,equipoise", "--no-break-even", "--sends", "rows", "--json"]
    by_file = equipoise("simulate", dump, "--ep", "4", "--schedule", out, *options)
    at_once = equipoise("simulate", dump, *rule, "--pack", *options)
    given = equipoise("simulate", dump, *rule, *options)
    assert at_once.code == 0, at_once.err
    seconds = [[p["seconds"] for p in outcome.document["policies"]] for outcome in (by_file, at_once, given)]
    assert seconds[0] == seconds[1] != seconds[2]


def test_what_cannot_be_packed_is_refused_by_name(equipoise, counts, tmp_path):
    loads = tmp_path / "loads.npz"
    converted = equipoise("convert", counts, "--to", "loads", "--ep", "4", "--no-recompute", "-o", loads)
    assert converted.code == 0, converted.err
    found = next(tmp_path.glob("loads*.npz"))
    outcome = equipoise("pack", found, "-o", tmp_path / "a.json")
    assert outcome.code == 2 and "scheduled already; give the samples" in outcome.err
    outcome = equipoise("simulate", found, "--model", "olmoe", "--ep", "4", "--pack")
    assert outcome.code == 2 and "--pack cannot pack again" in outcome.err
    cut = equipoise("pack", counts, "--ep", "4", "--sp", "4", *NODES, "-o", tmp_path / "a.json")
    assert cut.code == 2 and "does not divide the 2 ranks of a node" in cut.err
    assert not (tmp_path / "a.json").exists()


def test_a_limit_on_memory_names_the_micro_step_and_the_budget(equipoise, counts, tmp_path):
    out = tmp_path / "schedule.json"
    roomy = equipoise("pack", counts, *SCHEDULE, *NODES, "--memory-gib", "4", "-o", out)
    assert roomy.code == 0, roomy.err
    tight = equipoise("pack", counts, *SCHEDULE, *NODES, "--memory-gib", "0.25", "-o", out, "--force")
    assert tight.code == 2 and "micro-step" in tight.err and "use a token budget of about" in tight.err

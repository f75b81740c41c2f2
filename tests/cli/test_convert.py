"""`generate` and `convert`: a file in, a file out, one JSON document last."""

import json

import numpy as np
import pytest

from equipoise.core import ModelShape, Routes, SampleRoutes
from equipoise.loads import count_routes, generate_routes, load_counts, save_counts
from equipoise.routes import format_names, open_store, write_routes

MODEL = ModelShape.preset("olmoe")


@pytest.fixture
def routes() -> Routes:
    return generate_routes(MODEL, samples=3, mean_tokens=30, seed=4)


@pytest.fixture
def dump(routes, tmp_path):
    path = tmp_path / "rollouts.jsonl"
    write_routes(routes, path, format="vllm-http")
    return path


def test_generate_writes_the_store_that_the_seed_says(equipoise, tmp_path):
    store = tmp_path / "routes.eqr"
    options = ["--model", "olmoe", "--samples", "3", "--tokens", "30", "--seed", "4"]
    outcome = equipoise("generate", *options, "-o", store, "--json")
    assert outcome.code == 0
    wanted = generate_routes(MODEL, samples=3, mean_tokens=30, seed=4)
    assert list(open_store(store)) == list(wanted)
    assert outcome.document["tokens"] == wanted.num_tokens
    assert outcome.document["bytes"] == store.stat().st_size
    assert len(outcome.out.splitlines()) == 1


def test_a_store_keeps_every_route(equipoise, routes, dump, tmp_path):
    store = tmp_path / "routes.eqr"
    outcome = equipoise("convert", dump, "--model", "olmoe", "-o", store)
    assert outcome.code == 0
    assert "3 samples" in outcome.out and "olmoe" in outcome.out
    for ours, theirs in zip(open_store(store), routes, strict=True):
        assert np.array_equal(ours.ids_TLK, theirs.ids_TLK)
        assert ours.num_tokens == theirs.num_tokens


def test_a_store_brings_its_own_model(equipoise, dump, tmp_path):
    assert equipoise("convert", dump, "--model", "olmoe", "-o", tmp_path / "a.eqr").code == 0
    again = equipoise("convert", tmp_path / "a.eqr", "-o", tmp_path / "b.eqr", "--json")
    assert (again.code, again.document["model"], again.document["samples"]) == (0, "olmoe", 3)


def test_other_forms_need_their_model_named(equipoise, dump, tmp_path):
    outcome = equipoise("convert", dump, "-o", tmp_path / "a.eqr")
    assert outcome.code == 2
    assert "does not name its model; add --model" in outcome.err


def test_a_dump_that_breaks_half_way_leaves_no_half_store(equipoise, dump, tmp_path):
    lines = dump.read_text().splitlines()
    record = json.loads(lines[-1])
    record["choices"][0]["routed_experts"] = "!not base64!"
    dump.write_text("\n".join([*lines[:-1], json.dumps(record)]))
    store = tmp_path / "routes.eqr"
    outcome = equipoise("convert", dump, "--model", "olmoe", "-o", store)
    assert outcome.code == 2
    assert outcome.err.count("\n") == 1
    assert not store.exists()


@pytest.mark.parametrize("kind", ["store", "counts"])
def test_a_file_is_replaced_only_by_force(equipoise, dump, tmp_path, kind):
    target = tmp_path / "taken"
    target.write_text("precious")
    given = ("convert", dump, "--to", kind, "--model", "olmoe", "-o", target)
    refused = equipoise(*given)
    assert refused.code == 2
    assert refused.err == f"equipoise: {target} already exists; add --force to replace it, or choose another name\n"
    assert target.read_text() == "precious"
    assert equipoise(*given, "--force").code == 0
    assert len(open_store(target) if kind == "store" else load_counts(target)) == 3


def test_a_store_is_replaced_by_force_and_never_added_to(equipoise, dump, routes, tmp_path):
    store = tmp_path / "routes.eqr"
    assert equipoise("convert", dump, "--model", "olmoe", "-o", store).code == 0
    assert equipoise("convert", store, "-o", store, "--force").code == 0
    assert [sample.num_tokens for sample in open_store(store)] == [sample.num_tokens for sample in routes]


def test_what_cannot_be_read_replaces_nothing_even_by_force(equipoise, dump, tmp_path):
    store = tmp_path / "routes.eqr"
    store.write_text("precious")
    dump.write_text("not a record\n")
    assert equipoise("convert", dump, "--model", "olmoe", "--format", "vllm-http", "-o", store, "--force").code == 2
    assert store.read_text() == "precious"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rollouts.jsonl", "routes.eqr"]


OUTPUTS = [
    ("analyze", "--demo", "--out"),
    ("analyze", "--demo", "--report"),
    ("simulate", "--demo", "--out"),
    ("simulate", "--demo", "--report"),
    ("plan", "loads.npz", "--model", "olmoe", "--out"),
    ("convert", "counts.npz", "--to", "loads", "--out"),
    ("generate", "--model", "olmoe", "--out"),
    ("calibrate", "--trial", "--out"),
    ("report", "result.json", "--out"),
    ("report", "result.json", "--trace"),
]


@pytest.mark.parametrize("arguments", OUTPUTS, ids=" ".join)
def test_no_verb_overwrites_a_file_unasked(equipoise, tmp_path, arguments):
    target = tmp_path / "taken"
    target.write_text("precious")
    refused = equipoise(*arguments, target)
    assert refused.code == 2
    assert f"{target} already exists; add --force to replace it" in refused.err
    assert (refused.out, target.read_text()) == ("", "precious")


def test_what_is_read_is_never_replaced_and_nothing_is_written_twice(equipoise, dump, tmp_path):
    before = dump.read_bytes()
    over = equipoise("convert", dump, "--to", "counts", "--model", "olmoe", "-o", dump, "--force")
    assert (over.code, f"{dump} would replace a file that is read" in over.err) == (2, True)
    assert dump.read_bytes() == before
    twice = equipoise("analyze", dump, "--model", "olmoe", "-o", tmp_path / "a", "--report", tmp_path / "a")
    assert (twice.code, "be written twice" in twice.err) == (2, True)
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    "verb",
    [("convert", "-o", "x.eqr"), ("convert", "--to", "counts", "-o", "x.npz"), ("doctor",)],
    ids=["store", "counts", "doctor"],
)
def test_histograms_in_place_of_routes_are_called_what_they_are(equipoise, routes, tmp_path, verb):
    name, *out = verb
    save_counts(count_routes(routes), tmp_path / "histograms")
    for model in ((), ("--model", "olmoe")):
        outcome = equipoise(name, tmp_path / "histograms", *model, *out)
        assert (outcome.code, outcome.err.count("\n")) == (2, 1)
        assert (
            "holds histograms, not routes; equipoise convert --to loads, analyze and simulate read them" in outcome.err
        )


@pytest.mark.parametrize("verb", ["analyze", "simulate"])
def test_a_file_that_is_not_there_is_missed_before_its_model(equipoise, tmp_path, verb):
    outcome = equipoise(verb, tmp_path / "absent.npz")
    assert outcome.code == 2 and outcome.err.startswith(f"equipoise: no dump at {tmp_path / 'absent.npz'}; give a file")


def test_a_model_that_looks_like_a_path_is_missed_as_a_file(equipoise, tmp_path):
    outcome = equipoise("generate", "--model", tmp_path / "absent" / "config.json", "-o", tmp_path / "x.eqr")
    assert (outcome.code, "absent/config.json" in outcome.err) == (2, True)
    assert "no model preset" not in outcome.err


def test_histograms_are_known_by_content_whatever_their_name(equipoise, dump, tmp_path):
    assert equipoise("convert", dump, "--to", "counts", "--model", "olmoe", "-o", tmp_path / "histograms").code == 0
    assert equipoise("analyze", tmp_path / "histograms", "--no-plan").code == 0


def test_a_folder_that_does_not_exist_is_named(equipoise, dump, tmp_path):
    outcome = equipoise("convert", dump, "--to", "counts", "--model", "olmoe", "-o", tmp_path / "no" / "counts.npz")
    assert outcome.code == 2
    assert f"there is no folder {tmp_path / 'no'}" in outcome.err


def test_counts_are_the_histograms_of_the_dump(equipoise, routes, dump, tmp_path):
    outcome = equipoise(
        "convert", dump, "--to", "counts", "--model", "olmoe", "--pairs", "-o", tmp_path / "counts.npz", "--json"
    )
    assert outcome.code == 0
    counts, wanted = load_counts(tmp_path / "counts.npz"), count_routes(routes, pairs=True)
    assert np.array_equal(counts.count_BLE, wanted.count_BLE)
    assert np.array_equal(counts.pair_LEE, wanted.pair_LEE)
    assert outcome.document["rows"] == wanted.count_BLE.sum()
    assert outcome.document["unknown"] == 3 * MODEL.layers


def test_counts_say_what_is_unknown(equipoise, tmp_path):
    ids = np.arange(8).reshape(1, 1, 8).repeat(5, axis=0).repeat(MODEL.layers, axis=1)
    known = np.ones((5, MODEL.layers), dtype=bool)
    known[2] = False
    sample = SampleRoutes(name="holes", ids_TLK=ids, num_tokens=6, known_TL=known)
    write_routes(Routes.of([sample], model=MODEL), tmp_path / "holes.eqr", format="equipoise")
    outcome = equipoise("convert", tmp_path / "holes.eqr", "--to", "counts", "-o", tmp_path / "counts.npz")
    assert f"{2 * MODEL.layers} routes unknown (each sample's last token has none)" in " ".join(outcome.out.split())


def test_counts_say_of_last_tokens_only_what_is_so(equipoise, tmp_path):
    ids = np.arange(8).reshape(1, 1, 8).repeat(5, axis=0).repeat(MODEL.layers, axis=1)
    whole, cut = (SampleRoutes(name=str(tokens), ids_TLK=ids, num_tokens=tokens) for tokens in (5, 6))
    for samples, words in (([whole], "; 0 routes unknown"), ([whole, cut], " (the last token of 1 sample has none)")):
        write_routes(Routes.of(samples, model=MODEL), tmp_path / f"{len(samples)}.eqr", format="equipoise")
        paths = (tmp_path / f"{len(samples)}.{suffix}" for suffix in ("eqr", "npz"))
        outcome = equipoise("convert", next(paths), "--to", "counts", "-o", next(paths))
        assert " ".join(outcome.out.split()).endswith(words)


def test_a_flag_is_called_what_the_user_wrote(equipoise, tmp_path):
    outcome = equipoise("generate", "--model", "olmoe", "--tokens", 1, "-o", tmp_path / "x.eqr")
    assert outcome.err == "equipoise: --tokens is 1; it must be from 2 to 1048576\n"


def write_rows(path, rows: int, *, tokens: int) -> None:
    """One vLLM sample with so many rows for so many tokens."""
    (sample,) = generate_routes(MODEL, samples=1, mean_tokens=rows + 1, length_sigma=0.0).samples
    np.savez(path, s=sample.ids_TLK, s_tokens=np.arange(tokens))


@pytest.mark.parametrize(
    "verb", [("convert", "--to", "store"), ("convert", "--to", "counts"), ("analyze",)], ids=" ".join
)
def test_a_recording_that_stopped_early_is_accepted_only_if_the_user_says_so(equipoise, tmp_path, verb):
    write_rows(tmp_path / "short.npz", 8, tokens=12)
    arguments = [*verb, tmp_path / "short.npz", "--model", "olmoe", "-o", tmp_path / "out", "--json"]
    refused = equipoise(*arguments)
    assert (refused.code, "8 rows for 12 tokens" in refused.err) == (2, True)
    accepted = equipoise(*arguments, "--allow-short")
    assert accepted.code == 0
    if "counts" in verb:
        assert accepted.document["unknown"] == 4 * MODEL.layers
    if "analyze" in verb:
        assert accepted.document["coverage"] == pytest.approx(8 / 11)


def test_a_placeholder_row_is_dropped_if_the_user_says_so(equipoise, tmp_path):
    write_rows(tmp_path / "full.npz", 12, tokens=12)
    arguments = ["convert", tmp_path / "full.npz", "--to", "counts", "--model", "olmoe", "--json"]
    recorded = equipoise(*arguments, "-o", tmp_path / "a.npz").document
    dropped = equipoise(*arguments, "-o", tmp_path / "b.npz", "--last-row", "placeholder").document
    assert recorded["rows"] - dropped["rows"] == MODEL.layers * MODEL.top_k
    assert dropped["unknown"] == MODEL.layers


def test_formats_lists_every_form_with_its_words_whole(equipoise):
    shown, listed = equipoise("convert", "--formats"), equipoise("convert", "--formats", "--json")
    assert shown.code == listed.code == 0
    assert [form["name"] for form in listed.document["formats"]] == format_names()
    assert all(name in shown.out for name in format_names())
    # Shapes in brackets must not be taken for colours.
    brackets = sum(form["summary"].count("[") for form in listed.document["formats"])
    assert brackets and shown.out.count("[") == brackets


def test_what_is_written_follows_from_the_name_or_from_to(equipoise, dump, tmp_path):
    unsaid = equipoise("convert", dump, "--model", "olmoe", "-o", tmp_path / "x.npz")
    assert (
        unsaid.code,
        "x.npz does not say what to write; add --to store, --to counts or --to loads" in unsaid.err,
    ) == (
        2,
        True,
    )
    loads = equipoise("convert", dump, "--model", "olmoe", "-o", tmp_path / "x.npz", "--to", "loads", "--json")
    assert [window["stage"] for window in loads.document["windows"]] == ["recompute", "update"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("-o", "x.eqr", "--ep", "4", "--no-recompute"), "--ep, --no-recompute schedules samples, and --to store does"),
        (("-o", "x.npz", "--to", "counts", "--mini-batches", "2"), "--mini-batches schedules samples, and --to counts"),
        (("-o", "x.eqr", "--pairs"), "--pairs has no effect on store; add --to counts"),
        (("-o", "x.eqr", "--formats"), "--formats only lists formats; leave out"),
        ((), "give a DUMP and a file to write with -o"),
    ],
    ids=" ".join,
)
def test_options_without_effect_are_refused(equipoise, dump, options, words):
    outcome = equipoise("convert", dump, "--model", "olmoe", *options)
    assert (outcome.code, outcome.out, outcome.err.count("\n")) == (2, "", 1)
    assert words in outcome.err

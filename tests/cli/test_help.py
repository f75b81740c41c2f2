"""Help is one screen with two examples; `--help-all` has everything; every example runs as it is written."""

import shlex
from pathlib import Path

import pytest
import typer

from equipoise.cli.app import USUAL, VERBS, build_app
from equipoise.core import EquipoiseError, ModelShape
from equipoise.loads import generate_routes
from equipoise.routes import write_routes
from tests.report.documents import metrics, write_run

NAMES = [verb.__name__ for verb in VERBS]
MODEL = ModelShape.preset("qwen3-30b-a3b")
WORK = {
    "train": "equipoise.rl.train.launch",
    "calibrate": "equipoise.calibrate.run.require_gpu",
    "watch": "equipoise.report.live.LiveReader",
}
"""Where work begins that takes minutes or a GPU: examples end there; the verbs' own tests go on."""
PROFILE = Path(__file__).parents[2] / "equipoise/cost/profiles/h200.json"
ADDED = {"equipoise simulate --demo": ["--policies=static", "--no-break-even"]}
"""Flags added to an example that would take half a minute."""


def listed(text: str) -> list[str]:
    """The examples at the end of a help text."""
    return [line.strip() for line in text.partition("Examples:\n")[2].splitlines()]


@pytest.mark.parametrize("verb", [None, *NAMES])
def test_help_is_one_screen_of_80_columns(equipoise, monkeypatch, verb):
    monkeypatch.setenv("COLUMNS", "80")
    lines = equipoise(*filter(None, [verb]), "--help").out.splitlines()
    assert len(lines) <= 30 and max(map(len, lines)) <= 80
    assert verb is None or len(listed("\n".join(lines))) == 2


@pytest.mark.parametrize("verb", NAMES)
def test_help_has_the_usual_options_in_order_and_help_all_has_every_one(equipoise, verb):
    options = {p.name: p for p in typer.main.get_command(build_app()).commands[verb].params}
    short, full = equipoise(verb, "--help"), equipoise(verb, "--help-all")
    assert (short.code, full.code, full.err) == (0, 0, "")
    usual = [options[name].opts[0] for name in USUAL[verb]]
    flags = [line.split()[0].rstrip(",") for line in short.out.splitlines() if line.startswith("  -")]
    assert flags == [*usual, "--help-all", "-h"]
    for option in options.values():
        if option.param_type_name == "option":
            assert f"  {', '.join(option.opts)}" in full.out, option.opts
    assert listed(full.out)[:2] == listed(short.out)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the files that the examples name: rollouts, a second recording, a run."""
    path = tmp_path_factory.mktemp("examples")
    routes = generate_routes(MODEL, samples=16, mean_tokens=24, seed=1)
    write_routes(routes, path / "rollouts.jsonl", format="vllm-http")
    write_routes(routes, path / "trainer.eqr", format="equipoise")
    (path / "out").mkdir()
    write_run(path / "out" / "train", [metrics(step) for step in range(3)])
    return path


def begin(*_: object, **__: object) -> None:
    raise EquipoiseError("work begins")


def make_files(equipoise, example: str) -> None:
    """Make the files that an example reads and no other example writes."""
    if "--check" in example:
        Path("profile.json").write_text(PROFILE.read_text())
    if "result.json" in example and not Path("result.json").exists():
        given = ("rollouts.jsonl", "--model", MODEL.name, "--policies", "static", "--no-break-even")
        assert equipoise("simulate", *given, "-o", "result.json").code == 0
        verdict = equipoise("doctor", "rollouts.jsonl", "--model", MODEL.name, "--json").out.splitlines()[-1]
        Path("doctor.json").write_text(verdict)


def test_every_example_of_every_verb_runs_as_written(equipoise, folder, monkeypatch):
    monkeypatch.chdir(folder)
    examples = [example for name in NAMES for example in listed(equipoise(name, "--help-all").out)]
    assert len(examples) >= 2 * len(NAMES)
    for example in examples:
        program, verb, *words = shlex.split(example)
        assert program == "equipoise"
        make_files(equipoise, example)
        with monkeypatch.context() as patched:
            if verb in WORK:
                patched.setattr(WORK[verb], begin)
            outcome = equipoise(verb, *words, *ADDED.get(example, []))
        wanted = (2, "equipoise: work begins\n") if verb in WORK else (0, "")
        assert (outcome.code, outcome.err) == wanted, example


def test_nine_verbs_are_listed():
    listed_verbs = [name for name, one in typer.main.get_command(build_app()).commands.items() if not one.hidden]
    assert len(listed_verbs) == 9 and "watch" in listed_verbs and not {"generate", "pack"} & set(listed_verbs)

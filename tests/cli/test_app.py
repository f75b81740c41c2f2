"""The verbs and their flags: the list is kept here, so that adding one is a decision; and how groups become flags."""

import inspect
import re
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, ClassVar

import pytest
import typer
from typer.testing import CliRunner

from equipoise.cli.app import RENAMED, VERBS, SectionedCommand, build_app, flatten
from equipoise.imbalance import imbalance_metrics
from equipoise.loads.forecast import forecast_memory
from equipoise.planner import PlanOptions
from equipoise.sim import StepSetting, analyze_loads

READING = {"--model", "--format", "--last-row", "--allow-short"}
PACKING = {
    "--ep",
    "--groups",
    "--schedule",
    "--mini-batches",
    "--cp",
    "--sp",
    "--recompute",
    "--no-recompute",
    "--longest-first",
}
MACHINE = {"--cluster", "--profile", "--ranks-per-node", "--network-gbit", "--nvlink-gbyte"}
FILE = {"-o", "--out", "--force", "--json"}
RESULTS = {*FILE, "--report"}
FLAGS = {
    "analyze": {
        *(READING | PACKING | MACHINE | RESULTS),
        "--demo",
        "--slots",
        "--plan",
        "--no-plan",
        "--memory-gib",
        "--activations",
        "--sends",
    },
    "doctor": {"--model", "--format", "--second", "--second-format", "--min-agreement", "--self-check", "--json"},
    "convert": {*(READING | PACKING | FILE), "--to", "--pairs", "--formats"},
    "pack": {*(READING | PACKING | FILE), "--ranks-per-node", "--memory-gib", "--activations"},
    "plan": {
        *(MACHINE | FILE),
        "--model",
        "--nodes",
        "--placement",
        "--slots",
        "--objective",
        "--policy",
        "--cross-node",
        "--waves",
        "--memory-gib",
        "--activations",
        "--sends",
        "--history",
        "--pairs",
        "--explain",
    },
    "simulate": {
        *(READING | PACKING | MACHINE | RESULTS),
        "--demo",
        "--pack",
        "--policies",
        "--slots",
        "--history",
        "--sweep",
        "--break-even",
        "--no-break-even",
        "--pipeline-stages",
        "--activations",
        "--sends",
        "--cross-node",
        "--waves",
        "--memory-gib",
        "--rollout-s",
        "--other-s",
        "--planning-s",
        "--timeline-layers",
        "--shown-window",
        "--shown-group",
        "--shown-micro-step",
    },
    "generate": {*FILE, "--model", "--samples", "--tokens", "--length-sigma", "--domains", "--seed", "--step"},
    "report": {*FILE, "--trace", "--doctor", "--measured", "--title"},
    "watch": {"--port", "--once", "--json"},
    "calibrate": {
        *FILE,
        "--check",
        "--limit",
        "--cluster",
        "--runs",
        "--commit",
        "--ranks",
        "--nodes",
        "--shapes",
        "--rows",
        "--slots",
        "--tokens",
        "--trial",
    },
    "train": {
        "--preset",
        "--set",
        "--ranks",
        "--model",
        "--reward",
        "--allow-missing-routes",
        "--compare",
        "--record",
        "--resume",
        "-o",
        "--out",
        "--report",
        "--json",
    },
}


ROOT = Path(__file__).parents[2]
SHOWN = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "equipoise").rglob("*.py"))]
SHOWN = [path for path in SHOWN if "equipoise " in path.read_text()]


def test_verbs_and_flags_are_the_decided_ones():
    commands = typer.main.get_command(build_app()).commands
    found = {
        name: {flag for p in command.params if p.param_type_name == "option" for flag in (*p.opts, *p.secondary_opts)}
        for name, command in commands.items()
    }
    assert {name: flags - {"-h", "--help", "--help-all"} for name, flags in found.items()} == FLAGS


def test_options_of_one_name_have_one_default_in_every_verb():
    defaults = {}
    for verb, command in typer.main.get_command(build_app()).commands.items():
        for option in command.params:
            if option.name in ("ep", "sends", "schedule", "slots", "ranks_per_node", "cluster"):
                defaults.setdefault(option.name, {})[verb] = option.default
    assert defaults["sends"] == dict.fromkeys(("analyze", "plan", "simulate"), "tokens")
    for function in (imbalance_metrics, analyze_loads):
        assert inspect.signature(function).parameters["sends"].default == "tokens", "and in Python"
    assert PlanOptions().sends == StepSetting().sends == "tokens"
    assert set(defaults["ep"].values()) == {8}
    assert all(len(set(by_verb.values()) - {None}) == 1 for name, by_verb in defaults.items() if name != "cluster")


def test_verbs_that_count_activations_ask_for_them_alike():
    commands = typer.main.get_command(build_app()).commands
    found = [
        next(p for p in commands[verb].params if p.name == "activations")
        for verb in ("analyze", "simulate", "plan", "pack")
    ]
    assert len({(option.help, option.default) for option in found}) == 1
    assert StepSetting().activations == found[0].default
    for function in (analyze_loads, forecast_memory):
        assert inspect.signature(function).parameters["activations"].default == found[0].default


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.__name__)
def test_every_verb_has_help_and_two_examples(equipoise, verb):
    shown = equipoise(verb.__name__, "--help")
    assert shown.code == 0
    assert verb.__doc__.splitlines()[0] in " ".join(shown.out.split())
    module = sys.modules[verb.__module__]
    lines = [line.strip() for line in module.__doc__.splitlines() if line.strip().startswith("equipoise ")]
    examples = [line for line in lines if line.split()[1] == verb.__name__]
    assert len(examples) >= 2
    # Every example is one of a verb that the module holds.
    assert all(getattr(module, line.split()[1]) in VERBS for line in lines)
    assert all(line in shown.out for line in examples[:2])


@pytest.mark.parametrize("path", SHOWN, ids=lambda path: path.name)
def test_every_command_that_is_shown_has_a_verb_and_flags_that_exist(path):
    lines = re.findall(r"^\s*equipoise ([a-z].*)$", path.read_text(), re.MULTILINE)
    for command in [*lines, *re.findall(r"`equipoise ([a-z][^`]*)`", path.read_text())]:
        # What follows a # or a ; is no part of the command.
        verb, *words = re.split("[#;]", command)[0].split()
        assert verb in FLAGS, command
        assert {word.partition("=")[0] for word in words if re.match("--?[a-z]", word)} <= FLAGS[verb], command


def test_help_teaches_where_to_start(equipoise):
    shown = equipoise("--help")
    assert shown.code == 0
    for words in ("equipoise analyze --demo", "Exit codes: 0 good, 1 findings, 2 bad input", "--json"):
        assert words in shown.out


def test_the_version_is_the_packages(equipoise):
    shown = equipoise("--version")
    assert (shown.code, shown.out) == (0, f"equipoise {version('equipoise')}\n")


@pytest.mark.parametrize("verb", [(), ("plan",)], ids=["app", "verb"])
def test_help_has_a_short_form(equipoise, verb):
    assert equipoise(*verb, "-h").out == equipoise(*verb, "--help").out != ""


def test_a_mistake_is_one_line_on_standard_error_and_exit_code_2(equipoise, tmp_path):
    outcome = equipoise("convert", tmp_path / "absent.jsonl", "--model", "olmoe", "-o", tmp_path / "x.eqr")
    assert outcome.code == 2
    assert outcome.out == ""
    assert outcome.err.startswith(f"equipoise: no dump at {tmp_path / 'absent.jsonl'}; give a file, a folder")
    assert outcome.err.count("\n") == 1


@pytest.mark.parametrize("arguments", [["juggle"], ["analyze", "--no-such-flag"], ["generate"]], ids=" ".join)
def test_words_that_are_not_understood_give_exit_code_2(equipoise, arguments):
    assert equipoise(*arguments).code == 2


@pytest.mark.parametrize("verb", RENAMED)
def test_an_old_verb_is_one_line_that_names_the_command_for_it(equipoise, verb):
    outcome = equipoise(verb, "dump.jsonl", "--model", "olmoe")
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err == f"equipoise: there is no verb {verb!r} any more; use: {RENAMED[verb]}\n"
    assert RENAMED[verb].split()[1] in FLAGS


def test_too_little_memory_is_one_line_and_exit_code_2(equipoise, monkeypatch):
    def allocate(*_: object, **__: object) -> None:
        raise MemoryError("Unable to allocate 3 TiB")

    monkeypatch.setattr("equipoise.cli.convert.screen", allocate)
    outcome = equipoise("convert", "--formats")
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err == (
        "equipoise: there is not enough memory (Unable to allocate 3 TiB); give less input at once\n"
    )


@pytest.mark.parametrize("place", ["convert.screen", "app.build_app"], ids=["in a verb", "before it"])
def test_an_interrupt_is_one_line_and_exit_code_130(equipoise, monkeypatch, place):
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(f"equipoise.cli.{place}", interrupt)
    outcome = equipoise("convert", "--formats")
    assert (outcome.code, outcome.out, outcome.err) == (130, "", "equipoise: interrupted\n")


def test_the_package_can_be_run_as_a_module():
    done = subprocess.run([sys.executable, "-m", "equipoise", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"equipoise {version('equipoise')}\n"


def test_help_needs_neither_numba_nor_torch():
    code = (
        "import sys\n"
        "from equipoise.cli.app import build_app\n"
        "build_app()\n"
        "assert not {'numba', 'torch', 'scipy'} & set(sys.modules), sorted(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@dataclass(frozen=True, kw_only=True)
class Soil:
    """Where it grows."""

    SECTION: ClassVar[str] = "The soil"
    depth: Annotated[int, typer.Option("--how-deep", min=1, help="Depth in cm.")] = 3
    wet: Annotated[bool, typer.Option("--wet", help="Whether it rained.")] = False


@dataclass(frozen=True, kw_only=True)
class Seed:
    """What is sown."""

    SECTION: ClassVar[str] = "The seed"
    kind: Annotated[str, typer.Option(help="Its kind.")]


DEEP = Soil(depth=9)
got: list[tuple] = []


def sow(place: Annotated[str, typer.Argument(help="Where.")], *, soil: Soil, seed: Seed, loud: bool = False) -> None:
    """Sow."""
    got.append((place, soil, seed, loud))


def sow_deep(*, soil: Soil = DEEP) -> None:
    """Sow deeper."""
    got.append((soil,))


@pytest.fixture
def call():
    """Call `call(verb, word, ...)` and get what typer's runner saw."""
    got.clear()

    def run(verb, *words):
        app = typer.Typer(rich_markup_mode=None)
        app.command(cls=SectionedCommand)(flatten(verb))
        return CliRunner().invoke(app, list(words))

    return run


def test_a_group_is_one_object_with_what_was_given_or_the_default(call):
    assert call(sow, "here", "--how-deep", "5", "--kind", "oak", "--loud").exit_code == 0
    assert call(sow, "there", "--kind", "elm", "--wet").exit_code == 0
    assert got == [
        ("here", Soil(depth=5), Seed(kind="oak"), True),
        ("there", Soil(wet=True), Seed(kind="elm"), False),
    ]


def test_a_default_object_gives_the_defaults_of_its_fields(call):
    assert call(sow_deep, "--wet").exit_code == 0
    assert got == [(Soil(depth=9, wet=True),)]
    assert "[default: 9; x>=1]" in call(sow_deep, "--help").output
    assert "[default: 3; x>=1]" in call(sow, "--help").output


def test_a_field_without_a_default_is_required_and_limits_hold(call):
    missing, low = call(sow, "here"), call(sow, "here", "--kind", "oak", "--how-deep", "0")
    assert (missing.exit_code, "--kind" in missing.output) == (2, True)
    assert (low.exit_code, "--how-deep" in low.output) == (2, True)
    assert got == []


def test_the_help_lists_every_flag_once_under_its_section(call):
    shown = call(sow, "--help").output
    sections = ["Arguments:", "The soil:", "The seed:", "Options:"]
    places = [shown.index(title) for title in sections]
    assert places == sorted(places)
    for flag, after in (("--how-deep", 1), ("--wet", 1), ("--kind", 2), ("--loud", 3), ("--help ", 3)):
        assert shown.count(f"  {flag}") == 1
        assert [place < shown.index(f"  {flag}") for place in places] == [i <= after for i in range(4)]

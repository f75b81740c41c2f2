"""The package as a whole: light to import, free of torch, its public names resolve, its papers are in order."""

import ast
import re
import statistics
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

import pytest

import equipoise
from equipoise.core import errors
from tests import mutants

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SOURCES = sorted((ROOT / "equipoise").rglob("*.py"))
# Rooms that may need torch; every other one must not.
TORCH_ROOMS = {"torch", "layer", "transfer", "launch", "adapters", "rl", "planning", "balancer", "calibrate"}
HEAVY = ["numpy", "numba", "scipy", "torch", "transformers", "typer", "rich"]

IMPORT_ALL_WITHOUT_TORCH = """
import importlib, pkgutil, sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "transformers"):
            raise ModuleNotFoundError(f"{name} is made unimportable here", name=name)

sys.meta_path.insert(0, Refuse())
import equipoise
for room in pkgutil.iter_modules(equipoise.__path__, "equipoise."):
    if room.name.split(".")[1] in TORCH_ROOMS:
        continue
    package = importlib.import_module(room.name)
    for module in pkgutil.walk_packages(getattr(package, "__path__", []), room.name + "."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
for name in equipoise.__all__:
    getattr(equipoise, name)
print(*sorted(name for name in sys.modules if name.startswith("equipoise.")))
"""


def run_python(code, *, cwd=ROOT):
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_torch_free_room_imports_where_torch_cannot_be():
    code = f"TORCH_ROOMS = {TORCH_ROOMS!r}\n{IMPORT_ALL_WITHOUT_TORCH}"
    imported = set(run_python(code).split())
    rooms = {"core", "routes", "loads", "cost", "planner", "sim", "report", "cli"}
    assert {f"equipoise.{room}" for room in rooms} <= imported
    assert "equipoise.core.window" in imported


def test_importing_the_package_imports_nothing_heavy():
    code = f"import sys, equipoise; print([name for name in {HEAVY!r} if name in sys.modules])"
    assert run_python(code).strip() == "[]"


def test_importing_the_package_takes_less_than_a_third_of_a_second():
    def seconds(code):
        """Of the processor: on a busy machine the clock says how long others had it."""
        return float(run_python(f"{code}\nimport time\nprint(time.process_time())"))

    empty, full = (statistics.median(seconds(code) for _ in range(5)) for code in ("pass", "import equipoise"))
    assert full - empty < 0.3, f"import equipoise takes {full - empty:.3f} s more than an empty interpreter"


@pytest.mark.parametrize("name", equipoise.__all__)
def test_every_public_name_resolves(name):
    value = getattr(equipoise, name)
    assert callable(value)
    assert value.__doc__, f"{name} has no docstring"
    assert name in dir(equipoise)


def test_a_star_import_brings_exactly_the_public_names():
    code = "from equipoise import *; print(*sorted(n for n in dir() if not n.startswith('_')))"
    assert run_python(code).split() == sorted(equipoise.__all__)


def test_an_unknown_name_is_an_attribute_error_that_names_it():
    with pytest.raises(AttributeError, match="'equipoise' has no attribute 'balance_everything'"):
        _ = equipoise.balance_everything


PUBLIC = [
    *(
        "read_routes",
        "write_routes",
        "count_routes",
        "diagnose",
        "plant_markers",
        "prove_slicing",
        "count_loads",
        "skew",
        "schedule_tokens",
        "sketch_counts",
        "pack_window",
        "plan",
        "plan_step",
        "plan_memory",
        "simulate",
        "imbalance_metrics",
    ),
    *(
        "write_report",
        "Cluster",
        "ModelShape",
        "Routes",
        "SampleRoutes",
        "RouteCounts",
        "Schedule",
        "LoadMatrix",
        "Plan",
    ),
    *(
        "PlanOptions",
        "Capacities",
        "MemoryLimit",
        "StepSetting",
        "Delivery",
        "EquipoiseError",
        "RoutesError",
        "ScheduleError",
        "LoadsError",
        "TopologyError",
    ),
    *("InfeasiblePlanError", "TransferError", "AdapterError", "TrainingError"),
]
PUBLIC_TORCH = [
    *("Balancer", "BalancerOptions", "WindowReport", "find_layers", "BalancedExperts", "LayerOptions", "ExpertWeights"),
    *("Visit", "save_experts", "load_experts", "run_ranks", "transformers", "transformers_sharded", "megatron"),
]


def test_the_public_names_are_the_decided_ones():
    import equipoise.torch

    assert equipoise.__all__ == PUBLIC
    assert equipoise.torch.__all__ == PUBLIC_TORCH
    for name in PUBLIC_TORCH:
        assert getattr(equipoise.torch, name).__doc__, f"{name} has no docstring"
    with pytest.raises(AttributeError, match="no attribute 'balance_everything'"):
        _ = equipoise.torch.balance_everything


def imported_by(text):
    """The modules of the package that a piece of Python imports."""
    tree = ast.parse(text)
    named = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    named |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    return {name for name in named if name and name.split(".")[0] == "equipoise"}


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name)
def test_an_example_imports_the_public_faces_alone(path):
    # Trainers' flags name the module of hooks, so it is public too.
    assert imported_by(path.read_text()) <= {"equipoise", "equipoise.torch", "equipoise.adapters.slime"}


@pytest.mark.parametrize(
    "path", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda path: path.name
)
def test_documents_import_the_public_faces_alone(path):
    shown = re.findall(r"^\s*(?:from|import) (equipoise[\w.]*)", path.read_text(), re.MULTILINE)
    assert set(shown) <= {"equipoise", "equipoise.torch"}


def test_no_class_name_means_two_things():
    named = Counter(
        node.name for path in SOURCES for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)
    )
    assert [name for name, count in named.items() if count > 1] == []


def test_rooms_and_chapters_have_the_decided_size():
    files = [path for path in SOURCES if path.name not in ("__init__.py", "__main__.py")]
    lines = {path: len(path.read_text().splitlines()) for path in files}
    rooms = Counter(str(path.parent.relative_to(ROOT)) for path in files)
    assert {room: count for room, count in rooms.items() if count > 12} == {}, "a room has at most 12 files"
    # 30,000 lines are the aim; docs/design.md says where readability won. This holds what has been reached.
    assert len(SOURCES) <= 172 and sum(lines.values()) <= 44_450
    assert statistics.median(lines.values()) >= 150, "a file is a chapter"
    assert len([path for path in files if lines[path] < 60]) <= 15


def test_every_error_is_public():
    classes = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}
    assert classes <= set(equipoise.__all__)
    assert len(classes) >= 8


def test_the_version_is_the_one_of_the_project_file():
    assert equipoise.__version__ == PROJECT["project"]["version"]


def test_the_licence_is_apache_2():
    text = (ROOT / "LICENSE").read_text()
    assert PROJECT["project"]["license"] == "Apache-2.0"
    for words in (
        "Apache License",
        "Version 2.0, January 2004",
        "Grant of Patent License",
        "END OF TERMS AND CONDITIONS",
    ):
        assert words in text


def requirements():
    """(name, bound) of every dependency the project file names, in any extra."""
    project = PROJECT["project"]
    named = [*PROJECT["build-system"]["requires"], *project["dependencies"]]
    named += [entry for extra in project["optional-dependencies"].values() for entry in extra]
    parts = {re.fullmatch(r"([\w-]+)(?:\[[\w,]+\])?(.*)", entry).groups() for entry in named}
    return sorted(parts)


@pytest.mark.parametrize(("name", "bound"), requirements(), ids=lambda part: part)
def test_every_dependency_is_explained_with_its_bound(name, bound):
    lines = (ROOT / "docs" / "dependencies.md").read_text().splitlines()
    assert any(f" {name} |" in line and f"`{bound}`" in line for line in lines), f"{name}{bound} is not explained"


def test_every_installed_dependency_is_pinned_in_the_constraints():
    pinned = {
        line.split("==")[0].lower() for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line
    }
    project = PROJECT["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    names = {re.match(r"[\w-]+", entry)[0].lower() for entry in wanted}
    assert names <= pinned


def test_torch_is_pinned_to_the_tested_version_in_both_places():
    assert "torch==2.13.0" in PROJECT["project"]["optional-dependencies"]["dev"]
    assert "torch==2.13.0" in (ROOT / "constraints.txt").read_text().splitlines()


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_module_opens_with_its_docstring_in_plain_ascii(path):
    text = path.read_text(encoding="utf-8")
    assert text.isascii(), f"{path} holds a character that is not ASCII"
    assert ast.get_docstring(ast.parse(text)), f"{path} has no docstring"


@pytest.mark.parametrize("file", mutants.TARGETS)
def test_the_functions_that_mutants_change_and_the_tests_that_must_notice_are_there(file):
    tests, functions = mutants.TARGETS[file]
    assert str(next(mutants.mutants(file, set(functions.split())))).startswith(file)
    assert [test for test in tests.split() if not (ROOT / "tests" / test).exists()] == []

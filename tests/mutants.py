"""Change important lines one at a time and report the changes that no test notices. Not part of `make test`.

    python -m tests.mutants                       # all rooms, more than two hundred mutants
    python -m tests.mutants routes/source.py      # one file
    python -m tests.mutants --list

A mutant is one change in one function of `TARGETS`: a comparison turned to its neighbour, `and` for `or`, a `not` left
out, a number plus one, a `raise` or a call whose result nobody uses left out. Each is written to a copy of the project,
and the tests named beside its file run there until the first fails. A mutant that passes them all has survived: either
a test is missing, or the line does nothing. Before, the tests must pass on the copy as it is, or all would be noticed.

Kernels run as plain Python, because a changed one would be compiled with all others.
"""

import argparse
import ast
import copy
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIMIT_S = 600.0
"""Of the tests of a file as it is."""
LIMIT_FACTOR, LEAST_LIMIT_S = 5, 120.0
"""A mutant's tests may take so many times as long as without it; one that hangs is noticed."""
PER_FUNCTION = 2
"""Most mutants of one function, spread over its lines."""

TARGETS = {
    "routes/source.py": (
        "routes/test_source.py routes/test_torch_file.py routes/test_on_disk.py",
        "_alike _suffix _line load_torch plain __setstate__ integer_array",
    ),
    "routes/wire.py": (
        "routes/test_vllm.py routes/test_sglang.py routes/test_on_disk.py",
        "decode_npy decode_base64 shape_bytes finish",
    ),
    "routes/vllm.py": ("routes/test_vllm.py", "_parts"),
    "routes/store.py": (
        "routes/test_store.py",
        "_accept map_store open_store _is_whole _parse_file_head _parse_sample _check_payload",
    ),
    "routes/doctor/reading.py": ("routes/doctor", "_dead_layers read num_judged judge"),
    "routes/doctor/checks.py": ("routes/doctor", "look"),
    "routes/interpret.py": ("routes/test_interpret.py", "map_recording interpret"),
    "core/model.py": ("core/test_model.py", "_moe_layer_numbers _listed_layers"),
    "core/plan_file.py": ("core/test_plan_file.py", "save_plan load_plan _read_facts _number _build _object _cluster"),
    "core/split.py": (
        "core/test_split.py",
        "split_rows add_split _add_in_proportion _add_local_first _add_evenly _pair_by_node _pair fill_shares "
        "fill_levels",
    ),
    "planner/replicas.py": (
        "planner/test_fill.py planner/test_trade.py",
        "fill node_bound _fill_node _pick rebalance_rows _shared trade_across _best_trade _part trade_inside "
        "_best_pair _level_ranks _trade",
    ),
    "planner/homes.py": (
        "planner/test_level.py planner/test_near.py",
        "level _best_swap polish rests more_away common_multiple busiest near _fill_others _burden_after_swap",
    ),
    "planner/layer.py": (
        "planner/test_layer.py planner/test_reference.py",
        "plan_layer candidates is_good_start value_of edges_ns edge_price crossings assign_ranks level_ranks",
    ),
    "transfer/waits.py": (
        "transfer/test_watchdog.py transfer/test_puller.py transfer/test_jobs.py",
        "wait check abort lost _check_peers is_gone drain",
    ),
    "transfer/host_store.py": (
        "transfer/test_host_store.py",
        "announce check _checksum check_store_budget complete",
    ),
    "transfer/pulls.py": (
        "transfer/test_schedule.py transfer/test_puller.py",
        "announce begin_next end close pause close_layer _pull _is_stopped",
    ),
    "transfer/edges.py": (
        "transfer/test_edges.py transfer/test_publish.py",
        "plan_rounds relocate _agree publish_layer complete collect_layer _follow",
    ),
    "transfer/engine.py": ("transfer/test_progress.py transfer/test_puller.py", "begin passed collect_layer"),
    "transfer/returns.py": ("transfer/test_engine.py", "hand_in collect check_empty"),
}
"""By file: the tests that must notice, and the functions that are changed."""

NEIGHBOURS = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}


@dataclass(frozen=True)
class Mutant:
    """One changed line."""

    file: str
    line: int
    before: str
    after: str
    source: str
    """The whole file with the change."""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.before}  ->  {self.after}"


def changed(node: ast.AST) -> ast.AST | None:
    """Return a changed copy of a node; None where it is not one that is changed."""
    node = copy.deepcopy(node)
    if isinstance(node, ast.Compare) and type(node.ops[0]) in NEIGHBOURS:
        node.ops[0] = NEIGHBOURS[type(node.ops[0])]()
    elif isinstance(node, ast.BoolOp):
        node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return node.operand
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        node.value += 1
    elif isinstance(node, ast.Raise) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
        return ast.copy_location(ast.Pass(), node)
    else:
        return None
    return node


def mutants(file: str, functions: set[str]) -> Iterator[Mutant]:
    """Yield the mutants of the named functions of a file."""
    tree = ast.parse((ROOT / "equipoise" / file).read_text())
    found = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name in functions]
    if lost := functions - {function.name for function in found}:
        raise SystemExit(f"equipoise/{file} has no function {', '.join(sorted(lost))}; correct TARGETS")
    for function in found:
        # What is said in an error is not changed.
        said = {id(inner) for node in ast.walk(function) if isinstance(node, ast.Raise) for inner in ast.walk(node)}
        places = [
            (parent, field, at, node)
            for parent in ast.walk(function)
            for field, value in ast.iter_fields(parent)
            for at, node in enumerate(value if isinstance(value, list) else [value])
            if isinstance(node, ast.AST) and (id(node) not in said or isinstance(node, ast.Raise)) and changed(node)
        ]
        for parent, field, at, node in places[:: max(1, -(-len(places) // PER_FUNCTION))]:
            new = changed(node)
            _put(parent, field, at, new)
            source = ast.unparse(ast.fix_missing_locations(tree))
            _put(parent, field, at, node)
            yield Mutant(file, getattr(node, "lineno", function.lineno), ast.unparse(node), ast.unparse(new), source)


def _put(parent: ast.AST, field: str, at: int, node: ast.AST) -> None:
    """Put a node into a field, which is a node or a list of nodes."""
    value = getattr(parent, field)
    if isinstance(value, list):
        value[at] = node
    else:
        setattr(parent, field, node)


def is_noticed(mutant: Mutant, tests: list[str], project: Path, limit_s: float) -> bool:
    """Whether a test fails, or does not end, with the mutant in place of the file."""
    path = project / "equipoise" / mutant.file
    kept = path.read_text()
    path.write_text(mutant.source)
    try:
        return bool(run_tests(tests, project, limit_s).returncode)
    except subprocess.TimeoutExpired:
        return True
    finally:
        path.write_text(kept)


def run_tests(tests: list[str], project: Path, limit_s: float) -> subprocess.CompletedProcess[str]:
    """Run tests of a copy of the project until the first fails."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    own = {"PYTHONPATH": str(project), "PYTHONDONTWRITEBYTECODE": "1", "NUMBA_DISABLE_JIT": "1"}
    environment = {**os.environ, **own}
    return subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, timeout=limit_s)


def limit_of(tests: list[str], project: Path) -> float:
    """Seconds that the tests may take with a mutant; they must pass without one."""
    start = time.perf_counter()
    done = run_tests(tests, project, LIMIT_S)
    if done.returncode:
        raise SystemExit(f"the tests {' '.join(tests)} fail without a mutant; mend them first:\n{done.stdout[-2000:]}")
    return max(LEAST_LIMIT_S, LIMIT_FACTOR * (time.perf_counter() - start))


def main() -> int:
    """Run the mutants that are asked for; returns the number of survivors."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", choices=[*TARGETS, []], metavar="FILE")
    parser.add_argument("--list", action="store_true", help="only show the mutants")
    given = parser.parse_args()
    survivors = []
    with tempfile.TemporaryDirectory(prefix="equipoise-mutants-") as folder:
        project = Path(folder)
        for name in ("equipoise", "tests", "docs", "pyproject.toml"):
            (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, project / name)
        for file in given.files or TARGETS:
            names, functions = TARGETS[file]
            tests = [f"tests/{name}" for name in names.split()]
            limit_s = 0.0 if given.list else limit_of(tests, project)
            for mutant in mutants(file, set(functions.split())):
                if given.list:
                    print(mutant)
                elif is_noticed(mutant, tests, project, limit_s):
                    print(f"noticed   {mutant}", flush=True)
                else:
                    survivors.append(mutant)
                    print(f"SURVIVED  {mutant}", flush=True)
    print(f"{len(survivors)} survived")
    return len(survivors)


if __name__ == "__main__":
    sys.exit(min(main(), 100))

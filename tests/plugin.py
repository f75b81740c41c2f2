"""Pytest plug-in of this project: a floor under the number of tests, and each room's test time.

`--minimum-tests` fails a run in which fewer tests passed than `tests/minimum_tests.txt` says, so that an import
error, a lost file or a marker typo cannot turn into a green run.

Under `-n 3 --dist loadgroup` three processes share the tests. Those that use a pool of ranks stay in two of them, those
of layers and transfers and the rest, so that there are two pools; those with Megatron-Core have one more. Tests in the
browser stay beside the second pool, which one of them uses too. Of the rest a file stays together. With
`--no-loadscope-reorder` they begin with the longest, so that none is left for one process at the end.
"""

import gc
import sys
from collections import defaultdict
from pathlib import Path

import pytest

LONGEST = (
    "pool, transfer",
    "pool",
    "megatron",
    "tests/rl",
    "tests/planner",
    "tests/transfer",
    "tests/layer",
    "tests/balancer",
    "tests/cli",
)
"""How the names begin by which tests that take long stay together, longest first."""
MINIMUM_FILE = Path(__file__).parent / "minimum_tests.txt"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--minimum-tests", action="store_true", help="fail if fewer tests pass than the kept number")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """What a test draws without a seed of its own must not depend on the tests that ran before it in this process.

    Tiny models need no threads; on a machine that others keep busy too they only wait for each other.
    """
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(0)
        torch.set_num_threads(1)


class RoomTimes:
    """Collects seconds and passes per folder of tests."""

    def __init__(self) -> None:
        self.seconds = defaultdict(float)
        self.passed = defaultdict(int)

    @pytest.hookimpl
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        parts = Path(report.nodeid.split("::")[0]).parts
        room = parts[1] if len(parts) > 2 else "package"
        self.seconds[room] += report.duration
        if report.when == "call" and report.passed:
            self.passed[room] += 1

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
        terminalreporter.section("time by room")
        for room in sorted(self.seconds):
            terminalreporter.line(f"{room:<10} {self.passed[room]:>5} passed {self.seconds[room]:>8.1f} s")
        if config.getoption("--minimum-tests"):
            wanted = int(MINIMUM_FILE.read_text())
            terminalreporter.line(f"{sum(self.passed.values())} passed; at least {wanted} must")

    @pytest.hookimpl
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        is_whole = not hasattr(session.config, "workerinput")
        if is_whole and session.config.getoption("--minimum-tests") and exitstatus == pytest.ExitCode.OK:
            wanted = int(MINIMUM_FILE.read_text())
            if sum(self.passed.values()) < wanted:
                session.exitstatus = pytest.ExitCode.TESTS_FAILED


# First: xdist reads the groups when its own turn comes.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Say which tests stay together where processes share them, and put those that take long first."""
    place = {}
    for item in items:
        together = item.nodeid.split("::")[0]
        fixtures = {*getattr(item, "fixturenames", ())}
        if "pool" in fixtures and together.startswith(("tests/layer", "tests/transfer", "tests/balancer")):
            together = "pool, transfer"
        elif fixtures & {"pool", "browser"}:
            together = "pool"
        elif "megatron_pool" in fixtures:
            together = "megatron"
        item.add_marker(pytest.mark.xdist_group(together))
        place[item] = next((n for n, name in enumerate(LONGEST) if together.startswith(name)), len(LONGEST))
    if hasattr(config, "workerinput"):
        items.sort(key=place.__getitem__)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Refuse to run without groups: every process would make pools of its own, in silence."""
    is_grouped = getattr(session.config.option, "loadgroup", False)
    if is_grouped and session.items and "@" not in session.items[0].nodeid:
        raise pytest.UsageError("xdist's groups have no effect with this pytest; install what constraints.txt names")
    # Modules and tests stay: tests that collect garbage, to see what is left, need not look at half a million objects.
    gc.freeze()


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(RoomTimes(), "room-times")

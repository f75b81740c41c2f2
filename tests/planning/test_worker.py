"""The planning process: it answers, tells what went wrong, and ends with its parent."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from equipoise.core import InfeasiblePlanError, LoadsError
from equipoise.core.options import BalancerOptions
from equipoise.planning.worker import PlanWorker
from tests.layer.cases import cluster_of, model_of, random_routing
from tests.transfer.test_pool import is_alive


@pytest.fixture
def worker():
    made = PlanWorker()
    yield made
    made.close()


def test_a_worker_plans_and_tells_what_is_wrong(worker):
    routing, other = random_routing(1, ranks=2), random_routing(1, ranks=4)
    worker.call("open", cluster_of(2), model_of(routing), BalancerOptions(objective="skew"))
    share = worker.call("share", routing.loads(), range(2))
    plan = worker.call("whole", routing.loads(), [share])
    assert plan.loads == routing.loads()
    with pytest.raises(LoadsError, match="loads have 4 source ranks, the EP group has 2"):
        worker.call("whole", other.loads(), [])
    with pytest.raises(InfeasiblePlanError, match="planning failed:\nTraceback"):
        worker.call("no such method")
    assert worker.call("whole", routing.loads(), [share]).home_LE.shape == plan.home_LE.shape


def test_a_worker_is_lent_to_one_balancer_at_a_time(worker):
    first, second = object(), object()
    worker.lend(first)
    worker.lend(first)
    with pytest.raises(InfeasiblePlanError, match=f"process {worker.pid} plans for another balancer; close that one"):
        worker.lend(second)
    worker.take_back(second)
    with pytest.raises(InfeasiblePlanError, match="plans for another balancer"):
        worker.lend(second)
    worker.take_back(first)
    worker.lend(second)


def test_callers_in_several_threads_get_their_own_answers(worker):
    routings = [random_routing(seed, ranks=2) for seed in range(3)]
    worker.call("open", cluster_of(2), model_of(routings[0]), BalancerOptions(objective="skew"))
    with ThreadPoolExecutor(3) as threads:
        plans = list(threads.map(lambda routing: worker.call("whole", routing.loads(), []), routings * 3))
    assert [plan.loads for plan in plans] == [routing.loads() for routing in routings * 3]


def test_a_killed_worker_is_told_and_closes(worker):
    os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises(InfeasiblePlanError, match=f"the planning process {worker.pid} ended"):
        for _ in range(2):
            worker.call("open")
    worker.close()
    worker.close()


def test_a_worker_does_not_hear_ctrl_c(capfd):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    worker = PlanWorker()
    signal.signal(signal.SIGINT, before)
    try:
        for _ in range(2):
            with pytest.raises(InfeasiblePlanError, match="planning failed:"):
                worker.call("no such method")
            os.kill(worker.pid, signal.SIGINT)
    finally:
        worker.close()
    assert capfd.readouterr().err == ""


def test_a_worker_ends_with_a_killed_parent():
    code = (
        "import os, signal; from equipoise.planning.worker import PlanWorker\n"
        "print(PlanWorker().pid, flush=True); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, stdout=subprocess.PIPE, timeout=300)
    assert done.returncode == -signal.SIGKILL
    # It first imports the planner, which takes its time on a busy machine.
    end = time.monotonic() + 120
    while is_alive(int(done.stdout)):
        assert time.monotonic() < end, "the worker outlived its parent by 120 s"
        time.sleep(0.05)


def test_training_processes_do_not_import_numba():
    code = (
        "import sys, equipoise.balancer; assert 'numba' not in sys.modules and 'equipoise.planner' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])

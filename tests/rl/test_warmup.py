"""Warm-up and groups of ranks: the same weights everywhere, groups that fit together, and a planner that is ready."""

import threading

import numpy as np
import pytest
import torch

from equipoise.core import InfeasiblePlanError, TopologyError
from equipoise.rl import train
from equipoise.rl.config import build_cluster, change
from equipoise.rl.metrics import ignore
from equipoise.rl.model import build_model
from equipoise.rl.preflight import shape_of
from equipoise.rl.train import StartedPlanner, launch, start_planner
from tests.rl import work


@pytest.mark.dist(2)
def test_warm_up_lowers_the_loss_and_leaves_the_same_weights_on_every_rank(pool):
    config = work.small(warmup={"steps": 12})
    found = {}
    for sharing in (1, 2):
        # Ranks that share a device leave warm-up to the first of them.
        first, second = pool.run(work.warmed_up, 2, change(config, model={"ranks_per_device": sharing}))
        assert work.same_weights(first[0], second[0])
        assert first[1] == second[1], "the loss is that of all ranks"
        assert first[1][-1] < first[1][0]
        found[sharing] = first
    np.testing.assert_allclose(found[1][1], found[2][1], rtol=1e-4)
    for name, tensor in found[1][0].items():
        torch.testing.assert_close(tensor, found[2][0][name], rtol=1e-2, atol=1e-3)


@pytest.mark.dist(2)
def test_no_warm_up_steps_change_nothing(pool):
    config = work.small(warmup={"steps": 0})
    weights, losses = pool.run(work.warmed_up, 2, config)[0]
    assert not losses
    assert work.same_weights(weights, build_model(config.model, seed=config.seed).state_dict())


@pytest.mark.dist(4)
def test_every_rank_is_in_one_ep_group_and_one_group_of_owners(pool):
    found = pool.run(work.groups_of, 4, work.small(ranks=4, ep=2))
    assert [ep for ep, _ in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [owners for _, owners in found] == [[0, 2], [1, 3], [0, 2], [1, 3]]


@pytest.mark.dist(2)
def test_another_number_of_ranks_than_configured_is_refused(pool):
    said = pool.run(work.ranks_error, 2, work.small(ranks=4))
    assert said == ["setting ranks is 4, but 2 ranks were started; make them equal"] * 2


def test_experts_that_do_not_divide_are_refused_before_anything_is_built():
    config = work.small(model={"experts": 9})
    with pytest.raises(TopologyError, match="9 experts"):
        build_cluster(config, shape_of(config))


def name_of_rank(config, ranks, show, words):
    return f"{words} {ranks.rank} of {ranks.size}"


def test_under_torchrun_this_process_is_the_rank(monkeypatch, tmp_path):
    # As torchrun does it: the store is there already, so that nobody can take its port in between.
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    places = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    for name, value in {**places, "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
        monkeypatch.setenv(name, value)
    threads = torch.get_num_threads()
    try:
        assert launch(name_of_rank, work.small(ranks=1), "rank") == "rank 0 of 1"
    finally:
        torch.set_num_threads(threads)


class SlowWorker:
    """A planning process that compiles until it is let go, and may fail then."""

    def __init__(self, *, fails=False):
        self.gate, self.fails, self.calls = threading.Event(), fails, []

    def call(self, method, *args):
        self.gate.wait(30)
        self.calls.append(method)
        if self.fails:
            raise InfeasiblePlanError("the planning process ended")

    def close(self):
        raise AssertionError("a given worker is left running")


def started(worker):
    config = work.small()
    return StartedPlanner(config, shape_of(config), worker=worker)


def test_waiting_for_the_kernels_is_shown_and_forgetting_opens_a_new_plan_server(monkeypatch):
    monkeypatch.setattr(train, "_PATIENCE_S", 0.01)
    worker, told = SlowWorker(), []

    def show(event):
        told.append(event.values["message"])
        worker.gate.set()

    planner = started(worker)
    assert planner.ready(show) is worker
    assert told[0] == "compiling planner kernels, once per machine"
    assert worker.calls == ["open", "share", "whole", "whole"]
    planner.forget()
    assert worker.calls[-1] == "open"
    planner.close()


def test_a_planner_that_cannot_start_is_an_error_and_not_a_hang():
    worker = SlowWorker(fails=True)
    worker.gate.set()
    with pytest.raises(InfeasiblePlanError, match="the planning process ended"):
        started(worker).ready(ignore)


def test_only_a_mode_that_plans_starts_a_process():
    config = work.small()
    for mode in ("off", "static"):
        assert start_planner(change(config, balance={"mode": mode}), shape_of(config), mode=mode) is None

"""Copies in one go: which way is chosen, the bits, and that a visit's replicas are one submission."""

import logging

import pytest
import torch

from equipoise.core import TransferError
from equipoise.core.options import TransferOptions
from equipoise.transfer.pulls import Copy, MappedPath, make_copier
from tests.transfer.play import Rank, run_window
from tests.transfer.windows import random_plan

CPU = torch.device("cpu")


def test_plain_copies_bring_every_bit_and_touch_nothing_else():
    target, source = torch.full((4, 3), torch.nan), torch.randn(4, 3)
    make_copier(CPU).copy([Copy(target[2], source[0]), Copy(target[0], source[3])])
    assert torch.equal(target[2], source[0]) and torch.equal(target[0], source[3])
    assert target[[1, 3]].isnan().all()


def test_the_way_is_chosen_once_and_logged(caplog):
    with caplog.at_level(logging.INFO, logger="equipoise.transfer.pulls"):
        assert make_copier(CPU).name == make_copier(CPU, "plain").name == "plain"
    assert caplog.messages == ["pulls inside a node are plain copies on cpu"] * 2
    for method in ("kernel", "parallel"):
        with pytest.raises(TransferError, match=f"'{method}', but experts are on cpu; give 'plain' or 'auto'"):
            make_copier(CPU, method)
    with pytest.raises(TransferError, match="copies is 'fast'; it must be one of auto, plain, kernel, parallel"):
        TransferOptions(slots=1, copies="fast")


class CountedPath(MappedPath):
    """Shared memory that notes how many replicas each submission brings."""

    def __init__(self):
        self.sizes = []

    def attach(self, node):
        super().__init__(node)

    def pull(self, needs, buffer):
        self.sizes.append(len(needs))
        return super().pull(needs, buffer)


def submissions(group, plan):
    path, other = CountedPath(), CountedPath()
    rank = Rank(group, plan, paths={"peer": path, "host": other})
    path.attach(rank.engine._node)
    other.attach(rank.engine._node)
    with rank.engine as engine:
        engine.open_window(plan)
        run_window(rank, plan, lambda: None)
        engine.close_window()
    return path.sizes, other.sizes


@pytest.mark.dist(2)
def test_the_replicas_of_a_visit_that_share_a_path_are_one_submission(pool):
    plan = random_plan((0, 0), seed=3, slots=2, fewest=2, layers=4, micro_steps=3, stage="recompute")
    together = []
    for rank, sizes in enumerate(pool.run(submissions, 2, plan)):
        visits = [[pull.path for pull in plan.pulls(visit, rank)] for visit in range(len(plan.itinerary))]
        for path, seen in zip(("peer", "host"), sizes, strict=True):
            wanted = [paths.count(path) for paths in visits if path in paths]
            assert seen == wanted
            together += wanted
    assert {1, 2} == set(together)

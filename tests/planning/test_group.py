"""The planning group: objects to every rank, and rows as the training's own group would exchange them."""

import pytest
import torch

from equipoise.layer.ops import all_to_all
from equipoise.transfer.waits import OwnGroup


def gathered_and_swapped(group, send_RR):
    own = OwnGroup(group, timeout_s=60.0)
    rank = group.rank()
    rows_NX = torch.arange(3 * sum(send_RR[rank])).view(-1, 3) + 100 * rank
    receive_R = [row[rank] for row in send_RR]
    wanted_NX = all_to_all(rows_NX, send_RR[rank], receive_R, group)
    assert torch.equal(own.swap(rows_NX, send_RR[rank], receive_R), wanted_NX)
    values = own.gather({"rank": rank, "text": "x" * (1 + 50 * rank)})
    own.close()
    return [(value["rank"], len(value["text"])) for value in values]


@pytest.mark.dist(4)
@pytest.mark.parametrize("send_RR", [[[1, 2, 0, 3], [0] * 4, [4, 0, 1, 0], [2, 2, 0, 2]], [[0] * 4] * 4])
def test_objects_and_rows_reach_every_rank(pool, send_RR):
    for values in pool.run(gathered_and_swapped, 4, send_RR):
        assert values == [(rank, 1 + 50 * rank) for rank in range(4)]

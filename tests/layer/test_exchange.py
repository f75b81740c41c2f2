"""All-to-all of rows between processes: uneven and zero splits, and the gradient's way back."""

import pytest
import torch

from equipoise.layer.ops import exchange_rows


def swap(group, send_RR):
    """Send `send_RR[r][q]` rows that name (source, number) and return what came, and the gradient of what was sent."""
    rank = group.rank()
    rows_ND = torch.tensor([[100.0 * rank + n, 1.0] for n in range(sum(send_RR[rank]))]).reshape(-1, 2).requires_grad_()
    receive_R = [row[rank] for row in send_RR]
    got_ND = exchange_rows(rows_ND, send_R=send_RR[rank], receive_R=receive_R, group=group)
    # The holder's rank comes back as the gradient of each row it received.
    (got_ND * torch.tensor([0.0, float(rank)])).sum().backward()
    return got_ND[:, 0].tolist(), rows_ND.grad[:, 1].tolist()


@pytest.mark.dist(4)
@pytest.mark.parametrize(
    "send_RR",
    [
        [[1, 2, 0, 3], [0, 0, 0, 0], [4, 0, 1, 0], [2, 2, 0, 2]],
        [[0, 0, 0, 0]] * 4,
        [[0, 3, 0, 0]] * 4,
    ],
    ids=["uneven", "no rows at all", "one receiver"],
)
def test_rows_arrive_by_source_and_gradients_return_to_their_rows(pool, send_RR):
    answers = pool.run(swap, 4, send_RR)
    for rank, (got, grads) in enumerate(answers):
        wanted = [
            100.0 * source + n
            for source, row in enumerate(send_RR)
            for n in range(sum(row[:rank]), sum(row[: rank + 1]))
        ]
        assert got == wanted
        assert grads == [float(holder) for holder, count in enumerate(send_RR[rank]) for _ in range(count)]

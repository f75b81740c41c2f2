"""A packed optimizer step has the gradient of the given one: the same samples, added in another order."""

import numpy as np
import torch

from equipoise.core import ModelShape
from equipoise.loads import TokenPolicy, generate_counts, pack_window, schedule_tokens, sketch_counts
from equipoise.loads.packer import micro_batches


def test_the_gradient_of_a_packed_step_is_equal_up_to_the_order_of_sums():
    counts = generate_counts(ModelShape.preset("olmoe", layers=2), samples=40, mean_tokens=60, domains=2, seed=3)
    policy = TokenPolicy(last_token="unknown")
    given = schedule_tokens(counts.tokens_B, ranks=4, token_budget=400, policy=policy)
    packed = pack_window(sketch_counts(counts), given, node_R=[0, 0, 1, 1]).schedule
    assert sorted(map(tuple, given.pieces[:, :3])) == sorted(map(tuple, packed.pieces[:, :3]))
    assert not np.array_equal(given.pieces, packed.pieces)
    torch.manual_seed(0)
    experts_EDD = torch.randn(4, 8, 8)
    inputs = [torch.randn(int(tokens), 8) for tokens in counts.tokens_B]

    def gradient(schedule):
        """Of the sum over ranks and micro-steps, each forwarded and differentiated by itself."""
        weight_EDD = experts_EDD.clone().requires_grad_()
        for rank in range(4):
            for samples in micro_batches(schedule, rank):
                if samples:
                    x_TD = torch.cat([inputs[b] for b in samples])
                    expert_T = torch.arange(len(x_TD)) * 0 + (x_TD[:, 0] > 0) + 2 * (x_TD[:, 1] > 0)
                    torch.einsum("td,tdf->tf", x_TD, weight_EDD[expert_T]).square().sum().backward()
        return weight_EDD.grad

    before, after = gradient(given), gradient(packed)
    assert before.abs().max() > 1
    torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-3)
    # One sample left out is seen.
    inputs[int(given.pieces[0, 0])] *= 0
    assert (gradient(given) - before).abs().max() > 1

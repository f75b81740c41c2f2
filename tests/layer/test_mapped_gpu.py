"""Mapped rows on a CUDA device that several ranks share: bits, an end when a rank dies, and no wait of the host."""

import pytest
import torch

from tests.layer import mapped_work
from tests.parity.case import ParityCase
from tests.transfer.own_ranks import KILLED, run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CASES = {
    "4 ranks, no slot": (ParityCase(ranks=4, slots=0, layers=2, tokens=40, top_k=4, device="cuda"), {}),
    "4 ranks": (ParityCase(ranks=4, slots=2, layers=2, tokens=40, top_k=4, device="cuda"), {}),
    "recomputed": (ParityCase(ranks=2, slots=1, layers=2, tokens=32, device="cuda"), {"is_checkpointed": True}),
    "a rank without tokens": (ParityCase(ranks=4, slots=1, layers=2, tokens=32, device="cuda"), {"silent": (2,)}),
    "8 ranks": (ParityCase(ranks=8, slots=1, layers=2, tokens=16, home_slots=2, device="cuda"), {}),
    "2 nodes of 2": (ParityCase(ranks=4, nodes=2, slots=2, layers=2, tokens=40, top_k=4, device="cuda"), {}),
    "2 nodes of 4, in two levels": (
        ParityCase(ranks=8, nodes=2, slots=1, layers=2, tokens=16, home_slots=2, dispatch="two_level", device="cuda"),
        {"silent": (2,)},
    ),
}


@pytest.mark.dist(8)
@pytest.mark.parametrize("name", CASES)
def test_mapped_rows_give_the_bits_of_exchanged_rows(pool, name):
    mapped_work.check_bits(pool, *CASES[name])


NODES = {
    "2 nodes of 2": {"ranks": 4, "slots": 2, "tokens": 40, "top_k": 4},
    "2 nodes of 2, in two levels": {"ranks": 4, "slots": 2, "tokens": 40, "top_k": 4, "dispatch": "two_level"},
    "2 nodes of 4": {"ranks": 8, "slots": 1, "tokens": 16, "home_slots": 2},
    "2 nodes of 4, in two levels": {"ranks": 8, "slots": 1, "tokens": 16, "home_slots": 2, "dispatch": "two_level"},
}


@pytest.mark.dist(8)
@pytest.mark.parametrize("how", [{}, {"silent": (2,), "is_checkpointed": True}], ids=["plain", "recomputed"])
@pytest.mark.parametrize("name", NODES)
def test_what_crosses_nodes_by_nccl_has_the_same_bits(nccl_pool, name, how):
    mapped_work.check_bits(nccl_pool, ParityCase(nodes=2, layers=2, device="cuda", **NODES[name]), how)


def test_a_rank_that_is_killed_ends_the_others_and_their_streams():
    case = ParityCase(ranks=4, slots=1, layers=2, tokens=32, device="cuda")
    said = run_ranks(mapped_work.die_in_a_window, 4, case, 20.0, timeout_s=120.0)
    assert said[1] == KILLED
    for words in (said[0], said[2], said[3]):
        assert "rank 1 (process" in words and "is gone" in words


def test_a_rank_that_stands_still_ends_the_others_within_the_bound():
    case = ParityCase(ranks=2, slots=1, layers=2, tokens=32, device="cuda")
    waiting, standing = run_ranks(mapped_work.stand_still, 2, case, 5.0, timeout_s=120.0)
    assert "rows in layer index 0" in waiting[0] and "did not finish within 5 s" in waiting[0]
    assert waiting[1] < 60 and standing[0]

"""Windows that fill free tokens: what counts keeps its bits, coverage is complete, and dispatch is prepared."""

import pytest
import torch

from tests.balancer import free
from tests.parity.case import ParityCase

CASE = ParityCase(ranks=2, layers=2, tokens=14, home_slots=3, slots=0)


def same(one, other):
    return len(one) == len(other) and all(map(torch.equal, one, other))


@pytest.mark.dist(2)
@pytest.mark.parametrize(("share", "rows", "top_k"), [(0.25, "auto", 2), (0.25, "collective", 6), (1.0, "auto", 3)])
def test_filled_tokens_change_no_bit_of_what_counts(pool, share, rows, top_k):
    case = ParityCase(ranks=2, layers=2, tokens=14, home_slots=3, slots=0, top_k=top_k)
    for found, reports in pool.run(free.fill, 2, case, share, rows):
        filled, by_hand, unfilled = (found[name] for name in ("filled", "by hand", "unfilled"))
        assert sorted(filled["filled"]) == [(m, layer) for m in range(2) for layer in range(2)]
        for entry, (token_F, ids_FK, num_tokens) in filled["filled"].items():
            assert (ids_FK.diff(dim=1) > 0).all(), f"{entry}: K distinct experts, here of {case.experts}"
            assert len(token_F) == round(num_tokens * share) or len(token_F) == num_tokens - round(
                num_tokens * (1 - share)
            )
        # Equal experts give equal plans, and equal bits of all that counts.
        assert filled["digest"] == by_hand["digest"] == found["again"]["digest"]
        for part in ("outputs", "inputs", "weights"):
            assert same(filled[part], by_hand[part]), part
            assert same(filled[part], found["again"][part]), part
        # In the deterministic mode an output does not depend on its group; weight gradients add zeros elsewhere.
        assert same(filled["outputs"], unfilled["outputs"])
        for one, other in zip(
            filled["weights"] + filled["inputs"], unfilled["weights"] + unfilled["inputs"], strict=True
        ):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
        assert reports["unfilled"].dispatch.startswith("exchanged: rank 0 knows")
        assert unfilled["estimated"] > 0 or share == 1
        assert reports["filled"].dispatch == "prepared" and filled["estimated"] == 0
        assert reports["filled"].is_as_planned and reports["by hand"].is_as_planned
        rows_F = sum(one.ids_FK.numel() for one in filled["filled"].values())
        assert reports["filled"].filled_rows == rows_F > 0
        assert reports["unfilled"].filled_rows == reports["by hand"].filled_rows == 0


@pytest.mark.dist(2)
def test_where_no_token_is_free_nothing_is_filled_and_the_plan_is_the_same(pool):
    for found, reports in pool.run(free.fill, 2, CASE, 0.0):
        assert found["filled"]["filled"] == {} and reports["filled"].filled_rows == 0
        assert found["filled"]["digest"] == found["unfilled"]["digest"]
        assert same(found["filled"]["weights"], found["unfilled"]["weights"])


@pytest.mark.dist(1)
def test_rows_that_a_window_was_not_told_of_are_an_error_and_a_disabled_balancer_fills_none(pool):
    case = ParityCase(ranks=1, layers=2, tokens=6, home_slots=4)
    (words,) = pool.run(free.other_rows, 1, case)
    assert words[0] == "RoutesError" and "tokens are filled among" in words[1]
    assert pool.run(free.disabled, 1, case) == [(0, 0)]

"""A rank killed anywhere ends the others in time, and training goes on from the last checkpoint to the same numbers."""

import functools

import pytest
import torch

from tests.balancer import resume
from tests.parity.case import ParityCase
from tests.transfer.own_ranks import KILLED, run_ranks

CASE = ParityCase(ranks=2, layers=2, tokens=10)
WINDOWS = 4
BOUND_S = 60.0
"""`timeout_s` of the tests' balancers."""


@functools.cache
def plans():
    """The planner's plan of every window; none knows another, so that training may begin with any of them."""
    import equipoise as eq
    from equipoise.planning.rows import count_rows, join_rows

    made = []
    for number in range(WINDOWS):
        rows = [count_rows(CASE.routes(number, rank), experts=CASE.experts) for rank in range(CASE.ranks)]
        loads = join_rows(rows, layer_numbers=CASE.model.layer_numbers, top_k=CASE.model.top_k)
        given = {"cluster": CASE.cluster, "model": CASE.model, "slots": CASE.slots}
        made.append(eq.plan(loads, objective="skew", **given))
    return made


@pytest.fixture(scope="module")
def undisturbed(pool, tmp_path_factory):
    """Trained weights by rank."""
    return pool.run(resume.train_through, 2, CASE, plans(), tmp_path_factory.mktemp("undisturbed"))


@pytest.mark.dist(2)
@pytest.mark.parametrize("where", ["forward", "backward", "publish", "collect"])
def test_a_killed_rank_ends_the_others_and_training_resumes_to_the_same_numbers(pool, undisturbed, tmp_path, where):
    fatal = plans()[resume.FATAL]
    assert fatal.displaced_LE[1].any() and len(fatal.replica_table), "a window that moves nothing shows nothing"
    (words, seconds, is_clean), victim = run_ranks(resume.train_until_killed, 2, CASE, plans(), tmp_path, where)
    assert victim == KILLED
    assert ("rank 1" in words and "gone" in words) or "look for a rank that ended" in words, words
    assert seconds < BOUND_S / 2, f"{seconds:.1f} s until: {words}"
    assert is_clean, "mappings are left"
    for (last, weights), wanted in zip(pool.run(resume.resume, 2, CASE, plans(), tmp_path), undisturbed, strict=True):
        assert last == resume.FATAL
        assert all(map(torch.equal, weights, wanted))


@pytest.mark.dist(4)
@pytest.mark.parametrize("nodes", [1, 2], ids=["one node", "two nodes"])
def test_state_is_saved_and_loaded_inside_a_window(pool, nodes):
    results = pool.run(resume.state_inside_a_window, 4, ParityCase(ranks=4, nodes=nodes, slots=0, layers=2, tokens=12))
    for found in results:
        for key, value in found["before"].items():
            assert torch.equal(found["canonical"][key], value)
            assert torch.equal(found["after"][key], 2 * value), "what was written in `canonical` stays"
    pairs = [(found["at the homes"][key], value) for found in results for key, value in found["before"].items()]
    assert not all(torch.equal(x, y) for x, y in pairs), "a plan that displaces nothing shows nothing"

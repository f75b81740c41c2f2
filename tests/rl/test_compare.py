"""The proof that training is unchanged: it holds, it finds a mode that learns something else, and it says so."""

from dataclasses import replace

import pytest
import torch

from equipoise.core import TrainingError
from equipoise.rl.compare import LIMITS, PLACED, Leg, build_comparison, parse_modes
from tests.rl import work

ALL = ("off", "static", "equipoise")


def check(comparison, steps):
    assert comparison.is_good, "\n".join(comparison.lines())
    assert [leg["name"] for leg in comparison.legs] == [*ALL, PLACED]
    assert all(len(leg["loss"]) == steps and min(leg["grad_norm"]) > 0 for leg in comparison.legs)
    by_name = {leg["name"]: leg for leg in comparison.legs}
    assert by_name["equipoise"]["replicas"] > 0
    assert by_name[PLACED]["displaced"] > 0 and by_name[PLACED]["replicas"] == 0
    bits = [pair for pair in comparison.pairs if pair.must_be_bit_equal]
    assert [pair.names for pair in bits] == [("static", PLACED)] and bits[0].is_bit_equal
    assert max(bits[0].weight_gap) == 0.0
    assert all(leg["step_s"] > 0 and leg["tokens_per_s"] > 0 for leg in comparison.legs)
    shown = " ".join(" ".join(comparison.lines(width=50)).split())
    assert all(f"{leg['name']} {leg['step_s']:.3f} {leg['tokens_per_s']:,.0f} " in shown for leg in comparison.legs)


@pytest.mark.dist(2)
def test_all_modes_learn_the_same(pool):
    comparison, other = pool.run(work.compare_run, 2, work.small(update={"kl": 0.1}), ALL)
    assert other is None
    check(comparison, 2)
    assert comparison.lines()[-1] == "training is unchanged"


@pytest.mark.slow
@pytest.mark.dist(4)
def test_ten_steps_on_four_ranks_of_two_nodes_learn_the_same(pool):
    # One layer, one window of two micro-steps per stage: several of them are compared above.
    config = work.small(steps=10, ranks=4, ranks_per_node=2, model={"layers": 1}, update={"mini_batches": 1})
    check(pool.run(work.compare_run, 4, config, ALL, timeout_s=600)[0], 10)


def test_the_first_step_is_left_out_of_the_speed_where_there_are_more():
    one, two = (replace(leg("off"), seconds=s, tokens=t) for s, t in (((9.0,), (90,)), ((9.0, 2.0, 4.0), (9, 30, 30))))
    assert one.speed == {"step_s": 9.0, "tokens_per_s": 10.0}
    assert two.speed == {"step_s": 3.0, "tokens_per_s": 10.0}
    # One step in which another program had the cores says nothing about a mode.
    hiccup = replace(two, seconds=(9.0, 2.0, 2.5, 40.0), tokens=(9, 30, 30, 30))
    assert hiccup.speed == {"step_s": 2.5, "tokens_per_s": 12.0}


@pytest.mark.dist(2)
def test_own_rollouts_are_shown_without_a_verdict(pool):
    comparison = pool.run(work.compare_run, 2, work.small(steps=1, compare_free=True), ("off", "static"))[0]
    assert comparison.is_free and comparison.is_good
    assert comparison.lines()[-1] == "every mode made its own rollouts: no verdict"


def leg(name, *, loss=0.5, weight=1.0, moved=1):
    weights = {"w": torch.tensor([1.0, weight])}
    return Leg(
        name=name,
        losses=((loss, 0.25),),
        sizes=((1.0, 1.0),),
        norms=(1.0,),
        weights=(weights,),
        displaced=moved,
    )


@pytest.mark.parametrize(
    ("change", "is_good"),
    [
        ({}, True),
        ({"loss": 0.5 + 9e-6}, True),
        ({"loss": 0.5 + 2e-5}, False),
        ({"weight": 1 + 9e-6}, True),
        ({"weight": 1 + 2e-5}, False),
        ({"loss": float("nan")}, False),
    ],
    ids=["the same", "loss within", "loss beyond", "weight within", "weight beyond", "loss lost"],
)
def test_a_mode_that_learns_something_else_is_found(change, is_good):
    comparison = build_comparison([leg("off"), leg("equipoise", **change)], is_free=False, limit=1e-5)
    assert comparison.is_good == is_good
    assert comparison.lines()[-1] == ("training is unchanged" if is_good else "TRAINING DIFFERS")


@pytest.mark.parametrize(("gap", "is_good"), [(2e-3, True), (6e-3, False)])
def test_weights_in_bf16_may_be_one_step_of_its_rounding_apart(gap, is_good):
    for change in ({"loss": 0.5 + gap}, {"weight": 1 + gap}):
        comparison = build_comparison([leg("off"), leg("equipoise", **change)], is_free=False, limit=LIMITS["bfloat16"])
        assert comparison.is_good == is_good


def test_placement_must_have_the_bits_of_static():
    legs = [leg("off"), leg("static"), leg("equipoise"), leg(PLACED, loss=0.5 + 1e-7)]
    comparison = build_comparison(legs, is_free=False, limit=1e-5)
    assert not comparison.is_good
    assert any("OTHER BITS" in line for line in comparison.lines())


def test_a_comparison_in_which_nothing_moved_or_was_learnt_proves_nothing():
    still = build_comparison([leg("off"), leg("equipoise", moved=0)], is_free=False, limit=1e-5)
    assert not still.is_good and any("nothing was displaced" in line for line in still.lines())
    idle = [replace(one, sizes=((0.0, 0.0),), losses=((0.0, 0.0),)) for one in (leg("off"), leg("equipoise"))]
    comparison = build_comparison(idle, is_free=False, limit=1e-5)
    assert not comparison.is_good and any("no sample earned more" in line for line in comparison.lines())
    assert still.verdict == comparison.verdict == comparison.lines()[-1] == "NOTHING IS PROVED"


def test_modes_are_parsed_in_a_fixed_order_and_strangers_refused():
    assert parse_modes("equipoise, off") == ("off", "equipoise")
    for words in ("off", "off,off", "off,dynamic", ""):
        with pytest.raises(TrainingError, match="give two or three different ones of off, static, equipoise"):
            parse_modes(words)

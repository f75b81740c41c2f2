"""The examples of Megatron-Core, slime and verl run as they say."""

import re


def test_the_megatron_loop_moves_experts_in_every_step_as_planned(megatron_pool):
    first, *others = megatron_pool.call("megatron_example")
    assert others == [[], [], []], "the first rank prints"
    form = r"step (\d): (\d+) experts displaced, (\d+) replicas; done.is_as_planned=True"
    found = [re.fullmatch(form, line).groups() for line in first]
    assert [line[0] for line in found] == ["0", "1"] and all(int(line[1]) + int(line[2]) > 0 for line in found)


def test_hooks_of_ones_own_around_ours_balance_and_log_every_window(megatron_pool):
    first, *others = megatron_pool.call("slime_example")
    assert others == [[], [], []], "the first rank logs"
    # The log-prob passes begin before there is a window; the last window's log is not called for.
    assert [line.split(":")[0] for line in first] == [
        "before step 0 of rollout 0",
        "before step 1 of rollout 0",
        "before step 0 of rollout 0",
    ]
    assert sum(int(re.search(r"displaced (\d+) experts", line)[1]) for line in first) > 0


def test_the_verl_loop_trains_with_the_registered_engine_and_moves_experts(megatron_pool):
    # verl prints a line of its own on every rank.
    first, *others = [
        [line for line in lines if line.startswith("verl ")] for lines in megatron_pool.call("verl_example")
    ]
    assert others == [[], [], []], "the first rank prints"
    form = r"verl 0.9.1, step (\d): loss (\d+\.\d+), (\d+) experts displaced, (\d+) replicas"
    found = [re.fullmatch(form, line).groups() for line in first]
    assert [line[0] for line in found] == ["0", "1"] and all(int(line[2]) + int(line[3]) > 0 for line in found)

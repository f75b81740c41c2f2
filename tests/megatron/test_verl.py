"""verl's own Megatron engine: the same bits with balanced experts, and errors before anything changes."""

import re

import pytest

from tests.megatron.layouts import LAYOUTS

# Tokens of a micro-step whose route nobody knows. R3: the last of two samples on every DP rank, and with sequence
# parallelism one of padding. R2 has routes of all, also of padding.
UNKNOWN = {("R3", "EP4"): 4 * 2, ("R3", "EP4, TP2 + SP"): 2 * 3, ("R2", "EP4"): 0, ("R2", "EP4, TP2 + SP"): 0}


@pytest.mark.parametrize(("mode", "name"), UNKNOWN)
def test_verls_engine_trains_with_the_bits_of_plain_training(megatron_pool, mode, name):
    ranks = megatron_pool.call("train_with_verl", LAYOUTS[name], mode)
    # Log-prob pass and update of two steps; in mode R2 the log-prob pass records.
    windows = 4 if mode == "R3" else 2
    for rank in ranks:
        assert rank["is registered"]
        assert rank["differences"] == [], "log-probs, losses, norms, weights and shards"
        assert rank["losses"] == 2 * (9 + 14 + 6 + 11) + 2 * 2
        assert rank["micro-steps"] == [2] * windows
        assert sum(rank["displaced"]) > 0
        assert rank["other rows"] == 0, "routers replay what the window was told"
    assert max(ranks[0]["norms"]) > 0
    assert sum(rank["unknown rows"] for rank in ranks) == windows * 2 * 4 * UNKNOWN[mode, name]


# In R2, whose recorded routes are of all tokens, only padding is filled, which only sequence parallelism needs here.
@pytest.mark.parametrize(("mode", "name", "filled"), [("R3", "EP4, TP2 + SP", 2 * 3), ("R2", "EP4, TP2 + SP", 2 * 1)])
def test_windows_that_fill_rows_change_no_bit_of_what_counts(megatron_pool, mode, name, filled):
    ranks = megatron_pool.call("fill_in_verl", LAYOUTS[name], mode)
    windows = 4 if mode == "R3" else 2
    for rank in ranks:
        assert rank["differences"] == [], "log-probs, losses, norms, weights and shards"
        assert any(rank["losses"])
        assert rank["dispatch"] == {"prepared"} and rank["as planned"] and rank["displaced"] > 0
    # Two micro-steps of four layers, two rows per token.
    assert sum(rank["filled rows"] for rank in ranks) == windows * 2 * 4 * 2 * filled


ERRORS = {
    "replay off": "AdapterError: router_replay.mode is 'disabled'.*router_replay.mode=R3",
    "another verl": "AdapterError: verl 0.8.0 is not supported; use verl==0.9.1",
    "no routes": "AdapterError: rank 2: micro-step 0 has no routed_experts; have the rollout return them",
    "too few rows": "AdapterError: rank 2: routed_experts do not fit the batch: .* 7 route rows for 9",
    "too few layers": "AdapterError: rank 2: routed_experts do not fit the batch: .*missing_layer",
    "ids out of range": "AdapterError: rank 2: layer 0, micro-step 0: .* from 0 to 1.; the router takes 2 of 0 to 7",
    "another width": "AdapterError: rank 2: layer 0, micro-step 0: 1 ids per token of routed_experts",
    "z-loss": "AdapterError: rank 0: no row is free: each reaches the z-loss .moe_z_loss_coeff=0.001.",
    "experts do not divide": "TopologyError: 9 experts of 'megatron' do not divide by 4 ranks",
    "another Megatron": "AdapterError: rank 0: megatron-core 0.20.0 is not between",
    "unknown option": "AdapterError: equipoise.slot is no option",
    "no cluster": "AdapterError: no cluster preset is made of CPU",
}


def test_bad_input_is_one_error_on_every_rank_before_anything_changes(megatron_pool):
    for rank in megatron_pool.call("refuse_in_verl", LAYOUTS["EP4"]):
        assert rank["errors"].keys() == ERRORS.keys()
        for name, error in rank["errors"].items():
            assert re.match(ERRORS[name], error), f"{name}: {error}"
        assert rank["changed"] == []
        assert not rank["is installed"], "a pass that replays nothing has no window"

"""slime's and miles' hooks: the same bits as without them, and errors before anything changes."""

import re

import pytest

from tests.megatron.layouts import LAYOUTS


@pytest.mark.parametrize(("pads_with", "name"), [("distinct ids", "EP4"), ("-1", "EP2 x PP2")])
def test_hooks_train_two_rollouts_with_the_bits_of_plain_training(megatron_pool, pads_with, name):
    ranks = megatron_pool.call("replay_with_hooks", LAYOUTS[name], pads_with)
    for rank in ranks:
        assert rank["differences"] == [], "losses of log-prob passes and steps, norms, weights and shards"
        # Log-prob windows of both optimizer steps, their updates, and the update of the second rollout.
        assert rank["micro-steps"] == [4, 3, 4, 3, 4]
        assert sum(rank["displaced"][:2]) > 0 and sum(rank["displaced"][2:]) > 0
        assert rank["as planned"]
        assert rank["hooks left"] == 0
    assert max(rank["losses"] for rank in ranks) == 25


@pytest.mark.parametrize(("pads_with", "name"), [("distinct ids", "EP4"), ("-1", "EP2 x PP2")])
def test_windows_that_fill_padding_change_no_bit_of_what_counts(megatron_pool, pads_with, name):
    layout = LAYOUTS[name]
    for rank in megatron_pool.call("fill_with_hooks", layout, pads_with):
        assert rank["differences"] == [], "to plain training whose padding was given the same experts"
        assert rank["dispatch"] == {"prepared"} and rank["as planned"] and rank["displaced"] > 0
        # Three rows of padding in every micro-step, in this stage's layers.
        rows = 3 * layout.top_k * 4 // layout.pp
        assert rank["filled rows"] == [rows * count for count in (4, 3, 4, 3, 4)]
        assert rank["experts of padding"] > layout.top_k, "not experts 0 to K-1"


ERRORS = {
    "replay off": "AdapterError: rank 0: args.use_routing_replay is off.*add --use-rollout-routing-replay",
    "no replay lists": "AdapterError: rank 0: `chunk 0 decoder.layers.3`: router.routing_replay is None",
    "missing routes": "AdapterError: rank 2: .*4 micro-steps come next, but routes of 3 are left",
    "another shape": r"AdapterError: rank 2: .*micro-step 0, torch.Size\(\[32, 1\]\), must be a tensor \[T, 2\] of ids",
    "ids out of range": "AdapterError: rank 2: .*ids 0 to 7",
    "experts do not divide": "TopologyError: 9 experts of 'megatron' do not divide by 4 ranks",
    "another Megatron": "AdapterError: rank 0: megatron-core 0.20.0 is not between",
    "aux loss": "AdapterError: rank 0: no row is free: each reaches the auxiliary loss .moe_aux_loss_coeff=0.01.",
    "no padder": "AdapterError: rank 0: equipoise.fill_free_rows needs the function by which slime or miles pads",
    "unclear": "AdapterError: rank 0: equipoise.fill_free_rows is 'yes'; give true or false",
    "another caller": "AdapterError: rank 0: no function train_one_step with num_microbatches",
    "offload": "AdapterError: args.offload_train frees memory",
    "unknown option": "AdapterError: equipoise.slot is no option",
    "no cluster": "AdapterError: no cluster preset is made of CPU",
}


def test_bad_input_is_one_error_on_every_rank_before_anything_changes(megatron_pool):
    for rank in megatron_pool.call("refuse", LAYOUTS["EP4"]):
        assert rank["errors"].keys() == ERRORS.keys()
        for name, error in rank["errors"].items():
            assert re.match(ERRORS[name], error), f"{name}: {error}"
            assert "\n" not in error
        assert rank["changed"] == []
        assert not rank["is installed"], "a pass that records and a critic have no window"

"""The bench itself: stand-ins come and go, and a difference is found. That there is none else, `test_parity` shows."""

import pytest

from tests.megatron.layouts import LAYOUTS


def test_stand_ins_are_removed_and_refuse_a_changed_target(megatron_pool):
    for found in megatron_pool.call("try_shims"):
        assert found["left"] == []
        assert "maybe_move_tensor_to_cpu takes ('tensor',)" in found["changed"]
        assert "dist_all_gather_func does not exist" in found["missing"]


@pytest.mark.parametrize("tamper", ["swapped experts", "another route"])
def test_a_changed_weight_or_route_is_found(megatron_pool, tamper):
    for differences in megatron_pool.call("train_twice", LAYOUTS["EP4"], tamper):
        assert {"losses", "norms"} <= set(differences)
        assert any("local_experts" in name for name in differences)
        assert any("embedding" in name for name in differences)

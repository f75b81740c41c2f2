"""The bench itself: stand-ins come and go, layouts train the same model, and a difference is found."""

import pytest

from tests.megatron.layouts import LAYOUTS


def test_stand_ins_are_removed_and_refuse_a_changed_target(megatron_pool):
    for found in megatron_pool.call("try_shims"):
        assert found["left"] == []
        assert "maybe_move_tensor_to_cpu takes ('tensor',)" in found["changed"]
        assert "dist_all_gather_func does not exist" in found["missing"]


def test_layouts_train_the_same_model_and_twice_the_same_bits(megatron_pool):
    """Where the same ranks see the same data, in two groups by the number of data-parallel ranks."""
    norms = {}
    for name in ("EP2 x DP2", "grouped experts", "EP4, TP2 + SP", "EP2 x PP2 x VPP2"):
        ranks = megatron_pool.call("train_twice", LAYOUTS[name])
        assert [rank["differences"] for rank in ranks] == [[]] * 4, name
        assert all(rank["norms"] == ranks[0]["norms"] for rank in ranks), name
        norms[name] = ranks[0]["norms"]
    assert norms["grouped experts"] == pytest.approx(norms["EP2 x DP2"], rel=1e-6)
    assert norms["EP2 x PP2 x VPP2"] == pytest.approx(norms["EP4, TP2 + SP"], rel=1e-4)


@pytest.mark.parametrize("tamper", ["swapped experts", "another route"])
def test_a_changed_weight_or_route_is_found(megatron_pool, tamper):
    for rank in megatron_pool.call("train_twice", LAYOUTS["EP4"], tamper):
        assert {"losses", "norms"} <= set(rank["differences"])
        assert any("local_experts" in name for name in rank["differences"])
        assert any("embedding" in name for name in rank["differences"])

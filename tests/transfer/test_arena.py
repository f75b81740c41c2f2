"""Home and replica slots in one tensor: the same bits as apart, and no memory but that of the replica slots."""

import gc
import time

import pytest
import torch

from equipoise.core import TransferError
from equipoise.core.options import TransferOptions
from equipoise.transfer.node import Arena, ExpertLayout
from equipoise.transfer.pages import HostPager
from tests.transfer.play import play_windows
from tests.transfer.test_layout import weights
from tests.transfer.windows import LAYOUTS, random_plan

ARENA = {"buffers": "arena"}


def make_arena(*, layers=3, slots=2, depth=1):
    layout = ExpertLayout.of([weights(width=24, hidden=40)] * layers, TransferOptions(slots=slots, depth=depth))
    pager = HostPager()
    homes = [pager.make(size) for size in layout.pieces(pager.granule)[:-1]]
    return layout, homes, Arena(layout, pager=pager, homes=homes)


def test_a_replica_slot_is_seen_behind_every_layer_and_changes_nothing_else():
    layout, homes, arena = make_arena()
    for layer in range(layout.layers):
        for matrix in arena.home(layer):
            matrix.fill_(layer)
    for buffer in range(2):
        for tensor in arena.slots[buffer].tensors():
            tensor.copy_(torch.arange(2.0).add(10 * (buffer + 1))[:, None, None].expand_as(tensor))
    for layer in range(layout.layers):
        for buffer in range(2):
            for matrix in arena.joined[layer][buffer]:
                assert matrix.is_contiguous()
                values = [float(slot.unique()) for slot in matrix]
                assert values == [layer, layer, 10 * (buffer + 1), 10 * (buffer + 1) + 1]
    for pages in homes:
        pages.release()


class ShortPager(HostPager):
    """Has addresses for some spans only."""

    def __init__(self, spans):
        super().__init__()
        self._left = spans

    def map(self, pages):
        self._left -= 1
        if self._left < 0:
            raise TransferError("shared memory: bytes could not be mapped")
        return super().map(pages)


def test_an_arena_that_cannot_be_mapped_leaves_nothing():
    from tests.transfer.test_memory import held

    before, pager = held(), ShortPager(spans=5)
    layout = ExpertLayout.of([weights(width=24, hidden=40)] * 3, TransferOptions(slots=2))
    homes = [pager.make(size) for size in layout.pieces(pager.granule)[:-1]]
    with pytest.raises(TransferError, match="could not be mapped"):
        Arena(layout, pager=pager, homes=homes)
    for pages in homes:
        pages.release()
    gc.collect()
    assert held() == before


def without_buffers(group):
    """What every rank says, how soon and with what left, where rank 1 alone has no room for replica buffers."""
    from equipoise.transfer import node
    from tests.transfer.test_memory import held
    from tests.transfer.windows import all_experts, owned_parameters

    def fail(*given, **figures):
        raise torch.OutOfMemoryError("no room on this device")

    gc.collect()
    before, homes = held(), owned_parameters(all_experts(4, 2, 0), group.rank(), 2)
    kept = node.make_buffers
    node.make_buffers = fail if group.rank() == 1 else kept
    begin, words = time.monotonic(), ""
    try:
        node.NodeMemory(homes, group=group, node_R=(0, 0), options=TransferOptions(slots=1))
    except TransferError as error:
        words = str(error)
    finally:
        node.make_buffers = kept
    gc.collect()
    return words, time.monotonic() - begin, held() == before


@pytest.mark.dist(2)
def test_replica_buffers_that_one_rank_cannot_make_are_refused_on_all(pool):
    for words, seconds, is_clean in pool.run(without_buffers, 2):
        assert "rank 1: replica buffers could not be made: no room on this device" in words
        assert seconds < 30.0, "the bound on waits is 60 s"
        assert is_clean, "mappings or descriptors are left"


def grown_by_an_arena():
    """Shared memory that 40 layers with an arena take, and the most it may be."""
    from tests.transfer.test_memory import held, shared_bytes

    before, used = held(), shared_bytes()
    _, homes, arena = make_arena(layers=40, slots=2, depth=3)
    pages = {one.num_bytes for one in homes}
    assert len(pages) == 2, "gate_up and down"
    grown = shared_bytes() - used
    for one in homes:
        one.release()
    arena.close()
    del arena
    assert held() == before
    # Mapping replicas behind 40 layers by copying would take 20 times as much.
    own = 40 * sum(pages)
    replicas = 4 * 2 * 2 * HostPager.granule * 8
    return grown, 2 * (own + replicas) + 2**20


def test_memory_beyond_the_homes_is_that_of_the_replica_slots():
    # Other processes share and free memory meanwhile, some of them much: the middle one of several counts.
    grown, most = sorted(grown_by_an_arena() for _ in range(5))[2]
    assert grown < most


@pytest.mark.dist(4)
@pytest.mark.parametrize("has_bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("stage", ["update", "recompute"])
def test_windows_through_an_arena_have_every_bit(pool, stage, has_bias):
    plans = [random_plan(LAYOUTS["4 as two nodes"], seed=w, slots=2, fewest=1, stage=stage) for w in range(2)]
    for moved in pool.run(play_windows, 4, plans, {"transfer": ARENA, "has_bias": has_bias}):
        assert moved["pulls"] > 0 and moved["is_clean"], "mappings or descriptors are left"

"""Pages and spans: the same bytes under several addresses, without a gap, and nothing left when nobody looks."""

import os

import pytest
import torch

from equipoise.core import TransferError
from equipoise.transfer.pages import HostPager, share_pages, share_storages, whole
from tests.transfer.test_memory import held

PAGE = HostPager.granule


def test_pages_in_a_row_are_seen_without_a_gap():
    pager = HostPager()
    first, second = pager.make(PAGE), pager.make(2 * PAGE)
    row, alone = pager.map([first, second]), pager.map([second])
    across = row.view(PAGE - 8, (4,), torch.float32)
    across.copy_(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert alone.view(0, (2,), torch.float32).tolist() == [3.0, 4.0]
    for pages in (first, second):
        pages.release()


def test_the_same_pages_behind_several_others_hold_one_value():
    pager = HostPager()
    fronts, shared = [pager.make(PAGE) for _ in range(3)], pager.make(PAGE)
    rows = [pager.map([front, shared]).view(0, (2, PAGE // 8), torch.int64) for front in fronts]
    rows[1][1].fill_(7)
    for number, row in enumerate(rows):
        row[0].fill_(number)
    assert [row[1].unique().tolist() for row in rows] == [[7]] * 3
    assert [row[0].unique().tolist() for row in rows] == [[0], [1], [2]]
    for pages in (*fronts, shared):
        pages.release()


def test_a_span_lives_as_long_as_a_view_of_it():
    before, pager = held(), HostPager()
    pages = pager.make(PAGE)
    view = pager.map([pages]).view(64, (5,), torch.int64)
    pages.release()
    pages.release()
    view.fill_(3)
    assert view.sum() == 15 and held()[0] == before[0] + 1
    del view
    assert held() == before


def test_pages_of_another_descriptor_are_the_same_memory():
    before, pager = held(), HostPager()
    pages = pager.make(PAGE)
    descriptor = pages.export()
    other = pager.open(descriptor, PAGE)
    os.close(descriptor)
    pager.map([pages]).view(0, (1,), torch.int64).fill_(9)
    assert pager.map([other]).view(0, (1,), torch.int64).item() == 9
    pages.release()
    other.release()
    assert held() == before


def test_sizes_are_whole_granules_and_at_least_one():
    assert [whole(n, 4096) for n in (0, 1, 4096, 4097)] == [4096, 4096, 4096, 8192]


def share_and_tell(group, node_R, sizes):
    """Each rank writes its number to all its pieces; every rank tells what it sees of its node."""
    import torch.distributed as dist

    before = held()
    try:
        shared = share_pages(sizes, pager=HostPager(), group=group, node_R=node_R, timeout_s=20)
    except TransferError as error:
        return str(error), held() == before
    for pages in shared.own:
        pages.release()
    for span, size in zip(shared.spans[group.rank()], sizes, strict=True):
        span.view(0, (size // 8,), torch.int64).fill_(group.rank() + 1)
    dist.barrier(group)
    seen = {
        rank: [int(span.view(size - 8, (1,), torch.int64)) for span, size in zip(spans, sizes, strict=True)]
        for rank, spans in shared.spans.items()
    }
    dist.barrier(group)
    assert held()[1] == before[1], "a descriptor is left"
    del shared, span
    return seen, held() == before


@pytest.mark.dist(4)
@pytest.mark.parametrize("count", [1, 450])
def test_every_rank_sees_its_nodes_pages_and_no_other(pool, count):
    node_R = (0, 1, 0, 0)
    sizes = [PAGE * (1 + number % 2) for number in range(count)]
    for rank, (seen, is_clean) in enumerate(pool.run(share_and_tell, 4, node_R, sizes)):
        peers = [r for r in range(4) if node_R[r] == node_R[rank]]
        assert seen == {peer: [peer + 1] * count for peer in peers}
        assert is_clean, "mappings or descriptors are left"


@pytest.mark.dist(4)
def test_pages_that_do_not_fit_are_refused_on_every_rank(pool):
    for words, is_clean in pool.run(share_and_tell, 4, (0, 0, 1, 1), [PAGE, 2**50]):
        assert "rank 0: shared memory: 2,251,799,813,693,440 bytes are needed on this node" in words
        assert is_clean, "mappings or descriptors are left"


def share_in_place(group, node_R, is_spoilt):
    """Each rank shares parts of two buffers that exist already, reads its node's and writes to the next rank's."""
    import torch.distributed as dist

    before, rank = held(), group.rank()
    flat, other = torch.arange(100.0) + 1000 * rank, torch.full((7,), float(rank))
    parts = [flat[10:30].view(4, 5), flat[64:70], other]
    if is_spoilt and rank == 2:
        parts[1] = flat[64:76:2]
    place = flat.data_ptr()
    try:
        shared = share_storages(parts, group=group, node_R=node_R, timeout_s=20)
    except TransferError as error:
        return str(error), flat.data_ptr() == place and held() == before
    seen = {source: [float(t.reshape(-1)[0]) for t in tensors] for source, tensors in shared.items()}
    dist.barrier(group)
    peers = sorted(shared)
    shared[peers[peers.index(rank) - 1]][0][3, 4] = -1.0 - rank
    dist.barrier(group)
    writer = peers[(peers.index(rank) + 1) % len(peers)]
    assert flat[29] == parts[0][3, 4] == -1.0 - writer, "every tensor over the buffer sees what another rank wrote"
    assert flat[28] == 28 + 1000 * rank, "values stay when the memory is replaced"
    dist.barrier(group)
    del shared, parts, flat, other
    return seen, held() == before


@pytest.mark.dist(4)
@pytest.mark.parametrize("is_spoilt", [False, True])
def test_memory_that_others_own_is_shared_under_the_tensors_that_are_in_it(pool, is_spoilt):
    node_R = (0, 1, 0, 0)
    for rank, (said, is_clean) in enumerate(pool.run(share_in_place, 4, node_R, is_spoilt)):
        if is_spoilt:
            assert "rank 2: a [6] tensor on cpu cannot be shared where it is" in said
        else:
            peers = [r for r in range(4) if node_R[r] == node_R[rank]]
            assert said == {peer: [10.0 + 1000 * peer, 64.0 + 1000 * peer, float(peer)] for peer in peers}
        assert is_clean, "mappings or descriptors are left, or memory was replaced by a call that was refused"

"""`MappedGroup`: an all-to-all through mapped memory, for layers that have no prepared dispatch.

NCCL joins several ranks of one GPU by sockets only, far slower than a link inside a node, so a layer that sends rows by
all-to-all would look much worse than it is. Here rows are copied to a buffer that all ranks map, and every rank copies
its parts out of them: two passes over device memory, as NCCL's copies over NVLink take.
"""

from typing import Any

import torch
import torch.distributed as dist
import triton  # type: ignore[import-not-found]  # comes with CUDA builds of torch only
import triton.language as tl  # type: ignore[import-not-found]  # as above
from torch import Tensor

from equipoise.core.options import TransferOptions
from equipoise.transfer.cuda_pages import CudaPager
from equipoise.transfer.mapped_rows import RowViews, StreamWords
from equipoise.transfer.node import ExpertWeights, NodeMemory
from equipoise.transfer.pages import share_pages, whole
from equipoise.transfer.waits import Transfer

# Triton evaluates annotations of kernels as kernel code, so their arguments have none.
# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

HEAD = 4096
"""Bytes in front of the rows: step numbers, and where the rows for each rank begin."""
BLOCK = 1024


class MappedGroup(dist.ProcessGroup):
    """The ranks of one node, for `dist.all_to_all_single` of CUDA tensors alone."""

    def __init__(self, group: dist.ProcessGroup, *, most_bytes: int) -> None:
        """Share two buffers; every rank of `group` must call this.

        Args:
            most_bytes: largest tensor that is sent
        """
        super().__init__(group.rank(), group.size())
        # So that torch's functions take it for one of its groups.
        world = dist.distributed_c10d._world
        world.pg_map[self], world.pg_group_ranks[self] = ("mapped", None), {r: r for r in range(group.size())}
        device = torch.device("cuda", torch.cuda.current_device())
        tiny = ExpertWeights(*(torch.zeros(1, 16, 16, device=device) for _ in range(2)))
        self._node = NodeMemory([tiny], group=group, node_R=[0] * group.size(), options=TransferOptions(slots=0))
        pager = CudaPager(device)
        size = whole(HEAD + most_bytes, pager.granule)
        shared = share_pages([size] * 2, pager=pager, group=group, node_R=[0] * group.size(), timeout_s=60)
        for pages in shared.own:
            pages.release()
        # Two buffers take turns: a rank that has written the next step has read everything of the one before.
        self._heads = [
            [shared.spans[r][at].view(0, (HEAD // 8,), torch.int64) for r in sorted(shared.spans)] for at in (0, 1)
        ]
        self._own = [shared.spans[group.rank()][at].view(HEAD, (size - HEAD,), torch.uint8) for at in (0, 1)]
        self._bases = [torch.tensor([head.data_ptr() for head in heads], device=device) for heads in self._heads]
        views = {}
        for rank, head in enumerate(self._heads[0]):
            head[: group.size()].zero_() if rank == group.rank() else None
            views[rank] = RowViews(head[: group.size()], *[head[:0]] * 5)
        torch.cuda.synchronize()
        dist.barrier(group)
        self._words, self._number = StreamWords(self._node, views), 0

    def getBackendName(self) -> str:
        """Name for torch's messages."""
        return "mapped"

    def alltoall_base(self, output: Tensor, given: Tensor, out_splits: Any, in_splits: Any, options: Any) -> "_Done":
        """Exchange rows; called by `dist.all_to_all_single`."""
        ranks, at = self.size(), self._number % 2
        in_splits = in_splits or [len(given) // ranks] * ranks
        out_splits = out_splits or [len(output) // ranks] * ranks
        width = given[:1].numel() * given.element_size() if len(given) else output[:1].numel() * output.element_size()
        device, head = output.device, self._heads[at][self.rank()]
        sent_R = torch.tensor(in_splits, device=device)
        head[ranks : 2 * ranks] = sent_R.cumsum(0) - sent_R
        self._own[at][: given.nbytes] = given.contiguous().view(-1).view(torch.uint8)
        self._number += 1
        self._words.step(self._number, Transfer("rows", path="peer"))
        if len(output):
            got_R = torch.tensor(out_splits, device=device)
            source_N = torch.repeat_interleave(torch.arange(ranks, device=device), got_R, output_size=len(output))
            number_N = torch.arange(len(output), device=device) - (got_R.cumsum(0) - got_R)[source_N]
            words = width // 4
            grid = (len(output), triton.cdiv(words, BLOCK))
            flat = output.view(-1).view(torch.int32)
            _take[grid](self._bases[at], source_N, number_N, flat, self.rank(), ranks, words, HEAD, BLOCK)
        return _Done()

    def close(self) -> None:
        """Let go of the buffers."""
        torch.cuda.synchronize()
        world = dist.distributed_c10d._world
        del world.pg_map[self], world.pg_group_ranks[self]
        self._words.close()
        self._heads, self._own = [], []
        self._node.close()


class _Done(dist.Work):
    """Work that the stream has in its order."""

    def wait(self, timeout: Any = None) -> bool:
        return True


@triton.jit
def _take(bases, source, number, out, rank, ranks, words, HEAD: tl.constexpr, SIZE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    inside = column < words
    base = tl.load(bases + tl.load(source + row))
    first = tl.load((base + 8 * (ranks + rank)).to(tl.pointer_type(tl.int64)))
    at = first + tl.load(number + row)
    rows = (base + HEAD).to(tl.pointer_type(tl.int32))
    tl.store(out + row * words + column, tl.load(rows + at * words + column, mask=inside), mask=inside)

"""One Triton kernel that copies up to four pieces of a device's memory: one launch, one ramp.

`pulls.make_copier` chooses when to use it. Its programs share the device's processors with whatever else runs, so it is
for memory of the same device, where a plain copy does so too.
"""

from collections.abc import Sequence

import torch
import triton  # type: ignore[import-not-found]  # comes with CUDA builds of torch only
import triton.language as tl  # type: ignore[import-not-found]  # as above
from torch import Tensor

# Triton evaluates annotations of kernels as kernel code, so their arguments have none.
# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="no-untyped-def, no-untyped-call"


PIECES = 4
"""Of one launch: two experts of two matrices."""
SIZE = 2048
"""Words one program copies at a time: 8 for each of 256 threads."""
PROGRAMS = 528
"""Four for each processor of an H200; more copy no faster there."""


def copy_pieces(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy (into, out of) pairs of contiguous tensors, on the current stream; a launch for every `PIECES` of them."""
    for start in range(0, len(pairs), PIECES):
        words = [_words(*pair) for pair in pairs[start : start + PIECES]]
        # What is not used has no words, and any address will do.
        given = words + [(*words[0][:2], 0)] * (PIECES - len(words))
        blocks = sum(triton.cdiv(count, SIZE) for *_, count in words)
        _copy_four[(min(blocks, PROGRAMS),)](*(value for piece in given for value in piece), SIZE, num_warps=8)


def _words(into: Tensor, out_of: Tensor) -> tuple[Tensor, Tensor, int]:
    """Both as rows of the widest words that fit, and their number."""
    assert into.is_contiguous() and out_of.is_contiguous(), "a copy of words needs them in one piece"
    places = into.data_ptr() | out_of.data_ptr() | into.nbytes
    dtype = torch.int64 if places % 8 == 0 else torch.uint8
    return into.reshape(-1).view(dtype), out_of.reshape(-1).view(dtype), into.nbytes // dtype.itemsize


@triton.jit
def _copy_block(into, out_of, count, block, SIZE: tl.constexpr):
    place = block.to(tl.int64) * SIZE + tl.arange(0, SIZE)
    # Whole blocks need no mask, and without one words are read several at a time.
    if (block + 1) * SIZE <= count:
        tl.store(into + place, tl.load(out_of + place))
    else:
        inside = place < count
        tl.store(into + place, tl.load(out_of + place, mask=inside), mask=inside)


@triton.jit(do_not_specialize=["count_a", "count_b", "count_c", "count_d"])
def _copy_four(
    into_a,
    out_of_a,
    count_a,
    into_b,
    out_of_b,
    count_b,
    into_c,
    out_of_c,
    count_c,
    into_d,
    out_of_d,
    count_d,
    SIZE: tl.constexpr,
):
    end_a = tl.cdiv(count_a, SIZE)
    end_b = end_a + tl.cdiv(count_b, SIZE)
    end_c = end_b + tl.cdiv(count_c, SIZE)
    end_d = end_c + tl.cdiv(count_d, SIZE)
    for block in range(tl.program_id(0), end_d, tl.num_programs(0)):
        if block < end_a:
            _copy_block(into_a, out_of_a, count_a, block, SIZE)
        elif block < end_b:
            _copy_block(into_b, out_of_b, count_b, block - end_a, SIZE)
        elif block < end_c:
            _copy_block(into_c, out_of_c, count_c, block - end_b, SIZE)
        else:
            _copy_block(into_d, out_of_d, count_d, block - end_c, SIZE)

"""One Triton kernel that copies any number of pieces of a device's memory: one launch, one ramp.

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


SIZE = 2048
"""Words one program copies at a time: 8 for each of 256 threads."""
PROGRAMS = 528
"""Four for each processor of an H200; more copy no faster there."""


def copy_pieces(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy (into, out of) pairs of contiguous tensors of one device, on the current stream."""
    pieces = [(into.data_ptr(), out_of.data_ptr(), into.nbytes) for into, out_of in pairs if into.nbytes]
    if not pieces:
        return
    for tensor in (tensor for pair in pairs for tensor in pair):
        assert tensor.is_contiguous(), "a copy of words needs contiguous tensors"
    # The widest words that fit all pieces; two words of 8 bytes are read at once where addresses allow it.
    align = next(align for align in (16, 8, 1) if all(value % align == 0 for piece in pieces for value in piece))
    word = min(align, 8)
    table_P3 = torch.tensor([(into, out_of, size // word) for into, out_of, size in pieces])
    blocks = triton.cdiv(max(size for *_, size in pieces), word * SIZE)
    grid = (min(blocks, triton.cdiv(PROGRAMS, len(pieces))), len(pieces))
    table_P3 = table_P3.to(pairs[0][0].device, non_blocking=True)
    _copy_pieces[grid](table_P3, tl.int64 if word == 8 else tl.int8, align, SIZE, num_warps=8)


@triton.jit
def _copy_pieces(table, WORD: tl.constexpr, ALIGN: tl.constexpr, SIZE: tl.constexpr):
    piece = table + 3 * tl.program_id(1)
    into = tl.multiple_of(tl.load(piece), ALIGN).to(tl.pointer_type(WORD))
    out_of = tl.multiple_of(tl.load(piece + 1), ALIGN).to(tl.pointer_type(WORD))
    count = tl.load(piece + 2)
    for block in range(tl.program_id(0), tl.cdiv(count, SIZE), tl.num_programs(0)):
        place = tl.cast(block, tl.int64) * SIZE + tl.arange(0, SIZE)
        # Whole blocks need no mask, and without one words are read several at a time.
        if (block + 1) * SIZE <= count:
            tl.store(into + place, tl.load(out_of + place))
        else:
            inside = place < count
            tl.store(into + place, tl.load(out_of + place, mask=inside), mask=inside)

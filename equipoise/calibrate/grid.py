"""`Grid`: which sizes a calibration visits, and how rows are cut into groups.

Knows numbers only. Does not know torch or what is done with the sizes.

Rows of a rank are never even over its experts, and an even cut flatters: groups of a power of two fill whole tiles of
the products' kernels. So tables are measured on *uneven* groups, Zipf's law over the slots (the second has half the
rows of the first, the third a third), and a part of them on *even* ones to show the difference. At 8 slots the largest
group is then 2.9 times the mean; in the real traces that `benchmarks/rank_replay.py` runs it is 2.7 to 3.2 times.

Invariants (asserted by the tests):
1. A cut has as many groups as slots and all the rows; no group is empty where there are as many rows as slots.
2. An even cut's groups differ by one row at most; an uneven cut's groups never ascend.
"""

from dataclasses import dataclass

import numpy as np

SLOTS = (1, 2, 4, 8, 16, 32)
ROWS = (64, 256, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
ZIPF = 1.0
"""Exponent of the uneven cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """One layer's attention."""

    hidden: int
    heads: int
    kv_heads: int
    width: int
    """Width of one head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """What is measured."""

    shapes: tuple[tuple[int, int], ...]
    """(hidden, expert width) of the expert tables."""
    slots: tuple[int, ...] = SLOTS
    rows: tuple[int, ...] = ROWS
    attention: tuple[AttentionShape, ...]
    tokens: tuple[int, ...]
    """Sequence lengths of the attention."""
    moved_rows: tuple[int, ...]
    """Rows that are put in order, of the first shape's hidden width and the last's."""
    top_k: int = 8
    copies: int = 16
    """Experts that copies rotate over, so that none finds its source in L2."""

    @classmethod
    def full(cls) -> "Grid":
        """Experts of Qwen3-30B-A3B, DeepSeek-V2-Lite, gpt-oss, Qwen3-235B-A22B, DeepSeek-V3; attention of two."""
        return cls(
            shapes=((2048, 768), (2048, 1408), (2880, 2880), (4096, 1536), (7168, 2048)),
            attention=(
                AttentionShape(hidden=2048, heads=32, kv_heads=4, width=128),
                AttentionShape(hidden=4096, heads=64, kv_heads=4, width=128),
            ),
            tokens=(4096, 8192),
            moved_rows=(16384, 65536),
        )

    @classmethod
    def smoke(cls) -> "Grid":
        """Everything once, in milliseconds on a CPU."""
        return cls(
            shapes=((32, 16),),
            slots=(1, 2),
            rows=(8, 24),
            attention=(AttentionShape(hidden=32, heads=4, kv_heads=2, width=8),),
            tokens=(16,),
            moved_rows=(16,),
            top_k=2,
            copies=2,
        )

    @property
    def expert_shape(self) -> tuple[int, int]:
        """The expert that copies are made of: the first."""
        return self.shapes[0]

    @property
    def cells(self) -> int:
        """Cells of one expert table."""
        return len(self.slots) * len(self.rows)


def cut_rows(rows: int, slots: int, *, zipf: float) -> np.ndarray:
    """[S] int32 end of each slot's rows, by Zipf's law with exponent `zipf`; 0 cuts evenly.

    Every slot takes one row first, as long as there are rows.
    """
    first = min(rows, slots)
    weight_S = np.arange(1, slots + 1, dtype=np.float64) ** -zipf
    # Rounded ends of the rest: they ascend to exactly the rows that are left.
    rest_S = np.floor((rows - first) * np.cumsum(weight_S) / weight_S.sum() + 0.5).astype(np.int64)
    ends_S = rest_S + np.minimum(np.arange(1, slots + 1), first)
    count_S = np.sort(np.diff(ends_S, prepend=0))[::-1]
    return np.cumsum(count_S).astype(np.int32)

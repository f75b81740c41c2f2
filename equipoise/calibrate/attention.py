"""One layer's attention: projections and causal scores, forward and backward.

Knows torch's own attention. Does not know norms, rotary embeddings or a model's other layers.

A rate is operations per second: a pair of tokens is counted once (scores are causal), backward is counted as twice the
forward operations.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from equipoise.calibrate.bench import Bench, measure
from equipoise.calibrate.grid import AttentionShape, Grid
from equipoise.calibrate.progress import Steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """The projections of one layer."""

    shape: AttentionShape
    qkv_w: Tensor
    out_w: Tensor

    @classmethod
    def random(cls, shape: AttentionShape, bench: Bench) -> "Attention":
        """Draw the projections."""
        query = shape.heads * shape.width
        both = query + 2 * shape.kv_heads * shape.width
        qkv_w = bench.random(both, shape.hidden, scale=shape.hidden**-0.5).requires_grad_()
        return cls(
            shape=shape, qkv_w=qkv_w, out_w=bench.random(shape.hidden, query, scale=query**-0.5).requires_grad_()
        )

    def forward(self, x_TD: Tensor, *, sequence: int) -> Tensor:
        """Attend inside sequences of `sequence` tokens, which must divide the tokens."""
        heads, kv_heads, width = self.shape.heads, self.shape.kv_heads, self.shape.width
        parts = F.linear(x_TD, self.qkv_w).split([heads * width, kv_heads * width, kv_heads * width], dim=-1)
        q, k, v = (part.view(-1, sequence, part.shape[1] // width, width).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return F.linear(mixed.transpose(1, 2).reshape(len(x_TD), heads * width), self.out_w)

    def flops(self, tokens: int, *, sequence: int) -> int:
        """Forward operations."""
        pairs = tokens * (sequence + 1) // 2
        return 2 * tokens * (self.qkv_w.numel() + self.out_w.numel()) + 4 * pairs * self.shape.heads * self.shape.width


def measure_attention(grid: Grid, *, bench: Bench, steps: Steps) -> dict[str, Any]:
    """Time all shapes and sequence lengths; operations of all over the time of all."""
    flops, forward_ns, backward_ns = 0, 0.0, 0.0
    for shape in grid.attention:
        attention = Attention.random(shape, bench)
        for tokens in grid.tokens:
            flops += attention.flops(tokens, sequence=tokens)
            forward, backward = time_attention(attention, tokens, bench)
            forward_ns, backward_ns = forward_ns + forward, backward_ns + backward
            steps.advance()
    heads = " and ".join(
        f"{one.heads} heads and {one.kv_heads} key-value heads of {one.width}" for one in grid.attention
    )
    return {
        "forward_flops_per_s": round(flops / forward_ns * 1e9),
        "backward_flops_per_s": round(2 * flops / backward_ns * 1e9),
        "source": f"measured: projections and causal scaled_dot_product_attention, sequences of "
        f"{' and '.join(map(str, grid.tokens))} tokens, {heads}; norms and rotary embedding left out",
    }


def time_attention(attention: Attention, tokens: int, bench: Bench) -> tuple[float, float]:
    """Nanoseconds of one sequence, forward and backward."""
    x_TD = bench.random(tokens, attention.shape.hidden).requires_grad_()
    grad_TD = bench.random(tokens, attention.shape.hidden)
    leaves = (x_TD, attention.qkv_w, attention.out_w)

    def infer() -> Tensor:
        with torch.no_grad():
            return attention.forward(x_TD, sequence=tokens)

    out_TD = attention.forward(x_TD, sequence=tokens)
    backward = measure(lambda: torch.autograd.grad(out_TD, leaves, grad_TD, retain_graph=True), bench)
    return measure(infer, bench).median_ns, backward.median_ns

"""Layouts of four ranks that the tests of this room train; light, so that the test process need not import Megatron."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How four ranks share one model, and what of Megatron-Core it uses."""

    ep: int = 4
    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    experts: int = 8
    top_k: int = 2
    dtype: Literal["fp32", "bf16", "fp64"] = "fp32"
    recompute: Literal["full", "selective"] | None = None
    has_shared_experts: bool = False
    """With an auxiliary loss."""
    hidden: int = 64
    width: int = 48
    """Of an expert."""
    num_dense: int = 0
    """First layers without experts."""
    is_grouped: bool = False
    """Experts are `TEGroupedMLP` over a stand-in of Transformer Engine's grouped linear."""
    is_overlapped: bool = False
    """Gradients are reduced and parameters are gathered while the model runs."""
    waves: int = 1
    """In which rows travel where there are replicas."""


LAYOUTS = {
    "EP4": Layout(),
    "EP2 x DP2": Layout(ep=2),
    "EP4, TP2 + SP": Layout(tp=2),
    "EP2 x PP2": Layout(ep=2, pp=2),
    "EP2 x PP2 x VPP2": Layout(ep=2, pp=2, vpp=2),
    "full recompute": Layout(recompute="full"),
    "selective recompute": Layout(recompute="selective"),
    "shared experts, aux loss": Layout(has_shared_experts=True),
    "overlap": Layout(ep=2, is_overlapped=True),
    "top-4 of 16": Layout(experts=16, top_k=4),
    "grouped experts": Layout(ep=2, is_grouped=True),
    "waves": Layout(waves=2, experts=16, recompute="full"),
}

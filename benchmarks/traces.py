"""Real routing traces as `LoadMatrix`, and wider layers composed of them.

Knows the files of the traces folder beside the project (`../shared/data`). Does not know plans.

How loads are made:
1. Tokens in file order, cut into micro-steps of equal token counts; what does not fill one is dropped.
2. The traces name no source rank: tokens are dealt round-robin, token i of a micro-step to rank i mod R.
3. `scaled` multiplies loads: the same routing pattern with more tokens per micro-step, for sizes the traces lack.
4. `stacked` lays the experts of consecutive layers side by side, in a fixed random order, as one wide layer: loads of
   real experts, but no real model has this layer. It stands in for wide expert parallelism and is named "stacked".

Invariants (asserted by the tests):
1. Every (micro-step, layer) holds tokens x top_k rows.
2. Stacking keeps every expert's load.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.results import ROOT
from equipoise.core import LoadMatrix, ModelShape

FOLDER = ROOT.parent / "shared" / "data"
ESFT_DOMAINS = ("intent", "law", "summary", "translation")
MICRO_STEP_TOKENS = 1024
STACK_SEED = 20


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trace:
    """The routes of one recording."""

    name: str
    model: ModelShape
    ids_TLK: np.ndarray

    def loads(self, ranks: int, *, tokens: int = MICRO_STEP_TOKENS, micro_steps: int | None = None) -> LoadMatrix:
        """Count the loads of micro-steps of `tokens` tokens each, all of them or the first `micro_steps`."""
        available = len(self.ids_TLK) // tokens
        count = available if micro_steps is None else min(micro_steps, available)
        _, layers, top_k = self.ids_TLK.shape
        ids = self.ids_TLK[: count * tokens].reshape(count, tokens, layers, top_k).astype(np.int64)
        # Entry of a flat [M, L, R, E]: micro-step, layer, source rank by dealing, expert.
        flat = np.arange(count)[:, None, None, None] * layers + np.arange(layers)[None, None, :, None]
        flat = flat * ranks + (np.arange(tokens) % ranks)[None, :, None, None]
        flat = flat * self.model.experts + ids
        shape = (count, layers, ranks, self.model.experts)
        return LoadMatrix(np.bincount(flat.reshape(-1), minlength=int(np.prod(shape))).reshape(shape))


def read_traces(folder: Path = FOLDER) -> tuple[Trace, ...]:
    """Read the four ESFT domains and gpt-oss."""
    if not folder.is_dir():
        raise SystemExit(f"no traces at {folder}; the benchmark needs the real routing traces beside the project")
    esft_model, gpt_model = ModelShape.preset("deepseek-v2-lite"), ModelShape.preset("gpt-oss-20b")
    with np.load(folder / "dsv2lite_esft_routes.npz", allow_pickle=False) as file:
        esft = [Trace(name=f"ESFT {d}", model=esft_model, ids_TLK=file[f"{d}_ids"]) for d in ESFT_DOMAINS]
    with np.load(folder / "gptoss20b_decode_routes.npz", allow_pickle=False) as file:
        gpt = Trace(name="gpt-oss-20b", model=gpt_model, ids_TLK=file["ids"])
    return (*esft, gpt)


def joined(parts: Sequence[LoadMatrix]) -> LoadMatrix:
    """One window of all micro-steps of several, in order."""
    return LoadMatrix(np.concatenate([part.load_MLRE for part in parts]), stage=parts[0].stage)


def scaled(loads: LoadMatrix, factor: int) -> LoadMatrix:
    """The same pattern with `factor` times the rows."""
    return LoadMatrix(loads.load_MLRE * factor, stage=loads.stage)


def stacked(trace: Trace, experts: int, *, overlapping: bool = False) -> Trace:
    """Widen the layers to `experts` experts: those of consecutive layers side by side, in a fixed random order.

    Args:
        trace: of narrower layers
        experts: of a wide layer
        overlapping: begin a wide layer at every narrow one, which gives several times as many
    """
    each = trace.model.experts
    height = experts // each
    tokens, layers, top_k = trace.ids_TLK.shape
    starts = np.arange(0, layers - height + 1, 1 if overlapping else height)
    order_E = np.random.default_rng(STACK_SEED).permutation(experts)
    ids = trace.ids_TLK[:, starts[:, None] + np.arange(height)].astype(np.int64)
    ids = order_E[ids + np.arange(height)[:, None] * each].reshape(tokens, len(starts), height * top_k)
    model = ModelShape.preset("qwen3-30b-a3b", experts=experts, layers=len(starts), top_k=height * top_k)
    return Trace(name=f"{trace.name} stacked x{height}", model=model, ids_TLK=ids)

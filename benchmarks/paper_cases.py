"""Workloads of the papers' comparison: shapes, widths, and loads of one batch in 32 micro-steps.

Four kinds, and every result says which:
- generated: loads with the measured properties of real routing (`loads.generator`), in the model's own shape. "math"
  and "code" are one domain each (different ones), "mixed" is four domains, "grouped" the same four domains one after
  another. 1,024 samples (2,048 at EP64) of 4,096 tokens on average; samples of similar length share a micro-step, as
  trainers group them, so sources are nearly level. The longest micro-step runs first and the next longest last, as
  `--longest-first` has it, so that what any policy moves at a window's edges hides best.
- generated, "shifting": fluctuates as the papers describe. The 16 rollouts of a prompt stand side by side and share
  what it asks of the experts; a micro-step has two prompts (four at EP64). Samples are equally long, so nothing else
  changes. The abstracts speak of hot experts that "shift frequently across micro-batches" (ReLibra), and of "severe,
  high-frequency load fluctuations" while the step's load is stable (ForeMoE). No figure was found, so the spread of
  prompts is chosen by ReLibra's results: 1.06 to 1.21 over EPLB with oracle loads, at 90 to 94 % of balanced, mean that
  balanced is 1.13 to 1.34 times as fast as EPLB. So it is here at EP16 and EP32 where a token crosses once per node.
- real, composed: recorded routes of gpt-oss-20b answering questions of mathematics, of computer science, or of all
  kinds. Four consecutive layers of 32 experts stand side by side as one layer of 128 (see `traces.stacked`), from each
  of the 24 on that has three behind it: 21 composed layers that share experts. Loads are multiplied to the same rows
  per rank. Micro-steps have 1,024 recorded tokens; where there are not enough for 32, the answers come again in other
  orders, as trainers roll out a question several times. Sources have 32 or 64 tokens then and differ by chance, which
  multiplying keeps; real ones of 4,096 tokens differ by what they are about.
- real, composed, sources alike: the same loads of experts, each dealt evenly to the sources: chance is left out.
- real, whole samples: the recorded answers as samples of a batch of 1,024, one or two whole ones at each source, as
  trainers deal them; layers composed and multiplied as above. A micro-step then has 32 answers instead of about three,
  so its experts fluctuate less, and sources differ by what they are about. "mixed" has answers of similar length in a
  micro-step, "grouped" those of one kind of question. There are 494 answers: each comes two or three times.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise, product
from typing import Any, NamedTuple

import numpy as np

from benchmarks.traces import FOLDER, MICRO_STEP_TOKENS, Trace, stacked
from equipoise.core import Cluster, LoadMatrix, ModelShape
from equipoise.loads.generator import generate_counts
from equipoise.loads.packing import longest_first_order

MODELS = ("qwen3-30b-a3b", "glm-4.5-air", "qwen3-235b-a22b")
WIDTHS = (16, 32, 64)
SAMPLES, MICRO_STEPS, MEAN_TOKENS = 1024, 32, 4096
EXPERTS = 128
"""Of a composed layer."""
WORKLOADS: dict[str, dict[str, Any]] = {
    "math": {"domains": 1, "seed": 11},
    "code": {"domains": 1, "seed": 12},
    "mixed": {"domains": 4, "seed": 13},
    "grouped": {"domains": 4, "seed": 13},
    "shifting": {"domains": 4, "seed": 13, "rollouts": 16, "prompt_sigma": 0.7, "length_sigma": 0.0},
}
"""Figures of each generated workload, see `loads.generator.Workload`."""
TOPICS = {
    "math": ("math", "mathematics", "algebra", "statistics"),
    "code": ("computer", "machine_learning"),
    "mixed": ("",),
}
"""What a category's name must hold to belong to a real workload."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Case:
    """One line of the comparison."""

    source: str
    workload: str
    model: ModelShape
    cluster: Cluster
    loads: LoadMatrix
    """The update; recompute replays the same micro-steps."""


def cases(layers: int, *, only: Sequence[str] = ()) -> Iterator[Case]:
    """Every case whose name has all words of `only`, with this many of each model's MoE layers."""
    made: dict[str, Callable[[], Case]] = {}
    for name, workload, ranks in product(MODELS, WORKLOADS, WIDTHS):
        made[f"generated {name} {workload} {ranks}"] = partial(generated_case, name, workload, ranks, layers)
    if FOLDER.is_dir():
        for workload, ranks in product(TOPICS, WIDTHS):
            made[f"composed {workload} {ranks}"] = partial(real_case, workload, ranks)
            made[f"composed alike {workload} {ranks}"] = partial(real_case, workload, ranks, alike=True)
        for workload, ranks in product(("mixed", "grouped"), WIDTHS):
            made[f"samples {workload} {ranks}"] = partial(sampled_case, workload, ranks)
    for name, make in made.items():
        if set(only) <= set(name.split()):
            yield make()


def cluster_of(ranks: int) -> Cluster:
    """8-GPU H200 nodes with NVLink and 400 Gb/s per GPU."""
    return Cluster.preset("h200", ranks_per_node=8, ep=ranks, network_bytes_per_s=50_000_000_000)


def generated_case(name: str, workload: str, ranks: int, layers: int) -> Case:
    """Loads with measured properties, in the shape of a published model."""
    model = ModelShape.preset(name)
    model = model.replace(layers=min(layers, model.layers))
    counts = generate_counts(model, samples=samples_of(ranks), mean_tokens=MEAN_TOKENS, **WORKLOADS[workload])
    domain_B = [name.rpartition("-")[2] for name in counts.names] if workload == "grouped" else None
    order_B = side_by_side(counts.tokens_B, domain_B)
    return Case(
        source="generated",
        workload=workload,
        model=model,
        cluster=cluster_of(ranks),
        loads=one_batch(counts.count_BLE[order_B], ranks),
    )


def samples_of(ranks: int) -> int:
    """Samples of a batch: 1,024, and at EP64 as many as give every source one in each micro-step."""
    return max(SAMPLES, MICRO_STEPS * ranks)


def side_by_side(tokens_B: np.ndarray, kind_B: Sequence[str] | None) -> np.ndarray:
    """[B] samples in an order in which those of similar length stand together; within their kind, if that is given."""
    order_B = np.argsort(tokens_B, kind="stable")
    if kind_B is None:
        return order_B
    grouped_B: np.ndarray = order_B[np.argsort(np.array(kind_B)[order_B], kind="stable")]
    return grouped_B


def one_batch(count_BLE: np.ndarray, ranks: int) -> LoadMatrix:
    """Deal samples to micro-steps and sources in their order; the longest micro-step runs first."""
    samples, layers, experts = count_BLE.shape
    shape = (MICRO_STEPS, ranks, samples // MICRO_STEPS // ranks, layers, experts)
    load_MLRE = count_BLE.reshape(shape).sum(axis=2).transpose(0, 2, 1, 3)
    return LoadMatrix(np.ascontiguousarray(load_MLRE[longest_first_order(load_MLRE[:, 0].sum(axis=(1, 2)))]))


def real_case(workload: str, ranks: int, *, alike: bool = False) -> Case:
    """Recorded routes of one kind of question, four layers side by side; `alike`: no source differs from another."""
    wide = stacked(_read_topic(workload), EXPERTS, overlapping=True)
    loads = wide.loads(ranks, micro_steps=MICRO_STEPS)
    load_MLRE = to_full_size(loads.load_MLRE)
    return Case(
        source=f"real, composed{', sources alike' if alike else ''}",
        workload=workload,
        model=wide.model,
        cluster=cluster_of(ranks),
        loads=LoadMatrix(dealt_evenly(load_MLRE) if alike else load_MLRE),
    )


def sampled_case(workload: str, ranks: int) -> Case:
    """Recorded answers as the samples of one batch, four layers side by side."""
    recorded = _read_recording()
    wide = stacked(recorded.trace, EXPERTS, overlapping=True)
    tokens_B = np.diff(recorded.offsets)
    samples = samples_of(ranks)
    turns = in_turns(tokens_B, int(tokens_B.sum()) * (-(-samples // len(tokens_B))))[:samples]
    order_B = turns[side_by_side(tokens_B[turns], recorded.category[turns] if workload == "grouped" else None)]
    return Case(
        source="real, whole samples",
        workload=workload,
        model=wide.model,
        cluster=cluster_of(ranks),
        loads=LoadMatrix(to_full_size(one_batch(count_samples(wide, recorded.offsets)[order_B], ranks).load_MLRE)),
    )


def count_samples(trace: Trace, offsets: np.ndarray) -> np.ndarray:
    """[B, L, E] rows of each sample."""
    layers, experts = trace.ids_TLK.shape[1], trace.model.experts
    flat_TLK = trace.ids_TLK + np.arange(layers)[:, None] * experts
    counts = [
        np.bincount(flat_TLK[start:stop].reshape(-1), minlength=layers * experts)
        for start, stop in pairwise(offsets.tolist())
    ]
    return np.stack(counts).reshape(-1, layers, experts)


def to_full_size(load_MLRE: np.ndarray) -> np.ndarray:
    """The same pattern with as many rows per layer as the generated workloads' tokens have at top-8."""
    factor = samples_of(load_MLRE.shape[2]) * MEAN_TOKENS * 8 / load_MLRE[:, 0].sum()
    return np.rint(load_MLRE * factor).astype(np.int64)


def dealt_evenly(load_MLRE: np.ndarray) -> np.ndarray:
    """[M, L, R, E] every expert's rows dealt evenly to the sources; what is left over goes to them in turn."""
    ranks, total_MLE = load_MLRE.shape[2], load_MLRE.sum(axis=2)
    left_MLE = total_MLE % ranks
    turn_MLE = np.cumsum(left_MLE, axis=2) - left_MLE
    place_MLRE = (np.arange(ranks)[:, None] - turn_MLE[:, :, None]) % ranks
    return total_MLE[:, :, None] // ranks + (place_MLRE < left_MLE[:, :, None])


class Recording(NamedTuple):
    """Recorded answers."""

    trace: Trace
    offsets: np.ndarray
    """[B + 1] where each answer begins."""
    category: np.ndarray
    """[B] kind of question."""


def _read_recording() -> Recording:
    with np.load(FOLDER / "gptoss20b_decode_routes.npz", allow_pickle=False) as file:
        trace = Trace(name="gpt-oss-20b", model=ModelShape.preset("gpt-oss-20b"), ids_TLK=file["ids"])
        return Recording(trace, file["offsets"], file["category"])


def _read_topic(workload: str) -> Trace:
    recorded = _read_recording()
    offsets, ids_TLK = recorded.offsets, recorded.trace.ids_TLK
    chosen = [i for i, kind in enumerate(recorded.category) if any(topic in str(kind) for topic in TOPICS[workload])]
    order = in_turns(np.diff(offsets)[chosen], MICRO_STEPS * MICRO_STEP_TOKENS)
    ids = np.concatenate([ids_TLK[offsets[chosen[i]] : offsets[chosen[i] + 1]] for i in order])
    return Trace(name=f"{recorded.trace.name} {workload}", model=recorded.trace.model, ids_TLK=ids)


def in_turns(tokens_B: np.ndarray, least: int) -> np.ndarray:
    """Samples in a fixed order that mixes them, again in another one and so on until they have `least` tokens."""
    rng, turns = np.random.default_rng(0), -(-least // int(tokens_B.sum()))
    return np.concatenate([rng.permutation(len(tokens_B)) for _ in range(turns)])


def fluctuation(loads: LoadMatrix) -> float:
    """Return the coefficient of variation of an expert's share over micro-steps, a mean weighted by rows.

    A share is of the rows of one layer in one micro-step. The mean is over experts and layers; idle micro-steps are
    left out. 0: all micro-steps choose alike. This is what no placement for a whole window can level.
    """
    total_MLE = loads.total_MLE()
    rows_ML1 = total_MLE.sum(axis=2, keepdims=True)
    is_idle_ML1, share_MLE = rows_ML1 == 0, total_MLE / np.maximum(rows_ML1, 1)
    used_L1 = np.maximum(1, (~is_idle_ML1).sum(axis=0))
    mean_LE = share_MLE.sum(axis=0) / used_L1
    square_LE = np.where(is_idle_ML1, 0.0, (share_MLE - mean_LE) ** 2).sum(axis=0) / used_L1
    variation_LE = np.sqrt(square_LE) / np.where(mean_LE > 0, mean_LE, 1.0)
    row_LE = total_MLE.sum(axis=0)
    return float((variation_LE * row_LE).sum() / max(1, row_LE.sum()))

"""An expert-parallel step composed of every rank's own work, run one rank after another on one GPU.

    python -m benchmarks.rank_replay --prepare out/replay_work.npz
    python -m benchmarks.rank_replay --work out/replay_work.npz -o benchmarks/reports/rank_replay_h200_202611.json
    python -m benchmarks.rank_replay --cpu-smoke -o out/smoke.json

The first command plans (it needs the traces, no GPU), the second runs the ranks' work (it needs a GPU, no traces).

What is real: routing of real traces (`benchmarks/replay_work.py` says how loads are made of them), the runtime's
kernels over each rank's rows and slots, attention between them, pulls on a side stream, return copies and gradient
adds (`benchmarks/replay_chain.py`).
What is composed: the ranks run one after another on one GPU; a layer of a micro-step takes as long as its slowest
rank, plus what every rank does with its own tokens (spread to rows, combined), measured once.
What is modelled: the all-to-all; and, in the column `charged`, what nothing hides of a window's edges, shared out over
its micro-steps, and what `reactive` is charged for planning and pushing in the open. Pulls from peers are copies inside
the device. The wait of a home for gradients under way is not part of it.

What bounds it: `balanced`, every rank with the mean load in groups as uneven as the experts are. Throughput of the MoE
part in percent of `balanced` is given over measured parts alone, with the modelled all-to-all, and with every charge.
`balanced, even`, forced routing with even groups, shows what uneven groups alone cost: no placement of real experts
can reach it.

Variants beside the policies, on one node: `equipoise, host` pulls everything from pinned host memory; `equipoise, two
calls` runs home and replica slots as the two grouped calls of the portable back-end.

Method: chains of attention and MoE parts of a few layers, forward and back; launches hidden behind a sleep; events; the
median of the runs of each (micro-step, layer, rank). Policies take turns rank by rank, so that a warm device favours
none.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.replay_chain import Chain, Stage, Times, Work
from benchmarks.replay_work import (
    CASES,
    EVEN,
    LAYERS,
    RUN,
    Case,
    CaseWork,
    PolicyWork,
    build_case,
    load_work,
    save_work,
)
from benchmarks.results import Limit, format_table
from equipoise.calibrate.bench import AttentionShape, Bench
from equipoise.calibrate.measures import Attention, time_sent
from equipoise.calibrate.run import provenance
from equipoise.core import ModelShape

HEADS = {
    "deepseek-v2-lite": (16, 16, 128),
    "gpt-oss-20b": (64, 8, 64),
    "glm-4.5-air": (96, 8, 128),
    "qwen3-30b-a3b": (32, 4, 128),
    "olmoe": (16, 16, 128),
}
"""Query heads, key-value heads, head width; latent attention as plain heads of its value width."""
LIMIT_PCT = 97.0
STAGES = ("forward", "update")
ONE_NODE = 8
HOST, TWO_CALLS = "equipoise, host", "equipoise, two calls"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Medians of one variant."""

    forward_ns_MLR: np.ndarray
    backward_ns_MLR: np.ndarray
    add_ns_MLR: np.ndarray
    spread: float
    """Median over all visits of (largest - smallest) / median of their runs."""

    def stage_ns(self, stage: str) -> np.ndarray:
        """[M, L, R] nanoseconds of each rank's MoE part."""
        if stage == "forward":
            return self.forward_ns_MLR
        return self.forward_ns_MLR + self.backward_ns_MLR + self.add_ns_MLR


def variants_of(work: CaseWork) -> dict[str, tuple[PolicyWork, bool]]:
    """Every variant's work, and whether it runs two calls."""
    made = {name: (one, False) for name, one in work.policies.items()}
    if work.case.ranks > ONE_NODE:
        return made
    ours = work.policies["equipoise"]
    by_host = replace(ours, host_MLR2=ours.host_MLR2 + ours.peer_MLR2, peer_MLR2=np.zeros_like(ours.peer_MLR2))
    return {**made, HOST: (by_host, False), TWO_CALLS: (ours, True)}


def rank_works(work: PolicyWork, micro_step: int, rank: int, *, is_pulling: bool) -> list[Work]:
    """One rank's work, layer by layer; where weights are pushed in the open nothing is pulled."""
    made = []
    for layer in range(work.rows_MLRS.shape[1]):
        at = (micro_step, layer, rank)
        pulls = [
            tuple(pulls_MLR2[at].tolist()) if is_pulling else (0, 0) for pulls_MLR2 in (work.host_MLR2, work.peer_MLR2)
        ]
        made.append(
            Work(
                rows=tuple(int(rows) for rows in work.rows_MLRS[at] if rows >= 0),
                homes=int(work.homes_MLR[at]),
                host=pulls[0],
                peer=pulls[1],
                sent=int(work.sent_MLR[at]),
                added=int(work.added_MLR[at]),
            )
        )
    return made


def run_case(work: CaseWork, *, bench: Bench, attention: AttentionShape, shape: tuple[int, int]) -> dict[str, Measured]:
    """Run every variant of every rank, in turn."""
    variants = variants_of(work)
    micro_steps, layers, ranks, _ = work.policies["equipoise"].rows_MLRS.shape
    most_rows = max(int(one.row_MLR.max()) for one, _ in variants.values())
    stage = Stage(
        shape,
        width=max(one.rows_MLRS.shape[3] for one, _ in variants.values()),
        most_rows=most_rows,
        layers=layers,
        attention=Attention.random(attention, bench),
        bench=bench,
    )
    seen = {name: np.zeros((3, bench.runs, micro_steps, layers, ranks)) for name in variants}
    for micro_step in range(micro_steps):
        for rank in range(ranks):
            for name, (one, two_calls) in variants.items():
                works = rank_works(one, micro_step, rank, is_pulling=name != "reactive")
                chain = Chain(stage, works, tokens=work.tokens, sequence=work.tokens // 2, two_calls=two_calls)
                for run, times in enumerate(time_chain(chain, bench)):
                    for layer, one_times in enumerate(times):
                        parts = (one_times.forward, one_times.backward, one_times.add)
                        seen[name][:, run, micro_step, layer, rank] = parts
    return {name: summarise(runs) for name, runs in seen.items()}


def time_chain(chain: Chain, bench: Bench) -> Iterator[list[Times]]:
    """Run a chain once to warm up, then `bench.runs` times."""
    chain.run()
    for _ in range(bench.runs):
        bench.flush.sum()
        reads = chain.run()
        if bench.is_gpu:
            torch.cuda.synchronize()
        yield [read() for read in reads]


def summarise(runs_PXMLR: np.ndarray) -> Measured:
    """Take medians over the runs."""
    median = np.median(runs_PXMLR, axis=1)
    whole = runs_PXMLR.sum(axis=0)
    spread = (whole.max(axis=0) - whole.min(axis=0)) / np.median(whole, axis=0)
    return Measured(
        forward_ns_MLR=median[0], backward_ns_MLR=median[1], add_ns_MLR=median[2], spread=float(np.median(spread))
    )


def compose(measured: Measured, work: PolicyWork, *, stage: str, sent_ns: float) -> dict[str, float]:
    """Mean nanoseconds of one layer in one micro-step: measured parts, with the all-to-all, with every charge."""
    slowest_ML = measured.stage_ns(stage).max(axis=2)
    parts = float(slowest_ML.mean()) + sent_ns
    share = 0.5 if stage == "forward" else 1.0
    exchanged = parts + share * float(work.exchange_ns_ML.mean())
    return {"measured": parts, "with all-to-all": exchanged, "charged": exchanged + float(work.charge_ns.sum())}


def rows_of(work: CaseWork, measured: dict[str, Measured], sent: tuple[float, float]) -> list[dict[str, Any]]:
    """The table's lines of one case."""
    rows, variants = [], variants_of(work)
    for stage, sent_ns in zip(STAGES, sent, strict=True):
        ceiling = compose(measured["balanced"], work.policies["balanced"], stage=stage, sent_ns=sent_ns)
        for name, (one, _) in variants.items():
            made = compose(measured[name], one, stage=stage, sent_ns=sent_ns)
            row_MLR = one.row_MLR
            rows.append(
                {
                    "case": work.case.name,
                    "stage": stage,
                    "policy": name,
                    "skew": round(float((row_MLR.max(axis=2) / row_MLR.mean(axis=2)).mean()), 4),
                    "layer_ms": round(made["measured"] / 1e6, 4),
                    **{f"pct {key}": round(100 * ceiling[key] / made[key], 2) for key in made},
                    "spread_pct": round(100 * measured[name].spread, 2),
                }
            )
    return rows


def raw_of(work: CaseWork, measured: dict[str, Measured], sent: tuple[float, float], bench: Bench) -> dict[str, Any]:
    """What `benchmarks/validate.py` compares with predictions: every rank's rows, slots and nanoseconds."""
    variants = variants_of(work)
    return {
        "name": work.case.name,
        "model": work.case.model,
        "ranks": work.case.ranks,
        "tokens": work.tokens,
        "top_k": work.top_k,
        "sent_ns": [round(ns) for ns in sent],
        "added_entry_bytes": bench.dtype.itemsize,
        "variants": {
            name: {
                "rows_MLR": one.row_MLR.tolist(),
                "busy_MLR": one.busy_MLR.tolist(),
                "added_MLR": one.added_MLR.tolist(),
                "forward_ns_MLR": measured[name].stage_ns("forward").round().astype(int).tolist(),
                "update_ns_MLR": measured[name].stage_ns("update").round().astype(int).tolist(),
            }
            for name, (one, _) in variants.items()
        },
    }


def limits_of(rows: list[dict[str, Any]]) -> list[Limit]:
    """The promise: at least 97 % of `balanced` throughput for the MoE part."""
    return [
        Limit(name=f"{key} of balanced, {row['case']}, {row['stage']}", value=row[key], at_least=LIMIT_PCT)
        for row in rows
        if row["policy"] == "equipoise"
        for key in ("pct measured", "pct with all-to-all")
    ]


def replay(work: CaseWork, bench: Bench) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Run one case; its lines and its raw figures."""
    model = ModelShape.preset(work.case.model)
    heads, kv_heads, width = HEADS[work.case.model]
    attention = AttentionShape(hidden=model.hidden, heads=heads, kv_heads=kv_heads, width=width)
    sent = time_sent(work.tokens, model.hidden, work.top_k, bench)
    measured = run_case(work, bench=bench, attention=attention, shape=(model.hidden, model.expert_width))
    return rows_of(work, measured, sent), raw_of(work, measured, sent, bench)


def replays(path: Path, only: int | None, bench: Bench) -> Iterator[tuple[list[dict[str, Any]], dict[str, Any]]]:
    """Run the cases of a file, all or one."""
    for number, work in enumerate(load_work(path)):
        if only is None or number == only:
            yield replay(work, bench)


def smoke(bench: Bench) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Two ranks, two layers, tiny experts: the script itself on a CPU."""
    work = smoke_work()
    attention = AttentionShape(hidden=32, heads=2, kv_heads=1, width=16)
    sent = time_sent(work.tokens, 32, work.top_k, bench)
    measured = run_case(work, bench=bench, attention=attention, shape=(32, 16))
    return rows_of(work, measured, sent), raw_of(work, measured, sent, bench)


def smoke_work() -> CaseWork:
    """Work of two ranks with one home each and a replica of rank 0's expert on rank 1."""
    case = Case(trace="smoke", stack=1, model="smoke", ranks=2, factor=1)
    none_MLR = np.zeros((1, 2, 2), dtype=np.int64)
    one_MLR = none_MLR + np.array([0, 1])
    static = PolicyWork(
        rows_MLRS=np.broadcast_to(np.array([[24, -1], [8, -1]]), (1, 2, 2, 2)).copy(),
        homes_MLR=none_MLR + 1,
        host_MLR2=np.zeros((1, 2, 2, 2), dtype=np.int64),
        peer_MLR2=np.zeros((1, 2, 2, 2), dtype=np.int64),
        sent_MLR=none_MLR,
        added_MLR=none_MLR,
        exchange_ns_ML=np.full((1, 2), 1000),
        charge_ns=np.zeros(3, dtype=np.int64),
    )
    ours = replace(
        static,
        rows_MLRS=np.broadcast_to(np.array([[16, -1], [8, 8]]), (1, 2, 2, 2)).copy(),
        peer_MLR2=np.stack([one_MLR, one_MLR], axis=-1),
        sent_MLR=one_MLR,
        added_MLR=one_MLR[..., ::-1].copy(),
    )
    balanced = replace(static, rows_MLRS=np.full((1, 2, 2, 1), 16))
    policies = {"static": static, "eplb-oracle": ours, "reactive": ours, "equipoise": ours}
    policies |= {"balanced": balanced, EVEN: balanced}
    return CaseWork(case=case, tokens=16, top_k=2, policies=policies)


def main() -> int:
    """Prepare, or measure and publish."""
    parser = argparse.ArgumentParser(description="Every rank's own work of an expert-parallel step, on one GPU.")
    parser.add_argument("--prepare", type=Path, help="plan all cases and write their work here")
    parser.add_argument("--work", type=Path, help="work to run, as prepared")
    parser.add_argument("-o", "--output", type=Path, help="where the raw figures go, as JSON")
    parser.add_argument("--only", type=int, help="run this case alone, counted from 0")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--commit", help="commit of the source, where git cannot tell")
    parser.add_argument("--cpu-smoke", action="store_true", help="tiny sizes on the CPU, to try the script itself")
    given = parser.parse_args()
    if given.prepare:
        save_work([build_case(case) for case in CASES], given.prepare)
        return 0
    torch.manual_seed(0)
    device = "cpu" if given.cpu_smoke else "cuda"
    bench = Bench.on(device, runs=given.runs)
    rows, raw = [], []
    for lines, figures in [smoke(bench)] if given.cpu_smoke else replays(given.work, given.only, bench):
        rows, raw = rows + lines, [*raw, figures]
        # One case at a time, so that a run that is cut off leaves what it has.
        print(format_table(lines), flush=True)
        document = document_of(rows, provenance(device, given.commit), runs=given.runs)
        if given.output:
            given.output.write_text(json.dumps({**document, "cases": raw}) + "\n")
    print(json.dumps(document))
    return 0 if all(limit["holds"] for limit in document["limits"]) else 1


def document_of(rows: list[dict[str, Any]], made_by: dict[str, str], *, runs: int) -> dict[str, Any]:
    """The result as one JSON document."""
    facts = {key: made_by[key] for key in ("commit", "device", "driver", "torch", "date")}
    note = (
        f"{LAYERS} layers and micro-steps {RUN} of a planned window, bf16, medians of {runs} runs; measured rank by "
        "rank on one GPU, composed by the slowest; the all-to-all and charges are modelled"
    )
    limits = [{**asdict(limit), "holds": limit.holds} for limit in limits_of(rows)]
    return {"benchmark": "rank replay", **facts, "note": note, "rows": rows, "limits": limits}


if __name__ == "__main__":
    sys.exit(main())

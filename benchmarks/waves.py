"""What waves give: exchanges beside experts, at EP16 to EP64 with RDMA; simulated.

    python -m benchmarks.waves
    python -m benchmarks.waves --write benchmarks/reports/waves_simulated_202611

What bounds it: a layer cannot be faster than its exchanges alone, nor than its experts alone; one that takes as long for
both can at best be twice as fast, however many waves there are.

Update windows on 8-GPU H200 nodes with 400 Gb/s per GPU, 8 MoE layers of each model, 1 replica slot. Loads:
    generated   "mixed" of `benchmarks.paper_cases`: four domains, in the shape of a published model
    real        "real, whole samples" of `benchmarks.paper_cases`: answers of gpt-oss-20b, four layers of 32 experts side
                by side as one of 128; a token chooses 16 experts there and reaches every node, so only rows are shown
    real        DeepSeek-V2-Lite, four domains, as `benchmarks.packing` schedules them as given; 64 experts: to EP32
Plans are made once, for one wave, and then cut into 1 to 4. `balanced` computes the mean on every rank and spreads rows
evenly; it is shown in one wave and in its own best number of waves, so that it is as fast as a rival can be.

Waves are priced as if they were level. How level they are: the largest wave's share of a rank's rows, times the number
of waves, is 1 where they are; `cut` is its mean over micro-steps, layers and ranks, and its worst. What uneven waves
cost is estimated with `real cuts`: every wave's experts take what its own rows and slots cost, and its part of each
exchange is as long as its rows on the rank that has most of them; neither slows the other there, as in the difference
to level waves that is added. Ranks of a node that read rows where they are do not send them, and have no waves.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.packing import LAYERS, POLICY, batches
from benchmarks.paper_cases import MEAN_TOKENS, WIDTHS, cluster_of, generated_case, sampled_case
from benchmarks.results import Limit, format_table, publish, read_commit, read_machine, say_limit
from equipoise.core import Cluster, LoadMatrix, ModelShape
from equipoise.core.plan import Plan, Sends, wave_cuts
from equipoise.cost import CostModel
from equipoise.cost.clock import NANO, replay
from equipoise.cost.waves import in_waves
from equipoise.cost.window import visit_ns
from equipoise.cost.work import Work
from equipoise.loads import count_loads, schedule_tokens
from equipoise.planner import PlanOptions, plan
from equipoise.planner.assemble import TRIED_WAVES
from equipoise.sim.replay import plan_work

Row = dict[str, Any]
GENERATED = ("qwen3-30b-a3b", "qwen3-235b-a22b")
NOTE = (
    "simulated: kernels and transfers measured on one H200, all-to-all modelled, what exchanges take of the compute "
    "beside them assumed; waves have never run on a GPU"
)


class Case(NamedTuple):
    """Loads of one window, and what may cross nodes."""

    name: str
    model: ModelShape
    loads: LoadMatrix
    crossing: tuple[Sends, ...] = ("tokens", "rows")


def main() -> int:
    """Price every case and publish."""
    parser = argparse.ArgumentParser(description="Waves, simulated")
    parser.add_argument("--write", type=Path, help="also write <path>.json and <path>.md")
    given = parser.parse_args()
    rows = []
    for ranks in WIDTHS:
        for case in cases(ranks):
            rows += [compare(case, cluster_of(ranks), sends) for sends in case.crossing]
            print(format_table(rows[-1:]), flush=True)
    limits = limits_of(rows)
    if given.write is not None:
        write_report(given.write, rows, limits)
    return publish("waves", rows, limits=limits, note=NOTE)


def cases(ranks: int) -> Iterator[Case]:
    """Every window of this width."""
    for name in GENERATED:
        made = generated_case(name, "mixed", ranks, LAYERS)
        yield Case(f"{name}, generated", made.model, made.loads)
    made = sampled_case("mixed", ranks)
    model, load_MLRE = made.model.replace(layers=LAYERS), made.loads.load_MLRE[:, :LAYERS]
    yield Case("gpt-oss-20b composed, real", model, LoadMatrix(np.ascontiguousarray(load_MLRE)), ("rows",))
    for batch in batches(ranks):
        if batch.name == "DeepSeek-V2-Lite, four domains":
            counts = batch.counts
            budget = int(max(counts.tokens_B.mean() * batch.samples_per_batch, counts.tokens_B.max()))
            given = schedule_tokens(counts.tokens_B, ranks=ranks, token_budget=budget, policy=POLICY)
            factor = MEAN_TOKENS / counts.tokens_B.mean()
            full = np.rint(count_loads(counts, given).load_MLRE * factor).astype(np.int64)
            yield Case("DeepSeek-V2-Lite, real", counts.model, LoadMatrix(full))


def compare(case: Case, cluster: Cluster, sends: Sends) -> Row:
    """One row: throughput in percent of balanced in one wave, and how level real waves are."""
    options, given = PlanOptions(sends=sends), {"cluster": cluster, "model": case.model, "slots": 1}
    made, static, balanced = (
        plan(case.loads, policy=policy, options=options, **given) for policy in ("equipoise", "static", "balanced")
    )
    cost = CostModel.of(cluster, case.model, stage=case.loads.stage, sends=sends)
    work, level_work = (plan_work(each, sends=sends) for each in (made, balanced))
    ours, level = (seconds_by_waves(cost, each) for each in (work, level_work))
    cuts = {waves: RealCuts.of(cost, work, made, waves) for waves in TRIED_WAVES[1:]}
    real = {1: ours[1], **{waves: ours[waves] + cuts[waves].lost_s for waves in cuts}}
    best, level_best, real_best = (min(found, key=lambda n: found[n]) for found in (ours, level, real))
    return {
        "case": case.name,
        "EP": cluster.ep,
        "crossing": sends,
        "all_to_all": 100 * made.seconds.all_to_all / made.seconds.total,
        "static": 100 * level[1] / static.seconds.total,
        **{f"waves_{waves}": 100 * level[1] / seconds for waves, seconds in ours.items()},
        "best": best,
        "balanced_best": 100 * level[1] / level[level_best],
        "balanced_waves": level_best,
        "real_cuts": 100 * level[1] / real[real_best],
        "real_best": real_best,
        **{f"cut_{waves}": cuts[waves].mean for waves in cuts},
        **{f"worst_{waves}": cuts[waves].worst for waves in cuts},
    }


def seconds_by_waves(cost: CostModel, work: Work) -> dict[int, float]:
    """Seconds of a window's expert layers, by the number of waves."""
    return {waves: replay([in_waves(cost, work, waves)]).seconds.total for waves in TRIED_WAVES}


class RealCuts(NamedTuple):
    """How far the waves of a plan are from level."""

    mean: float
    """Of the largest wave's rows over the mean wave's, over micro-steps, layers and ranks that have rows."""
    worst: float
    lost_s: float
    """Estimated seconds by which the window is slower than with level waves."""

    @classmethod
    def of(cls, cost: CostModel, work: Work, made: Plan, waves: int) -> "RealCuts":
        """Cut every (micro-step, layer) of a plan as layers do; `work` is the plan's in one wave."""
        cut_plan, slots = replace(made, waves=waves), made.home_slots + made.slots
        rows_XWR, busy_XWR = [], []
        for entry in np.ndindex(*work.exchange_ML.shape):
            rows_RS, cut_RW = slot_rows(made, *entry), wave_cuts(cut_plan, *entry)
            wave_RS = (np.arange(slots)[None, :, None] >= cut_RW[:, None, 1:-1]).sum(axis=2)
            is_in_WRS = wave_RS == np.arange(waves)[:, None, None]
            rows_XWR.append((rows_RS * is_in_WRS).sum(axis=2))
            busy_XWR.append(((rows_RS > 0) & is_in_WRS).sum(axis=2))
        rows, busy = np.array(rows_XWR), np.array(busy_XWR)
        whole_XR = rows.sum(axis=1)
        share_X = (rows.max(axis=1) * waves)[whole_XR > 0] / whole_XR[whole_XR > 0]
        lost_ns = _piped_ns(cost, work, rows, busy) - _piped_ns(cost, work, *_level(work, waves))
        return cls(mean=float(share_X.mean()), worst=float(share_X.max()), lost_s=float(lost_ns.sum()) / NANO)


def slot_rows(made: Plan, micro_step: int, layer: int) -> np.ndarray:
    """[R, S] rows of every rank's local slots."""
    # In as many waves as there are slots and more, the plan itself would say; this is the numbering of its docstring.
    quota_ER, home_E = made.quota_ER(micro_step, layer), made.home_LE[layer]
    rows_RS = np.zeros((made.cluster.ep, made.home_slots + made.slots), dtype=np.int64)
    rows_RS[home_E, made.home_slot_LE[layer]] = quota_ER[np.arange(len(home_E)), home_E]
    next_R = np.full(made.cluster.ep, made.home_slots)
    for expert, rank in made.replicas(micro_step, layer):
        rows_RS[rank, next_R[rank]] = quota_ER[expert, rank]
        next_R[rank] += 1
    return rows_RS


def _level(work: Work, waves: int) -> tuple[np.ndarray, np.ndarray]:
    """([X, W, R] rows, [X, W, R] busy slots) of level waves, as they are priced."""
    ranks = work.shape[2]
    flat = (-(-whole.reshape(-1, 1, ranks) // waves) for whole in (work.rows_MLR, work.busy_MLR))
    rows, busy = (np.repeat(each, waves, axis=1) for each in flat)
    return rows, busy


def _piped_ns(cost: CostModel, work: Work, rows_XWR: np.ndarray, busy_XWR: np.ndarray) -> np.ndarray:
    """[X] nanoseconds of both directions of every (micro-step, layer), wave by wave, without what exchanges slow."""
    waves, ranks = rows_XWR.shape[1:]
    wave = visit_ns(cost, rows_MLR=rows_XWR, busy_MLR=busy_XWR, sent_MLR=np.zeros_like(rows_XWR))
    forward_XWR, inputs_XWR = wave.forward_MLR, wave.backward_MLR // 2
    rest_XR = work.backward_MLR.reshape(-1, ranks) // 2
    fixed = work.tables.exchange_fixed_ns
    wire_X1 = (work.exchange_ML - fixed).reshape(-1, 1)
    # A part is as long as its rows on the rank that has most of them, in a wave, of all the rows of the busiest rank.
    most_X1 = np.maximum(1, work.rows_MLR.reshape(-1, ranks).max(axis=1)[:, None])
    part_XW = fixed + wire_X1 * rows_XWR.max(axis=2) // most_X1
    end_X = np.zeros(len(part_XW), dtype=np.int64)
    for wave_XWR, after_XR in ((forward_XWR, 0 * rest_XR), (inputs_XWR, rest_XR)):
        arrived_XW = np.cumsum(part_XW, axis=1)
        network_X, free_XR = arrived_XW[:, -1], np.zeros_like(rest_XR)
        for w in range(waves):
            free_XR = np.maximum(free_XR, arrived_XW[:, w, None]) + wave_XWR[:, w]
            network_X = np.maximum(network_X, free_XR.max(axis=1)) + part_XW[:, w]
        end_X += np.maximum(network_X, (free_XR + after_XR).max(axis=1))
    return end_X


def limits_of(rows: Sequence[Row]) -> list[Limit]:
    """Waves chosen by price never lose, and a plan in waves stays near balanced in its own best waves."""
    limits = []
    for sends in ("tokens", "rows"):
        some = [row for row in rows if row["crossing"] == sends]
        worst = min(some, key=lambda row: row[f"waves_{row['best']}"] / row["balanced_best"])
        share = 100 * worst[f"waves_{worst['best']}"] / worst["balanced_best"]
        where = f"{sends} cross nodes, worst of {len(some)} ({worst['case']}, EP{worst['EP']})"
        limits.append(Limit(name=f"% of balanced, both in their best waves, {where}", value=share, at_least=95.0))
    return limits


def write_report(path: Path, rows: Sequence[Row], limits: Sequence[Limit]) -> None:
    """Write `<path>.json` and `<path>.md`."""
    said = [
        {"name": x.name, "value": x.value, "at_least": x.at_least, "at_most": x.at_most, "holds": x.holds}
        for x in limits
    ]
    command = f"python -m benchmarks.waves --write {path}"
    document = {"benchmark": "waves", "command": command, "commit": read_commit(), "machine": read_machine()}
    document |= {"note": NOTE, "rows": list(rows), "limits": said}
    path.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n")
    text = (__doc__ or "").split("\n\n", 2)[2]
    lines = ["# Waves: exchanges beside experts", "", f"`{command}`, {NOTE}.", "", "```", text.strip(), "```", ""]
    lines += [
        "Throughput of expert layers in percent of balanced in one wave; `all_to_all`: percent of the plan's time"
    ]
    lines += ["in one wave; `best`: the fastest number of waves, by level waves and by real cuts.", ""]
    lines += ["```", format_table(rows), *map(say_limit, limits), "```"]
    path.with_suffix(".md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())

"""What waves give: exchanges beside experts, at EP16 to EP64 with RDMA; simulated.

    python -m benchmarks.waves
    python -m benchmarks.waves --write benchmarks/reports/waves_simulated_202611

What bounds it: a layer cannot be faster than its exchanges alone, nor than its experts alone; one that takes as long
for both can at best be twice as fast, however many waves there are.

Update windows on 8-GPU H200 nodes with 400 Gb/s per GPU, 8 MoE layers of each model, 1 replica slot. Loads:
    generated   "mixed" of `benchmarks.paper_cases`: four domains, in the shape of a published model
    real        "real, whole samples" of `benchmarks.paper_cases`: answers of gpt-oss-20b, four layers of 32 experts
                side by side as one of 128; a token chooses 16 experts there and reaches every node: only rows are shown
    real        DeepSeek-V2-Lite, four domains, as `benchmarks.packing` schedules them as given; 64 experts
Plans are made once, for one wave, and then cut into 1 to 4. `balanced` computes the mean on every rank and spreads rows
evenly, in level waves; it is shown in one wave and in its own best number of waves, so that it is as fast as a rival
can be. Waves have as many rows on every rank; `level` waves also share out its experts, so that no weights are read
twice. Each part of an exchange is priced as if its busiest link had its share of the rows; `links` is what the busiest
links of both parts of two waves really have, over the busiest link of all rows, in the mean of some entries: 1.05 are
exchanges that are 5 % longer than priced. Ranks of a node that read rows where they are do not send them, and have no
waves.
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
from equipoise.core.plan import Itinerary, Plan, Sends, wave_cuts
from equipoise.cost import CostModel
from equipoise.cost.clock import replay
from equipoise.cost.work import Decision, works_of
from equipoise.loads import count_loads, schedule_tokens
from equipoise.planner import PlanOptions, plan
from equipoise.planner.assemble import TRIED_WAVES, build_itinerary

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
    commit, rows = read_commit(), []
    for ranks in WIDTHS:
        for case in cases(ranks):
            rows += [compare(case, cluster_of(ranks), sends) for sends in case.crossing]
            print(format_table(rows[-1:]), flush=True)
    limits = limits_of(rows)
    if given.write is not None:
        write_report(given.write, rows, limits, commit)
    return publish("waves", rows, limits=limits, note=NOTE, commit=commit)


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
    """One row: throughput in percent of balanced in one wave, and how level waves are."""
    options, given = PlanOptions(sends=sends), {"cluster": cluster, "model": case.model, "slots": 1}
    made, static, balanced = (
        plan(case.loads, policy=policy, options=options, **given) for policy in ("equipoise", "static", "balanced")
    )
    one = balanced.seconds.total
    ours, rival = (dict(enumerate(seconds_in_waves(each, sends), 1)) for each in (made, balanced))
    best, rival_best = (min(found, key=lambda waves: found[waves]) for found in (ours, rival))
    return {
        "case": case.name,
        "EP": cluster.ep,
        "crossing": sends,
        "all_to_all": 100 * made.seconds.all_to_all / made.seconds.total,
        "static": 100 * one / static.seconds.total,
        **{f"waves_{waves}": 100 * one / seconds for waves, seconds in ours.items()},
        "best": best,
        "level": 100 * one / min(seconds_in_waves(made, sends, is_level=True)),
        "balanced_best": 100 * one / rival[rival_best],
        "balanced_waves": rival_best,
        "links": busiest_links(replace(made, waves=2)),
    }


def seconds_in_waves(made: Plan, sends: Sends, *, is_level: bool = False) -> list[float]:
    """Seconds of a window's expert layers in 1 to 4 waves, as they are cut or level."""
    cost = CostModel.of(made.cluster, made.model, stage=made.loads.stage, sends=sends)
    decisions = [Decision.of(replace(made, waves=waves)) for waves in TRIED_WAVES]
    if is_level:
        decisions = [each._replace(rows_MLRS=None) for each in decisions]
    return [replay([work]).seconds.total for work in works_of(cost, made.loads, itinerary_of(made), decisions)]


def busiest_links(made: Plan) -> float:
    """Rows of the busiest link between nodes in each wave, added up, over those of all waves: mean of some entries."""
    node_R, found = np.array(made.cluster.node_R), []
    is_far_RR = node_R[:, None] != node_R
    for layer in range(0, made.loads.num_layers, 3):
        cuts, split_RER = wave_cuts(made, 0, layer), made.split_RER(0, layer)
        held_RS = experts_of_slots(made, 0, layer)
        parts_RRW = np.zeros((*is_far_RR.shape, made.waves), dtype=np.int64)
        for rank, held_S in enumerate(held_RS):
            count_RS = np.where(held_S >= 0, split_RER[:, held_S, rank], 0)
            slot_S = np.arange(len(held_S))
            ahead_RSW = [
                np.where(slot_S < slot, count_RS, np.where(slot_S == slot, count_RS * before // max(rows, 1), 0))
                for slot, before, rows in zip(*(array[rank].tolist() for array in cuts), strict=True)
            ]
            parts_RRW[:, rank] = np.diff([0 * count_RS, *ahead_RSW, count_RS], axis=0).sum(axis=2).T
        far_RRW = parts_RRW * is_far_RR[..., None]
        links_W = np.maximum(far_RRW.sum(axis=0).max(axis=0), far_RRW.sum(axis=1).max(axis=0))
        far_RR = far_RRW.sum(axis=2)
        found.append(links_W.sum() / max(1, far_RR.sum(axis=0).max(), far_RR.sum(axis=1).max()))
    return float(np.mean(found))


def experts_of_slots(made: Plan, micro_step: int, layer: int) -> np.ndarray:
    """[R, S] the expert in every local slot, -1 in an empty one."""
    held_RS = np.full((made.cluster.ep, made.home_slots + made.slots), -1)
    held_RS[made.home_LE[layer], made.home_slot_LE[layer]] = np.arange(made.loads.num_experts)
    next_R = np.full(made.cluster.ep, made.home_slots)
    for expert, rank in made.replicas(micro_step, layer):
        held_RS[rank, next_R[rank]] = expert
        next_R[rank] += 1
    return held_RS


def itinerary_of(made: Plan) -> Itinerary:
    """A plan's itinerary; the plain one where it is not executed."""
    if made.itinerary is not None:
        return made.itinerary
    return build_itinerary(made.loads.stage, np.zeros(made.ns_ML.shape, dtype=np.bool_), PlanOptions())


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


def write_report(path: Path, rows: Sequence[Row], limits: Sequence[Limit], commit: str) -> None:
    """Write `<path>.json` and `<path>.md`."""
    said = [
        {"name": x.name, "value": x.value, "at_least": x.at_least, "at_most": x.at_most, "holds": x.holds}
        for x in limits
    ]
    command = f"python -m benchmarks.waves --write {path}"
    document = {"benchmark": "waves", "command": command, "commit": commit, "machine": read_machine()}
    document |= {"note": NOTE, "rows": list(rows), "limits": said}
    path.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n")
    text = (__doc__ or "").split("\n\n", 2)[2]
    lines = ["# Waves: exchanges beside experts", "", f"`{command}`, {NOTE}.", "", "```", text.strip(), "```", ""]
    lines += [
        "Throughput of expert layers in percent of balanced in one wave; `all_to_all`: percent of the plan's time"
    ]
    lines += ["in one wave; `best`: the fastest number of waves; all other columns: the fastest of theirs.", ""]
    lines += ["```", format_table(rows), *map(say_limit, limits), "```"]
    path.with_suffix(".md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())

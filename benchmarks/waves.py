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
can be. Waves have the rows of the plan's own cuts, of contiguous slots; how uneven these are is `cut`: the largest
wave's share of a rank's rows times the number of waves, in the mean over micro-steps, layers and ranks, and the worst
one. All ranks meet in every part of an exchange, which is the slow end of what networks do: a rank that has its part
could go on. The fast end, and the most that better cuts could give, are `level` waves. `sorted` are waves of slots that
a rank would take in the best order for each micro-step (the fullest slot to the emptiest wave); layers cannot do that,
because slots lie one after another. `by_tokens` are waves that are no part of the project: each has the same share of
every expert's rows instead of a share of the slots. They are level, and a token crosses in one of them; but every call
reads all weights, and an expert's rows are in several products. Ranks of a node that read rows where they are do not
send them, and have no waves.
"""

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.packing import LAYERS, POLICY, batches
from benchmarks.paper_cases import MEAN_TOKENS, WIDTHS, cluster_of, generated_case, sampled_case
from benchmarks.results import Limit, format_table, publish, read_commit, read_machine, say_limit
from equipoise.core import Cluster, LoadMatrix, ModelShape
from equipoise.core.plan import Itinerary, Plan, Sends, slot_rows
from equipoise.cost import CostModel
from equipoise.cost.clock import replay
from equipoise.cost.waves import WaveRows, in_waves
from equipoise.cost.window import VisitNs
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
    """One row: throughput in percent of balanced in one wave, and how level waves are."""
    options, given = PlanOptions(sends=sends), {"cluster": cluster, "model": case.model, "slots": 1}
    made, static, balanced = (
        plan(case.loads, policy=policy, options=options, **given) for policy in ("equipoise", "static", "balanced")
    )
    one, several = balanced.seconds.total, TRIED_WAVES[1:]
    ours, rival = (dict(enumerate(seconds_in_waves(each, sends), 1)) for each in (made, balanced))
    best, rival_best = (min(found, key=lambda waves: found[waves]) for found in (ours, rival))
    rows_XRS = slot_rows(made, 0, made.ns_ML.size)
    rows_MLRS = rows_XRS.reshape(*made.ns_ML.shape, *rows_XRS.shape[1:])
    cuts = {waves: unevenness(WaveRows.of(rows_MLRS, waves)) for waves in several}
    return {
        "case": case.name,
        "EP": cluster.ep,
        "crossing": sends,
        "all_to_all": 100 * made.seconds.all_to_all / made.seconds.total,
        "static": 100 * one / static.seconds.total,
        **{f"waves_{waves}": 100 * one / seconds for waves, seconds in ours.items()},
        "best": best,
        "sorted": 100 * one / min(seconds_in_waves(made, sends, rows_of=lambda n: in_order(rows_MLRS, n))),
        "level": 100 * one / min(seconds_in_waves(made, sends, rows_of=lambda _: None)),
        "by_tokens": 100 * one / min(seconds_by_tokens(made, sends)),
        "balanced_best": 100 * one / rival[rival_best],
        "balanced_waves": rival_best,
        "balanced_by_tokens": 100 * one / min(seconds_by_tokens(balanced, sends)),
        **{f"cut_{waves}": cuts[waves][0] for waves in several},
        **{f"worst_{waves}": cuts[waves][1] for waves in several},
    }


def seconds_in_waves(
    made: Plan, sends: Sends, *, rows_of: Callable[[int], np.ndarray | None] | None = None
) -> list[float]:
    """Seconds of a window's expert layers in 1 to 4 waves; `rows_of` gives other rows of slots, or None for level."""
    cost = CostModel.of(made.cluster, made.model, stage=made.loads.stage, sends=sends)
    decisions = [Decision.of(replace(made, waves=waves)) for waves in TRIED_WAVES]
    if rows_of is not None:
        decisions = [each._replace(rows_MLRS=rows_of(each.waves)) for each in decisions]
    return [replay([work]).seconds.total for work in works_of(cost, made.loads, itinerary_of(made), decisions)]


def seconds_by_tokens(made: Plan, sends: Sends) -> list[float]:
    """The same where each wave has an equal share of every slot's rows."""
    cost = CostModel.of(made.cluster, made.model, stage=made.loads.stage, sends=sends)
    [work] = works_of(cost, made.loads, itinerary_of(made), [Decision.of(made)])
    busy_MLR = np.full_like(work.rows_MLR, made.home_slots)
    if made.policy != "balanced":
        busy_MLR = (slot_rows(made, 0, made.ns_ML.size) > 0).sum(axis=2).reshape(work.rows_MLR.shape)
    visits = VisitNs(**{name: getattr(work, name) for name in VisitNs._fields})
    wire_ML, found = work.exchange_ML - work.tables.exchange_fixed_ns, [made.seconds.total]
    for waves in TRIED_WAVES[1:]:
        rows_MLWR = WaveRows.level(work.rows_MLR, busy_MLR, waves).rows_MLWR
        rows = WaveRows(rows_MLWR, np.repeat(busy_MLR[:, :, None], waves, axis=2))
        layers = in_waves(cost, visits, wire_ML, -(-wire_ML // waves), rows)
        found.append(replay([replace(work, **layers._asdict())]).seconds.total)
    return found


def itinerary_of(made: Plan) -> Itinerary:
    """A plan's itinerary; the plain one where it is not executed."""
    if made.itinerary is not None:
        return made.itinerary
    return build_itinerary(made.loads.stage, np.zeros(made.ns_ML.shape, dtype=np.bool_), PlanOptions())


def unevenness(rows: WaveRows) -> tuple[float, float]:
    """(Mean, worst) of the largest wave's rows over the mean wave's, of ranks that have rows."""
    waves, whole_MLR = rows.rows_MLWR.shape[2], rows.rows_MLWR.sum(axis=2)
    share_X = (waves * rows.rows_MLWR.max(axis=2))[whole_MLR > 0] / whole_MLR[whole_MLR > 0]
    return float(share_X.mean()), float(share_X.max())


def in_order(rows_MLRS: np.ndarray, waves: int) -> np.ndarray:
    """The same slots of every rank, put wave by wave: the fullest that is left goes to the emptiest wave."""
    rows_XS = -np.sort(-rows_MLRS.reshape(-1, rows_MLRS.shape[-1]), axis=1)
    sum_XW, wave_XS = np.zeros((len(rows_XS), waves), dtype=np.int64), np.zeros_like(rows_XS)
    entry_X = np.arange(len(rows_XS))
    for slot in range(rows_XS.shape[1]):
        wave_XS[:, slot] = sum_XW.argmin(axis=1)
        sum_XW[entry_X, wave_XS[:, slot]] += rows_XS[:, slot]
    order_XS = np.argsort(wave_XS, axis=1, kind="stable")
    ordered: np.ndarray = np.take_along_axis(rows_XS, order_XS, axis=1).reshape(rows_MLRS.shape)
    return ordered


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
    lines += ["in one wave; `best`: the fastest number of waves; all other columns: the fastest of theirs.", ""]
    lines += ["```", format_table(rows), *map(say_limit, limits), "```"]
    path.with_suffix(".md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())

"""The page of an analysis: a document of format "equipoise-analysis-2" (its fields: `equipoise/sim/analysis.py`).

Takes every figure from the document; adds up nothing that the document adds up.
"""

from collections.abc import Iterator
from typing import Any

from equipoise.core.value import STAGE_WORDS, plural
from equipoise.report.charts import (
    activations_text,
    cost_parts,
    memory,
    skew_by_layer,
    skew_by_width,
    skew_over_micro_steps,
)
from equipoise.report.page import (
    Chart,
    Figure,
    Missing,
    Page,
    beyond_balanced,
    count,
    gained,
    lost,
    num_bytes,
    percent,
    ratio,
    ratios,
    seconds,
)

FORMAT = "equipoise-analysis-2"
Document = dict[str, Any]

_SIMULATE = "equipoise simulate ROUTES_OR_LOADS -o result.json --report report.html"
_MISSING = (
    ("Heat maps, timeline, byte matrix, time by rank", "An analysis keeps totals alone. A simulation has them:"),
    ("Policies and sweeps", "An analysis prices one plan. A simulation compares policies and finds the break-even:"),
)


def analysis_page(document: Document, *, title: str) -> Page:
    """Make the page of an analysis."""
    where = f"{document['model']} on {document['cluster'].upper()}, EP {document['ep']}"
    return Page(
        title=title,
        kind=f"Analysis of one step, {where}",
        answer=_answer(document),
        conditions=tuple(_conditions(document)),
        notes=(),
        figures=_figures(document),
        sections=(_parts(document), _over_micro_steps(document), *_by_layer_and_width(document), _memory(document)),
        missing=tuple(Missing(title=name, text=text, command=_SIMULATE) for name, text in _MISSING),
        document=document,
    )


def _answer(document: Document) -> str:
    whole, plan = document["seconds"], document["plan"]
    now = lost(whole["lost"]["share"])
    if plan is None:
        return f"{now}; no plan was tried: {document['no_plan']}."
    gain = gained(whole["saved"]["share"], lost=whole["lost"]["share"])
    slots = plural(plan["slots"], "replica slot") if plan["slots"] else "placement alone"
    text = f"{now}; a plan with {slots} ({num_bytes(plan['buffer_bytes'])} per GPU) would {gain}"
    return f"{text}." if plan["worth_it"] else f"{text}, which is not worth it here."


_SENT = {
    "tokens": "a token is sent once to each node, as in DeepEP; Megatron's alltoall sends every row (--sends rows)",
    "rows": "every row is sent on its own, as in Megatron's alltoall; DeepEP sends a token once (--sends tokens)",
}


def _conditions(document: Document) -> Iterator[str]:
    profile, steps = document["profile"], plural(document["micro_steps"], "micro-step")
    yield (
        f"Predicted, not measured on a cluster, from the loads of one step: {steps}, "
        f"{count(document['rows'])} rows, {percent(document['padding'])} of them padding; routes of "
        f"{percent(document['coverage'])} of the tokens are known."
    )
    if document.get("schedule"):
        yield document["schedule"]
    made = f"{profile['device']}, {profile['kind']}"
    yield f"Expert compute: {made}. Links: published rates and an assumed share of them."
    if document.get("sends") is not None:
        yield f"All-to-all, assumed: {_SENT[document['sends']]}."
    yield "Seconds are those of expert layers alone: no attention, no optimizer, no rollout."
    # Why more can be recovered than is lost, where that is so.
    whole = document["seconds"]
    if document["plan"] is not None and whole["saved"]["share"] > whole["lost"]["share"]:
        planned, level = whole["planned"], whole["balanced"]
        # Null where all-to-all was not priced.
        sends_less = (planned["all_to_all"] or 0) < (level["all_to_all"] or 0)
        computes_less = planned["compute"] < level["compute"]
        yield beyond_balanced("The plan", sends_less=sends_less, computes_less=computes_less)


def _figures(document: Document) -> tuple[Figure, ...]:
    whole, plan, held = document["seconds"], document["plan"], document["memory"]
    text = f"{seconds(whole['lost']['seconds'])} of {seconds(whole['now']['total'])} per step"
    found = [Figure(label="Lost", value=percent(whole["lost"]["share"]), text=text)]
    if plan is not None:
        saved, stage = whole["saved"], _longest_stage(document)
        speed = whole["now"]["total"] / (whole["planned"]["total"] or 1.0)
        label, text = "Saved by a plan", f"{seconds(saved['seconds'])}, so {ratio(speed)} times as fast"
        if saved["share"] < 0:
            label, text = "Slower by", f"{seconds(-saved['seconds'])} more with a plan, every cost charged"
        skew = plan["skew"][stage]
        levelled = f"{ratio(skew['before']['mean'])} to {ratio(skew['after']['mean'])}"
        found += [
            Figure(label=label, value=percent(abs(saved["share"])), text=text),
            Figure(label="Mean skew", value=levelled, text=f"busiest rank / mean rank, {STAGE_WORDS[stage]}"),
        ]
    peak = f"received rows, rank {held['place']['rank']}, layer {held['place']['layer']}"
    return (*found, Figure(label="Peak memory", value=num_bytes(held["peak_bytes"]), text=peak))


def _longest_stage(document: Document) -> str:
    stages = document["stages"]
    return str(max(stages, key=lambda name: stages[name]["seconds"]["now"]["total"]))


def _parts(document: Document) -> Chart:
    bars: dict[str, dict[str, float]] = {}
    for stage, found in document["stages"].items():
        for which in ("now", "planned", "balanced"):
            parts = found["seconds"][which]
            if parts is not None:
                names = {"compute": "compute", "all_to_all": "all-to-all", "transfers": "transfers"}
                bars[f"{STAGE_WORDS[stage]}, {which}"] = {label: parts[name] or 0.0 for name, label in names.items()}
    whole = document["seconds"]
    planned = "" if whole["planned"] is None else f", {seconds(whole['planned']['total'])} with the plan"
    return cost_parts(
        bars,
        title="Where the seconds go",
        caption=f"A step takes {seconds(whole['now']['total'])} in expert layers now{planned}, "
        f"{seconds(whole['balanced']['total'])} if every rank were level.",
        terms=("balanced", "lost", "saved"),
    )


def _over_micro_steps(document: Document) -> Chart:
    stages, plan = document["stages"], document["plan"]
    steps = [step for stage in stages.values() for step in stage["skew"]["micro_steps"]]
    series = {"before": [s["mean"] for s in steps], "before, worst layer": [s["max"] for s in steps]}
    text = f"The busiest rank has {ratios(series['before'])} times the mean load"
    text += f", up to {ratio(max(series['before, worst layer']))} in single layers"
    if plan is not None:
        lengths = {name: len(stage["skew"]["micro_steps"]) for name, stage in stages.items()}
        series["after"] = [plan["skew"][name]["after"]["mean"] for name, n in lengths.items() for _ in range(n)]
        text += f"; with the plan {ratio(max(series['after']))} on average over each stage"
    return skew_over_micro_steps(
        series,
        windows=[(STAGE_WORDS[name], len(stage["skew"]["micro_steps"])) for name, stage in stages.items()],
        caption=f"{text}. Lines are means over layers.",
    )


def _by_layer_and_width(document: Document) -> tuple[Chart, Chart]:
    stage = _longest_stage(document)
    found = document["stages"][stage]
    layers, numbers = found["skew"]["layers"], document["layer_numbers"]
    means = [layer["mean"] for layer in layers]
    worst = max(range(len(means)), key=lambda i: (means[i], -i))
    widths = {int(ep): figures for ep, figures in found["widths"].items()}
    widths.setdefault(document["ep"], {name: found["skew"][name] for name in ("mean", "p50", "p95", "max")})
    return (
        skew_by_layer(
            {"mean": means, "max": [layer["max"] for layer in layers]},
            layers=numbers,
            caption=f"Layer {numbers[worst]} is the most uneven, {ratio(means[worst])} on average; "
            f"the least uneven has {ratio(min(means))} ({STAGE_WORDS[stage]}, before).",
        ),
        skew_by_width(
            widths,
            caption=f"The same rows at other widths, before: mean {ratio(widths[min(widths)]['mean'])} at EP "
            f"{min(widths)}, {ratio(widths[max(widths)]['mean'])} at EP {max(widths)} ({STAGE_WORDS[stage]}).",
        ),
    )


def _memory(document: Document) -> Chart:
    held = document["memory"]
    place, limit = held["place"], held["limit_bytes"]
    verdict = "No limit was given (--memory-gib)."
    if limit is not None:
        verdict = f"It fits into {num_bytes(limit)}." if held["fits"] else f"It does not fit into {num_bytes(limit)}."
        verdict += "".join(f" {fix['words'][0].upper()}{fix['words'][1:]}." for fix in held["fixes"][:1])
    return memory(
        {"before": {"received rows": held["rank_peak_bytes"]}},
        limit_bytes=limit,
        caption=f"Rank {place['rank']} needs {num_bytes(held['peak_bytes'])} for {plural(held['peak_rows'], 'row')} in "
        f"{STAGE_WORDS[place['stage']]} micro-step {place['micro_step']}, layer {place['layer']}. "
        f"{activations_text(held['activations'])} {verdict}",
    )

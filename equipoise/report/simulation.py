"""The page of a simulation: a document of format "equipoise-simulation-1" (its fields: `equipoise/sim/result.py`).

Takes every figure from the document, and says nothing of a policy that was not simulated. Shares are of static's
`expert_s`. "After" is `equipoise` if it was simulated, else the fastest policy but `static` and `balanced`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from equipoise.core.value import STAGE_WORDS, plural
from equipoise.report import charts
from equipoise.report.page import (
    Chart,
    Figure,
    Listing,
    Missing,
    Page,
    Table,
    beyond_balanced,
    gained,
    lost,
    num_bytes,
    percent,
    ratio,
    ratios,
    seconds,
)
from equipoise.sim.result import RANK_PARTS, WORTH

Document = dict[str, Any]
MOVED = ("pull", "return", "publish", "collect")
"""Parts of the seconds that are transfers of experts."""
EXPERT_PARTS = ("compute", "all_to_all_inside", "all_to_all_across", *MOVED, "planning")
"""Parts of the seconds that balance changes."""
OTHER_PARTS = ("attention", "bubble", "rollout", "other")
LABELS = {
    "all_to_all": "all-to-all",
    "all_to_all_inside": "all-to-all inside",
    "all_to_all_across": "all-to-all across",
    "wait": "waiting",
}
"""Names of parts in charts, where they are not those of the document."""
DEFINED = ("static", "eplb-history", "eplb-oracle", "lplb", "lpt", "relibra", "reactive", "equipoise", "balanced")
"""Policies that have a definition; a name with one of these in front is a variant of it."""
COMMAND = "equipoise simulate ROUTES_OR_LOADS"
"""What makes a result again, with an option more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedPolicies:
    """The policies that the page speaks of; None where one was not simulated."""

    static: Document | None
    after: Document | None
    balanced: Document | None

    @classmethod
    def of(cls, document: Document) -> "ComparedPolicies":
        """Find them among the document's policies."""
        found = {policy["policy"]: policy for policy in document["policies"]}
        static, balanced = found.pop("static", None), found.pop("balanced", None)
        after = found.get("equipoise") or min(found.values(), key=lambda policy: policy["expert_s"], default=None)
        return cls(static=static, after=after, balanced=balanced)

    def share(self, policy: Document) -> float:
        """Return the share of static's seconds in expert layers that a policy saves."""
        assert self.static is not None, "only asked for where static was simulated"
        return 1 - policy["expert_s"] / self.static["expert_s"] if self.static["expert_s"] else 0.0


def simulation_page(document: Document, *, title: str) -> Page:
    """Make the page of a simulation."""
    # Refuse what no simulation writes and no chart would notice; the message names the field.
    if not document["policies"]:
        raise ValueError("`policies` is empty, a simulation has at least one")
    for policy in document["policies"]:
        charts.check_lanes(policy["timeline"], of=f"policy {policy['policy']}")
    compared = ComparedPolicies.of(document)
    views = {name: p for name, p in (("before", compared.static), ("after", compared.after)) if p is not None}
    if not views:
        views = {document["policies"][0]["policy"]: document["policies"][0]}
    return Page(
        title=title,
        kind=f"Simulation of one step, {document['model']['name']} on {_machine(document)}",
        answer=_answer(compared),
        conditions=tuple(_conditions(document, compared)),
        notes=tuple(document["notes"]),
        figures=tuple(_figures(document, compared)),
        sections=tuple(_sections(document, views, compared.after)),
        missing=tuple(_missing(document, compared)),
        document=document,
    )


def _machine(document: Document) -> str:
    """Name nodes and ranks of all pipeline stages and EP groups; the document's cluster may be one group alone."""
    cluster, stages = document["cluster"], document["setting"]["pipeline_stages"]
    groups, per_node = document["windows"][0]["groups"], cluster["ranks_per_node"]
    ranks = stages * groups * cluster["ep"]
    nodes = max(cluster["nodes"], -(-ranks // per_node))
    parts = [f"{plural(nodes, 'node')} of {per_node} {cluster['name'].upper()}", f"EP {cluster['ep']}"]
    parts += [f"{groups} EP groups"] if groups > 1 else []
    parts += [f"{stages} pipeline stages"] if stages > 1 else []
    parts += [f"{ranks} ranks"] if stages * groups > 1 else []
    network, nvlink = cluster.get("network_bytes_per_s"), cluster.get("nvlink_bytes_per_s")
    if network is not None and nvlink is not None:
        parts.append(f"{network * 8 / 1e9:,.4g} Gb/s network and {nvlink / 1e9:,.4g} GB/s NVLink per rank")
    return ", ".join(parts)


def _answer(compared: ComparedPolicies) -> str:
    static, after, balanced = compared.static, compared.after, compared.balanced
    if static is None:
        fastest = after or balanced
        assert fastest is not None, "checked to have at least one policy"
        return f"With {fastest['policy']} a step takes {seconds(fastest['expert_s'])} in expert layers."
    now = f"A step takes {seconds(static['expert_s'])} in expert layers"
    if balanced is not None:
        now = lost(compared.share(balanced))
    if after is None:
        return f"{now}; no plan was simulated."
    plan = "a plan" if after["policy"] == "equipoise" else after["policy"]
    memory = f"{plural(after['slots'], 'replica slot')} ({num_bytes(after['memory']['replicas_bytes'])} per GPU)"
    saved = compared.share(after)
    # Without balanced nothing is known to be lost but what the plan gives back.
    gain = gained(saved, lost=saved if balanced is None else compared.share(balanced))
    text = f"{now}; {plan} with {memory if after['slots'] else 'placement alone'} would {gain}"
    return f"{text}." if saved >= WORTH else f"{text}, which is not worth it here."


def _conditions(document: Document, compared: ComparedPolicies) -> Iterator[str]:
    windows, profile, model = document["windows"], document["profile"], document["model"]
    steps = sum(window["micro_steps"] for window in windows)
    tokens = np.mean([window["tokens_per_rank"] for window in windows])
    stages, ep = document["setting"]["pipeline_stages"], document["cluster"]["ep"]
    piped = "" if stages == 1 else f" in {stages} pipeline stages of {ep} ranks each"
    yield (
        f"Predicted, not measured on a cluster: {plural(len(windows), 'window')}, {plural(steps, 'micro-step')} in "
        f"all, with {tokens:,.0f} tokens per rank in each, {plural(model['layers'], 'layer')} of {model['experts']} "
        f"experts, top-{model['top_k']}, {plural(windows[0]['groups'], 'EP group')}{piped}."
    )
    yield (
        f"Expert compute: {profile['device']}, {profile['kind']}. Shares are of the time in expert layers: compute, "
        "all-to-all, and what moving experts and planning cost."
    )
    # Why more can be recovered than is lost, where that is so.
    after, balanced = compared.after, compared.balanced
    if after is not None and balanced is not None and after["expert_s"] < balanced["expert_s"]:
        ours, level = after["seconds"], balanced["seconds"]
        sent, level_sent = (p["all_to_all_inside"] + p["all_to_all_across"] for p in (ours, level))
        computes_less = ours["compute"] < level["compute"]
        yield beyond_balanced(after["policy"], sends_less=sent < level_sent, computes_less=computes_less)


def _figures(document: Document, compared: ComparedPolicies) -> Iterator[Figure]:
    """Yield the key numbers, as far as the policies for them were simulated."""
    static, after, balanced = compared.static, compared.after, compared.balanced
    if static is not None and balanced is not None:
        share, now, level = compared.share(balanced), static["expert_s"], balanced["expert_s"]
        text = f"{seconds(now - level)} of {seconds(now)} per step"
        if share <= 0:
            text = f"balanced takes {seconds(level)}, static {seconds(now)} per step"
        yield Figure(label="Lost", value=percent(max(0.0, share)), text=text)
    if after is None:
        return
    if static is not None:
        share = compared.share(after)
        if share < 0:
            text = "more time in expert layers with the plan"
            yield Figure(label="Slower by", value=percent(-share), text=text)
        else:
            text = f"expert layers {ratio(static['expert_s'] / (after['expert_s'] or 1.0))} times as fast"
            yield Figure(label="Saved by a plan", value=percent(share), text=text)
    # Means over all micro-steps; each is the mean over as many layers.
    before_M, after_M = (
        np.concatenate([window[which]["skew_M"] for window in windows])
        for which, windows in (("before", document["windows"]), ("after", after["windows"]))
    )
    levelled = f"{ratio(float(before_M.mean()))} to {ratio(float(after_M.mean()))}"
    yield Figure(label="Mean skew", value=levelled, text="busiest rank / mean rank")
    # What moving experts costs, with planning named apart where training waits for it.
    spent, label, text = after["seconds"], "Cost of moving", "exposed, of expert time"
    if spent["planning"]:
        planning, moving = (s / after["expert_s"] for s in (spent["planning"], sum(spent[name] for name in MOVED)))
        label, text = "Planning and moving", f"planning {percent(planning)}, moving {percent(moving)}"
    yield Figure(label=label, value=percent(after["exposed_share"]), text=text)
    if static is not None:
        text, longer = f"{percent(static['expert_share'])} of training is experts", after["step_s"] / static["step_s"]
        if longer > 1:
            yield Figure(label="Whole step longer by", value=percent(longer - 1), text=text)
        else:
            speed = f"{static['step_s'] / after['step_s']:.2f} x"
            yield Figure(label="Whole step", value=speed, text=f"as fast; {text}")


def _missing(document: Document, compared: ComparedPolicies) -> Iterator[Missing]:
    if compared.static is None or compared.after is None or compared.balanced is None:
        text = "The comparison needs doing nothing, a plan, and even ranks:"
        yield Missing(title="Policies", text=text, command=f"{COMMAND} --policies static,equipoise,balanced")
    sweep = document["sweep"] or {"points": [], "break_even": None}
    for part, found, option in (
        ("Sweep", sweep["points"], "--sweep ep=8,16 slots=0,1,2"),
        ("Break-even", sweep["break_even"], "--break-even"),
    ):
        if not found:
            # As the notes say why, or else because nobody asked.
            note = next((note for note in document["notes"] if note.startswith(f"{part} left out:")), None)
            command = f"{COMMAND} {option}" if note is None else ""
            yield Missing(title=part, text=note or "Not asked for:", command=command)
    if not any(policy["timeline"] for policy in document["policies"]):
        text = "This result was written without one:"
        yield Missing(title="Timeline", text=text, command=f"{COMMAND} -o result.json")


def _sections(document: Document, views: dict[str, Document], after: Document | None) -> Iterator[Chart | Listing]:
    """Yield everything the document holds, in the order of the page; `views`: before and after, if they exist."""
    by_step, by_layer = _rank_loads(document, after)
    # What people ask for first; what follows the first five is folded.
    yield _skew(document, after)
    yield _policies(document)
    yield by_step
    if any(policy["timeline"] for policy in views.values()):
        yield _timeline(document, views)
    yield _memory(document, views)
    yield by_layer
    yield _traffic(document, views)
    yield _experts(document)
    yield _rank_seconds(document, views)
    if document["sweep"] is not None:
        yield from _sweep(document["sweep"])
    if after is not None and any(use["bytes"] for window in after["windows"] for use in window["paths"]):
        yield _paths(document, after)


def _skew(document: Document, after: Document | None) -> Chart:
    series = {"before": [float(v) for window in document["windows"] for v in window["before"]["skew_M"]]}
    text = f"Before, the busiest rank has {ratios(series['before'])} times the mean load"
    if after is not None:
        series["after"] = [float(v) for window in after["windows"] for v in window["after"]["skew_M"]]
        text += f"; with {after['policy']} {ratios(series['after'])}"
    caption = f"{text}. Each point is the mean over layers of one micro-step's skew."
    return charts.skew_over_micro_steps(series, windows=_windows(document), caption=caption)


def _policies(document: Document) -> Chart:
    """Draw the seconds of every policy; the caption compares the fastest plan with static and balanced."""
    shown = (*EXPERT_PARTS, *OTHER_PARTS)
    named = {p["policy"]: p for p in document["policies"]}
    bars = {name: {LABELS.get(part, part): p["seconds"][part] for part in shown} for name, p in named.items()}
    # Each view says its own speed-up: a step is more than its expert layers.
    texts = tuple(
        [name if p[speed] is None else f"{name}  {p[speed]:.2f} x" for name, p in named.items()]
        for speed in ("speedup", "step_speedup")
    )
    static, balanced = named.pop("static", None), named.pop("balanced", None)
    plan = min(named.values(), key=lambda p: p["expert_s"], default=None)
    said = []
    if plan is not None:
        said.append(_against(plan, static))
    elif static is not None:
        said.append(f"Expert layers take {seconds(static['expert_s'])} with static")
    if balanced is not None:
        said.append(f"with equally many rows on every rank (balanced) they would take {seconds(balanced['expert_s'])}")
    text = "; ".join(said)
    defined = (name for name in DEFINED if any(p["policy"].startswith(name) for p in document["policies"]))
    return charts.cost_parts(
        bars,
        title="Policies by cost part",
        caption=f"{text[0].upper()}{text[1:]}. Transfers count only if nothing hides them.",
        terms=("exposed", *defined),
        focus=[LABELS.get(part, part) for part in EXPERT_PARTS],
        texts=(texts[0], texts[1]),
    )


def _against(plan: Document, static: Document | None) -> str:
    """Compare the fastest plan's seconds with static's and balanced's, as far as they were simulated."""
    text = f"The fastest plan is {plan['policy']} with {seconds(plan['expert_s'])} in expert layers"
    speeds = []
    if static is not None and plan["expert_s"] >= static["expert_s"]:
        now = f"No plan is faster than static, which takes {seconds(static['expert_s'])} in expert layers"
        text = f"{now}: the fastest one, {plan['policy']}, takes {seconds(plan['expert_s'])}"
    elif static is not None:
        speeds.append(f"{plan['speedup']:.2f} times static's speed")
    if plan["of_balanced"] is not None:
        speeds.append(f"{percent(plan['of_balanced'])} of balanced's speed")
    return f"{text}, {' and '.join(speeds)}" if speeds else text


def _rank_loads(document: Document, after: Document | None) -> Iterator[Chart]:
    """Load of each rank in each micro-step of the step, and in each layer of the shown window."""
    window = document["shown"]["window"]
    named = [("before", document["windows"])] + ([("after", after["windows"])] if after is not None else [])
    by_step = {
        name: np.concatenate([np.array(w[name]["rank_load_MR"], dtype=float) for w in windows])
        for name, windows in named
    }
    by_layer = {name: np.array(windows[window][name]["rank_load_LR"], dtype=float) for name, windows in named}
    skew = float(np.concatenate([w["before"]["skew_M"] for w in document["windows"]]).mean())
    yield charts.rank_heat_map(
        by_step,
        skew=skew,
        caption="Rows of a rank / rows of the mean rank, all layers of a micro-step added up; single layers are more "
        f"uneven. No colour means average, the strongest colour the step's mean skew or more.{_stages_added(document)}",
    )
    yield charts.layer_heat_map(
        by_layer,
        layers=document["layer_numbers"],
        skew=skew,
        caption=f"Rows of a rank / rows of the mean rank, all micro-steps of {_windows(document)[window][0]} added up: "
        "layers are uneven in different ways.",
    )


def _experts(document: Document) -> Chart:
    window = document["shown"]["window"]
    load_LE = np.array(document["windows"][window]["load_LE"], dtype=float)
    hottest = int(load_LE.max(axis=1).argmax()) if load_LE.size else 0
    share = load_LE[hottest].max() / max(load_LE[hottest].sum(), 1)
    number = document["layer_numbers"][hottest]
    return charts.expert_heat_map(
        {"load": load_LE},
        layers=document["layer_numbers"],
        caption=f"Rows of an expert / rows of the layer's mean expert, {_windows(document)[window][0]}. The hottest "
        f"expert, {int(load_LE[hottest].argmax())} of layer {number}, takes {percent(share)} of its layer's rows.",
    )


def _rank_seconds(document: Document, views: dict[str, Document]) -> Chart:
    group, drawn, waits = document["shown"]["group"], {}, []
    for view, policy in views.items():
        kinds = {
            LABELS.get(part, part): np.sum([window["ranks"][part][group] for window in policy["windows"]], axis=0)
            for part in RANK_PARTS
        }
        ranks = range(len(kinds["compute"]))
        drawn[view] = {str(r): {part: float(values[r]) for part, values in kinds.items()} for r in ranks}
        whole = max(sum(sum(parts.values()) for parts in drawn[view].values()), 1e-12)
        waits.append(f"{percent(sum(parts['waiting'] for parts in drawn[view].values()) / whole)} {view}")
    planning = " and planning" if any(policy["seconds"]["planning"] for policy in views.values()) else ""
    return charts.rank_seconds(
        drawn,
        caption=f"Ranks of group {group} wait {' and '.join(waits)} of their time: for the busiest rank, and for "
        f"transfers{planning} that nothing hides.{_stages_counted(document)}",
    )


def _timeline(document: Document, views: dict[str, Document]) -> Chart:
    """Draw the first layers of the first pipeline stage."""
    layers, setting = document["model"]["layers"], document["setting"]
    stages = setting["pipeline_stages"]
    drawn = min(setting["timeline_layers"], layers // stages)
    held = f"First {drawn} of {layers} layers"
    if drawn == layers:
        held = "The only layer" if layers == 1 else f"All {layers} layers"
    held += "" if stages == 1 else f" (pipeline stage 0 of {stages})"
    events = {policy["policy"]: policy["timeline"] for policy in views.values() if policy["timeline"]}
    ends = [f"{seconds(max(e['end_s'] for e in found))} with {policy}" for policy, found in events.items()]
    place = f"{_shown_micro_step(document)}, group {document['shown']['group']}"
    caption = f"{held} of {place}: {', '.join(ends)}. Drag to zoom, double-click to go back."
    return charts.timeline(events, caption=caption)


def _traffic(document: Document, views: dict[str, Document]) -> Chart:
    window = document["shown"]["window"]
    found = {view: np.array(policy["windows"][window]["byte_RR"], dtype=float) for view, policy in views.items()}
    sums = [f"{num_bytes(float(byte_RR.sum()))} {view}" for view, byte_RR in found.items()]
    place = f"{_shown_micro_step(document).capitalize()}, group {document['shown']['group']}"
    caption = f"{place}, all layers and exchanges: {', '.join(sums)}.{_stages_added(document)}"
    return charts.traffic(found, caption=caption)


def _memory(document: Document, views: dict[str, Document]) -> Chart:
    held, setting = {view: policy["memory"] for view, policy in views.items()}, document["setting"]
    limit = max(memory["limit_bytes"] for memory in held.values())
    pages = {view: m.get("row_page_bytes", 0) for view, m in held.items()}
    fixed = {view: m["experts_bytes"] + m["replicas_bytes"] + pages[view] for view, m in held.items()}
    peaks = {view: fixed[view] + max(m["received_bytes_X"]) for view, m in held.items()}
    text = ", ".join(f"{num_bytes(peak)} {view}" for view, peak in peaks.items())
    text += f", of {num_bytes(limit)}" if limit else ""
    return charts.memory(
        {
            view: {
                "expert weights": [m["experts_bytes"]] * len(m["received_bytes_X"]),
                "replica slots": [m["replicas_bytes"]] * len(m["received_bytes_X"]),
                "rows read in place": [pages[view]] * len(m["received_bytes_X"]),
                "received rows": m["received_bytes_X"],
            }
            for view, m in held.items()
        },
        limit_bytes=limit or None,
        caption=f"Memory of the fullest rank: {text}. "
        f"{charts.activations_text(setting['activations'], stages=setting['pipeline_stages'])} Attention, optimizer "
        f"and the rest are not counted.{_stages_counted(document)}",
    )


def _sweep(found: Document) -> Iterator[Chart]:
    points = found["points"]
    if points:
        best = max(points, key=lambda p: p["saved_share"])
        place = f"at EP {best['ep']} with {plural(best['slots'], 'slot')} and {best['tokens']:,} tokens per rank"
        caption = f"At most {percent(best['saved_share'])}, {place}."
        if best["saved_share"] < 0:
            caption = f"A plan takes more time everywhere, {percent(-best['saved_share'])} at least, {place}."
        yield charts.sweep(points, axes=found["axes"], caption=caption)
    if found["break_even"] is not None:
        curves = found["break_even"]["curves"]
        starts = ["never with the numbers tried" if c["tokens"] is None else f"from {c['tokens']:,} on" for c in curves]
        text = [f"skew {ratio(c['skew'])}: {start}" for c, start in zip(curves, starts, strict=True)]
        worth = found["break_even"]["worth"]
        caption = f"Tokens per rank and micro-step from which on a plan saves at least {percent(worth)}. "
        yield charts.break_even(curves, worth=worth, caption=f"{caption}{'; '.join(text).capitalize()}.")


def _paths(document: Document, after: Document) -> Listing:
    rows = [
        (name, use["path"], *(round(use[k], 6) for k in ("moved_s", "hidden_s", "exposed_s")), num_bytes(use["bytes"]))
        for (name, _), window in zip(_windows(document), after["windows"], strict=True)
        for use in window["paths"]
        if use["bytes"]
    ]
    exposed, moved = (sum(u[k] for w in after["windows"] for u in w["paths"]) for k in ("exposed_s", "moved_s"))
    return Listing(
        name="paths",
        title="Transfers by path",
        caption=f"Computation hides {percent(1 - exposed / moved if moved else 1.0)} of the time that transfers take "
        f"({after['policy']}).",
        data=Table(columns=("window", "path", "moved, s", "hidden, s", "exposed, s", "bytes"), rows=tuple(rows)),
        terms=("peer", "host", "return", "edges", "publish", "collect", "moved", "hidden", "exposed"),
    )


def _windows(document: Document) -> list[tuple[str, int]]:
    """Return name and micro-steps of each window: 'log-prob', 'update 1', 'update 2'."""
    stages = [STAGE_WORDS[window["stage"]] for window in document["windows"]]
    names = []
    for i, stage in enumerate(stages):
        names.append(stage if stages.count(stage) == 1 else f"{stage} {stages[: i + 1].count(stage)}")
    return [(name, window["micro_steps"]) for name, window in zip(names, document["windows"], strict=True)]


def _shown_micro_step(document: Document) -> str:
    """Name the micro-step whose byte matrix and timeline the document holds: 'micro-step 0 of log-prob'."""
    shown = document["shown"]
    return f"micro-step {shown['micro_step']} of {_windows(document)[shown['window']][0]}"


def _stages_added(document: Document) -> str:
    """Say what a rank of the EP group means if there are pipeline stages."""
    stages = document["setting"]["pipeline_stages"]
    return "" if stages == 1 else f" Rank r is rank r of each of the {stages} pipeline stages, added up."


def _stages_counted(document: Document) -> str:
    """Say how ranks are counted if each pipeline stage has its own."""
    stages, ep = document["setting"]["pipeline_stages"], document["cluster"]["ep"]
    return "" if stages == 1 else f" Ranks are counted stage by stage, {ep} to each of {stages} pipeline stages."

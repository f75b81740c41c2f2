"""The page of a simulation: a document of format "equipoise-simulation-1" (its fields: `equipoise/sim/result.py`).

Chooses what is said; `simulation_charts.py` chooses what is drawn. Takes every figure from the document.

Which policy is "after": `equipoise` if it was simulated, else the fastest that is neither `static` nor `balanced`.

Invariants (asserted by the tests):
1. Shares are of static's `expert_s`: lost is static less balanced, recovered is static less after. Where balanced takes
   longer than static, nothing is lost, and the page says that balanced ranks would not be faster.
2. Why after takes less time than balanced is said by the parts, compute and all-to-all, that take it less.
3. A policy that was not simulated is never spoken of, and a part it would give is named as missing.
4. The machine is all of it: every pipeline stage and EP group has its own ranks; its links are named where the document
   has both.
5. A plan that takes longer than static is said to, and no figure of it reads as a gain; planning is charged apart from
   moving.
6. A part that was asked for and left out is missing for the reason that the document's notes give.
7. A document without policies, or with bars of an unknown lane, is refused in words that name them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from equipoise.report.charts import (
    activations_words,
    break_even,
    check_lanes,
    cost_parts,
    expert_heat_map,
    layer_heat_map,
    memory,
    rank_heat_map,
    rank_seconds,
    skew_over_micro_steps,
    sweep,
    timeline,
    traffic,
)
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
    plural,
    ratio,
    seconds,
)
from equipoise.sim.result import WORTH

# Which charts a simulation's document has, with what their captions say.
#
# Takes arrays and seconds from the document and hands them to the charts. Knows the fields of the document
# (`equipoise/sim/result.py`); does not know how a chart is drawn.


Document = dict[str, Any]
Policy = dict[str, Any]

EXPERT_PARTS = {
    "compute": "compute",
    "all_to_all_inside": "all-to-all inside",
    "all_to_all_across": "all-to-all across",
    "pull": "pull",
    "return": "return",
    "publish": "publish",
    "collect": "collect",
    "planning": "planning",
}
"""Parts of the document that balance changes, by the words they are drawn with."""
OTHER_PARTS = {"attention": "attention", "bubble": "bubble", "rollout": "rollout", "other": "other"}
RANK_PARTS = {
    "compute": "compute",
    "attention": "attention",
    "all_to_all": "all-to-all",
    "edges": "edges",
    "wait": "waiting",
    "bubble": "bubble",
}


def draw_simulation(document: Document, *, before: Policy | None, after: Policy | None) -> tuple[Chart | Listing, ...]:
    """Draw everything the document holds.

    Args:
        document: of format "equipoise-simulation-1"
        before: its policy `static`, if there
        after: its policy that is shown as the plan, if there
    """
    named = {"before": before, "after": after}
    views = {name: policy for name, policy in named.items() if policy is not None}
    if not views:
        (first, *_) = document["policies"]
        views = {first["policy"]: first}
    return tuple(_charts(document, views, after))


def _charts(document: Document, views: dict[str, Policy], after: Policy | None) -> Iterator[Chart | Listing]:
    yield _skew(document, after)
    yield _policies(document)
    yield _ranks_by_micro_step(document, after)
    yield _ranks_by_layer(document, after)
    yield _traffic(document, views)
    yield _experts(document)
    yield _rank_seconds(document, views)
    if any(policy["timeline"] for policy in views.values()):
        yield _timeline(document, views)
    yield _memory(document, views)
    if document["sweep"] is not None:
        yield from _sweep(document["sweep"])
    if after is not None and any(use["bytes"] for window in after["windows"] for use in window["paths"]):
        yield _paths(document, after)


def _skew(document: Document, after: Policy | None) -> Chart:
    series = {"before": _joined(document["windows"], "before", "skew_M")}
    words = f"Before, the busiest rank has {ratio(min(series['before']))} to {ratio(max(series['before']))} times the "
    words += "mean load"
    if after is not None:
        series["after"] = _joined(after["windows"], "after", "skew_M")
        words += f"; with {after['policy']} {ratio(min(series['after']))} to {ratio(max(series['after']))}"
    caption = f"{words}. Each point is the mean over layers of one micro-step's skew."
    return skew_over_micro_steps(series, windows=_windows(document), caption=caption)


def _policies(document: Document) -> Chart:
    parts = EXPERT_PARTS | OTHER_PARTS
    bars = {_bar(p): {parts[k]: p["seconds"][k] for k in parts} for p in document["policies"]}
    return cost_parts(
        bars,
        title="Policies by cost part",
        caption=f"{_fastest(document['policies'])} Transfers count only as far as nothing hides them.",
        terms=("exposed", *_defined(document)),
        focus=tuple(EXPERT_PARTS.values()),
    )


def _fastest(policies: list[Policy]) -> str:
    """Which plan takes least time, beside doing nothing and beside even ranks, neither of which is a plan."""
    named = {p["policy"]: p for p in policies}
    static, balanced = named.pop("static", None), named.pop("balanced", None)
    plan = min(named.values(), key=lambda p: p["expert_s"], default=None)
    words = []
    if plan is not None:
        words.append(_against(plan, static))
    elif static is not None:
        words.append(f"Expert layers take {seconds(static['expert_s'])} with static")
    if balanced is not None:
        words.append(f"balanced, which is even ranks and no plan, would take {seconds(balanced['expert_s'])}")
    text = "; ".join(words)
    return f"{text[0].upper()}{text[1:]}."


def _against(plan: Policy, static: Policy | None) -> str:
    """The fastest plan's seconds, against doing nothing and balanced as far as they were simulated."""
    is_no_faster = static is not None and plan["expert_s"] >= static["expert_s"]
    words = f"The fastest plan is {plan['policy']} with {seconds(plan['expert_s'])} in expert layers"
    if static is not None and is_no_faster:
        now = f"No plan is faster than static, which takes {seconds(static['expert_s'])} in expert layers"
        words = f"{now}: the fastest one, {plan['policy']}, takes {seconds(plan['expert_s'])}"
    speeds = [] if static is None or is_no_faster else [f"{plan['speedup']:.2f} times static's speed"]
    speeds += [] if plan["of_balanced"] is None else [f"{percent(plan['of_balanced'])} of balanced's speed"]
    return f"{words}, {' and '.join(speeds)}" if speeds else words


def _defined(document: Document) -> tuple[str, ...]:
    """Policies of the document that have a definition, without their variants."""
    known = ("static", "eplb-history", "eplb-oracle", "lplb", "reactive", "equipoise", "balanced")
    return tuple(name for name in known if any(p["policy"].startswith(name) for p in document["policies"]))


def _bar(policy: Policy) -> str:
    speedup = policy["speedup"]
    return policy["policy"] if speedup is None else f"{policy['policy']}  {speedup:.2f} x"


def _ranks_by_micro_step(document: Document, after: Policy | None) -> Chart:
    loads = {"before": _stacked(document["windows"], "before", "rank_load_MR")}
    if after is not None:
        loads["after"] = _stacked(after["windows"], "after", "rank_load_MR")
    caption = "Rows over the mean rank's, all layers of a micro-step added up; single layers are more uneven than this."
    words = f"{caption} A level rank has the colour of the ground.{_stages_added(document)}"
    return rank_heat_map(loads, caption=words)


def _ranks_by_layer(document: Document, after: Policy | None) -> Chart:
    window = document["shown"]["window"]
    loads = {"before": np.array(document["windows"][window]["before"]["rank_load_LR"], dtype=float)}
    if after is not None:
        loads["after"] = np.array(after["windows"][window]["after"]["rank_load_LR"], dtype=float)
    name = _windows(document)[window][0]
    words = f"Rows over the mean rank's, all micro-steps of {name} added up: layers are uneven in different ways."
    return layer_heat_map(loads, layers=document["layer_numbers"], caption=words)


def _experts(document: Document) -> Chart:
    window = document["shown"]["window"]
    load_LE = np.array(document["windows"][window]["load_LE"], dtype=float)
    hottest = int(load_LE.max(axis=1).argmax()) if load_LE.size else 0
    share = load_LE[hottest].max() / max(load_LE[hottest].sum(), 1)
    number = document["layer_numbers"][hottest]
    return expert_heat_map(
        {"load": load_LE},
        layers=document["layer_numbers"],
        caption=f"Rows over the mean expert of the layer, {_windows(document)[window][0]}. The hottest expert, "
        f"{int(load_LE[hottest].argmax())} of layer {number}, takes {percent(share)} of its layer's rows.",
    )


def _rank_seconds(document: Document, views: dict[str, Policy]) -> Chart:
    group = document["shown"]["group"]
    drawn = {view: _by_rank(policy, group) for view, policy in views.items()}
    waits, has_planning = [], any(policy["seconds"]["planning"] for policy in views.values())
    for view, ranks in drawn.items():
        waiting = sum(parts["waiting"] for parts in ranks.values())
        waits.append(f"{percent(waiting / max(sum(sum(p.values()) for p in ranks.values()), 1e-12))} {view}")
    return rank_seconds(
        drawn,
        caption=f"Ranks wait {' and '.join(waits)}, of the time of group {group}'s ranks together: for the busiest "
        f"one, and for transfers{' and planning' if has_planning else ''} that nothing hides."
        f"{_stages_counted(document)}",
    )


def _by_rank(policy: Policy, group: int) -> dict[str, dict[str, float]]:
    total = {
        words: np.sum([window["ranks"][name][group] for window in policy["windows"]], axis=0)
        for name, words in RANK_PARTS.items()
    }
    return {str(r): {w: float(values[r]) for w, values in total.items()} for r in range(len(total["compute"]))}


def _timeline(document: Document, views: dict[str, Policy]) -> Chart:
    shown = document["shown"]
    events = {policy["policy"]: policy["timeline"] for policy in views.values() if policy["timeline"]}
    ends = [f"{seconds(max(e['end_s'] for e in found))} with {policy}" for policy, found in events.items()]
    caption = f"{_drawn_layers(document)} of {_shown_micro_step(document)}, group {shown['group']}: {', '.join(ends)}."
    return timeline(events, caption=f"{caption} Drag to zoom, double-click to go back.")


def _drawn_layers(document: Document) -> str:
    """Which layers the timeline holds: the first ones of the first pipeline stage."""
    layers, setting = document["model"]["layers"], document["setting"]
    stages = setting["pipeline_stages"]
    drawn = min(setting["timeline_layers"], layers // stages)
    words = f"First {drawn} of {layers} layers"
    if drawn == layers:
        words = "The only layer" if layers == 1 else f"All {layers} layers"
    return words if stages == 1 else f"{words} (pipeline stage 0 of {stages})"


def _shown_micro_step(document: Document) -> str:
    """The micro-step whose byte matrix and timeline the document holds: 'micro-step 0 of recompute'."""
    shown = document["shown"]
    return f"micro-step {shown['micro_step']} of {_windows(document)[shown['window']][0]}"


def _traffic(document: Document, views: dict[str, Policy]) -> Chart:
    window = document["shown"]["window"]
    found = {view: np.array(policy["windows"][window]["byte_RR"], dtype=float) for view, policy in views.items()}
    sums = [f"{num_bytes(float(byte_RR.sum()))} {view}" for view, byte_RR in found.items()]
    place = _shown_micro_step(document).capitalize()
    caption = f"{place}, group {document['shown']['group']}, all layers and exchanges: {', '.join(sums)}."
    return traffic(found, caption=f"{caption}{_stages_added(document)}")


def _stages_added(document: Document) -> str:
    """What a rank of the EP group stands for, where there are pipeline stages."""
    stages = document["setting"]["pipeline_stages"]
    return "" if stages == 1 else f" Rank r stands for rank r of each of the {stages} pipeline stages, added up."


def _stages_counted(document: Document) -> str:
    """How ranks are counted where each pipeline stage has its own."""
    stages, ep = document["setting"]["pipeline_stages"], document["cluster"]["ep"]
    return "" if stages == 1 else f" Ranks are counted stage by stage, {ep} to each of {stages} pipeline stages."


def _memory(document: Document, views: dict[str, Policy]) -> Chart:
    held, setting = {view: policy["memory"] for view, policy in views.items()}, document["setting"]
    limit = max(memory_["limit_bytes"] for memory_ in held.values())
    peaks = {view: m["experts_bytes"] + m["replicas_bytes"] + max(m["received_bytes_X"]) for view, m in held.items()}
    words = ", ".join(f"{num_bytes(peak)} {view}" for view, peak in peaks.items())
    words += f", of {num_bytes(limit)} that it has" if limit else ""
    return memory(
        {
            view: {
                "expert weights": [m["experts_bytes"]] * len(m["received_bytes_X"]),
                "replica slots": [m["replicas_bytes"]] * len(m["received_bytes_X"]),
                "received rows": m["received_bytes_X"],
            }
            for view, m in held.items()
        },
        limit_bytes=limit or None,
        caption=f"What expert parallelism takes of a rank at worst: {words}. "
        f"{activations_words(setting['activations'], stages=setting['pipeline_stages'])} Attention, optimizer and the "
        f"rest are not counted.{_stages_counted(document)}",
    )


def _sweep(found: Document) -> Iterator[Chart]:
    points = found["points"]
    if points:
        yield sweep(points, axes=found["axes"], caption=_best(points))
    if found["break_even"] is not None:
        curves = found["break_even"]["curves"]
        starts = ["never with those tried" if c["tokens"] is None else f"from {c['tokens']:,} on" for c in curves]
        words = [f"skew {ratio(c['skew'])}: {start}" for c, start in zip(curves, starts, strict=True)]
        worth = found["break_even"]["worth"]
        caption = f"Tokens per rank and micro-step from which on a plan saves at least {percent(worth)}. "
        yield break_even(curves, worth=worth, caption=f"{caption}{'; '.join(words).capitalize()}.")


def _best(points: list[Document]) -> str:
    """Where a plan saves most, or that it saves nowhere."""
    best = max(points, key=lambda p: p["saved_share"])
    place = f"at EP {best['ep']} with {plural(best['slots'], 'slot')} and {best['tokens']:,} tokens per rank"
    if best["saved_share"] < 0:
        return f"A plan takes more time everywhere, {percent(-best['saved_share'])} at least, {place}."
    return f"At most {percent(best['saved_share'])}, {place}."


def _paths(document: Document, after: Policy) -> Listing:
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
    """Words and micro-steps of each window: 'recompute', 'update 1', 'update 2'."""
    stages = [window["stage"] for window in document["windows"]]
    names = []
    for i, stage in enumerate(stages):
        names.append(stage if stages.count(stage) == 1 else f"{stage} {stages[: i + 1].count(stage)}")
    return [(name, window["micro_steps"]) for name, window in zip(names, document["windows"], strict=True)]


def _joined(windows: list[Document], which: str, name: str) -> list[float]:
    return [float(value) for window in windows for value in window[which][name]]


def _stacked(windows: list[Document], which: str, name: str) -> np.ndarray:
    return np.concatenate([np.array(window[which][name], dtype=float) for window in windows])


FORMAT = "equipoise-simulation-1"
MOVING = ("pull", "return", "publish", "collect")
"""Parts of the seconds that are transfers of experts."""
COMMAND = "equipoise simulate ROUTES_OR_LOADS"
"""What makes a result again, with an option more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """The policies that the page speaks of; None where one was not simulated."""

    static: Document | None
    after: Document | None
    balanced: Document | None

    @classmethod
    def of(cls, document: Document) -> "Compared":
        """Find them among the document's policies."""
        found = {policy["policy"]: policy for policy in document["policies"]}
        static, balanced = found.pop("static", None), found.pop("balanced", None)
        after = found.get("equipoise") or min(found.values(), key=lambda policy: policy["expert_s"], default=None)
        return cls(static=static, after=after, balanced=balanced)

    def share(self, policy: Document) -> float:
        """What a policy would give back of static's seconds in expert layers."""
        assert self.static is not None, "only asked for where static was simulated"
        return 1 - policy["expert_s"] / self.static["expert_s"] if self.static["expert_s"] else 0.0


def simulation_page(document: Document, *, title: str) -> Page:
    """Make the page of a simulation."""
    _check(document)
    compared = Compared.of(document)
    return Page(
        title=title,
        kind=f"Simulation of one step, {document['model']['name']} on {_machine(document)}",
        answer=_answer(compared),
        conditions=(*_conditions(document), *_beyond_balanced(compared)),
        notes=tuple(document["notes"]),
        figures=_figures(document, compared),
        sections=draw_simulation(document, before=compared.static, after=compared.after),
        missing=_missing(document, compared),
        document=document,
    )


def _check(document: Document) -> None:
    """Refuse what no simulation writes and what no chart would notice, in words that name the field."""
    if not document["policies"]:
        raise ValueError("`policies` is empty, a simulation has at least one")
    for policy in document["policies"]:
        check_lanes(policy["timeline"], of=f"policy {policy['policy']}")


def _machine(document: Document) -> str:
    """Nodes and ranks of all pipeline stages and EP groups; a result's cluster may be as large as one group alone."""
    cluster, stages = document["cluster"], document["setting"]["pipeline_stages"]
    groups, per_node = document["windows"][0]["groups"], cluster["ranks_per_node"]
    ranks = stages * groups * cluster["ep"]
    nodes = max(cluster["nodes"], -(-ranks // per_node))
    parts = [f"{plural(nodes, 'node')} of {per_node} {cluster['name'].upper()}", f"EP {cluster['ep']}"]
    parts += [f"{groups} EP groups"] if groups > 1 else []
    parts += [f"{stages} pipeline stages"] if stages > 1 else []
    parts += [f"{ranks} ranks"] if stages * groups > 1 else []
    return ", ".join([*parts, *_links(cluster)])


def _links(cluster: Document) -> tuple[str, ...]:
    """Rates of a rank's links, one direction; none where the document does not have both."""
    network, nvlink = cluster.get("network_bytes_per_s"), cluster.get("nvlink_bytes_per_s")
    if network is None or nvlink is None:
        return ()
    return (f"{network * 8 / 1e9:,.4g} Gb/s network and {nvlink / 1e9:,.4g} GB/s NVLink per rank",)


def _answer(compared: Compared) -> str:
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
    saved = compared.share(after)
    # Without balanced nothing is known to be lost but what the plan gives back.
    gain = gained(saved, lost=saved if balanced is None else compared.share(balanced))
    words = f"{now}; {_plan(after)} would {gain}"
    return f"{words}." if saved >= WORTH else f"{words}, which is not worth it here."


def _plan(after: Document) -> str:
    name = "a plan" if after["policy"] == "equipoise" else after["policy"]
    if not after["slots"]:
        return f"{name} with placement alone"
    taken = num_bytes(after["memory"]["replicas_bytes"])
    return f"{name} with {plural(after['slots'], 'replica slot')} ({taken} per GPU)"


def _conditions(document: Document) -> tuple[str, ...]:
    windows, profile, model = document["windows"], document["profile"], document["model"]
    steps = sum(window["micro_steps"] for window in windows)
    tokens = np.mean([window["tokens_per_rank"] for window in windows])
    groups = windows[0]["groups"]
    return (
        f"Predicted, not measured on a cluster: {plural(len(windows), 'window')}, {plural(steps, 'micro-step')} in "
        f"all, with {tokens:,.0f} tokens per rank in each, {plural(model['layers'], 'layer')} of {model['experts']} "
        f"experts, top-{model['top_k']}, {plural(groups, 'EP group')}{_stages(document)}.",
        f"Expert compute: {profile['device']}, {profile['kind']}. Shares are of the time in expert layers: compute, "
        "all-to-all, and what moving experts and planning cost.",
    )


def _stages(document: Document) -> str:
    stages, ep = document["setting"]["pipeline_stages"], document["cluster"]["ep"]
    return "" if stages == 1 else f" in {stages} pipeline stages of {ep} ranks each"


def _beyond_balanced(compared: Compared) -> tuple[str, ...]:
    """Why more can be recovered than is lost, where that is so."""
    after, balanced = compared.after, compared.balanced
    if after is None or balanced is None or after["expert_s"] >= balanced["expert_s"]:
        return ()
    ours, level = after["seconds"], balanced["seconds"]
    sent, level_sent = (sum(parts[f"all_to_all_{way}"] for way in ("inside", "across")) for parts in (ours, level))
    computes_less = ours["compute"] < level["compute"]
    return (beyond_balanced(after["policy"], sends_less=sent < level_sent, computes_less=computes_less),)


def _figures(document: Document, compared: Compared) -> tuple[Figure, ...]:
    """Label, value and words of the key numbers, as far as the policies for them were simulated."""
    static, after, balanced = compared.static, compared.after, compared.balanced
    found = []
    if static is not None and balanced is not None:
        found.append(_lost_figure(compared.share(balanced), static=static["expert_s"], balanced=balanced["expert_s"]))
    if static is not None and after is not None:
        found.append(_saved_figure(compared.share(after), of_balanced=after["of_balanced"]))
    if after is not None:
        levelled = _mean_skew(document["windows"], "before"), _mean_skew(after["windows"], "after")
        found.append(("Mean skew", " to ".join(map(ratio, levelled)), "busiest rank / mean rank"))
        found.append(_cost_figure(after))
    if static is not None and after is not None:
        found.append(_step_figure(static, after))
    return tuple(Figure(label=label, value=value, words=words) for label, value, words in found)


def _saved_figure(share: float, *, of_balanced: float | None) -> tuple[str, str, str]:
    """What the plan gives back of static's seconds, or takes beyond them."""
    if share < 0:
        return "Slower by", percent(-share), "more time in expert layers with the plan"
    words = "of the time in expert layers" if of_balanced is None else f"{percent(of_balanced)} of balanced"
    return "Recovered", percent(share), words


def _cost_figure(after: Document) -> tuple[str, str, str]:
    """What moving experts costs, with planning named apart where training waits for it."""
    spent, whole = after["seconds"], after["expert_s"]
    if not spent["planning"]:
        return "Cost of moving", percent(after["exposed_share"]), "exposed, of expert time"
    moving = sum(spent[name] for name in MOVING)
    words = f"planning {percent(spent['planning'] / whole)}, moving {percent(moving / whole)}"
    return "Planning and moving", percent(after["exposed_share"]), words


def _step_figure(static: Document, after: Document) -> tuple[str, str, str]:
    """How much faster the whole step is, or how much longer it takes."""
    words = f"{percent(static['expert_share'])} of training is experts"
    longer = after["step_s"] / static["step_s"] - 1
    if longer > 0:
        return "Whole step longer by", percent(longer), words
    return "Whole step", f"{static['step_s'] / after['step_s']:.2f} x", f"as fast; {words}"


def _lost_figure(share: float, *, static: float, balanced: float) -> tuple[str, str, str]:
    """What balanced would give back of static's seconds; nothing where it takes longer."""
    if share <= 0:
        return "Lost", "0 %", f"balanced takes {seconds(balanced)}, static {seconds(static)} per step"
    return "Lost", percent(share), f"{seconds(static - balanced)} of {seconds(static)} per step"


def _mean_skew(windows: list[Document], which: str) -> float:
    """Mean over all micro-steps; each is the mean over as many layers."""
    return float(np.mean(np.concatenate([window[which]["skew_M"] for window in windows])))


def _missing(document: Document, compared: Compared) -> tuple[Missing, ...]:
    found = []
    if compared.static is None or compared.after is None or compared.balanced is None:
        words = "The comparison needs doing nothing, a plan, and even ranks:"
        found.append(("Policies", words, f"{COMMAND} --policies static,equipoise,balanced"))
    sweep = document["sweep"] or {"points": [], "break_even": None}
    if not sweep["points"]:
        found.append(_left_out(document, "Sweep", "--sweep ep=8,16 slots=0,1,2"))
    if sweep["break_even"] is None:
        found.append(_left_out(document, "Break-even", "--break-even"))
    if not any(policy["timeline"] for policy in document["policies"]):
        found.append(("Timeline", "This result was written without one:", f"{COMMAND} -o result.json"))
    return tuple(Missing(title=title, words=words, command=line) for title, words, line in found)


def _left_out(document: Document, part: str, option: str) -> tuple[str, str, str]:
    """Title, words and command of a part that is not there: as the notes say why, or else because nobody asked."""
    for note in document["notes"]:
        if note.startswith(f"{part} left out:"):
            return part, note, ""
    return part, "Not asked for:", f"{COMMAND} {option}"

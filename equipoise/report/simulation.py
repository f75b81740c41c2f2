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

from dataclasses import dataclass
from typing import Any

import numpy as np

from equipoise.report.page import Figure, Missing, Page
from equipoise.report.simulation_charts import draw_simulation
from equipoise.report.time_charts import check_lanes
from equipoise.report.words import beyond_balanced, gained, lost, num_bytes, percent, plural, ratio, seconds
from equipoise.sim.trial import WORTH

FORMAT = "equipoise-simulation-1"
MOVING = ("pull", "return", "publish", "collect")
"""Parts of the seconds that are transfers of experts."""
COMMAND = "equipoise simulate ROUTES_OR_LOADS"
"""What makes a result again, with an option more."""
Document = dict[str, Any]


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

"""The pages of measured training: modes compared on one machine, and the demo, which adds a predicted step to them.

The document of a comparison (`equipoise train --compare`, made by `equipoise/rl/compare.py`):
    format    "equipoise-comparison-1"
    facts     model, parameters, layers, experts, top_k, ranks, device
    legs      per mode: name, loss, grad_norm and seconds of each step, skew, step_s, tokens_per_s, displaced, replicas
    pairs     per mode but the first: largest differences of losses and weights
    verdict   in words
The document of the demo has format "equipoise-demo-1" and the two documents `analysis` and `comparison`.
"""

from typing import Any

from equipoise.core.value import plural
from equipoise.report.analysis import analysis_page
from equipoise.report.charts import bars, frame, line, whole_ticks, with_unit
from equipoise.report.page import Chart, Figure, Missing, Page, Table, digits, ratio, seconds
from equipoise.report.render import BLUE, GREEN, GREY, SKY, VERMILION

FORMAT = "equipoise-comparison-1"
DEMO_FORMAT = "equipoise-demo-1"
Document = dict[str, Any]
_COLOURS = {"off": GREY, "static": VERMILION, "equipoise": BLUE, "equipoise, no replicas": SKY}
_MISSING = (
    Missing(
        title="Reward, bytes, seconds by stage",
        text="A comparison keeps losses and times. A run keeps figures per step:",
        command="equipoise train --report report.html",
    ),
)


def comparison_page(document: Document, *, title: str) -> Page:
    """Make the page of a comparison."""
    facts = document["facts"]
    return Page(
        title=title,
        kind=f"Training modes compared on {plural(facts['ranks'], 'rank')}, {facts['device']}",
        answer=measured_answer(document),
        conditions=measured_conditions(document),
        notes=(),
        figures=_figures(document),
        sections=(_speed(document), _losses(document)),
        missing=_MISSING,
        document=document,
    )


def demo_page(document: Document, *, title: str) -> Page:
    """Make the demo's page: what was measured on this machine, then what is predicted for a cluster."""
    measured, predicted = document["comparison"], analysis_page(document["analysis"], title=title)
    return Page(
        title=title,
        kind=f"Demo: training measured on this machine; {predicted.kind[0].lower()}{predicted.kind[1:]}, predicted",
        answer=f"{measured_answer(measured)} Predicted for a cluster: {predicted.answer}",
        conditions=(*measured_conditions(measured), *predicted.conditions),
        notes=(),
        figures=(*_figures(measured)[:2], *predicted.figures[:2]),
        sections=(_speed(measured), _losses(measured), *predicted.sections),
        missing=(*_MISSING, *predicted.missing),
        document=document,
    )


def measured_answer(document: Document) -> str:
    """Say in one sentence how much faster balanced training was, or that it was not, and whether losses agree."""
    slow, fast = _ends(document)
    times = slow["step_s"] / fast["step_s"]
    change = f"{seconds(fast['step_s'])} per step instead of {seconds(slow['step_s'])} (median)"
    learnt = "" if document["is_free"] else f"; {document['verdict']}"
    if times < 1.005:
        return f"Measured here, {fast['name']} was not faster than {slow['name']}: {change}{learnt}."
    return f"Measured here, {fast['name']} trained {ratio(times)} times as fast as {slow['name']}: {change}{learnt}."


def measured_conditions(document: Document) -> tuple[str, ...]:
    """Say what was trained and how it was timed."""
    facts, steps = document["facts"], len(document["legs"][0]["seconds"])
    timed = "the median step counts, without the first, in which memory is mapped" if steps > 1 else "of one step"
    return (
        f"Measured on {plural(facts['ranks'], 'local rank')}, {facts['device']}: {facts['model']}, "
        f"{facts['parameters'] / 1e6:.3g} M parameters, {plural(facts['layers'], 'MoE layer')} of {facts['experts']} "
        f"experts, top-{facts['top_k']}; log-prob pass and update, without rollout; {timed}.",
    )


def _ends(document: Document) -> tuple[Document, Document]:
    """Return the leg to compare with and the balanced one: `static` if it was trained, and `equipoise`."""
    legs = document["legs"]
    by_name = {leg["name"]: leg for leg in legs}
    return by_name.get("static", legs[0]), by_name.get("equipoise", legs[-1])


def _figures(document: Document) -> tuple[Figure, ...]:
    slow, fast = _ends(document)
    pairs = [pair for pair in document["pairs"] if pair["names"][1] == fast["name"]]
    gap = max((pair["weight_gap"][-1] for pair in pairs), default=0.0)
    found = [
        Figure(
            label="Speed-up, measured",
            value=ratio(slow["step_s"] / fast["step_s"]),
            text=f"{fast['name']} against {slow['name']}",
        ),
        Figure(
            label="Tokens per second",
            value=f"{digits(slow['tokens_per_s'])} to {digits(fast['tokens_per_s'])}",
            text="all ranks together",
        ),
        Figure(label="Weights differ by", value=f"{gap:.1e}", text="at most, of the largest weight"),
    ]
    if slow["skew"] is not None and fast["skew"] is not None:
        levelled = f"{ratio(slow['skew'])} to {ratio(fast['skew'])}"
        found.append(Figure(label="Mean skew", value=levelled, text="busiest rank / mean rank, update"))
    return tuple(found)


def _speed(document: Document) -> Chart:
    legs, (slow, fast) = document["legs"], _ends(document)
    steps = list(range(len(slow["seconds"])))
    timed = slow["seconds"][1:] or slow["seconds"], fast["seconds"][1:] or fast["seconds"]
    spread = " and ".join(
        f"{seconds(min(found))} to {seconds(max(found))} ({leg['name']})"
        for found, leg in zip(timed, (slow, fast), strict=True)
    )
    layout = frame(height=280, x="step", y="seconds, measured", hover="x unified") | {"barmode": "group"}
    layout["xaxis"] |= whole_ticks(len(steps))
    return Chart(
        name="measured-seconds",
        title="Seconds of each step, measured",
        caption=f"Steps took {spread}. Modes train the same rollouts one after another.",
        traces=tuple(
            bars(
                leg["name"],
                steps,
                [round(value, 4) for value in leg["seconds"]],
                colour=_COLOURS.get(leg["name"], GREEN),
                hover="%{y:.3g} s",
            )
            for leg in legs
        ),
        layout=layout,
        data=Table(
            columns=("step", *with_unit((leg["name"] for leg in legs), "s")),
            rows=tuple(zip(steps, *(leg["seconds"] for leg in legs), strict=True)),
        ),
        terms=("measured", "static", "equipoise"),
        wide=False,
    )


def _losses(document: Document) -> Chart:
    legs = document["legs"]
    steps = list(range(len(legs[0]["grad_norm"])))
    layout = frame(height=280, x="step", y="gradient norm", hover="x unified")
    layout["xaxis"] |= whole_ticks(len(steps))
    dashes = ("solid", "dash", "dot", "dashdot")
    worst = max((max(pair["loss_gap"]) for pair in document["pairs"]), default=0.0)
    return Chart(
        name="same-training",
        title="What every mode learnt",
        caption=f"Where lines cover each other, modes learn the same. Losses differ by at most {worst:.1e} of the size "
        "of their terms. Gradient norms are drawn, because the loss of GRPO is near zero by construction.",
        traces=tuple(
            line(leg["name"], steps, leg["grad_norm"], style=(_COLOURS.get(leg["name"], GREEN), dash))
            for leg, dash in zip(legs, dashes, strict=False)
        ),
        layout=layout,
        data=Table(
            columns=(
                "step",
                *(f"{leg['name']}, {what}" for leg in legs for what in ("loss", "gradient norm")),
            ),
            rows=tuple((step, *(leg[what][step] for leg in legs for what in ("loss", "grad_norm"))) for step in steps),
        ),
        terms=("measured",),
        wide=False,
    )

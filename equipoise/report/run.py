"""The page of a training run: the document made of its folder, and what is said and drawn of it.

The document, made from `config.toml` and `metrics.jsonl` (each figure: `docs/metrics.md`):
    format    "equipoise-run-1"
    settings  every setting of the run
    steps     one object of metrics per step

Figures of a run are measured, but for `static_s` and `saved_s`, which its plans predicted.
"""

import tomllib
from pathlib import Path
from typing import Any

from equipoise.core import EquipoiseError
from equipoise.core.value import plural
from equipoise.report.charts import PART_COLOURS, STYLES, bars, frame, line, whole_ticks, with_unit
from equipoise.report.live import Follower
from equipoise.report.page import Chart, Figure, Missing, Page, Table, digits, num_bytes, percent, ratio, seconds
from equipoise.report.render import BLUE, GREEN, ORANGE, PURPLE, SKY, YELLOW

FORMAT = "equipoise-run-1"
Document = dict[str, Any]
Steps = list[Document]
_TIME_COLOURS = {
    "rollout": PART_COLOURS["rollout"],
    "training": PART_COLOURS["training"],
    "waiting for plans": PART_COLOURS["planning"],
    "exposed transfers": PART_COLOURS["transfers"],
}
_PATH_COLOURS = {"peer": ORANGE, "host": YELLOW, "p2p": GREEN, "shm": PURPLE}


def read_run(folder: Path) -> Document:
    """Read a run's folder into its document."""
    metrics, settings = folder / "metrics.jsonl", folder / "config.toml"
    if not metrics.exists():
        raise EquipoiseError(f"{folder} has no metrics.jsonl; give the folder that `equipoise train -o FOLDER` wrote")
    steps: Steps = Follower(metrics).read()
    if not steps:
        raise EquipoiseError(f"{metrics} has no step yet; wait for the first one")
    try:
        read = tomllib.loads(settings.read_text(encoding="utf-8")) if settings.exists() else {}
    except ValueError as error:
        raise EquipoiseError(f"{settings} is not TOML ({error}); write the run again, or take the file away") from error
    return {"format": FORMAT, "settings": read, "steps": steps}


def run_page(document: Document, *, title: str) -> Page:
    """Make the page of a run."""
    steps, settings = document["steps"], document["settings"]
    has_skew = all(step["skew_after"] is not None for step in steps)
    is_priced = any(step["static_s"] for step in steps)
    charts = [_time(steps), _skew(steps, has_after=has_skew)]
    if is_priced:
        charts.append(_predicted(steps, settings.get("balance", {}).get("objective")))
    charts.append(_reward(steps))
    if any(any(step["bytes"].values()) for step in steps):
        charts.append(_bytes(steps))
    model = settings.get("model", {})
    name = model.get("path") or model.get("family") or "a model"
    mode = settings.get("balance", {}).get("mode", "unknown")
    return Page(
        title=title,
        kind=f"Training run of {plural(len(steps), 'step')}, {name}, mode {mode}",
        answer=_answer(steps, has_after=has_skew),
        conditions=_conditions(steps, settings),
        notes=(),
        figures=_figures(steps, has_after=has_skew),
        sections=tuple(charts),
        missing=(_NOT_COMPARED, *_MISSING, *((_NOT_TIMED,) if is_priced else ())),
        document=document,
    )


_NOT_COMPARED = Missing(
    title="Measured speed-up, equal losses",
    text="A single run has nothing to compare with. Train the same steps in several modes:",
    command="equipoise train --compare static,equipoise --report report.html",
)

_MISSING = (
    Missing(
        title="Heat maps, timeline, policies",
        text="A run keeps figures per step. Record its routes and simulate them:",
        command="equipoise train --record ROUTES; equipoise simulate ROUTES --model ROUTES/model/config.json",
    ),
)

_NOT_TIMED = Missing(
    title="Measured seconds of expert layers",
    text="Not measured: a run times its steps, stages and waits, but not its expert layers, and its predicted seconds "
    "are for the described cluster, not for this machine. A rank replay on one GPU measures both:",
    command="python -m benchmarks.rank_replay --work WORK -o REPLAY; python -m benchmarks.validate REPLAY",
)


def _answer(steps: Steps, *, has_after: bool) -> str:
    """Say what balance gained: load and predicted time of experts, then what was measured of the whole step."""
    before, static = ratio(_mean(steps, "skew_before")), _mean(steps, "static_s")
    measured = f"Measured: {seconds(_mean(steps, 'seconds'))} per step, {_tokens(steps)} tokens/s."
    if not has_after:
        return (
            f"Every rank had all experts; spread over ranks, the busiest would have {before} times the mean. {measured}"
        )
    levelled = (
        f"The busiest rank had {ratio(_mean(steps, 'skew_after'))} times the mean load, {before} without balancing"
    )
    if not static:
        return f"{levelled}. {measured}"
    saved = _mean(steps, "saved_s")
    faster = f"{ratio(static / (static - saved))} times as fast" if saved > 0 else f"{percent(-saved / static)} slower"
    change = f"expert layers are predicted to be {faster} on the described cluster" if saved else "no time is saved"
    return f"{levelled}; {change}. {measured}"


def _tokens(steps: Steps) -> str:
    return digits(_mean(steps, "tokens_per_s"))


def _conditions(steps: Steps, settings: Document) -> tuple[str, ...]:
    ranks = settings.get("ranks")
    device = settings.get("model", {}).get("device", "unknown device")
    where = "" if ranks is None else f" on {plural(int(ranks), 'rank')}, {device}"
    checked = sum(step["checked_windows"] for step in steps)
    return (
        f"Measured{where}, seed {settings.get('seed', 'unknown')}: reward, skew of the update's rows as they arrived, "
        "seconds, bytes.",
        f"Routes were known for {percent(_mean(steps, 'coverage'))} of the rows; rows arrived exactly as planned in "
        f"{plural(checked, 'window')} that {'was' if checked == 1 else 'were'} compared.",
    )


def _figures(steps: Steps, *, has_after: bool) -> tuple[Figure, ...]:
    first, last = _quarters(steps, "reward")
    spent = sum(step["seconds"] for step in steps)
    waited, exposed = (sum(step[name] for step in steps) for name in ("waited_s", "exposed_s"))
    skew = ratio(_mean(steps, "skew_before")) + (f" to {ratio(_mean(steps, 'skew_after'))}" if has_after else "")
    static, saved = _mean(steps, "static_s"), _mean(steps, "saved_s")
    found = [
        Figure(
            label="Tokens per second", value=_tokens(steps), text=f"measured, {seconds(spent / len(steps))} per step"
        ),
        Figure(label="Mean skew", value=skew, text="busiest rank / mean rank, update"),
    ]
    if static:
        text = f"expert layers, {seconds(static)} to {seconds(static - saved)} per step"
        found.append(Figure(label="Predicted speed-up", value=f"{ratio(static / (static - saved))} x", text=text))
    causes = f"{percent(waited / spent)} for plans, {percent(exposed / spent)} for transfers"
    return (
        *found,
        Figure(label="Waited", value=percent((waited + exposed) / spent), text=causes),
        Figure(label="Reward", value=f"{ratio(first)} to {ratio(last)}", text="first and last quarter"),
    )


def _reward(steps: Steps) -> Chart:
    first, last = _quarters(steps, "right_share")
    right = f"{percent(first)} in the first quarter, {percent(last)} in the last"
    # Two lines that are one would hide each other.
    is_share = all(step["reward"] == step["right_share"] for step in steps)
    return _lines(
        steps,
        {"reward": "reward"} if is_share else {"reward": "reward", "right answers": "right_share"},
        styles={"reward": (BLUE, "solid"), "right answers": (GREEN, "dot")},
        name="reward",
        title="Reward over steps",
        caption=f"Reward is the share of right answers: {right}." if is_share else f"Right answers: {right}.",
        y="mean over samples",
        terms=("reward",),
    )


def _skew(steps: Steps, *, has_after: bool) -> Chart:
    names = {"before": "skew_before", **({"after": "skew_after"} if has_after else {})}
    text = f"Before: recorded routes without balancing, {ratio(_mean(steps, 'skew_before'))} on average."
    after = f" After: rows that arrived, {ratio(_mean(steps, 'skew_after'))}." if has_after else ""
    return _lines(
        steps,
        names,
        styles=STYLES,
        name="skew-over-steps",
        title="Skew over steps",
        caption=f"{text}{after}",
        y="busiest rank / mean rank",
        terms=("skew", "before", "after"),
    )


def _predicted(steps: Steps, objective: str | None) -> Chart:
    static, saved = (sum(step[name] for step in steps) for name in ("static_s", "saved_s"))
    drawn = [{**step, "planned_s": step["static_s"] - step["saved_s"]} for step in steps]
    change = f"{percent(abs(saved / static))} {'less' if saved >= 0 else 'more'} than without balancing"
    # Without this a reader takes a plan that costs more for one that was meant to save.
    why = " The run balances rows at any cost (balance.objective = skew)." if objective == "skew" else ""
    return _lines(
        drawn,
        {"before": "static_s", "after": "planned_s"},
        styles=STYLES,
        name="predicted-seconds",
        title="Predicted seconds of expert layers",
        caption=f"Predicted for the described cluster, not measured on this machine: {change}, over all steps.{why}",
        y="seconds, predicted",
        from_zero=True,
        terms=("predicted", "before", "after", "saved"),
    )


def _time(steps: Steps) -> Chart:
    parts = {
        "rollout": [step["rollout_s"] for step in steps],
        "training": [s["seconds"] - s["rollout_s"] - s["waited_s"] - s["exposed_s"] for s in steps],
        "waiting for plans": [step["waited_s"] for step in steps],
        "exposed transfers": [step["exposed_s"] for step in steps],
    }
    spent = sum(step["seconds"] for step in steps)
    return _stacked(
        steps,
        parts,
        colours=_TIME_COLOURS,
        name="time-over-steps",
        title="Seconds of each step",
        caption=f"A step takes {seconds(spent / len(steps))} on average; {percent(sum(parts['rollout']) / spent)} is "
        "rollout. Waits are those of the slowest rank.",
        y="seconds",
        terms=("exposed", "measured"),
    )


def _bytes(steps: Steps) -> Chart:
    paths = sorted({path for step in steps for path, moved in step["bytes"].items() if moved})
    colours = {path: _PATH_COLOURS.get(path, SKY) for path in paths}
    moved = sum(sum(step["bytes"].values()) for step in steps)
    return _stacked(
        steps,
        {path: [step["bytes"].get(path, 0) / 2**20 for step in steps] for path in paths},
        colours=colours,
        name="bytes-over-steps",
        title="Bytes of experts moved in each step",
        caption=f"{num_bytes(moved)} in all, over all ranks, by the path they took: {', '.join(paths)}.",
        y="MiB",
        terms=("peer", "host", "pull", "return", "publish", "collect"),
    )


def _lines(
    steps: Steps,
    names: dict[str, str],
    *,
    styles: dict[str, tuple[str, str]],
    y: str,
    from_zero: bool = False,
    **page: Any,
) -> Chart:
    """Draw lines over steps; `names` says which metric a line shows."""
    layout = _step_frame(len(steps), y=y)
    if from_zero:
        layout["yaxis"]["rangemode"] = "tozero"
    at = [step["step"] for step in steps]
    return Chart(
        traces=tuple(line(n, at, [s[metric] for s in steps], style=styles[n]) for n, metric in names.items()),
        layout=layout,
        data=Table(
            columns=("step", *with_unit(names, y)),
            rows=tuple((s["step"], *(s[metric] for metric in names.values())) for s in steps),
        ),
        wide=False,
        **page,
    )


def _stacked(steps: Steps, parts: dict[str, list[float]], *, colours: dict[str, str], y: str, **page: Any) -> Chart:
    """Draw stacked columns over steps."""
    at = [step["step"] for step in steps]
    shown = {name: values for name, values in parts.items() if any(values)}
    return Chart(
        traces=tuple(
            bars(name, at, [round(v, 6) for v in values], colour=colours[name], hover="%{y:.4g}")
            for name, values in shown.items()
        ),
        layout=_step_frame(len(steps), y=y) | {"barmode": "stack", "bargap": 0.15},
        data=Table(columns=("step", *with_unit(shown, y)), rows=tuple(zip(at, *shown.values(), strict=True))),
        wide=False,
        **page,
    )


def _step_frame(count: int, *, y: str) -> dict[str, Any]:
    layout = frame(height=280, x="step", y=y, hover="x unified")
    layout["xaxis"] |= whole_ticks(count)
    return layout


def _mean(steps: Steps, name: str) -> float:
    return float(sum(step[name] for step in steps) / len(steps))


def _quarters(steps: Steps, name: str) -> tuple[float, float]:
    """Return the means over the first and the last quarter."""
    quarter = max(1, len(steps) // 4)
    return _mean(steps[:quarter], name), _mean(steps[-quarter:], name)

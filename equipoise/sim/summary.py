"""A simulation in plain text, for any width: the answer, policies, parts, sweep, notes."""

import textwrap
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import fields
from typing import Any, NamedTuple

from equipoise.core.value import STAGE_WORDS, plural
from equipoise.cost import Profile
from equipoise.cost.waves import SLOWED_PERMILLE
from equipoise.cost.work import REACTIVE_PLAN_NS, REACTIVE_PUSH_NS
from equipoise.sim.result import WORTH, Groups, Parts, Simulation
from equipoise.sim.windows import PlanSource, StepCase

SHORT = 0.5
"""A first micro-step below this share of the longest gets a note."""
WIDEST = 100
"""Columns of the text if no width is given; wider tables go on below."""
MIB = 2**20
CROSSING = {
    "rows": "Every row crosses nodes on its own, as in Megatron's alltoall dispatcher; engines that send a token once "
    "per node need less.",
    "tokens": "A token crosses to a node once and is forwarded inside, as in DeepEP; how many do is estimated for each "
    "source as if a token's choices were independent.",
}
PARTS = {"compute": "experts", "all_to_all_inside": "a2a in", "all_to_all_across": "a2a across"}
"""Columns of parts that have another name than the part."""


def notes_of(windows: Sequence[Groups], sources: Sequence[PlanSource], case: StepCase) -> tuple[str, ...]:
    """Say what is measured, what is modelled and what is left out."""
    cluster, setting, has_pairs = case.cluster, case.setting, case.pair_LEE is not None
    names, profile = [source.policy for source in sources], Profile.read(cluster.profile)
    made = "measured" if profile.kind == "measured" else "derived from an H200's measured figures by published ones"

    # What every simulation models.
    notes = [
        "Everything is simulated; no cluster was run.",
        f"Expert compute, attention and pulls: {profile.device}, {made}.",
        f"All-to-all: modelled by the busiest link, at {profile.across_permille / 10:g} % of "
        f"{cluster.network_bytes_per_s * 8 / 1e9:,.4g} Gb/s across nodes and {profile.inside_permille / 10:g} % of "
        f"{cluster.nvlink_bytes_per_s / 1e9:,.4g} GB/s inside, per rank, and {profile.exchange_fixed_ns / 1000:g} us "
        "for each; all ranks meet in it, and expert transfers pause meanwhile.",
    ]
    if assumed := profile.say_assumed(cluster.num_ep_nodes):
        notes.append(assumed)
    if setting.sends == "tokens" or not has_pairs:
        notes.append(CROSSING[setting.sends])
    if has_pairs:
        notes.append("What crosses nodes is thinned by counted pairs of experts chosen together.")
    notes += [
        "Pulls slow the compute beside them as measured; for those from peers, and for publish and collect inside "
        "nodes, which are taken alike, that is an upper bound. Across nodes these slow it as pulls from the host do.",
        "Attention: attention and shared experts of the MoE layers, at an assumed context of 4,096 tokens, and "
        "spreading tokens to rows.",
        "Left out unless given as seconds: optimizer, gradient reduction, embedding, head, dense layers, rollout.",
    ]

    # What single policies know and are charged.
    if "equipoise" in names and setting.planning_s:
        how = "hides behind what runs before the window" if setting.planning == "hidden" else "is not hidden"
        notes.append(f"Planning takes {setting.planning_s:g} s per window and {how}.")
    elif "equipoise" in names:
        besides = ", besides the exchange of counts and the making of dispatches" if profile.is_shared else ""
        notes.append(f"Planning is assumed to take no time on the critical path{besides}.")
    if "eplb-history" in names:
        half = "the first half of each window's own micro-steps"
        known = half if case.history is None else "an earlier step's loads"
        notes.append(f"eplb-history knows {known}.")
    if "reactive" in names:
        notes.append(
            f"reactive is charged {REACTIVE_PLAN_NS / 1e6:g} ms of planning per layer and {REACTIVE_PUSH_NS / 1e6:g} "
            "ms of weight push, as UltraEP reports."
        )

    if case.options.waves != 1:
        notes.append(
            "Waves: exchanges run beside the experts of other waves, which are taken to be level, and slow them by an "
            f"assumed {SLOWED_PERMILLE / 10:g} % of their time; all-to-all is what is left in the open. Only where all "
            "rows travel by collectives. Simulated; this has never run on a GPU."
        )

    # What planning was allowed, and what it could be.
    if case.options.cross_node:
        notes.append(
            "Replicas may be in any node; every node then needs host memory for all experts, which the "
            "memory per rank does not hold."
        )
    elif "equipoise" in names and cluster.num_ep_nodes > 1:
        notes.append(
            "Replicas stay in their node. With --cross-node they may be in any: less crosses nodes, and an expert "
            "hotter than a node's share is levelled, too; every node then needs host memory for all experts."
        )

    filled = sum(group.num_filled for groups in windows for group in groups)
    if filled:
        total = sum(int(group.load_MLRE.sum()) for groups in windows for group in groups)
        notes.append(
            f"{plural(filled, 'row')} of last and padding tokens ({filled / total:.2%}) are given the least loaded "
            "experts, as windows with free tokens do; no route says theirs."
        )

    # A short first micro-step leaves publish little to hide behind; pipelines want it short.
    rows = [groups[0].load_MLRE[:, 0].sum(axis=(1, 2)) for groups in windows]
    share = min(int(rows_M[0]) / max(1, int(rows_M.max())) for rows_M in rows)
    if share < SHORT and setting.pipeline_stages == 1:
        notes.append(
            f"The first micro-step of a window has {share:.0%} of the longest one's rows: displaced experts are "
            "published behind it, and would hide better behind the longest (--longest-first)."
        )
    if setting.pipeline_stages > 1:
        notes.append(f"{setting.pipeline_stages} pipeline stages, one forward, one backward, not interleaved.")
    if max(len(groups) for groups in windows) > 1:
        notes.append("A window takes its slowest EP group.")
    return tuple(notes)


class Unit(NamedTuple):
    """The unit in which times are shown."""

    name: str
    scale: float

    @classmethod
    def of(cls, policies: Sequence[dict[str, Any]]) -> "Unit":
        """Return seconds, or milliseconds if every step takes less than a second."""
        return cls("s", 1.0) if max(entry["step_s"] for entry in policies) >= 1 else cls("ms", 1e3)

    def show(self, seconds: float) -> str:
        """Format with three decimals of seconds, or two of milliseconds."""
        return f"{seconds * self.scale:.{3 if self.name == 's' else 2}f}"


def summary(simulation: Simulation, *, title: str, width: int = WIDEST) -> str:
    """Write a simulation as text of at most `width` columns; no number is cut."""
    document = simulation.to_dict()
    policies, unit = document["policies"], Unit.of(document["policies"])
    lines = [*wrap_text([*_head(document, title), "", *_answer(policies)], width)]
    about = "Policies: time in expert layers, share of balanced and speed-up of it, then of the whole step"
    lines += wrap_text([about], width)
    expert, step = f"expert {unit.name}", f"step {unit.name}"
    head = ["policy", "slots", expert, "of bal.", "speed-up", "experts", step, "of bal.", "speed-up", "MiB/GPU"]
    rows = [
        [
            entry["policy"],
            str(entry["slots"]),
            unit.show(entry["expert_s"]),
            _percent(entry["of_balanced"]),
            _times(entry["speedup"]),
            f"{entry['expert_share']:.0%}",
            unit.show(entry["step_s"]),
            _percent(entry["step_of_balanced"]),
            _times(entry["step_speedup"]),
            f"{entry['memory']['replicas_bytes'] / MIB:,.0f}",
        ]
        for entry in policies
    ]
    lines += [*wrapped([head, *rows], width), ""]
    lines += wrap_text(_waves(policies, unit), width)
    # One column per part that any policy has.
    parts = [f.name.rstrip("_") for f in fields(Parts)]
    shown = [key for key in parts if any(entry["seconds"][key] for entry in policies)]
    head = ["policy", *(PARTS.get(key, key) for key in shown)]
    rows = [[entry["policy"], *(unit.show(entry["seconds"][key]) for key in shown)] for entry in policies]
    lines += [f"Parts, {unit.name} on the critical path", *wrapped([head, *rows], width), ""]
    if document["sweep"] is not None:
        lines += _sweep(document["sweep"], unit, width)
    return "\n".join([*lines, *wrap_text((f"- {note}" for note in document["notes"]), width)]) + "\n"


def _head(document: dict[str, Any], title: str) -> Iterator[str]:
    """Yield the model, the ranks (of all EP groups and pipeline stages) and the windows."""
    model, cluster, profile, windows = (document[name] for name in ("model", "cluster", "profile", "windows"))
    layers, experts = plural(model["layers"], "MoE layer"), plural(model["experts"], "expert")
    yield f"{title}: {model['name']}, {layers} of {experts}, top-{model['top_k']}"
    groups, stages = max(window["groups"] for window in windows), document["setting"]["pipeline_stages"]
    made_of = [f"EP {cluster['ep']}"]
    made_of += [f"{stages} pipeline stages"] if stages > 1 else []
    made_of += [f"{groups} EP groups"] if groups > 1 else []
    ranks = plural(cluster["ep"] * stages * groups, "rank") + (f" ({' x '.join(made_of)})" if len(made_of) > 1 else "")
    yield f"{ranks} in nodes of {cluster['ranks_per_node']}, {profile['device']} ({profile['kind']})"
    for window in windows:
        skew_M = window["before"]["skew_M"]
        tokens = plural(round(window["tokens_per_rank"]), "token")
        size = f"{plural(window['micro_steps'], 'micro-step')}, {tokens} per rank and micro-step"
        shown = f" (EP group {document['shown']['group']} of 0 to {window['groups'] - 1})"
        of_group = shown if window["groups"] > 1 else ""
        yield f"  {STAGE_WORDS[window['stage']]}: {size}, mean skew {sum(skew_M) / len(skew_M):.2f}{of_group}"


def _answer(policies: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Say what equipoise saves, in one sentence; nothing if it was not compared."""
    ours = next((p for p in policies if p["policy"] == "equipoise"), None)
    if ours is None or ours["speedup"] is None:
        return
    slots, size = plural(ours["slots"], "slot"), ours["memory"]["replicas_bytes"] / MIB
    saved = 1 - 1 / ours["speedup"]
    less = f"{abs(saved):.1%} {'more' if saved < 0 else 'less'} time"
    yield (
        f"Equipoise, {slots} ({size:,.{0 if size >= 10 else 2}f} MiB per GPU): expert layers {ours['speedup']:.2f} "
        f"times as fast ({less}), the whole step {ours['step_speedup']:.2f} times; exposed overhead "
        f"{ours['exposed_share']:.2%}."
        f"{'' if saved >= WORTH else ' Not worth it here.'}"
    )
    yield ""


def _waves(policies: Sequence[dict[str, Any]], unit: Unit) -> Iterator[str]:
    """Say into how many waves each policy's windows are cut, and what that saves; nothing where none is."""
    found = []
    for entry in policies:
        counts = sorted({window["waves"] for window in entry["windows"]})
        saved = sum(window["waves_saved_s"] for window in entry["windows"])
        if counts[-1] > 1:
            found.append(f"{entry['policy']} {' or '.join(map(str, counts))} ({unit.show(saved)} {unit.name})")
    if found:
        yield f"Waves, and what they save of the step: {', '.join(found)}"
        yield ""


def _sweep(sweep: dict[str, Any], unit: Unit, width: int) -> Iterator[str]:
    if sweep["points"]:
        yield f"Sweep, {unit.name} in expert layers"
        head = ["EP", "slots", "samples", "tokens/rank", "skew", "static", "equipoise", "balanced", "saved", "of bal."]
        rows = [
            [
                str(point["ep"]),
                str(point["slots"]),
                "-" if point["micro"] is None else str(point["micro"]),
                f"{point['tokens']:,}",
                f"{point['skew']:.2f}",
                *(unit.show(point["seconds"][name]) for name in ("static", "equipoise", "balanced")),
                f"{point['saved_share']:.1%}",
                _percent(point["of_balanced"]),
            ]
            for point in sweep["points"]
        ]
        yield from (*wrapped([head, *rows], width), "")
    if sweep["break_even"] is not None:
        worth, curves = sweep["break_even"]["worth"], sweep["break_even"]["curves"]
        about = f"Break-even: tokens per rank from which on a plan pays (saves at least {worth:.0%} of expert time)"
        yield from wrap_text([about], width)
        rows = [
            [
                f"{curve['skew']:.2f}",
                "never" if curve["tokens"] is None else f"{curve['tokens']:,}",
                *(f"{point['saved_share']:.1%}" for point in curve["points"]),
            ]
            for curve in curves
        ]
        head = ["skew", "pays from", *(f"{p['tokens']:,}" for p in curves[0]["points"])]
        yield from (*wrapped([head, *rows], width), "")


def table(rows: Sequence[Sequence[str]], *, left: Collection[int] = (0,)) -> list[str]:
    """Return the lines of a plain-text table; the columns of `left` are aligned to the left, figures to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = (
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        lines.append(("  " + "  ".join(cells)).rstrip())
    return lines


def wrapped(rows: Sequence[Sequence[str]], width: int) -> list[str]:
    """Return the lines of a table; columns beyond `width` follow below, beside the same names."""
    shown = len(rows[0])
    while shown > 2 and max(map(len, table([row[:shown] for row in rows]))) > width:
        shown -= 1
    lines = table([row[:shown] for row in rows])
    return lines if shown == len(rows[0]) else [*lines, *wrapped([[row[0], *row[shown:]] for row in rows], width)]


def wrap_text(lines: Iterable[str], width: int) -> Iterator[str]:
    """Yield lines of text broken between words; what goes on below is indented."""
    for line in lines:
        indent = len(line) - len(line.lstrip()) + 2
        options: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
        yield from textwrap.wrap(line, width, subsequent_indent=" " * indent, **options) or [""]


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}x"

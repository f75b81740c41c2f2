"""A simulation in plain text, tables of 100 columns or less: the answer, policies, parts, sweep, small print.

Knows results. Computes nothing but what stands in them; knows no colours, so that any terminal or log shows it.

Invariants (asserted by the tests):
1. Every figure is one of `Simulation.to_dict()`, rounded.
2. The parts that are shown of a policy add up to its step.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from equipoise.core import Cluster
from equipoise.core.plan import Sends
from equipoise.core.value import plural
from equipoise.cost import Profile
from equipoise.cost.clock import REACTIVE_PLAN_NS, REACTIVE_PUSH_NS
from equipoise.planner import PlanOptions
from equipoise.sim.result import WORTH, Groups, Simulation
from equipoise.sim.windows import PlanSource, StepSetting

# Sentences that stand beside every simulated figure: what is measured, what is modelled, what is left out.


SHORT = 0.5
"""A first micro-step below this share of the longest is worth a word."""
CROSSING = {
    "rows": "Every row crosses nodes on its own, as in Megatron's alltoall dispatcher; engines that send a token once "
    "per node need less.",
    "tokens": "A token crosses to a node once and is handed on inside, as in DeepEP; how many do is estimated for each "
    "source as if a token's choices were independent.",
}


def notes_of(
    windows: Sequence[Groups],
    sources: Sequence[PlanSource],
    *,
    cluster: Cluster,
    setting: StepSetting,
    options: PlanOptions,
    knows: tuple[bool, bool],
) -> tuple[str, ...]:
    """Say how these figures came about; `knows` tells whether history and pairs were given."""
    has_history, has_pairs = knows
    profile = Profile.read(cluster.profile)
    made = "measured" if profile.kind == "measured" else "derived from an H200's measured figures by published ones"
    return (
        "Everything is simulated; no cluster was run.",
        f"Expert compute, attention and pulls: {profile.device}, {made}.",
        _of_links(cluster, profile),
        *_of_crossing(setting.sends, has_pairs=has_pairs),
        "Pulls slow the compute beside them as measured; for those from peers, and for publish and collect inside "
        "nodes, which are taken alike, that is an upper bound. Across nodes these slow it as pulls from the host do.",
        "Attention: attention and shared experts of the MoE layers, at an assumed context of 4,096 tokens, and "
        "spreading tokens to rows.",
        "Left out unless given as seconds: optimizer, gradient reduction, embedding, head, dense layers, rollout.",
        *_of_policies([source.policy for source in sources], setting, has_history=has_history),
        *_of_options(options, could_cross=_could_cross(windows, sources, cluster)),
        *_of_order(windows, setting),
        *_of_shape(windows, setting),
    )


def _of_links(cluster: Cluster, profile: Profile) -> str:
    """Whose rate an all-to-all has."""
    return (
        f"All-to-all: modelled by the busiest link, at {profile.across_permille / 10:g} % of "
        f"{cluster.network_bytes_per_s * 8 / 1e9:,.4g} Gb/s across nodes and {profile.inside_permille / 10:g} % of "
        f"{cluster.nvlink_bytes_per_s / 1e9:,.4g} GB/s inside, per rank, and {profile.exchange_fixed_ns / 1000:g} us "
        "for each; all ranks meet in it, and expert transfers stand still meanwhile."
    )


def _of_crossing(sends: Sends, *, has_pairs: bool) -> Iterator[str]:
    """What crosses nodes."""
    if sends == "tokens" or not has_pairs:
        yield CROSSING[sends]
    if has_pairs:
        yield "What crosses nodes is thinned by counted pairs of experts chosen together."


def _of_policies(names: Sequence[str], setting: StepSetting, *, has_history: bool) -> Iterator[str]:
    """What single policies know and are charged."""
    if "equipoise" in names and setting.planning_s:
        how = "hides behind what runs before the window" if setting.planning == "hidden" else "is not hidden"
        yield f"Planning takes {setting.planning_s:g} s per window and {how}."
    elif "equipoise" in names:
        yield "Planning is assumed to take no time on the critical path."
    if "eplb-history" in names:
        known = "an earlier step's loads" if has_history else "the first half of each window's own micro-steps"
        yield f"eplb-history knows {known}."
    if "reactive" in names:
        plan_ms, push_ms = REACTIVE_PLAN_NS / 1e6, REACTIVE_PUSH_NS / 1e6
        yield (
            f"reactive is charged {plan_ms:g} ms of planning per layer and {push_ms:g} ms of weight push, as UltraEP "
            "reports."
        )


def _could_cross(windows: Sequence[Groups], sources: Sequence[PlanSource], cluster: Cluster) -> bool:
    """Whether replicas of our plans could stand in other nodes: there are such, and a window without gradients."""
    is_ours = any(source.policy == "equipoise" for source in sources)
    return is_ours and cluster.num_ep_nodes > 1 and any(groups[0].stage == "recompute" for groups in windows)


def _of_options(options: PlanOptions, *, could_cross: bool) -> Iterator[str]:
    """What planning was allowed, and what it could be."""
    if could_cross and not options.cross_node:
        yield (
            "Replicas stay in their node. With --cross-node those of recompute may stand in any, so that less crosses "
            "nodes; every node then needs host memory for all experts."
        )
    if options.cross_node:
        yield (
            "Replicas of recompute may stand in any node; every node then needs host memory for all experts, which the "
            "memory per rank does not hold."
        )


def _of_order(windows: Sequence[Groups], setting: StepSetting) -> Iterator[str]:
    """Where a short first micro-step leaves publish little to hide behind; pipelines want it short."""
    rows = [groups[0].load_MLRE[:, 0].sum(axis=(1, 2)) for groups in windows]
    share = min(int(rows_M[0]) / max(1, int(rows_M.max())) for rows_M in rows)
    if share < SHORT and setting.pipeline_stages == 1:
        yield (
            f"The first micro-step of a window has {share:.0%} of the longest one's rows: displaced experts are "
            "published behind it, and would hide better behind the longest (--longest-first)."
        )


def _of_shape(windows: Sequence[Groups], setting: StepSetting) -> Iterator[str]:
    """How stages and groups meet."""
    if setting.pipeline_stages > 1:
        yield f"{setting.pipeline_stages} pipeline stages, one forward, one backward, not interleaved."
    if max(len(groups) for groups in windows) > 1:
        yield "A window takes its slowest EP group."


PARTS = (
    ("compute", "experts"),
    ("all_to_all_inside", "a2a in"),
    ("all_to_all_across", "a2a across"),
    ("pull", "pull"),
    ("return", "return"),
    ("publish", "publish"),
    ("collect", "collect"),
    ("planning", "planning"),
    ("attention", "attention"),
    ("bubble", "bubble"),
    ("rollout", "rollout"),
    ("other", "other"),
)
"""Parts of a step and how their columns are called."""
WIDEST = 100
"""Columns of a table; what is wider goes on below."""
MIB = 2**20


def summary(simulation: Simulation, *, title: str) -> str:
    """Everything, as text."""
    return "\n".join(_lines(simulation.to_dict(), title)) + "\n"


def _lines(document: dict[str, Any], title: str) -> Iterator[str]:
    model, cluster, profile = document["model"], document["cluster"], document["profile"]
    layers, experts = plural(model["layers"], "MoE layer"), plural(model["experts"], "expert")
    yield f"{title}: {model['name']}, {layers} of {experts}, top-{model['top_k']}"
    yield f"{_ranks(document)} in nodes of {cluster['ranks_per_node']}, {profile['device']} ({profile['kind']})"
    yield from _windows(document["windows"], document["shown"]["group"])
    yield ""
    yield from _answer(document)
    unit = Unit.of(document["policies"])
    yield "Policies: time in expert layers, share of balanced and speed-up of it, then of the whole step"
    yield from _policies(document["policies"], unit)
    yield ""
    yield f"Parts, {unit.name} on the critical path"
    yield from _parts(document["policies"], unit)
    yield ""
    yield from _sweep(document["sweep"], unit)
    yield from (f"- {note}" for note in document["notes"])


def _ranks(document: dict[str, Any]) -> str:
    """How many ranks there are: EP groups side by side, pipeline stages one behind the other."""
    groups = max(window["groups"] for window in document["windows"])
    stages, ep = document["setting"]["pipeline_stages"], document["cluster"]["ep"]
    made_of = [f"EP {ep}"]
    made_of += [f"{stages} pipeline stages"] if stages > 1 else []
    made_of += [f"{groups} EP groups"] if groups > 1 else []
    words = plural(ep * stages * groups, "rank")
    return words if len(made_of) == 1 else f"{words} ({' x '.join(made_of)})"


def _windows(windows: Sequence[dict[str, Any]], group: int) -> Iterator[str]:
    for window in windows:
        skew_M = window["before"]["skew_M"]
        tokens = plural(round(window["tokens_per_rank"]), "token")
        words = f"{plural(window['micro_steps'], 'micro-step')}, {tokens} per rank and micro-step"
        of_group = f" (EP group {group} of 0 to {window['groups'] - 1})" if window["groups"] > 1 else ""
        yield f"  {window['stage']}: {words}, mean skew {sum(skew_M) / len(skew_M):.2f}{of_group}"


def _answer(document: dict[str, Any]) -> Iterator[str]:
    """What equipoise gives back, in one sentence; nothing where it was not compared."""
    ours = next((p for p in document["policies"] if p["policy"] == "equipoise"), None)
    if ours is None or ours["speedup"] is None:
        return
    slots, size = plural(ours["slots"], "slot"), ours["memory"]["replicas_bytes"] / MIB
    is_worth = 1 - 1 / ours["speedup"] >= WORTH
    yield (
        f"Equipoise, {slots} ({size:,.{0 if size >= 10 else 2}f} MiB per GPU): {_less(ours['speedup'])} time in expert "
        f"layers, {_less(ours['step_speedup'])} for the whole step; exposed overhead {ours['exposed_share']:.2%}."
        f"{'' if is_worth else ' Not worth it here.'}"
    )
    yield ""


def _less(speedup: float) -> str:
    """`8.1% less`, or `3.0% more` where it is slower."""
    saved = 1 - 1 / speedup
    return f"{abs(saved):.1%} {'more' if saved < 0 else 'less'}"


class Unit(NamedTuple):
    """The unit in which times are shown."""

    name: str
    scale: float

    @classmethod
    def of(cls, policies: Sequence[dict[str, Any]]) -> "Unit":
        """Seconds, or milliseconds where every step takes less than a second."""
        return cls("s", 1.0) if max(entry["step_s"] for entry in policies) >= 1 else cls("ms", 1e3)

    def show(self, seconds: float) -> str:
        """Three decimals of seconds, two of milliseconds."""
        return f"{seconds * self.scale:.{3 if self.name == 's' else 2}f}"


def _policies(policies: Sequence[dict[str, Any]], unit: Unit) -> list[str]:
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
    return table([head, *rows])


def _parts(policies: Sequence[dict[str, Any]], unit: Unit) -> list[str]:
    """One column per part that any policy has."""
    shown = [(key, name) for key, name in PARTS if any(entry["seconds"][key] for entry in policies)]
    rows = [[entry["policy"], *(unit.show(entry["seconds"][key]) for key, _ in shown)] for entry in policies]
    return wrapped([["policy", *(name for _, name in shown)], *rows])


def _sweep(sweep: dict[str, Any] | None, unit: Unit) -> Iterator[str]:
    if sweep is None:
        return
    if sweep["points"]:
        yield f"Sweep, {unit.name} in expert layers"
        head = ["EP", "slots", "samples", "tokens/rank", "skew", "static", "equipoise", "balanced", "saved", "of bal."]
        yield from table([head, *(_point(point, unit) for point in sweep["points"])])
        yield ""
    if sweep["break_even"] is not None:
        worth = sweep["break_even"]["worth"]
        yield f"Break-even: a plan pays (saves at least {worth:.0%} of expert time) from so many tokens per rank on"
        curves = sweep["break_even"]["curves"]
        rows = [
            [
                f"{curve['skew']:.2f}",
                "never" if curve["tokens"] is None else f"{curve['tokens']:,}",
                *(f"{point['saved_share']:.1%}" for point in curve["points"]),
            ]
            for curve in curves
        ]
        yield from table([["skew", "pays from", *(f"{p['tokens']:,}" for p in curves[0]["points"])], *rows])
        yield ""


def _point(point: dict[str, Any], unit: Unit) -> list[str]:
    seconds = point["seconds"]
    return [
        str(point["ep"]),
        str(point["slots"]),
        "-" if point["micro"] is None else str(point["micro"]),
        f"{point['tokens']:,}",
        f"{point['skew']:.2f}",
        *(unit.show(seconds[name]) for name in ("static", "equipoise", "balanced")),
        f"{point['saved_share']:.1%}",
        _percent(point["of_balanced"]),
    ]


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table: names to the left, figures to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        cells[0] = row[0].ljust(widths[0])
        lines.append("  " + "  ".join(cells))
    return lines


def wrapped(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table; the columns that are too many for its width stand below, beside the same names."""
    shown = len(rows[0])
    while shown > 2 and len(table([row[:shown] for row in rows])[0]) > WIDEST:
        shown -= 1
    lines = table([row[:shown] for row in rows])
    return lines if shown == len(rows[0]) else [*lines, *wrapped([[row[0], *row[shown:]] for row in rows])]


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}x"

"""Draw a plan on a terminal: what it saves first, then seconds by part, what it moves and what it keeps in memory.

Knows figures of `Plan` and rich. Computes sums of them and nothing else; skew is that of `equipoise.loads`.
"""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from equipoise.core import Plan
from equipoise.core.explain import Explanation
from equipoise.cost.model import replica_bytes
from equipoise.loads import rank_loads, skew_ML
from equipoise.report.words import plural

MIB = 2**20
PARTS = {
    "compute": "compute, busiest rank",
    "all_to_all": "all-to-all",
    "pull": "pulls that nothing hides",
    "return_": "returns that nothing hides",
    "publish": "publish that nothing hides",
    "collect": "collect that nothing hides",
    "planning": "planning on the critical path",
}
PATHS = {
    "peer": "replicas, GPU to GPU",
    "host": "replicas, from host memory",
    "edge_inside": "displaced experts, inside nodes",
    "edge_across": "displaced experts, across nodes",
    "all_to_all_inside": "rows, inside nodes",
    "all_to_all_across": "rows, across nodes",
}


def document(plan: Plan, explanation: Explanation | None, *, out: Path | None, pairs: Path | None) -> dict[str, Any]:
    """Everything that is shown, as plain JSON content."""
    before, after = _skews(plan)
    content: dict[str, Any] = {
        "model": plan.model.name,
        "policy": plan.policy,
        "objective": plan.objective,
        "stage": plan.loads.stage,
        "slots": plan.slots,
        "skew_before": before,
        "skew_after": after,
        "seconds": {**asdict(plan.seconds), "total": plan.seconds.total},
        "static_seconds": plan.static_seconds,
        "saved_seconds": plan.saved_seconds,
        "bytes": {**asdict(plan.bytes), "total": plan.bytes.total},
        "slot_bytes_per_rank": slot_bytes(plan),
        "displaced": int(plan.displaced_LE.sum()),
        "replicas": len(plan.replica_table),
        "estimated_share": plan.estimated_share,
        "pairs": None if pairs is None else str(pairs),
        "digest": plan.digest(),
        "out": None if out is None else str(out),
    }
    if explanation is not None:
        content["explanation"] = {
            "binds": explanation.binds,
            "gate": explanation.gate,
            "bound": explanation.bound,
            "rows_at_owners": explanation.static_R.tolist(),
            "rows_at_homes": explanation.home_R.tolist(),
            "rows_planned": explanation.plan_R.tolist(),
            "replicas": [replica._asdict() for replica in explanation.replicas],
            "ns": explanation.ns,
            "ns_without_replicas": explanation.closed_ns,
        }
    return content


def slot_bytes(plan: Plan) -> int:
    """Bytes of replica slots on one rank: once per buffer, shared by all layers; per layer where replicas stay."""
    each = replica_bytes(plan.model, plan.loads.stage)
    if plan.persistent:
        return plan.slots * each * plan.loads.num_layers
    buffers = 1 if plan.itinerary is None else plan.itinerary.depth + 1
    return plan.slots * each * buffers


def show(plan: Plan, console: Console, *, source: str, pairs: Path | None) -> None:
    """Print the summary of a plan for what `source` names, made with the `pairs` of a counts file or without any."""
    cluster, loads = plan.cluster, plan.loads
    console.print(Text(f"{source}: {plan.model.name} on {cluster.name}, {plan.policy}, by {plan.objective}", "bold"))
    console.print(
        f"{plural(cluster.ep, 'rank')} on {plural(cluster.num_ep_nodes, 'node')}, "
        f"{plural(loads.num_micro_steps, 'micro-step')} of {plural(loads.num_layers, 'layer')}, {loads.stage}"
    )
    if pairs is not None:
        console.print(f"what crosses nodes is thinned by the pairs of {pairs}", soft_wrap=True)
    console.print(_answer(plan))
    console.print(_figures("Predicted milliseconds", asdict(plan.seconds), PARTS, scale=1e3, total=plan.seconds.total))
    console.print(_figures("Moved MiB, all ranks", asdict(plan.bytes), PATHS, scale=1 / MIB, total=plan.bytes.total))


def _skews(plan: Plan) -> tuple[float, float]:
    """Mean skew with experts at their owners, and as planned."""
    before, after = skew_ML(rank_loads(plan.loads)), skew_ML(plan.rank_load_MLR)
    return float(before.mean()), float(after.mean())


def _answer(plan: Plan) -> Table:
    before, after = _skews(plan)
    saved, whole = plan.saved_seconds, plan.static_seconds
    share = saved / whole if whole else 0.0
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold")
    grid.add_column()
    grid.add_row(
        "\n  skew", f"\n{before:.4f} at the owners, {after:.4f} planned (mean of busiest / mean rank, in rows)"
    )
    grid.add_row("  seconds", f"{whole * 1e3:.3f} ms at the owners, {plan.seconds.total * 1e3:.3f} ms planned")
    if saved > 0:
        grid.add_row("  saved", Text(f"{saved * 1e3:.3f} ms, {share:.1%}", "bold green"))
    else:
        grid.add_row("  saved", Text(f"{saved * 1e3:.3f} ms: not worth it here", "bold yellow"))
    grid.add_row("  homes", f"{int(plan.displaced_LE.sum()):,} of {plan.displaced_LE.size:,} experts displaced")
    entries = plan.loads.num_micro_steps * plan.loads.num_layers
    grid.add_row("  replicas", f"{len(plan.replica_table):,} in {entries:,} micro-steps and layers")
    grid.add_row("  memory", f"{slot_bytes(plan) / MIB:,.0f} MiB per rank (replica slots: {plan.slots})")
    if plan.estimated_share > 0:
        grid.add_row("  estimated", f"{plan.estimated_share:.1%} of the rows, whose routes are unknown")
    return grid


def _figures(title: str, values: dict[str, Any], words: dict[str, str], *, scale: float, total: float) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(f"  {title}")
    table.add_column("", justify="right")
    for name, value in values.items():
        if value:
            table.add_row(f"  {words[name]}", f"{value * scale:,.3f}")
    table.add_row("  total", f"{total * scale:,.3f}", style="bold")
    return table

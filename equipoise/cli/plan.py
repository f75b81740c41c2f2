"""Plan one window from its loads, and say what the plan saves and what it costs. Everything is predicted.

equipoise plan loads.npz --model qwen3-30b-a3b --cluster h200 --nodes 4 --ranks-per-node 8 --slots 1 -o plan.npz
equipoise plan loads.npz --model qwen3-30b-a3b --cluster h200 --explain 3,17
equipoise plan loads.npz --model qwen3-30b-a3b --policy eplb-oracle --json
equipoise plan loads.npz --model qwen3-30b-a3b --sends tokens --pairs counts.npz

Loads are made by `equipoise loads`. They do not say how large an expert is: without --model they are priced with
experts of qwen3-30b-a3b's size, and the answer says so. A plan that saves nothing is a normal answer, said in words,
with exit code 0.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from equipoise.cli.options import ForceFlag, JsonFlag, Machine, find_model, refuse_existing
from equipoise.cli.output import print_json, screen
from equipoise.core import Plan
from equipoise.core.explain import Explanation
from equipoise.core.options import replica_bytes
from equipoise.loads import rank_loads, skew_ML
from equipoise.report.page import plural

if TYPE_CHECKING:
    from equipoise.core import Cluster, LoadMatrix, ModelShape, Plan


# Draw a plan on a terminal: what it saves first, then seconds by part, what it moves and what it keeps in memory.


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


STAND_IN = "qwen3-30b-a3b"
"""Whose experts' size is taken where no model is named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planning:
    """How the window is planned."""

    SECTION: ClassVar[str] = "The plan"
    slots: Annotated[int, typer.Option(help="Replica slots per rank; 0 for placement alone.")] = 1
    objective: Annotated[
        Literal["seconds", "skew"], typer.Option(help="What is minimised: seconds with every cost, or rows alone.")
    ] = "seconds"
    policy: Annotated[
        str, typer.Option(help="equipoise, or a baseline: static, eplb-oracle, lplb, reactive, balanced ...")
    ] = "equipoise"
    cross_node: Annotated[
        bool,
        typer.Option(
            "--cross-node",
            help="In a recompute window, let replicas stand in any node where that pays; every node then needs host "
            "memory for all experts.",
        ),
    ] = False
    sends: Annotated[
        Literal["rows", "tokens"],
        typer.Option(help="What crosses nodes: every row (Megatron's alltoall), or a token once per node (DeepEP)."),
    ] = "rows"
    history: Annotated[Path | None, typer.Option(help="Loads of the window before, for the policy eplb-history.")] = (
        None
    )
    pairs: Annotated[
        Path | None,
        typer.Option(
            help="Counts that `equipoise count --pairs` made: tokens that reach a node for several of its experts, for "
            "--sends tokens."
        ),
    ] = None

    def run(self, window: "LoadMatrix", *, cluster: "Cluster", model: "ModelShape") -> "Plan":
        """Plan the window, once everything that was asked for has been found to make sense."""
        from equipoise.cli.options import check_slots
        from equipoise.cli.step_loads import read_history, read_pairs
        from equipoise.core import InfeasiblePlanError
        from equipoise.planner import PlanOptions
        from equipoise.planner import plan as plan_window

        if self.history is None and self.policy == "eplb-history":
            raise InfeasiblePlanError(
                "--policy eplb-history places experts by an earlier window's loads; add --history with their .npz file"
            )
        self._refuse_void_pairs()
        check_slots(self.slots, cluster=cluster, model=model)
        return plan_window(
            window,
            cluster=cluster,
            model=model,
            slots=self.slots,
            policy=self.policy,
            objective=self.objective,
            options=PlanOptions(cross_node=self.cross_node, sends=self.sends),
            history=read_history(self.history, [self.policy]),
            pair_LEE=None if self.pairs is None else read_pairs(self.pairs, window),
        )

    def _refuse_void_pairs(self) -> None:
        """Raise where pairs would change nothing: every row crosses, or the policy does not look at them."""
        from equipoise.core import InfeasiblePlanError

        if self.pairs is None:
            return
        for name, wanted, why in (
            ("sends", "tokens", "they say how often one sending of a token serves several experts"),
            ("policy", "equipoise", "no other policy looks at them"),
        ):
            if getattr(self, name) != wanted:
                raise InfeasiblePlanError(
                    f"--pairs {self.pairs} needs --{name} {wanted}: {why}; add that, or leave --pairs out"
                )


def plan(
    loads: Annotated[Path, typer.Argument(help="Loads of one window, made by `equipoise loads`.", show_default=False)],
    *,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            help=f"Model preset such as {STAND_IN}, or a HF config.json; left out, experts of {STAND_IN}'s size.",
        ),
    ] = None,
    machine: Machine,
    nodes: Annotated[
        int | None, typer.Option(help="Nodes of the EP group; by default as many as its ranks need.")
    ] = None,
    planning: Planning,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="The plan to write, for example plan.npz.")] = None,
    explain: Annotated[
        str | None, typer.Option(metavar="M,L", help="Show one decision: micro-step and layer index, such as 3,17.")
    ] = None,
    force: ForceFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Plan one window."""
    from equipoise.cli.step_loads import model_of_loads
    from equipoise.core import LoadMatrix

    refuse_existing(out, force=force, read=(loads, planning.history, planning.pairs))
    window = LoadMatrix.load(loads)
    entry = None if explain is None else _entry(explain)
    hardware = machine.describe(ep=window.num_ranks, nodes=nodes)
    shape = _stand_in(window) if model is None else model_of_loads(find_model(model), window, dump=loads)
    made = planning.run(window, cluster=hardware, model=shape)
    explanation = None if entry is None else made.explain(*entry)
    if out is not None:
        made.save(out)
    console = screen(as_json=as_json)
    if model is None:
        console.print(f"No --model was given: seconds are those of experts of {STAND_IN}'s size.", soft_wrap=True)
    if explanation is None:
        show(made, console, source=loads.name, pairs=planning.pairs)
    else:
        console.print(str(explanation), soft_wrap=True)
    if out is not None:
        console.print(f"Written: {out}", soft_wrap=True)
    if as_json:
        print_json(document(made, explanation, out=out, pairs=planning.pairs))


def _stand_in(window: "LoadMatrix") -> "ModelShape":
    """A model of the loads' experts and layers whose experts have a common size."""
    from equipoise.core import ModelShape

    known = ModelShape.preset(STAND_IN)
    given = {"experts": window.num_experts, "layers": window.num_layers}
    return ModelShape.preset(STAND_IN, top_k=min(known.top_k, window.num_experts), **given)


def _entry(words: str) -> tuple[int, int]:
    """Micro-step and layer index from `M,L`."""
    from equipoise.core import InfeasiblePlanError

    parts = words.split(",")
    if len(parts) != 2 or not all(part.isascii() and part.isdigit() for part in parts):
        raise InfeasiblePlanError(f"--explain is {words!r}; write the micro-step and the layer index, such as 3,17")
    return int(parts[0]), int(parts[1])

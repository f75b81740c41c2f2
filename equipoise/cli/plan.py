"""Plan one window from its loads, and say what the plan saves and what it costs. Everything is predicted.

    equipoise plan loads.npz --model qwen3-30b-a3b --cluster h200 -o plan.npz
    equipoise plan loads.npz --model qwen3-30b-a3b --explain 0,17
    equipoise plan loads.npz --model qwen3-30b-a3b --policy eplb-oracle --json
    equipoise plan loads.npz --model qwen3-30b-a3b --sends tokens --pairs counts.npz
    equipoise plan loads.npz --model qwen3-30b-a3b --slots 0 --placement sglang=experts.json
    equipoise plan loads.npz --model qwen3-30b-a3b --slots 2 --memory-gib 20 --activations recomputed

`equipoise convert --to loads` makes the loads. They do not say how large an expert is: without --model, experts are
priced with the size of qwen3-30b-a3b's, and the answer says so. A plan that saves nothing is a normal answer, with exit
code 0.
"""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import typer

from equipoise.cli.options import (
    DEFAULT_SENDS,
    ActivationsOption,
    CrossNodeFlag,
    ForceFlag,
    HistoryOption,
    JsonFlag,
    MachineFlags,
    MemoryOption,
    SendsOption,
    WavesOption,
    check_slots,
    find_model,
    npz_kind,
    parse_waves,
    refuse_existing,
)
from equipoise.cli.output import print_json, screen, show_plan
from equipoise.core import InfeasiblePlanError, LoadMatrix, LoadsError, ModelShape

if TYPE_CHECKING:
    from equipoise.core import Cluster, Plan
    from equipoise.core.plan import Explanation

STAND_IN = "qwen3-30b-a3b"
"""Model whose expert size is used if none is named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFlags:
    """How the window is planned."""

    SECTION: ClassVar[str] = "The plan"
    slots: Annotated[int, typer.Option(help="Replica slots per rank; 0 for placement alone.")] = 1
    objective: Annotated[
        Literal["seconds", "skew"], typer.Option(help="What to minimize: seconds with every cost, or rows alone.")
    ] = "seconds"
    policy: Annotated[
        str,
        typer.Option(
            help="equipoise, or a baseline: static, lpt, eplb-oracle, lplb, relibra, balanced ...; or a placement file "
            "(.json, as --placement writes), whose slots are used."
        ),
    ] = "equipoise"
    cross_node: CrossNodeFlag = False
    memory_gib: MemoryOption = None
    activations: ActivationsOption = "kept"
    sends: SendsOption = DEFAULT_SENDS
    waves: WavesOption = "1"
    history: HistoryOption = None
    pairs: Annotated[
        Path | None,
        typer.Option(
            help="Counts that `equipoise convert --to counts --pairs` wrote: tokens that reach a node for several of "
            "its experts, for --sends tokens."
        ),
    ] = None

    def make_plan(self, loads: LoadMatrix, *, cluster: "Cluster", model: ModelShape) -> "Plan":
        """Check that the options make sense together, then plan the window."""
        from equipoise.cli.step_loads import read_history, read_pairs
        from equipoise.loads.forecast import limit_in_bytes
        from equipoise.planner import PlanOptions
        from equipoise.planner import plan as plan_window

        limit, waves = limit_in_bytes(self.memory_gib), parse_waves(self.waves)
        if self.history is None and self.policy == "eplb-history":
            raise InfeasiblePlanError(
                "--policy eplb-history places experts by an earlier window's loads; add --history with their .npz file"
            )
        for name, wanted, why in (
            ("sends", "tokens", "they say how often one sending of a token serves several experts"),
            ("policy", "equipoise", "no other policy uses them"),
        ):
            if self.pairs is not None and getattr(self, name) != wanted:
                raise InfeasiblePlanError(
                    f"--pairs {self.pairs} needs --{name} {wanted}: {why}; add that, or leave --pairs out"
                )
        if self.policy.endswith(".json"):
            if limit is not None:
                raise InfeasiblePlanError(
                    f"--memory-gib {self.memory_gib} limits what is planned; {self.policy} is a placement: leave "
                    "one of them out"
                )
            from equipoise.engines.locations import read_placement
            from equipoise.planner.plan import plan_placement

            found = read_placement(Path(self.policy), model=model, ranks=cluster.ep)
            options = PlanOptions(sends=self.sends, waves=waves)
            return plan_placement(loads, found.held_LER, cluster=cluster, model=model, options=options)
        check_slots(self.slots, cluster=cluster, model=model)
        return plan_window(
            loads,
            cluster=cluster,
            model=model,
            slots=self.slots,
            policy=self.policy,
            objective=self.objective,
            options=PlanOptions(
                cross_node=self.cross_node,
                sends=self.sends,
                limit_bytes=limit,
                activations=self.activations,
                waves=waves,
            ),
            history=read_history(self.history, [self.policy]),
            pair_LEE=None if self.pairs is None else read_pairs(self.pairs, loads),
        )

    def one_wave_seconds(self, made: "Plan") -> float:
        """Return what the plan would take in one wave."""
        if made.waves == 1:
            return made.seconds.total
        from equipoise.cli.step_loads import read_pairs
        from equipoise.cost.clock import replay
        from equipoise.sim.replay import plan_work

        pair_LEE = None if self.pairs is None else read_pairs(self.pairs, made.loads)
        return replay([plan_work(replace(made, waves=1), sends=self.sends, pair_LEE=pair_LEE)]).seconds.total


def plan(
    loads: Annotated[
        Path, typer.Argument(help="Loads of one window, from `equipoise convert --to loads`.", show_default=False)
    ],
    *,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            help=f"Model preset such as {STAND_IN}, its HF id, or a config.json; left out, {STAND_IN}'s experts.",
        ),
    ] = None,
    machine: MachineFlags,
    nodes: Annotated[
        int | None, typer.Option(help="Nodes of the EP group; by default as many as its ranks need.")
    ] = None,
    planning: PlanFlags,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="The plan to write, for example plan.npz.")] = None,
    explain: Annotated[
        str | None, typer.Option(metavar="M,L", help="Show one decision: micro-step and layer index, such as 3,17.")
    ] = None,
    placement: Annotated[
        str | None,
        typer.Option(
            metavar="FORM=FILE",
            help="Also write where experts are placed, for sglang, vllm-ascend or megatron: sglang=experts.json. Needs "
            "--slots 0, or a policy whose replicas stay, such as eplb-oracle.",
        ),
    ] = None,
    force: ForceFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Plan one window from its loads."""
    from equipoise.cli.step_loads import model_of_loads
    from equipoise.sim.summary import CROSSING

    loads = _find_window(loads)
    refuse_existing(out, force=force, read=(loads, planning.history, planning.pairs))
    form, target = _parse_placement(placement)
    refuse_existing(target, force=force, read=(loads, planning.history, planning.pairs))
    window = LoadMatrix.load(loads)
    entry = None if explain is None else _parse_entry(explain)
    cluster = machine.build_cluster(ep=window.num_ranks, nodes=nodes)
    if model is not None:
        shape = model_of_loads(find_model(model), window, dump=loads)
    else:
        top_k = min(ModelShape.preset(STAND_IN).top_k, window.num_experts)
        shape = ModelShape.preset(STAND_IN, top_k=top_k, experts=window.num_experts, layers=window.num_layers)
    made = planning.make_plan(window, cluster=cluster, model=shape)
    explanation = None if entry is None else made.explain(*entry)
    if target is not None:
        from equipoise.engines.locations import Placement, write_placement

        write_placement(Placement.of(made), target, form=form)
    if out is not None:
        made.save(out)

    figures = build_document(made, explanation, out=out, planning=planning)
    console = screen(as_json=as_json)
    wide = console.width >= 80  # a narrower terminal would break lines inside words
    if model is None:
        console.print(f"No --model was given: seconds are those of experts of {STAND_IN}'s size.", soft_wrap=wide)
    if explanation is None:
        show_plan(made, figures, console, source=loads.name)
    else:
        console.print(explanation.to_text(width=console.width), soft_wrap=wide)
    console.print(CROSSING[planning.sends], soft_wrap=wide)
    if figures["assumed"]:
        console.print(figures["assumed"], soft_wrap=wide)
    for path in (out, target):
        if path is not None:
            console.print(f"Written: {path}", soft_wrap=True)
    if as_json:
        print_json(figures)


def _find_window(loads: Path) -> Path:
    """Return the file, or the one update window that `convert --to loads -o FILE` wrote beside it."""
    from equipoise.cli.step_loads import find_windows

    windows = find_windows(loads, "update")
    if len(windows) > 1:
        names = ", ".join(path.name for path in windows)
        raise LoadsError(f"{loads} does not exist, and several windows were written beside it; give one of {names}")
    (found,) = windows
    if found.is_file() and (npz_kind(found) in ("counts", "plan") or found.suffix != ".npz"):
        raise LoadsError(
            f"{found} holds no loads; make them first: equipoise convert {found} --model MODEL --to loads --ep 8 "
            "--schedule tokens:16384 -o loads.npz"
        )
    return found


def _parse_placement(text: str | None) -> tuple[str, Path | None]:
    """Parse `FORM=FILE` into a form and a path; nothing if there is no text."""
    form, _, name = (text or "").partition("=")
    if text is not None and (not name or form not in ("sglang", "vllm-ascend", "megatron")):
        raise InfeasiblePlanError(f"--placement is {text!r}; write sglang=FILE, vllm-ascend=FILE or megatron=FILE")
    return form, Path(name) if name else None


def _parse_entry(text: str) -> tuple[int, int]:
    """Parse `M,L` into a micro-step and a layer index."""
    parts = text.split(",")
    if len(parts) != 2 or not all(part.isascii() and part.isdigit() for part in parts):
        raise InfeasiblePlanError(f"--explain is {text!r}; write the micro-step and the layer index, such as 3,17")
    return int(parts[0]), int(parts[1])


def build_document(
    plan: "Plan", explanation: "Explanation | None", *, out: Path | None, planning: PlanFlags
) -> dict[str, Any]:
    """Return every figure that is shown, for JSON."""
    from equipoise.core.options import Capacities
    from equipoise.cost import Profile
    from equipoise.loads import plan_memory, rank_loads, skew_ML

    memory = plan_memory(plan, activations=planning.activations)
    micro_step, layer, rank = place = memory.place()
    try:
        factor = Capacities.of(plan).rank_factor()
    except InfeasiblePlanError:
        # Some routes are unknown, or a rank without tokens receives rows: no factor is enough.
        factor = None
    document: dict[str, Any] = {
        "model": plan.model.name,
        "policy": plan.policy,
        "objective": plan.objective,
        "stage": plan.loads.stage,
        "slots": plan.slots,
        "skew_before": float(skew_ML(rank_loads(plan.loads)).mean()),
        "skew_after": float(skew_ML(plan.rank_load_MLR).mean()),
        "seconds": {**asdict(plan.seconds), "total": plan.seconds.total},
        "static_seconds": plan.static_seconds,
        "saved_seconds": plan.saved_seconds,
        "waves": plan.waves,
        "one_wave_seconds": planning.one_wave_seconds(plan),
        "bytes": {**asdict(plan.bytes), "total": plan.bytes.total},
        "slot_bytes_per_rank": memory.slots_bytes,
        "row_page_bytes": memory.page_bytes,
        "memory": {
            "peak_bytes": int(memory.total_MLR[place]),
            "parts": memory.parts(place),
            "place": {"micro_step": micro_step, "layer": plan.model.layer_numbers[layer], "rank": rank},
            "rank_peak_bytes": memory.peak_R.tolist(),
            "activations": planning.activations,
        },
        "displaced": int(plan.displaced_LE.sum()),
        "replicas": len(plan.replica_table),
        "estimated_share": plan.estimated_share,
        "rank_capacity_factor": factor,
        "assumed": Profile.read(plan.cluster.profile).say_assumed(plan.cluster.num_ep_nodes),
        "pairs": None if planning.pairs is None else str(planning.pairs),
        "digest": plan.digest(),
        "out": None if out is None else str(out),
    }
    if explanation is not None:
        document["explanation"] = {
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
    return document

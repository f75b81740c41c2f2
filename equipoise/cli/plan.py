"""Plan one window from its loads, and say what the plan saves and what it costs. Everything is predicted.

equipoise plan loads.npz --model qwen3-30b-a3b --cluster h200 --nodes 4 --ranks-per-node 8 --slots 1 -o plan.npz
equipoise plan loads.npz --model qwen3-30b-a3b --cluster h200 --explain 3,17
equipoise plan loads.npz --model qwen3-30b-a3b --policy eplb-oracle --json
equipoise plan loads.npz --model qwen3-30b-a3b --sends tokens --pairs counts.npz

Loads are made by `equipoise loads`. They do not say how large an expert is: without --model they are priced with
experts of qwen3-30b-a3b's size, and the answer says so. A plan that saves nothing is a normal answer, said in words,
with exit code 0.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import typer

from equipoise.cli.machine import Machine
from equipoise.cli.options import ForceFlag, JsonFlag, find_model, refuse_existing
from equipoise.cli.output import print_json, screen

if TYPE_CHECKING:
    from equipoise.core import Cluster, LoadMatrix, ModelShape, Plan

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
        from equipoise.cli.slots import check_slots
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
    from equipoise.cli.plan_view import document, show
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

"""Expert placements as files: what a plan places is given to SGLang, vLLM-Ascend or Megatron, and theirs are read.

A placement has one row per MoE layer: expert_LP[l, p] is the expert in physical slot p, and rank r holds the slots
[r * P / R, (r + 1) * P / R). Experts may have several slots. One file holds one placement for a whole window.

Form `sglang` (0.5.23 and 0.5.18 read), for `--init-expert-location FILE.json`:
    physical_to_logical_map      [hidden layers][P]; dense layers hold slot modulo experts, as SGLang's own trivial map
    P is experts + `--ep-num-redundant-experts`.
Form `vllm-ascend` (`expert_map_path`), for vLLM on Ascend. vLLM's own EPLB (0.32 read) reads no file.
    moe_layer_count
    layer_list[].layer_id        number among the MoE layers
    layer_list[].device_count    ranks
    layer_list[].device_list[]   {device_id, device_expert: experts in slot order}
Form `megatron`, ours: Megatron-Core has no option for it. Whoever loads a checkpoint reorders each layer's experts, and
the rows of its router with them. There are no replicas.
    format                       "equipoise-expert-permutation-1"
    layer_numbers                global number of each row
    ranks
    expert_permutation           [MoE layers][experts]: position g, local expert g modulo (experts / ranks) of rank
                                 g // (experts / ranks), holds this expert
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from equipoise.core import InfeasiblePlanError, ModelShape, Plan
from equipoise.core.files import whole_file
from equipoise.core.value import Value, int64_array, require_int
from equipoise.routes.wire import field

PERMUTATION = "equipoise-expert-permutation-1"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Placement(Value):
    """Which expert each physical slot of each MoE layer holds, on every rank."""

    model: ModelShape
    ranks: int
    expert_LP: np.ndarray
    """[L, P] expert of each slot. Example: expert_LP[3, 17] == 5: slot 17 of layer 3 holds expert 5."""

    def __post_init__(self) -> None:
        expert_LP = int64_array("expert_LP", self.expert_LP, ndim=2, error=InfeasiblePlanError)
        ranks = require_int("ranks", self.ranks, low=1, error=InfeasiblePlanError)
        layers, slots = expert_LP.shape
        if layers != self.model.layers:
            raise InfeasiblePlanError(
                f"the placement has {layers} layers, {self.model.name!r} has {self.model.layers} with experts"
            )
        if slots % ranks:
            raise InfeasiblePlanError(f"{slots} slots do not divide by {ranks} ranks; each rank has as many")
        for layer, expert_P in enumerate(expert_LP):
            count_E = np.bincount(np.clip(expert_P, 0, self.model.experts), minlength=self.model.experts)
            if expert_P.min() < 0 or expert_P.max() >= self.model.experts or not count_E[: self.model.experts].all():
                raise InfeasiblePlanError(
                    f"layer {self.model.layer_numbers[layer]}: the placement holds {np.unique(expert_P).size} experts "
                    f"from {expert_P.min()} to {expert_P.max()}; each of 0 to {self.model.experts - 1} needs a slot"
                )
        object.__setattr__(self, "expert_LP", expert_LP)

    @property
    def held_LER(self) -> np.ndarray:
        """[L, E, R] copies of each expert on each rank."""
        layers, slots = self.expert_LP.shape
        held_LER = np.zeros((layers, self.model.experts, self.ranks), dtype=np.int64)
        rank_P = np.arange(slots) // (slots // self.ranks)
        np.add.at(held_LER, (np.arange(layers)[:, None], self.expert_LP, rank_P[None, :]), 1)
        return held_LER

    @classmethod
    def of(cls, plan: Plan) -> "Placement":
        """Return what a plan places for its whole window; raise if its replicas change between micro-steps."""
        if len(plan.replica_table) and not plan.persistent:
            raise InfeasiblePlanError(
                f"the plan has {len(plan.replica_table)} replicas that differ between micro-steps; a placement holds "
                "for the whole window: plan with slots=0, or with a policy whose replicas stay, such as eplb-oracle"
            )
        ranks, layers = plan.cluster.ep, plan.loads.num_layers
        held = plan.home_slots + (plan.slots if plan.persistent else 0)
        expert_LRS = np.full((layers, ranks, held), -1)
        if not plan.persistent:
            place = (np.arange(layers)[:, None], plan.home_LE, plan.home_slot_LE)
            expert_LRS[place] = np.arange(plan.loads.num_experts)[None, :]
        else:
            load_LE = plan.loads.total_MLE().sum(axis=0)
            layer_P = plan.replica_table.entry_P % layers
            for layer in range(layers):
                mine = layer_P == layer
                pairs = np.unique(
                    np.stack([plan.replica_table.expert_P[mine], plan.replica_table.rank_P[mine]]), axis=1
                )
                for rank in range(ranks):
                    homes = np.flatnonzero(plan.home_LE[layer] == rank)
                    experts = np.concatenate([homes, pairs[0, pairs[1] == rank]])
                    # Engines fill every slot: a slot that the plan left empty gets the busiest expert not held here.
                    others = np.setdiff1d(np.argsort(-load_LE[layer], kind="stable"), experts, assume_unique=True)
                    expert_LRS[layer, rank] = np.concatenate([experts, others])[:held]
        return cls(model=plan.model, ranks=ranks, expert_LP=expert_LRS.reshape(layers, -1))


def write_placement(placement: Placement, path: Path, *, form: str) -> None:
    """Write a placement as `sglang`, `vllm-ascend` or `megatron`."""
    if form not in WRITERS:
        raise InfeasiblePlanError(f"placement form {form!r} is unknown; use one of {', '.join(WRITERS)}")
    text = json.dumps(WRITERS[form](placement))
    with whole_file(path, error=InfeasiblePlanError) as draft:
        draft.write_text(text + "\n", encoding="utf-8")


def _as_sglang(placement: Placement) -> dict[str, Any]:
    model, slots = placement.model, placement.expert_LP.shape[1]
    whole = np.tile(np.arange(slots) % model.experts, (model.hidden_layers, 1))
    whole[list(model.layer_numbers)] = placement.expert_LP
    return {"physical_to_logical_map": whole.tolist()}


def _as_ascend(placement: Placement) -> dict[str, Any]:
    layers = []
    for number, expert_RS in enumerate(placement.expert_LP.reshape(len(placement.expert_LP), placement.ranks, -1)):
        devices = [{"device_id": rank, "device_expert": experts} for rank, experts in enumerate(expert_RS.tolist())]
        layers.append({"layer_id": number, "device_count": placement.ranks, "device_list": devices})
    return {"moe_layer_count": len(layers), "layer_list": layers}


def _as_megatron(placement: Placement) -> dict[str, Any]:
    slots, experts = placement.expert_LP.shape[1], placement.model.experts
    if slots != experts:
        raise InfeasiblePlanError(
            f"the placement has {slots} slots for {experts} experts; a permutation has no replicas: plan with slots=0"
        )
    return {
        "format": PERMUTATION,
        "layer_numbers": list(placement.model.layer_numbers),
        "ranks": placement.ranks,
        "expert_permutation": placement.expert_LP.tolist(),
    }


WRITERS: dict[str, Callable[[Placement], dict[str, Any]]] = {
    "sglang": _as_sglang,
    "vllm-ascend": _as_ascend,
    "megatron": _as_megatron,
}


def read_placement(path: Path, *, model: ModelShape, ranks: int) -> Placement:
    """Read a placement file of any form; the file says which."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InfeasiblePlanError(f"{path} cannot be read as a placement: {error}") from error
    try:
        rows = _rows(document, model)
        expert_LP = int64_array("slots", np.array(rows), ndim=2, error=InfeasiblePlanError)
        told = field(document, "ranks") or (
            field(document["layer_list"][0], "device_count") if "layer_list" in document else ranks
        )
        if told != ranks:
            raise InfeasiblePlanError(f"it is for {told} ranks, the EP group has {ranks}")
        return Placement(model=model, ranks=ranks, expert_LP=expert_LP)
    except (InfeasiblePlanError, KeyError, TypeError, ValueError, IndexError) as error:
        raise InfeasiblePlanError(f"{path} holds no placement of {model.name!r}: {error}") from error


def _rows(document: Any, model: ModelShape) -> Any:
    """Return [MoE layers][P] of a document of any form."""
    if isinstance(document, dict) and "physical_to_logical_map" in document:
        rows = document["physical_to_logical_map"]
        if len(rows) != model.hidden_layers:
            raise InfeasiblePlanError(f"it has {len(rows)} layers, the model {model.hidden_layers} hidden layers")
        return [rows[number] for number in model.layer_numbers]
    if isinstance(document, dict) and "layer_list" in document:
        return [
            [expert for device in layer["device_list"] for expert in device["device_expert"]]
            for layer in document["layer_list"]
        ]
    if field(document, "format") == PERMUTATION:
        if tuple(document["layer_numbers"]) != model.layer_numbers:
            raise InfeasiblePlanError(f"its layers are {document['layer_numbers']}, not the model's")
        return document["expert_permutation"]
    raise InfeasiblePlanError(f"it has none of physical_to_logical_map, layer_list and format {PERMUTATION!r}")

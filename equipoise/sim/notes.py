"""Sentences that stand beside every simulated figure: what is measured, what is modelled, what is left out.

Knows settings. Computes nothing.
"""

from collections.abc import Sequence

from equipoise.core import Cluster
from equipoise.cost import Profile
from equipoise.sim.plans import PlanSource
from equipoise.sim.setting import StepSetting
from equipoise.sim.trial import Groups

CROSSING = {
    "rows": "Every row crosses nodes on its own, as in Megatron's alltoall dispatcher; engines that send a token once "
    "per node need less.",
    "tokens": "A token crosses to a node once and is handed on inside, as in DeepEP; how many do is estimated as if a "
    "token chose its experts independently.",
    "pairs": "Rows that cross nodes are thinned by counted pairs of experts chosen together.",
}


def notes_of(
    windows: Sequence[Groups],
    sources: Sequence[PlanSource],
    *,
    cluster: Cluster,
    setting: StepSetting,
    knows: tuple[bool, bool],
) -> tuple[str, ...]:
    """Say how these figures came about; `knows` tells whether history and pairs were given."""
    has_history, has_pairs = knows
    profile = Profile.read(cluster.name)
    names = [source.policy for source in sources]
    made = "measured" if profile.kind == "measured" else "derived from an H200's measured figures by published ones"
    notes = [
        "Everything is simulated; no cluster was run.",
        f"Expert compute, attention and pulls: {profile.device}, {made}.",
        "All-to-all: modelled by the busiest link at a share of its published rate; all ranks meet in it, and expert "
        "transfers stand still meanwhile.",
        CROSSING["pairs" if has_pairs and setting.sends == "rows" else setting.sends],
        "Pulls slow the compute beside them as measured; for those from peers that is an upper bound.",
        "Attention: attention and shared experts of the MoE layers, at an assumed context of 4,096 tokens, and "
        "spreading tokens to rows.",
        "Left out unless given as seconds: optimizer, gradient reduction, embedding, head, dense layers, rollout.",
    ]
    if setting.planning_s and "equipoise" in names:
        how = "hides behind what runs before the window" if setting.planning == "hidden" else "is not hidden"
        notes.append(f"Planning takes {setting.planning_s:g} s per window and {how}.")
    elif "equipoise" in names:
        notes.append("Planning is assumed to take no time on the critical path.")
    if "eplb-history" in names:
        known = "an earlier step's loads" if has_history else "the first half of each window's own micro-steps"
        notes.append(f"eplb-history knows {known}.")
    if "reactive" in names:
        notes.append(
            "reactive is charged 0.08 ms of planning per layer and 0.255 ms of weight push, as UltraEP reports."
        )
    if setting.pipeline_stages > 1:
        notes.append(f"{setting.pipeline_stages} pipeline stages, one forward, one backward, not interleaved.")
    if max(len(groups) for groups in windows) > 1:
        notes.append("A window takes its slowest EP group.")
    return tuple(notes)

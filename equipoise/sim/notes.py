"""Sentences that stand beside every simulated figure: what is measured, what is modelled, what is left out.

Knows settings. Computes nothing.
"""

from collections.abc import Iterator, Sequence

from equipoise.core import Cluster
from equipoise.core.plan import Sends
from equipoise.cost import Profile
from equipoise.planner import PlanOptions
from equipoise.planner.policies import REACTIVE_PLAN_NS, REACTIVE_PUSH_NS
from equipoise.sim.plans import PlanSource
from equipoise.sim.setting import StepSetting
from equipoise.sim.trial import Groups

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

"""What a simulation says: frozen result types, and the JSON document they make together.

`Simulation.to_dict()`, format "equipoise-simulation-1" (seconds are floats, loads whole rows, arrays nested lists):
    format         "equipoise-simulation-1"
    model          {name, experts, top_k, layers, hidden, expert_width, expert_bytes}
    cluster        {name, device, ep, nodes, ranks_per_node, node_R, memory_bytes, nvlink_bytes_per_s,
                   network_bytes_per_s, host_bytes_per_s}: rates are published or given ones, per rank and direction
    profile        {device, kind}: whose figures the seconds are predicted with; kind is "measured" or "derived"
    setting        what was assumed: every field of `StepSetting`, and depth, slots and cross_node of planning
    layer_numbers  [L] global numbers of the MoE layers
    shown          {window, micro_step, group}: whose arrays and timeline are below; of several groups the one whose
                   busiest ranks have most rows, unless another was asked for
    notes          list of sentences: what is modelled and how, to be shown beside the figures
    windows        one per window of the step, the same for all policies. Arrays are those of the shown group:
        stage          "recompute" or "update"
        micro_steps, groups
        tokens_per_rank    mean tokens a source rank forwards per micro-step
        load_LE        [L][E] rows of each layer and expert, over all micro-steps
        before         a `Balance`, see below, with every expert at its owner
    policies       one per policy compared, in the order asked for:
        policy, slots      name, and replica slots per rank (0 where it takes none)
        seconds        `Parts` of the whole step, rollout included
        expert_s       the part spent in expert layers: compute, all-to-all, transfers, planning
        step_s         the whole step; training_s is the same without rollout
        expert_share   expert_s / training_s
        of_balanced    throughput relative to `balanced`: its expert_s / this one's; null if balanced was not simulated
        step_of_balanced   the same of step_s
        speedup        static's expert_s / this one's; null if static was not simulated. step_speedup of step_s
        exposed_share  transfers and planning that nothing hides, as a share of expert_s
        memory         {experts_bytes, replicas_bytes, row_page_bytes, received_bytes_X, limit_bytes}; X ranks of the
                       shown group
        windows        one per window:
            seconds        `Parts` of the slowest group
            slowest        that group's number; group_s [G] seconds of every group
            ranks          {compute, attention, all_to_all, edges, wait, bubble}: each [G][X] seconds of every rank;
                           busy is the first four, idle the last two; all six add up to the group's seconds
            paths          list of {path, moved_s, exposed_s, hidden_s, bytes}; path is peer, host, return or
                           edges (publish and collect together)
            waves, waves_saved_s   into how many waves its ranks' rows are cut, and the seconds that this saves
            after          a `Balance` of the shown group with this policy
            byte_RR        [R][R] bytes of all-to-all from rank to rank, shown group, in one micro-step: the shown one
                           (or the last, where the window has fewer), all layers and exchanges. Where tokens cross once
                           per node, they go to the rank that hands them on, and come from it
        timeline       list of {rank, lane, name, start_s, end_s} of the shown micro-step, 0 at its start: the first
                       `timeline_layers` of the setting, on the first pipeline stage; lane is compute, all-to-all,
                       pull, return or edges. Empty where no timeline was asked for
    sweep          null, or
        axes           {name: values} that were swept: ep, slots, micro (samples per micro-step), tokens (per rank)
        points         list of {ep, slots, micro, tokens, skew, seconds {policy: expert_s}, saved_share, of_balanced};
                       micro is null where it was not swept; skew is the mean before; saved_share is static's expert_s
                       minus equipoise's, over static's
        break_even     null, or {worth, curves}: curves is a list of {skew, tokens, points}; tokens is the least number
                       per rank from which on the plan saves `worth`, null if none of those tried;
                       points is a list of {tokens, saved_share}
`Parts`: {compute, all_to_all_inside, all_to_all_across, pull, return, publish, collect, planning, attention, bubble,
rollout, other, total}. `Balance`: {skew_M [M], busiest_M [M], mean_M [M], rank_load_MR [M][R], rank_load_LR [L][R]}.
With pipeline stages X counts ranks stage by stage: X = Q * R, rank r of stage q is q * R + r. Without, X = R.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from equipoise.core import Cluster, LoadMatrix, ModelShape, Stage
from equipoise.core.value import Value
from equipoise.cost import Profile
from equipoise.cost.clock import Lane

FORMAT = "equipoise-simulation-1"
WORTH = 0.01
"""Share of the seconds that a plan must save to be worth its trouble."""
Groups = Sequence[LoadMatrix]
"""One window: the loads of each of its EP groups."""
PathName = Literal["peer", "host", "return", "edges"]
RANK_PARTS = ("compute", "attention", "all_to_all", "edges", "wait", "bubble")
"""What a rank does with its seconds; the first four are busy, the others idle."""


def ratio(part: float, whole: float) -> float:
    """Return `part / whole`, and 1 if both are 0."""
    return part / whole if whole else 1.0


def _plain(value: Any) -> Any:
    """Convert a result to plain JSON content: types without a `to_dict` by field, arrays as nested lists."""
    if hasattr(value, "to_dict"):
        return value.to_dict()
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, TimelineEvent | Shown):
        return value._asdict()
    return [_plain(part) for part in value] if isinstance(value, tuple) else value


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Seconds on the critical path, by part."""

    compute: float = 0.0
    """Experts of the busiest rank, layer by layer."""
    all_to_all_inside: float = 0.0
    """Exchanges whose busiest link is inside a node."""
    all_to_all_across: float = 0.0
    """Exchanges whose busiest link crosses nodes."""
    pull: float = 0.0
    """What pulls take beyond what hides them."""
    return_: float = 0.0
    """What returning gradients and adding them takes beyond what hides it."""
    publish: float = 0.0
    """What publishing displaced experts takes beyond what hides it."""
    collect: float = 0.0
    """The same of collecting them."""
    planning: float = 0.0
    """Planning on the critical path."""
    attention: float = 0.0
    """Attention, shared experts and spreading tokens to rows, of the rank with most tokens."""
    bubble: float = 0.0
    """Waiting for other pipeline stages."""
    rollout: float = 0.0
    """As given."""
    other: float = 0.0
    """As given: optimizer, head, anything else that balance does not touch."""

    @property
    def transfers(self) -> float:
        """Moving experts, where nothing hides it."""
        return self.pull + self.return_ + self.publish + self.collect

    @property
    def experts(self) -> float:
        """Everything that balancing experts changes."""
        return self.compute + self.all_to_all_inside + self.all_to_all_across + self.transfers + self.planning

    @property
    def total(self) -> float:
        """All parts together."""
        return sum(getattr(self, f.name) for f in fields(self))

    @property
    def training(self) -> float:
        """All parts but rollout."""
        return self.total - self.rollout

    def __add__(self, other: "Parts") -> "Parts":
        return Parts(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})

    def to_dict(self) -> dict[str, float]:
        """Return every part and the total, for JSON."""
        return {**{f.name.rstrip("_"): getattr(self, f.name) for f in fields(self)}, "total": self.total}


class TimelineEvent(NamedTuple):
    """One bar of a timeline."""

    rank: int
    lane: Lane
    name: str
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PathUse:
    """How one path was used in a window, by the slowest group."""

    path: PathName
    moved_s: float
    """What its transfers would take in the open: per visit the busiest rank's, added up; of edges per layer."""
    exposed_s: float
    bytes: int
    """Over all ranks of the group."""

    def to_dict(self) -> dict[str, Any]:
        """Return the figures, for JSON."""
        return {**asdict(self), "hidden_s": self.moved_s - self.exposed_s}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Balance(Value):
    """How level the ranks of one group are in one window."""

    skew_M: np.ndarray
    """[M] busiest rank over mean rank, mean over layers."""
    busiest_M: np.ndarray
    """[M] rows of the busiest rank of each layer, added up over layers."""
    mean_M: np.ndarray
    """[M] rows of the mean rank, added up over layers."""
    rank_load_MR: np.ndarray
    """[M, R] rows of each rank, added up over layers."""
    rank_load_LR: np.ndarray
    """[L, R] rows of each rank, added up over micro-steps."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WindowLoads(Value):
    """What one window computes, whatever the policy."""

    stage: Stage
    micro_steps: int
    groups: int
    tokens_per_rank: float
    load_LE: np.ndarray
    before: Balance


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WindowResult(Value):
    """One window under one policy."""

    seconds: Parts
    """Of the slowest group."""
    slowest: int
    group_s_G: np.ndarray
    rank_s_CGX: np.ndarray
    """[C, G, X] seconds of every rank by kind, in the order of RANK_PARTS."""
    paths: tuple[PathUse, ...]
    after: Balance
    byte_RR: np.ndarray
    waves: int = 1
    """Into how many its ranks' rows are cut, by the slowest group's plans."""
    waves_saved_s: float = 0.0
    """What these save against one wave."""

    def to_dict(self) -> dict[str, Any]:
        """Return the figures, for JSON."""
        return {
            "seconds": self.seconds.to_dict(),
            "slowest": self.slowest,
            "group_s": _plain(self.group_s_G),
            "ranks": dict(zip(RANK_PARTS, self.rank_s_CGX.tolist(), strict=True)),
            "paths": _plain(self.paths),
            "waves": self.waves,
            "waves_saved_s": self.waves_saved_s,
            "after": _plain(self.after),
            "byte_RR": _plain(self.byte_RR),
        }


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Memory(Value):
    """Bytes of one rank that expert parallelism takes; attention, optimizer and the rest are not counted."""

    experts_bytes: int
    """Weights of the home slots of all its layers."""
    replicas_bytes: int
    """Weights and gradients of replica slots, and boxes for experts whose homes change."""
    received_bytes_X: np.ndarray
    """[X] rows received at the worst moment, with what the expert block makes of them."""
    limit_bytes: int
    """Of the device."""
    row_page_bytes: int = 0
    """Rows that ranks of one node read where they are."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PolicyResult(Value):
    """A whole step under one policy."""

    policy: str
    slots: int
    windows: tuple[WindowResult, ...]
    memory: Memory
    given: Parts
    """Parts that the setting gives: rollout and other."""
    timeline: tuple[TimelineEvent, ...] = ()

    @property
    def seconds(self) -> Parts:
        """The step, by part."""
        return sum((w.seconds for w in self.windows), self.given)

    def to_dict(self, *, balanced: "PolicyResult | None", static: "PolicyResult | None") -> dict[str, Any]:
        """Return the figures, for JSON, with ratios to balanced and static if these were simulated."""
        seconds = self.seconds
        ceiling = None if balanced is None else balanced.seconds
        floor = None if static is None else static.seconds
        return {
            "policy": self.policy,
            "slots": self.slots,
            "seconds": seconds.to_dict(),
            "expert_s": seconds.experts,
            "step_s": seconds.total,
            "training_s": seconds.training,
            "expert_share": ratio(seconds.experts, seconds.training),
            "of_balanced": None if ceiling is None else ratio(ceiling.experts, seconds.experts),
            "step_of_balanced": None if ceiling is None else ratio(ceiling.total, seconds.total),
            "speedup": None if floor is None else ratio(floor.experts, seconds.experts),
            "step_speedup": None if floor is None else ratio(floor.total, seconds.total),
            "exposed_share": ratio(seconds.transfers + seconds.planning, seconds.experts),
            "memory": _plain(self.memory),
            "windows": _plain(self.windows),
            "timeline": _plain(self.timeline),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPoint:
    """One corner of a sweep."""

    ep: int
    slots: int
    micro: int | None
    tokens: int
    """Per rank and micro-step."""
    skew: float
    """Mean before."""
    seconds: dict[str, float]
    """Seconds of expert layers by policy."""

    @property
    def saved_share(self) -> float:
        """What equipoise saves of static's seconds."""
        return 1 - ratio(self.seconds["equipoise"], self.seconds["static"])

    def to_dict(self) -> dict[str, Any]:
        """Return the figures, for JSON."""
        balanced = self.seconds.get("balanced")
        of_balanced = None if balanced is None else ratio(balanced, self.seconds["equipoise"])
        return {**asdict(self), "saved_share": self.saved_share, "of_balanced": of_balanced}


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakEvenCurve:
    """What a plan saves at one skew, over tokens per rank."""

    skew: float
    points: tuple[tuple[int, float], ...]
    """(tokens per rank and micro-step, saved share), ascending."""
    worth: float

    @property
    def tokens(self) -> int | None:
        """The least tokens per rank from which on every larger number tried pays; None if the largest does not."""
        found = None
        for tokens, saved in reversed(self.points):
            if saved < self.worth:
                break
            found = tokens
        return found

    def to_dict(self) -> dict[str, Any]:
        """Return the figures, for JSON."""
        points = [{"tokens": tokens, "saved_share": saved} for tokens, saved in self.points]
        return {"skew": self.skew, "tokens": self.tokens, "points": points}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """Points of a sweep and the break-even curves."""

    axes: dict[str, tuple[int, ...]]
    points: tuple[SweepPoint, ...]
    curves: tuple[BreakEvenCurve, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the figures, for JSON."""
        break_even = {"worth": self.curves[0].worth, "curves": _plain(self.curves)} if self.curves else None
        axes = {name: list(values) for name, values in self.axes.items()}
        return {"axes": axes, "points": _plain(self.points), "break_even": break_even}


class Shown(NamedTuple):
    """Whose arrays and timeline a result holds."""

    window: int = 0
    micro_step: int = 0
    group: int | None = None
    """None: the one whose busiest ranks have most rows."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Simulation(Value):
    """A step replayed under one or several policies."""

    model: ModelShape
    cluster: Cluster
    profile: Profile
    setting: dict[str, Any]
    """What was assumed, as plain JSON content."""
    shown: Shown
    windows: tuple[WindowLoads, ...]
    policies: tuple[PolicyResult, ...]
    notes: tuple[str, ...]
    sweep: Sweep | None = None

    def __repr__(self) -> str:
        seconds = ", ".join(f"{result.policy} {result.seconds.total:.3g} s" for result in self.policies)
        return f"Simulation({self.model.name}, EP {self.cluster.ep} of {self.cluster.name}: {seconds})"

    def policy(self, name: str) -> PolicyResult | None:
        """Return the result of one policy; None if it was not simulated."""
        return next((result for result in self.policies if result.policy == name), None)

    def to_dict(self) -> dict[str, Any]:
        """Return the document, see the top of this file."""
        model, cluster = self.model, self.cluster
        ends = {"balanced": self.policy("balanced"), "static": self.policy("static")}
        return {
            "format": FORMAT,
            "model": _named(model, ("name", "experts", "top_k", "layers", "hidden", "expert_width", "expert_bytes")),
            "cluster": {
                **_named(cluster, ("name", "device", "ep", "nodes", "ranks_per_node", "memory_bytes")),
                **_named(cluster, ("nvlink_bytes_per_s", "network_bytes_per_s", "host_bytes_per_s")),
                "node_R": list(cluster.node_R),
            },
            "profile": {"device": self.profile.device, "kind": self.profile.kind},
            "setting": self.setting,
            "layer_numbers": list(model.layer_numbers),
            "shown": _plain(self.shown),
            "notes": list(self.notes),
            "windows": _plain(self.windows),
            "policies": [result.to_dict(**ends) for result in self.policies],
            "sweep": _plain(self.sweep),
        }


def _named(value: object, names: Sequence[str]) -> dict[str, Any]:
    return {name: getattr(value, name) for name in names}

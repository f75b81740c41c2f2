"""The same step at other EP widths, slots and sizes, and from which tokens per rank and skew on a plan pays.

How sizes change without new routes:
- tokens: loads are multiplied, which keeps the routing pattern and its skew.
- skew: loads are mixed with the same rows dealt out evenly, which keeps the tokens.

The break-even looks at a few layers and micro-steps of one window, spread over it: what a plan saves is much the same
in all of them, and a curve needs many points.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product

import numpy as np

from equipoise.core import InfeasiblePlanError, LoadMatrix, LoadsError, ModelShape
from equipoise.core.value import require_int
from equipoise.loads.count import Progress
from equipoise.loads.skew import rank_loads, skew_ML
from equipoise.planner.plan import complete
from equipoise.sim.result import WORTH, BreakEvenCurve, Shown, SweepPoint
from equipoise.sim.step import simulate_case
from equipoise.sim.windows import StepCase

AXES = ("ep", "slots", "micro", "tokens")
"""What can be swept: EP width, replica slots, samples per micro-step, tokens per rank and micro-step."""
_MOST = {"ep": 65536, "slots": 65536, "micro": 2**20, "tokens": 2**24}
"""Largest value of each: far beyond any cluster, and small enough for loads and prices to be whole numbers."""
COMPARED = ("static", "balanced")
"""Policies beside equipoise that a point needs; they do not depend on slots."""
TOKENS = tuple(2**i for i in range(7, 16))
"""Tokens per rank that a break-even curve tries, 128 to 32,768."""
MIXES = (0.25, 0.5, 1.0)
"""Shares of the real loads that a break-even curve mixes with even ones."""
CURVE_ENTRIES = 4
"""Layers, and micro-steps, that a break-even curve looks at."""

Windows = Callable[[int, int | None], Sequence[LoadMatrix]]
"""The step's windows at an EP width and a number of samples per micro-step (None: as it is)."""


def sweep_points(
    windows: Windows, case: StepCase, *, axes: Mapping[str, Sequence[int]], progress: Progress | None = None
) -> tuple[SweepPoint, ...]:
    """Simulate every combination of the axes' values.

    Args:
        windows: makes the step's windows
        case: how the step is simulated; its EP width and slots hold where these are not swept
        axes: values by name, see AXES; a missing one keeps what the step has
        progress: called with (points done, points in all)
    """
    values = {name: checked_axis(name, axes[name]) for name in axes}
    widths, micros = values.get("ep", (case.cluster.ep,)), values.get("micro", (None,))
    counts, tokens = values.get("slots", (case.slots,)), values.get("tokens", (None,))
    total = len(widths) * len(micros) * len(tokens) * len(counts)
    points: list[SweepPoint] = []
    for ep, micro in product(widths, micros):
        assert ep is not None, "a cluster has an EP width"
        step = [complete(window)[0] for window in windows(ep, micro)]
        if "tokens" in values:
            check_rows(step)
        for size in tokens:
            sized = step if size is None else [at_tokens(loads, size, case.model) for loads in step]
            for point in _at(sized, counts, replace(case, cluster=case.cluster.with_ep(ep))):
                points.append(replace(point, micro=micro))
                if progress is not None:
                    progress(len(points), total)
    return tuple(points)


def _at(step: Sequence[LoadMatrix], slots: Sequence[int], case: StepCase) -> Iterator[SweepPoint]:
    """Yield one point per number of slots."""
    # A point has no arrays, and its windows may not have the micro-step that is shown; no policy here needs a history.
    case = replace(case, setting=replace(case.setting, timeline_layers=0, shown=Shown()), history=None)
    compared = {r.policy: r.seconds.experts for r in simulate_case(step, COMPARED, case).policies}
    for count in slots:
        ours = simulate_case(step, "equipoise", replace(case, slots=count)).policies[0].seconds.experts
        yield SweepPoint(
            ep=case.cluster.ep,
            slots=count,
            micro=None,
            tokens=round(mean_tokens(step, case.model)),
            skew=mean_skew(step, case.cluster.ep),
            seconds={**compared, "equipoise": ours},
        )


def break_even_curves(
    window: LoadMatrix, case: StepCase, *, progress: Progress | None = None
) -> tuple[BreakEvenCurve, ...]:
    """Return what a plan saves over tokens per rank, at several skews; arguments as in `sweep_points`.

    There is no curve where the layers and micro-steps looked at have no row.
    """
    few, shape, layers = sampled(complete(window)[0], case.model)
    few_case = replace(
        case,
        model=shape,
        setting=replace(case.setting, pipeline_stages=1, planning_s=0.0),
        pair_LEE=None if case.pair_LEE is None else case.pair_LEE[layers],
    )
    mixes, curves = distinct_mixes(few), list[BreakEvenCurve]()
    for mixed in mixes:
        points = []
        for tokens in TOKENS:
            (point,) = _at([at_tokens(mixed, tokens, shape)], (case.slots,), few_case)
            points.append((tokens, point.saved_share))
            if progress is not None:
                progress(len(curves) * len(TOKENS) + len(points), len(mixes) * len(TOKENS))
        curves.append(BreakEvenCurve(skew=mean_skew([mixed], case.cluster.ep), points=tuple(points), worth=WORTH))
    return tuple(curves)


def checked_axis(name: str, values: Sequence[int]) -> tuple[int, ...]:
    """Return the values of an axis, or raise an error that names what is wrong."""
    if name not in AXES:
        raise InfeasiblePlanError(f"there is no axis {name!r} to sweep; known: {', '.join(AXES)}")
    if not values:
        raise InfeasiblePlanError(f"axis {name!r} has no values; write {name}=1,2,4")
    low = 0 if name == "slots" else 1
    found = [require_int(f"sweep {name}", v, low=low, high=_MOST[name], error=InfeasiblePlanError) for v in values]
    if len(set(found)) < len(found):
        raise InfeasiblePlanError(f"axis {name!r} has a value twice: {', '.join(map(str, found))}; write each once")
    return tuple(found)


def check_rows(step: Sequence[LoadMatrix]) -> None:
    """Raise if a window has no row: more tokens multiply loads, and there are none."""
    for w, loads in enumerate(step):
        if not complete(loads)[0].load_MLRE.any():
            raise LoadsError(
                f"window {w} ({loads.stage}) has no row, and tokens= multiplies rows; leave that axis out of the "
                "sweep, or give loads with rows in every window"
            )


def mean_tokens(step: Sequence[LoadMatrix], model: ModelShape) -> float:
    """Return the mean tokens that a source rank forwards in a micro-step."""
    rows = sum(int(loads.load_MLRE.sum()) for loads in step)
    entries = sum(loads.load_MLRE[..., 0].size for loads in step)
    return rows / (entries * model.top_k)


def mean_skew(step: Sequence[LoadMatrix], ep: int) -> float:
    """Return the mean skew over all windows, groups, micro-steps and layers, with every expert at its owner."""
    found = [skew_ML(rank_loads(group)) for loads in step for group in loads.split_groups(ep)]
    return float(np.concatenate(found).mean())


def at_tokens(loads: LoadMatrix, tokens: int, model: ModelShape) -> LoadMatrix:
    """Scale loads to `tokens` tokens per rank and micro-step on average, in whole rows."""
    factor = tokens / mean_tokens([loads], model)
    return LoadMatrix(np.rint(loads.load_MLRE * factor).astype(np.int64), stage=loads.stage)


def deal_out(load_MLRE: np.ndarray) -> np.ndarray:
    """Deal the same rows of the same sources to ranks and their experts in turn, like cards; [M, L, R, E]."""
    ranks, experts = load_MLRE.shape[2:]
    turn_E = np.arange(experts)
    end_MLR1 = np.cumsum(load_MLRE.sum(axis=3), axis=2)[..., None]
    start_MLR1 = end_MLR1 - load_MLRE.sum(axis=3)[..., None]
    # Row i of an entry has turn i modulo the experts: count the rows of start..end-1 that have each turn.
    ahead_E = experts - 1 - turn_E
    level_MLRE = np.empty_like(load_MLRE)
    dealt_MLRE = (end_MLR1 + ahead_E) // experts - (start_MLR1 + ahead_E) // experts
    level_MLRE[..., turn_E % ranks * (experts // ranks) + turn_E // ranks] = dealt_MLRE
    return level_MLRE


def mixed_with_even(loads: LoadMatrix, share: float) -> LoadMatrix:
    """Keep `share` of the real loads, and deal out the rest of the same rows evenly over the experts."""
    even_MLRE = deal_out(loads.load_MLRE)
    mixed = even_MLRE + np.rint(share * (loads.load_MLRE - even_MLRE)).astype(np.int64)
    return LoadMatrix(mixed, stage=loads.stage)


def distinct_mixes(loads: LoadMatrix) -> list[LoadMatrix]:
    """Return the loads at every share of MIXES, each once, as few or even rows round to the same; none without rows."""
    mixes: list[LoadMatrix] = []
    for share in MIXES if loads.load_MLRE.any() else ():
        mixed = mixed_with_even(loads, share)
        if mixed not in mixes:
            mixes.append(mixed)
    return mixes


def sampled(loads: LoadMatrix, model: ModelShape) -> tuple[LoadMatrix, ModelShape, np.ndarray]:
    """Return a few layers and micro-steps, spread over the window, the model with these layers, and their indices."""
    layers, steps = (
        np.unique(np.linspace(0, size - 1, min(size, CURVE_ENTRIES)).round().astype(int))
        for size in (loads.num_layers, loads.num_micro_steps)
    )
    few = LoadMatrix(loads.load_MLRE[steps][:, layers], stage=loads.stage)
    return few, model.replace(layers=len(layers)), layers

"""From what is given to the windows of a step: which stages are replayed, and which EP groups each window has.

Knows loads. Does not know plans or seconds.

Invariants (asserted by the tests):
1. A stage that has windows keeps them; one that has none replays all micro-steps of the other in one window.
2. Every group has as many source ranks as the EP group, and every window the same layers and experts as the model.
"""

from collections.abc import Sequence
from typing import get_args

import numpy as np

from equipoise.core import Cluster, LoadMatrix, LoadsError, ModelShape, Stage
from equipoise.sim.trial import Groups


def windows_of(
    loads: LoadMatrix | Sequence[LoadMatrix | Groups],
    *,
    cluster: Cluster,
    model: ModelShape,
    stages: Sequence[Stage] | None,
) -> list[Groups]:
    """Return the windows to replay, each a sequence of EP groups; arguments as in `simulate`."""
    if not isinstance(loads, LoadMatrix | Sequence):
        raise LoadsError(f"loads are a {type(loads).__name__}; give a LoadMatrix, or a list of them, one per window")
    given = [loads] if isinstance(loads, LoadMatrix) else list(loads)
    if not given:
        raise LoadsError("no windows were given; a simulation needs the loads of at least one")
    windows = [_groups(window, cluster.ep) for window in given]
    for groups in windows:
        _check(groups[0], cluster, model)
    return windows if stages is None else [w for stage in stages for w in _in_stage(windows, stage)]


def layers_of(loads: LoadMatrix, layers: slice) -> LoadMatrix:
    """Some layers of a window."""
    padding, coverage, numbers = loads.padding_MLRE, loads.coverage_MLR, loads.layer_numbers_L
    return LoadMatrix(
        loads.load_MLRE[:, layers],
        stage=loads.stage,
        padding_MLRE=None if padding is None else padding[:, layers],
        coverage_MLR=None if coverage is None else coverage[:, layers],
        layer_numbers_L=None if numbers is None else numbers[layers],
    )


def joined(windows: Sequence[LoadMatrix], stage: Stage) -> LoadMatrix:
    """All micro-steps of several windows in one."""
    first = windows[0]

    def together(name: str, empty: float) -> np.ndarray | None:
        arrays = [getattr(window, name) for window in windows]
        if all(array is None for array in arrays):
            return None
        shape = 4 if name.endswith("E") else 3
        filled = [
            np.full(w.load_MLRE.shape[:shape], empty, dtype=type(empty)) if a is None else a
            for w, a in zip(windows, arrays, strict=True)
        ]
        return np.concatenate(filled)

    return LoadMatrix(
        np.concatenate([window.load_MLRE for window in windows]),
        stage=stage,
        padding_MLRE=together("padding_MLRE", 0),
        coverage_MLR=together("coverage_MLR", 1.0),
        layer_numbers_L=first.layer_numbers_L,
    )


def _groups(window: LoadMatrix | Groups, ep: int) -> Groups:
    if not isinstance(window, LoadMatrix):
        if not len(window):
            raise LoadsError("a window without EP groups was given; give at least one matrix")
        return window
    if window.num_ranks % ep:
        raise LoadsError(
            f"the loads have {window.num_ranks} source ranks, which do not fill EP groups of {ep}; "
            "give an EP width that divides them, or schedule the samples for it"
        )
    return window.split_groups(ep)


def _check(loads: LoadMatrix, cluster: Cluster, model: ModelShape) -> None:
    if not isinstance(loads, LoadMatrix):
        raise LoadsError(
            f"a window holds a {type(loads).__name__}; give a LoadMatrix, or one for each of its EP groups"
        )
    found, wanted = (loads.num_layers, loads.num_experts), (model.layers, model.experts)
    if found != wanted:
        raise LoadsError(
            f"loads have {found[0]} layers of {found[1]} experts, {model.name!r} has {wanted[0]} of {wanted[1]}; "
            "override them with ModelShape.preset(..., experts=, layers=) or fix the loads"
        )
    if loads.num_ranks != cluster.ep:
        raise LoadsError(
            f"loads of an EP group have {loads.num_ranks} source ranks, the group has {cluster.ep}; they must be equal"
        )


def _in_stage(windows: Sequence[Groups], stage: Stage) -> list[Groups]:
    if stage not in get_args(Stage):
        raise LoadsError(f"stages names {stage!r}; they are {', '.join(get_args(Stage))}")
    own = [groups for groups in windows if groups[0].stage == stage]
    if own:
        return own
    counts = {len(groups) for groups in windows}
    if len(counts) > 1:
        raise LoadsError(f"windows have {sorted(counts)} EP groups; give windows of the same groups")
    return [[joined([groups[g] for groups in windows], stage) for g in range(counts.pop())]]

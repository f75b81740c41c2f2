"""From what is on the command line to the loads of a step: find out what the dump is, schedule it, count it.

A dump is one of
    routes in any form     whole samples are counted as they are read; sliced ones are counted from the routes
    histograms (.npz)      made by `equipoise count`; whole samples only
    loads (.npz)           made by `equipoise loads`, `LoadMatrix.save`: one window, already scheduled
Knows files and options. Does not know how anything is counted: that is `loads`.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from equipoise.cli.options import COUNTS, LOADS, Packing, Reading, count_dump, find_model, npz_kind
from equipoise.cli.output import progress, remark
from equipoise.core import (
    Cluster,
    InfeasiblePlanError,
    LoadMatrix,
    LoadsError,
    ModelShape,
    RouteCounts,
    Routes,
    RoutesError,
    Schedule,
    ScheduleError,
    TopologyError,
)
from equipoise.core.value import require_int
from equipoise.loads import (
    TokenPolicy,
    count_step,
    generate_counts,
    load_counts,
    longest_first,
    read_schedules,
    slice_context,
    slice_sequence,
    step_schedules,
)
from equipoise.report.page import plural

DEMO_MODEL = "qwen3-30b-a3b"
"""Shape of the generated step of `--demo`."""


def schedule_step(packing: Packing, tokens_B: np.ndarray, *, policy: TokenPolicy) -> tuple[Schedule, ...]:
    """Schedule the samples of a step, as the trainer's file says or by rule."""
    step = _packed(packing, tokens_B, policy)
    return tuple(longest_first(window) for window in step) if packing.longest_first else step


def _packed(packing: Packing, tokens_B: np.ndarray, policy: TokenPolicy) -> tuple[Schedule, ...]:
    if packing.is_file:
        return _read_schedule(packing)
    # A mini-batch has at least one sample.
    require_int("--mini-batches", packing.mini_batches, low=1, high=max(1, len(tokens_B)), error=ScheduleError)
    step = step_schedules(
        tokens_B,
        ranks=packing.ranks // (packing.cp * packing.sp),
        mini_batches=packing.mini_batches,
        recompute=packing.recompute,
        policy=policy,
        **_way_of(packing),
    )
    return tuple(slice_sequence(slice_context(window, packing.cp), packing.sp) for window in step)


def check_packing(packing: Packing, model: ModelShape) -> None:
    """Raise if no samples of the model can be packed like this: before a dump is read, which may take minutes."""
    if packing.is_file:
        _read_schedule(packing)
    else:
        _way_of(packing)
    if packing.ep % (packing.cp * packing.sp):
        raise TopologyError(f"--cp {packing.cp} x --sp {packing.sp} does not divide the EP group of {packing.ep} ranks")
    # Of any device: only the division of experts over ranks is asked for.
    Cluster.preset("h100", ep=packing.ep).home_slots(model)


def _way_of(packing: Packing) -> dict[str, int]:
    """`samples:N` or `tokens:N` in the packer's words."""
    way, _, number = packing.schedule.partition(":")
    words = {"samples": "samples_per_micro_step", "tokens": "token_budget"}
    if way not in words or not (number.isascii() and number.isdigit()) or not int(number):
        raise ScheduleError(
            f"--schedule is {packing.schedule!r}; write samples:N, tokens:N, N at least 1, or the path of a schedule "
            "file (.json)"
        )
    return {words[way]: int(number)}


def _read_schedule(packing: Packing) -> tuple[Schedule, ...]:
    kept = {name: getattr(packing, name) for name in ("ep", "groups", "schedule", "longest_first")}
    if packing != Packing(**kept):
        raise ScheduleError(
            f"{packing.schedule} says which windows there are and how they are cut; "
            "leave --mini-batches, --cp, --sp and --no-recompute out"
        )
    step = read_schedules(packing.schedule)
    wrong = [s.ranks for s in step if s.ranks != packing.ranks]
    if wrong:
        raise ScheduleError(
            f"{packing.schedule} schedules {wrong[0]} ranks, --ep {packing.ep} x --groups {packing.groups} are "
            f"{packing.ranks}; give the ranks that it schedules"
        )
    return step


def demo_counts(dump: Path | None, model: str | None, *, demo: bool, samples: int) -> RouteCounts | None:
    """Histograms of a generated step for `--demo`, None where a dump was given; both or neither is refused."""
    if demo == (dump is not None):
        raise RoutesError("give one of the two: a DUMP, or --demo for a generated step")
    return generate_counts(find_model(model or DEMO_MODEL), samples=samples, mean_tokens=4096) if demo else None


def refuse_loads(dump: Path) -> None:
    """Raise if the dump is loads already."""
    if npz_kind(dump) == LOADS:
        raise ScheduleError(f"{dump} holds loads, which are scheduled already; equipoise plan takes them as they are")


def load_step(dump: Path, reading: Reading, packing: Packing) -> tuple[ModelShape, tuple[LoadMatrix, ...]]:
    """Return the model and the loads of every window of the step."""
    if npz_kind(dump) == LOADS:
        if packing != Packing(ep=packing.ep):
            raise ScheduleError(f"{dump} holds loads, which are scheduled already; of the options keep --ep alone")
        named, loads = find_model(reading.model, dump=dump), LoadMatrix.load(dump)
        return model_of_loads(named, loads, dump=dump), (loads,)
    samples = read_samples(dump, reading, packing)
    return samples.model, count_samples(samples, packing)


def model_of_loads(named: ModelShape, loads: LoadMatrix, *, dump: Path) -> ModelShape:
    """The named model with the layers of the loads, which do not say whose they are; raise if they cannot be its.

    Loads of fewer layers may be a pipeline stage's, or another model's whose experts are as many: that is remarked on.
    """
    numbers = () if loads.layer_numbers_L is None else loads.layer_numbers_L.tolist()
    is_within = loads.num_layers <= named.layers and set(numbers) <= set(named.layer_numbers)
    if loads.num_experts != named.experts or not is_within:
        raise LoadsError(
            f"{dump}: loads have {loads.num_layers} layers of {loads.num_experts} experts, {named.name!r} has "
            f"{named.layers} of {named.experts}{_strangers(numbers, named)}; name the model whose routes were counted: "
            "--model with a preset or a HF config.json"
        )
    if loads.num_layers == named.layers:
        return named
    remark(
        f"{dump} has loads of {plural(loads.num_layers, 'MoE layer')}, {named.name} has {named.layers}: experts are "
        "priced as that model's, layers are those of the loads"
    )
    return named.replace(layers=loads.num_layers)


def _strangers(numbers: Sequence[int], named: ModelShape) -> str:
    found = sorted(set(numbers) - set(named.layer_numbers))
    return f" and no MoE layer {found[0]}" if found else ""


def read_samples(dump: Path, reading: Reading, packing: Packing) -> RouteCounts | Routes:
    """The samples of a dump, which may take minutes: histograms, or the routes where samples are cut."""
    if npz_kind(dump) == COUNTS:
        counts = load_counts(dump)
        _check_model(dump, counts.model, reading.model)
        return counts
    check_packing(packing, find_model(reading.model, dump=dump, form=reading.form))
    return count_dump(dump, reading) if packing.whole_samples else _read(dump, reading)


def count_samples(samples: RouteCounts | Routes, packing: Packing) -> tuple[LoadMatrix, ...]:
    """Schedule and count samples, whole or cut."""
    if isinstance(samples, RouteCounts):
        return count_windows(samples, packing)
    check_packing(packing, samples.model)
    tokens_B = np.array([sample.num_tokens for sample in samples], dtype=np.int64)
    schedules = schedule_step(packing, tokens_B, policy=TokenPolicy())
    with progress("counting") as show:
        return count_step(samples, schedules, ep=packing.ep, progress=show)


def _read(dump: Path, reading: Reading) -> Routes:
    """All routes, in memory or mapped, with a bar while they are read."""
    model, stream = reading.stream(dump)
    samples = []
    with progress("reading") as show:
        for sample in stream:
            samples.append(sample)
            show(len(samples), 0)
    if not samples:
        raise RoutesError(f"{dump} holds no sample; is it the right file?")
    return Routes.of(samples, model=model, layer_numbers=stream.layer_numbers)


def count_windows(counts: RouteCounts, packing: Packing) -> tuple[LoadMatrix, ...]:
    """Schedule and count histograms."""
    check_packing(packing, counts.model)
    if packing.cp > 1 or packing.sp > 1:
        raise ScheduleError(
            f"--cp {packing.cp} and --sp {packing.sp} cut samples, and histograms hold them whole; give the routes, or "
            "leave both out"
        )
    unknown_BL = counts.unknown_BL
    last_recorded = unknown_BL is None or bool((unknown_BL.min(axis=1) == 0).any())
    # A histogram that holds the last token's row cannot drop it again: then all tokens are forwarded.
    policy = TokenPolicy(last_token="unknown" if last_recorded else "drop")
    return count_step(counts, schedule_step(packing, counts.tokens_B, policy=policy), ep=packing.ep)


def _check_model(dump: Path, counted: ModelShape, named: str | None) -> None:
    """Raise if histograms are of another model than the one that was named."""
    wanted = counted if named is None else find_model(named)
    for figure in ("experts", "top_k", "layer_numbers"):
        have, want = getattr(counted, figure), getattr(wanted, figure)
        if have != want:
            raise RoutesError(f"{dump} holds histograms of {counted.name!r}: {figure} is {have}, not {want}")


def read_history(path: Path | None, policies: Sequence[str]) -> LoadMatrix | None:
    """The loads of an earlier step or window, None where none are named; refused where no policy looks at them."""
    if path is None:
        return None
    if "eplb-history" not in policies:
        raise InfeasiblePlanError(
            f"--history {path} is for the policy eplb-history, which was not asked for; add it, or leave --history out"
        )
    return LoadMatrix.load(path)


def read_pairs(path: Path, loads: LoadMatrix) -> np.ndarray:
    """[L, E, E] tokens that chose both experts, of a counts file, in the layers of the loads."""
    counts = load_counts(path)
    if counts.pair_LEE is None:
        raise RoutesError(f"{path} holds no pairs; count the dump anew: equipoise count DUMP --pairs -o {path}")
    numbers = counts.layer_numbers if loads.layer_numbers_L is None else loads.layer_numbers_L.tolist()
    missing = sorted(set(numbers) - set(counts.layer_numbers))
    if missing or len(numbers) != loads.num_layers or counts.model.experts != loads.num_experts:
        raise RoutesError(
            f"{path} holds pairs of {len(counts.layer_numbers)} layers of {counts.model.experts} experts of "
            f"{counts.model.name!r}, the loads have {loads.num_layers} of {loads.num_experts}; give the counts that "
            "the loads were made of"
        )
    return counts.pair_LEE[[counts.layer_numbers.index(number) for number in numbers]]

"""From a dump on the command line to the loads of a step: find out what it is, schedule its samples, count rows.

A dump is one of
    routes in any format   whole samples are counted while they are read; samples that are cut need the routes
    histograms (.npz)      made by `equipoise convert --to counts`; whole samples only
    loads (.npz)           made by `equipoise convert --to loads` or `LoadMatrix.save`: one window, already scheduled;
                           the name that was given to `convert` stands for all windows that it wrote
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from equipoise.cli.options import TOKEN_BUDGET, PackingFlags, ReadingFlags, find_model, npz_kind
from equipoise.cli.output import progress, warn
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
from equipoise.core.value import plural, require_int
from equipoise.loads import (
    MemoryLimit,
    Packing,
    TokenPolicy,
    count_routes,
    count_step,
    generate_counts,
    load_counts,
    longest_first,
    pack_step,
    read_schedules,
    sketch_counts,
    slice_context,
    slice_sequence,
    step_schedules,
)

DEMO_MODEL = "qwen3-30b-a3b"
"""Shape of the generated step of `--demo`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSource:
    """Where the windows of a step come from, at any EP width and number of samples per micro-step (None: as given)."""

    model: ModelShape
    windows: Callable[[int, int | None], Sequence[LoadMatrix]]
    check: Callable[[int, int | None], None]
    """Raise, without reading or counting, if there are no such windows."""
    pair_LEE: np.ndarray | None = None
    """[L, E, E] tokens that chose both experts, if they were counted."""
    schedule: str = ""
    """How samples become micro-steps, as a sentence; empty for loads, which are scheduled already."""


def open_step(
    dump: Path | None,
    reading: ReadingFlags,
    packing: PackingFlags,
    *,
    demo_samples: int | None = None,
    pack_for: int | None = None,
) -> StepSource:
    """Open the step of a dump, or a generated one; routes are read here, once for all widths of a sweep.

    `demo_samples` is how many to generate where the user asked for the demo; `pack_for` are the ranks per node, if
    samples are packed by their experts.
    """
    if (dump is None) == (demo_samples is None):
        raise RoutesError("give one of the two: a DUMP, or --demo for a generated step")
    files = [] if dump is None else find_windows(dump)
    if dump is not None and npz_kind(files[0]) == "loads":
        if pack_for is not None:
            raise ScheduleError(f"{dump} holds loads, which --pack cannot pack again; give the samples")
        return _open_loads(dump, files, reading, packing)
    samples: RouteCounts | Routes
    if dump is None:
        assert demo_samples is not None, "one of the two was given"
        model = find_model(reading.model or DEMO_MODEL)
        samples = generate_counts(model, samples=demo_samples, mean_tokens=4096)
    else:
        samples = read_samples(dump, reading, packing)
    # A dump may hold only some of the model's layers.
    model = samples.model.replace(layers=len(samples.layer_numbers))

    def packed(ep: int, micro: int | None) -> PackingFlags:
        return replace(packing, ep=ep, schedule=packing.schedule if micro is None else f"samples:{micro}")

    return StepSource(
        model=model,
        windows=lambda ep, micro: count_samples(samples, packed(ep, micro), pack_for=pack_for),
        check=lambda ep, micro: check_packing(packed(ep, micro), model),
        pair_LEE=samples.pair_LEE if isinstance(samples, RouteCounts) else None,
        schedule=say_schedule(packing, samples),
    )


def find_windows(dump: Path, stage: str = "*") -> list[Path]:
    """Return the file, or the windows that `convert --to loads -o FILE` wrote in its place, in their order."""
    windows = [] if dump.exists() else dump.parent.glob(f"{dump.stem}-*-{stage}{dump.suffix}")
    numbered = {re.fullmatch(r"-(\d+)-(?:recompute|update)", path.stem[len(dump.stem) :]): path for path in windows}
    return [path for _, path in sorted((int(match[1]), path) for match, path in numbered.items() if match)] or [dump]


def _open_loads(dump: Path, files: Sequence[Path], reading: ReadingFlags, packing: PackingFlags) -> StepSource:
    """Open the loads of windows: they can be cut into EP groups of another width, but not packed again."""
    if packing != PackingFlags(ep=packing.ep):
        raise ScheduleError(
            f"{dump} holds loads, which are scheduled already; of the schedule's options keep only --ep"
        )
    named, windows = find_model(reading.model, dump=files[0]), tuple(LoadMatrix.load(path) for path in files)
    loads = windows[0]

    def check(ep: int, micro: int | None) -> None:
        if micro is not None:
            raise ScheduleError(
                f"{dump} holds loads, which are scheduled already: --sweep micro={micro} cannot pack them again; give "
                "the samples, or leave micro out"
            )
        if loads.num_ranks % ep:
            raise LoadsError(
                f"{dump} has loads of {loads.num_ranks} source ranks, which do not fill EP groups of {ep}; give a "
                "width that divides them, or the samples"
            )

    return StepSource(model=model_of_loads(named, loads, dump=dump), windows=lambda _ep, _micro: windows, check=check)


def model_of_loads(named: ModelShape, loads: LoadMatrix, *, dump: Path) -> ModelShape:
    """Return the named model with the layers of the loads, or raise if the loads cannot be that model's.

    Loads do not name their model. Loads of fewer layers may belong to a pipeline stage, or to another model with as
    many experts, so that is a warning.
    """
    numbers = set() if loads.layer_numbers_L is None else set(loads.layer_numbers_L.tolist())
    unknown = sorted(numbers - set(named.layer_numbers))
    if loads.num_experts != named.experts or loads.num_layers > named.layers or unknown:
        lacking = f" and no MoE layer {unknown[0]}" if unknown else ""
        raise LoadsError(
            f"{dump}: loads have {loads.num_layers} layers of {loads.num_experts} experts, {named.name!r} has "
            f"{named.layers} of {named.experts}{lacking}; name the model whose routes were counted: --model with a "
            "preset or a HF config.json"
        )
    if loads.num_layers == named.layers:
        return named
    warn(
        f"{dump} has loads of {plural(loads.num_layers, 'MoE layer')}, {named.name} has {named.layers}: experts are "
        "priced as that model's, layers are those of the loads"
    )
    return named.replace(layers=loads.num_layers)


def count_dump(dump: Path, reading: ReadingFlags, *, pairs: bool = False) -> RouteCounts:
    """Count a dump while reading it, with one sample in memory at a time."""
    model, stream = reading.stream(dump)
    with progress("counting") as show:
        counts = count_routes(stream, model=model, layer_numbers=stream.layer_numbers, pairs=pairs, progress=show)
    if not len(counts):
        raise RoutesError(f"{dump} holds no sample; is it the right file?")
    return counts


def read_samples(dump: Path, reading: ReadingFlags, packing: PackingFlags) -> RouteCounts | Routes:
    """Read the samples of a dump, which may take minutes: histograms, or the routes if samples are cut."""
    if npz_kind(dump) == "counts":
        counts = load_counts(dump)
        wanted = counts.model if reading.model is None else find_model(reading.model)
        for name in ("experts", "top_k", "layer_numbers"):
            have, want = getattr(counts.model, name), getattr(wanted, name)
            if have != want:
                raise RoutesError(f"{dump} holds histograms of {counts.model.name!r}: {name} is {have}, not {want}")
        return counts
    check_packing(packing, find_model(reading.model, dump=dump, form=reading.form))
    if packing.has_whole_samples:
        return count_dump(dump, reading)
    model, stream = reading.stream(dump)
    samples = []
    with progress("reading") as show:
        for sample in stream:
            samples.append(sample)
            show(len(samples), 0)
    if not samples:
        raise RoutesError(f"{dump} holds no sample; is it the right file?")
    return Routes.of(samples, model=model, layer_numbers=stream.layer_numbers)


def count_samples(
    samples: RouteCounts | Routes, packing: PackingFlags, *, pack_for: int | None = None
) -> tuple[LoadMatrix, ...]:
    """Schedule the samples of a step and count the loads of every window; arguments as in `open_step`."""
    check_packing(packing, samples.model)
    if isinstance(samples, RouteCounts) and (packing.cp > 1 or packing.sp > 1):
        raise ScheduleError(
            f"--cp {packing.cp} and --sp {packing.sp} cut samples, and histograms hold them whole; give the routes, or "
            "leave both out"
        )

    def packed(given: tuple[Schedule, ...]) -> tuple[Schedule, ...]:
        assert pack_for is not None, "only called if samples are packed"
        return tuple(made.schedule for made in pack_given(samples, given, packing, ranks_per_node=pack_for))

    pack = None if pack_for is None else packed
    schedules = schedule_step(packing, samples, policy=token_policy(samples), pack=pack)
    if isinstance(samples, RouteCounts):
        return count_step(samples, schedules, ep=packing.ep)
    with progress("counting") as show:
        return count_step(samples, schedules, ep=packing.ep, progress=show)


def token_policy(samples: RouteCounts | Routes) -> TokenPolicy:
    """Return what becomes of last tokens: a histogram that holds the last token's row cannot drop it again."""
    if isinstance(samples, Routes):
        return TokenPolicy()
    unknown_BL = samples.unknown_BL
    is_last_recorded = unknown_BL is None or bool((unknown_BL.min(axis=1) == 0).any())
    return TokenPolicy(last_token="unknown" if is_last_recorded else "drop")


def pack_given(
    samples: RouteCounts | Routes,
    given: tuple[Schedule, ...],
    packing: PackingFlags,
    *,
    ranks_per_node: int,
    memory: MemoryLimit | None = None,
) -> tuple[Packing, ...]:
    """Pack the windows of a step by experts; a source is a rank, or the ranks that share its samples."""
    require_int("--ranks-per-node", ranks_per_node, low=1, error=TopologyError)
    each = packing.cp * packing.sp
    if each > 1 and ranks_per_node % each:
        raise TopologyError(
            f"--cp {packing.cp} x --sp {packing.sp} does not divide the {ranks_per_node} ranks of a node: a sample "
            "would be on two nodes; give --ranks-per-node that they divide, or do not pack"
        )
    counts = samples if isinstance(samples, RouteCounts) else count_routes(samples)
    node_R = np.arange(packing.ep // each) * each // ranks_per_node
    policy = token_policy(samples)
    return pack_step(sketch_counts(counts), given, node_R=node_R.tolist(), policy=policy, memory=memory)


Pack = Callable[[tuple[Schedule, ...]], tuple[Schedule, ...]]
"""From windows of whole samples to the same windows, packed."""


def schedule_step(
    packing: PackingFlags, samples: RouteCounts | Routes, *, policy: TokenPolicy, pack: Pack | None = None
) -> tuple[Schedule, ...]:
    """Schedule the samples of a step, by the trainer's file or by rule; `pack` is called before samples are cut."""
    pack = pack or (lambda given: given)
    if packing.is_file:
        step = pack(_read_schedule(packing))
    else:
        tokens_B = _tokens_of(samples)
        # A mini-batch has at least one sample.
        require_int("--mini-batches", packing.mini_batches, low=1, high=max(1, len(tokens_B)), error=ScheduleError)
        whole = step_schedules(
            tokens_B,
            ranks=packing.ranks // (packing.cp * packing.sp),
            mini_batches=packing.mini_batches,
            recompute=packing.recompute,
            policy=policy,
            **_packing_rule(packing, longest=int(tokens_B.max(initial=0))),
        )
        step = tuple(slice_sequence(slice_context(window, packing.cp), packing.sp) for window in pack(whole))
    return tuple(longest_first(window) for window in step) if packing.longest_first else step


def _tokens_of(samples: RouteCounts | Routes) -> np.ndarray:
    if isinstance(samples, RouteCounts):
        return samples.tokens_B
    return np.array([sample.num_tokens for sample in samples], dtype=np.int64)


def check_packing(packing: PackingFlags, model: ModelShape) -> None:
    """Raise if no samples of the model can be packed like this: before a dump is read, which may take minutes."""
    if packing.is_file:
        _read_schedule(packing)
    else:
        _packing_rule(packing)
    if packing.ep % (packing.cp * packing.sp):
        raise TopologyError(f"--cp {packing.cp} x --sp {packing.sp} does not divide the EP group of {packing.ep} ranks")
    # Any device will do: this only divides the experts by the ranks.
    Cluster.preset("h100", ep=packing.ep).home_slots(model)


def _packing_rule(packing: PackingFlags, *, longest: int = 0) -> dict[str, int]:
    """Parse `samples:N` or `tokens:N` into the packer's argument; `tokens` alone also fits the longest sample."""
    if packing.schedule == "tokens":
        return {"token_budget": max(TOKEN_BUDGET, longest)}
    unit, _, number = packing.schedule.partition(":")
    arguments = {"samples": "samples_per_micro_step", "tokens": "token_budget"}
    if unit not in arguments or not (number.isascii() and number.isdigit()) or not int(number):
        raise ScheduleError(
            f"--schedule is {packing.schedule!r}; write samples:N or tokens:N with N at least 1, tokens alone, or "
            "the path of a schedule file (.json)"
        )
    return {arguments[unit]: int(number)}


def say_schedule(packing: PackingFlags, samples: RouteCounts | Routes) -> str:
    """Return how samples become micro-steps, as a sentence that names the option."""
    if packing.is_file:
        return f"Micro-steps are those of {packing.schedule}."
    ((argument, number),) = _packing_rule(packing, longest=int(_tokens_of(samples).max(initial=0))).items()
    unit, most = "tokens", f"at most {plural(number, 'token')}"
    if argument == "samples_per_micro_step":
        unit, most = "samples", plural(number, "sample")
    return f"Each rank forwards {most} per micro-step (--schedule {unit}:{number})."


def _read_schedule(packing: PackingFlags) -> tuple[Schedule, ...]:
    allowed = {name: getattr(packing, name) for name in ("ep", "groups", "schedule", "longest_first")}
    if packing != PackingFlags(**allowed):
        raise ScheduleError(
            f"{packing.schedule} defines the windows and how samples are cut; leave --mini-batches, --cp, --sp and "
            "--no-recompute out"
        )
    step = read_schedules(packing.schedule)
    wrong = [s.ranks for s in step if s.ranks != packing.ranks]
    if wrong:
        raise ScheduleError(
            f"{packing.schedule} schedules {wrong[0]} ranks, --ep {packing.ep} x --groups {packing.groups} are "
            f"{packing.ranks}; give the ranks that it schedules"
        )
    return step


def read_history(path: Path | None, policies: Sequence[str]) -> LoadMatrix | None:
    """Read the loads of an earlier step; refuse them if no policy uses them."""
    if path is None:
        return None
    if "eplb-history" not in policies:
        raise InfeasiblePlanError(
            f"--history {path} is for the policy eplb-history, which was not asked for; add it, or leave --history out"
        )
    return LoadMatrix.load(path)


def read_pairs(path: Path, loads: LoadMatrix) -> np.ndarray:
    """Read [L, E, E] tokens that chose both experts, from a counts file, for the layers of the loads."""
    counts = load_counts(path)
    if counts.pair_LEE is None:
        raise RoutesError(
            f"{path} holds no pairs; count the dump again: equipoise convert DUMP --to counts --pairs -o {path}"
        )
    numbers = counts.layer_numbers if loads.layer_numbers_L is None else loads.layer_numbers_L.tolist()
    missing = set(numbers) - set(counts.layer_numbers)
    if missing or len(numbers) != loads.num_layers or counts.model.experts != loads.num_experts:
        raise RoutesError(
            f"{path} holds pairs of {len(counts.layer_numbers)} layers of {counts.model.experts} experts of "
            f"{counts.model.name!r}, the loads have {loads.num_layers} of {loads.num_experts}; give the counts that "
            "the loads were made of"
        )
    return counts.pair_LEE[[counts.layer_numbers.index(number) for number in numbers]]

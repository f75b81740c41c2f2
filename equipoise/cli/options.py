"""Options that verbs share, alone and in groups, and how a model or a dump on the command line is understood.

Knows the words users write. Does not know how they become flags (`flags.py`), nor how routes are read or counted: it
calls the rooms that do.
"""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np
import typer

from equipoise.cli.output import progress
from equipoise.core import Cluster, InfeasiblePlanError, ModelShape, RoutesError, plan_file
from equipoise.core import loads as loads_file
from equipoise.core.options import replica_bytes
from equipoise.loads import count
from equipoise.planner import PlanOptions

if TYPE_CHECKING:
    from equipoise.core import Cluster, ModelShape, RouteCounts
    from equipoise.routes.interpret import SampleStream


# What a step runs on, as options that verbs share: a device preset, its prices, its nodes and links.
#
# Invariants (asserted by the tests):
# 1. What is given stands in the cluster; what is left out is the preset's.
# 2. A profile names its device: without --cluster its preset is taken, and another one's is refused.


DEFAULT = "h100"


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The device, its nodes and its links."""

    SECTION: ClassVar[str] = "The machine"
    cluster: Annotated[
        str | None,
        typer.Option(
            "--cluster", help=f"Device preset: h100, h200, a100 or b200; {DEFAULT}, or the profile's, if left out."
        ),
    ] = None
    profile: Annotated[
        Path | None,
        typer.Option("--profile", help="Prices of your own GPU: the file that `equipoise calibrate -o` wrote."),
    ] = None
    ranks_per_node: Annotated[int, typer.Option(help="Ranks of a node: GPUs that NVLink joins.")] = 8
    network_gbit: Annotated[
        float | None, typer.Option(help="Network of one GPU, one direction, in Gb/s; the preset's if left out.")
    ] = None
    nvlink_gbyte: Annotated[
        float | None, typer.Option(help="NVLink of one GPU, one direction, in GB/s; the preset's if left out.")
    ] = None

    def describe(self, *, ep: int, nodes: int | None = None) -> "Cluster":
        """Build the cluster of an EP group, or raise with what is wrong about the options."""
        from equipoise.core import Cluster, TopologyError
        from equipoise.core.value import require_int

        require_int("--ranks-per-node", self.ranks_per_node, low=1, error=TopologyError)
        figures: dict[str, Any] = {}
        for option, figure, unit in (
            ("network_gbit", "network_bytes_per_s", 10**9 / 8),
            ("nvlink_gbyte", "nvlink_bytes_per_s", 10**9),
        ):
            rate = getattr(self, option)
            if rate is not None:
                figures[figure] = _whole_rate(f"--{option.replace('_', '-')}", rate, unit)
        name = self.cluster or DEFAULT
        if self.profile is not None:
            name = _preset_of(self.profile, self.cluster)
            figures["profile"] = str(self.profile.resolve())
        return Cluster.preset(name, nodes=nodes, ranks_per_node=self.ranks_per_node, ep=ep, **figures)


def _whole_rate(option: str, rate: float, unit: float) -> int:
    """Bytes per second of a rate on the command line."""
    from equipoise.core import TopologyError

    if not 0.001 <= rate <= 10**6:
        raise TopologyError(f"{option} is {rate:g}; it must be from 0.001 to 1000000")
    return round(rate * unit)


def _preset_of(profile: Path, named: str | None) -> str:
    """The preset with the links of a profile's device: the one that is named, or that is named like the device."""
    from equipoise.core import TopologyError
    from equipoise.core.cluster import preset_names, presets_like
    from equipoise.cost import Profile

    device = Profile.read(profile).device
    fitting = presets_like(device)
    if named is None and not fitting:
        raise TopologyError(
            f"profile {profile} is of {device!r}, and no preset is named like it; name the one whose links and memory "
            f"it has: --cluster {', '.join(preset_names())}"
        )
    if named is not None and fitting and named.lower() not in fitting:
        raise TopologyError(
            f"profile {profile} is of {device!r}, --cluster is {named!r}; give {fitting[-1]!r}, or leave --cluster out"
        )
    return named or fitting[-1]


# Which of our files a path is: what an `.npz` archive says of itself, whatever its name.


LOADS, COUNTS, PLAN = loads_file.FORMAT, count.FORMAT, plan_file.FORMAT
_TAKERS = {
    COUNTS: ("histograms", "equipoise loads, analyze and simulate take them"),
    LOADS: ("loads", "equipoise plan, analyze and simulate take them"),
    PLAN: ("a plan", "Plan.load reads it"),
}


def npz_kind(path: Path) -> str:
    """What a file of ours says it is; empty for anything else, whose reader then says what is wrong."""
    if not path.is_file():
        return ""
    try:
        file = np.load(path, allow_pickle=False)
        if not isinstance(file, np.lib.npyio.NpzFile):
            return ""
        with file:
            return str(file["format"]) if "format" in file.files else ""
    except (*loads_file.NPZ_ERRORS, OSError, ValueError, EOFError, KeyError, RuntimeError):
        return ""


def refuse_counted(path: Path) -> None:
    """Raise where routes are wanted and the file is one that was made of them."""
    if found := _TAKERS.get(npz_kind(path)):
        what, who = found
        raise RoutesError(f"{path} holds {what}, not routes; {who}")


# How many replica slots a rank can hold: what `--slots` and `--sweep slots=` are held against before any planning.
#
# Two things bind: a rank has no use for more replicas than the experts that other ranks own, and their buffers must
# fit
# into its device. Knows sizes. Does not know loads or plans.
#
# Invariants (asserted by the tests):
# 1. The most that is allowed passes, one more is refused, and the message names value, limit, what binds and the fix.
# 2. Fewer than 0 slots are refused.


GB = 1e9


def check_slots(slots: int | Iterable[int], *, cluster: Cluster, model: ModelShape) -> None:
    """Raise if one of the numbers of replica slots is more than a rank of the group can hold, or less than none."""
    most, binds = most_slots(cluster, model)
    usual = "One slot is the usual choice" if most else "Give --slots 0, for placement alone"
    for number in (slots,) if isinstance(slots, int) else slots:
        if number < 0:
            raise InfeasiblePlanError(f"--slots is {number}; it must be 0 (placement alone) or more")
        if number > most:
            raise InfeasiblePlanError(f"--slots is {number}; a rank can hold at most {most}: {binds}. {usual}")


def most_slots(cluster: Cluster, model: ModelShape) -> tuple[int, str]:
    """The most replica slots a rank can hold, and in words what binds."""
    owned = cluster.home_slots(model)
    others = model.experts - owned
    each = (PlanOptions().depth + 1) * replica_bytes(model, "update")
    fitting = cluster.memory_bytes // each
    if fitting >= others:
        return others, f"the model has {model.experts} experts, of which it owns {owned} at EP {cluster.ep}"
    return fitting, f"{cluster.name} has {cluster.memory_bytes / GB:.0f} GB, and a slot takes {each / GB:.2f} GB"


MAX_RANKS = 65536
"""Most ranks of a step: far beyond any, and few enough to be counted."""
JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON document as the last line, and no tables.")]
ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="Model preset such as qwen3-30b-a3b, or a HF config.json. Stores and counts name theirs, loads do not.",
    ),
]
FormatOption = Annotated[
    str | None, typer.Option("--format", help="Form of the dump, see `equipoise formats`; by content if left out.")
]
ReportOption = Annotated[
    Path | None, typer.Option("--report", help="Also write the page of the result to this HTML file.")
]
ActivationsOption = Annotated[
    Literal["kept", "recomputed"],
    typer.Option("--activations", help="Activations of experts: kept for the backward pass, or recomputed in it."),
]
ForceFlag = Annotated[bool, typer.Option("--force", help="Replace files that already exist.")]
DumpArgument = Annotated[Path, typer.Argument(help="A rollout dump: file or folder in any form.", show_default=False)]


def find_model(name: str | None, *, dump: Path | None = None, form: str | None = None) -> "ModelShape":
    """Return the model of a preset name or a HF config.json; a native store brings its own where none is named."""
    from equipoise.core import RoutesError
    from equipoise.routes import open_store, store
    from equipoise.routes.registry import detect, find_format, resolve_model

    if name is not None:
        return resolve_model(name)
    # Loads do not name their model, and no form describes them.
    if dump is not None and not npz_kind(dump):
        found = detect(dump) if form is None else find_format(form)
        if found in store.FORMATS:
            return open_store(dump).model
    raise RoutesError(f"{dump or 'this'} does not name its model; add --model with a preset or a HF config.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How the user says a dump is to be read."""

    SECTION: ClassVar[str] = "The dump"
    model: ModelOption = None
    form: FormatOption = None
    last_row: Annotated[
        Literal["recorded", "placeholder"],
        typer.Option("--last-row", help="What the row of a sample's last token is: a route, or filler to drop."),
    ] = "recorded"
    allow_short: Annotated[
        bool,
        typer.Option("--allow-short", help="Accept samples whose recording stopped early; the rest stays unknown."),
    ] = False

    def stream(self, dump: Path) -> "tuple[ModelShape, SampleStream]":
        """Return the model and one sample after another."""
        from equipoise.routes import stream_routes

        refuse_counted(dump)
        shape = find_model(self.model, dump=dump, form=self.form)
        return shape, stream_routes(
            dump, model=shape, format=self.form, last_row=self.last_row, allow_short=self.allow_short
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """How the samples of a step become micro-steps of one EP group, or of several."""

    SECTION: ClassVar[str] = "The schedule"
    ep: Annotated[int, typer.Option(help="Ranks of the expert-parallel group.")] = 8
    groups: Annotated[int, typer.Option(help="EP groups side by side, each with its own share of the samples.")] = 1
    schedule: Annotated[
        str, typer.Option(help="samples:N per rank and micro-step, tokens:N budget, or a schedule file (.json).")
    ] = "samples:1"
    mini_batches: Annotated[int, typer.Option(help="Optimizer steps per RL step.")] = 1
    cp: Annotated[int, typer.Option(help="Context-parallel ranks that share a sample, within the EP group.")] = 1
    sp: Annotated[int, typer.Option(help="Sequence-parallel ranks that share a micro-batch, within the group.")] = 1
    recompute: Annotated[bool, typer.Option(help="Whether old log-probs take a forward pass of their own.")] = True
    longest_first: Annotated[
        bool,
        typer.Option(
            "--longest-first",
            help="Run each window's longest micro-step first and the next longest last: transfers at its edges hide.",
        ),
    ] = False

    def __post_init__(self) -> None:
        from equipoise.core import ScheduleError, TopologyError
        from equipoise.core.value import require_int

        require_int("--mini-batches", self.mini_batches, low=1, error=ScheduleError)
        for name in ("ep", "groups", "cp", "sp"):
            require_int(f"--{name}", getattr(self, name), low=1, high=MAX_RANKS, error=TopologyError)
        require_int("--ep x --groups", self.ranks, low=1, high=MAX_RANKS, error=TopologyError)

    @property
    def ranks(self) -> int:
        """Source ranks: those of all EP groups."""
        return self.ep * self.groups

    @property
    def whole_samples(self) -> bool:
        """Whether every piece is a whole sample, so that histograms are enough."""
        return self.cp == self.sp == 1 and not self.is_file

    @property
    def is_file(self) -> bool:
        """Whether the schedule is a trainer's own."""
        return self.schedule.endswith(".json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """Where a result goes beside the terminal."""

    SECTION: ClassVar[str] = "Results"
    out: Annotated[Path | None, typer.Option("-o", "--out", help="Also write the JSON document to this file.")] = None
    report: ReportOption = None
    force: ForceFlag = False
    as_json: JsonFlag = False

    def refuse_existing(self, *read: Path | None) -> None:
        """Raise before any work is done if a file cannot be written, or would replace one that is `read`."""
        refuse_existing(self.out, self.report, force=self.force, read=read)


def count_dump(dump: Path, reading: Reading, *, pairs: bool = False) -> "RouteCounts":
    """Count a dump as it is read, one sample in memory at a time."""
    from equipoise.core import RoutesError
    from equipoise.loads import count_routes

    shape, stream = reading.stream(dump)
    with progress("counting") as show:
        counts = count_routes(stream, model=shape, layer_numbers=stream.layer_numbers, pairs=pairs, progress=show)
    if not len(counts):
        raise RoutesError(f"{dump} holds no sample; is it the right file?")
    return counts


def refuse_existing(*paths: Path | None, force: bool, read: Sequence[Path | None] = ()) -> None:
    """Raise before any work is done if a file to be written has content that `force` does not allow to be replaced.

    None is a file not asked for. A file that cannot be written where it is to be is refused as well, and, `force` or
    not, one that is named twice or that is `read`.
    """
    from equipoise.core import EquipoiseError

    refuse_unwritable(*paths)
    taken = {path.resolve() for path in read if path is not None}
    for path in paths:
        if path is None:
            continue
        if not force and path.is_file() and path.stat().st_size:
            raise EquipoiseError(f"{path} already exists; add --force to replace it, or choose another name")
        if path.resolve() in taken:
            raise EquipoiseError(f"{path} would be replaced by what is made of it, or be written twice; choose another")
        taken.add(path.resolve())


def refuse_unwritable(*paths: Path | None) -> None:
    """Raise before any work is done if one of the files to be written has no place; None is a file not asked for."""
    from equipoise.core import EquipoiseError

    for path in paths:
        if path is None:
            continue
        if path.is_dir():
            raise EquipoiseError(f"{path} cannot be written: it is a folder; give the name of a file in it")
        if not path.parent.is_dir():
            raise EquipoiseError(f"{path} cannot be written: there is no folder {path.parent}; make it first")
        if not os.access(path.parent, os.W_OK):
            raise EquipoiseError(f"{path} cannot be written: no right to write to {path.parent}; choose another folder")


def require_torch(verb: str) -> None:
    """Raise, naming the extra to install, where a verb needs torch and it is not there."""
    from importlib.util import find_spec

    from equipoise.core import AdapterError

    if find_spec("torch") is None:
        raise AdapterError(f"equipoise {verb} needs torch, which is not installed; run: pip install 'equipoise[torch]'")

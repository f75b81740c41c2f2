"""Options that verbs share: single flags, groups of flags, and the checks that run before any work is done.

A group is a frozen dataclass whose fields are flags; `app.flatten` puts them on the command line under the heading
`SECTION`. What a flag gets wrong is an error that names the flag, its value, the limit and the fix.
"""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np
import typer

from equipoise.core import (
    AdapterError,
    Cluster,
    EquipoiseError,
    InfeasiblePlanError,
    ModelShape,
    RoutesError,
    ScheduleError,
    TopologyError,
)
from equipoise.core.cluster import preset_names, presets_like
from equipoise.core.files import NPZ_ERRORS
from equipoise.core.options import PlanOptions, replica_bytes
from equipoise.core.plan import MOST_WAVES
from equipoise.core.value import require_int

if TYPE_CHECKING:
    from equipoise.routes.interpret import SampleStream

DEFAULT_CLUSTER = "h100"
MAX_RANKS = 65536
"""Most ranks of a step: far more than any cluster has, and few enough to count."""
TOKEN_BUDGET = 16384
"""Most tokens of a micro-step where no number is given, as in verl's defaults."""
GB = 1e9

JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON document as the last line, and no tables.")]
ForceFlag = Annotated[bool, typer.Option("--force", help="Replace files that already exist.")]
ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="Model preset such as qwen3-30b-a3b, its HF id, or a config.json; stores and counts name theirs.",
    ),
]
FormatOption = Annotated[
    str | None,
    typer.Option("--format", help="Format of the dump, see `equipoise convert --formats`; detected if left out."),
]
ReportOption = Annotated[Path | None, typer.Option("--report", help="Also write the result as a page to this file.")]
ActivationsOption = Annotated[
    Literal["kept", "recomputed"],
    typer.Option("--activations", help="Expert activations: kept for the backward pass, or recomputed in it."),
]
MemoryOption = Annotated[
    float | None,
    typer.Option("--memory-gib", help="GiB that a rank has left after weights, gradients and optimizer."),
]
CrossNodeFlag = Annotated[
    bool,
    typer.Option(
        "--cross-node",
        help="Allow replicas in other nodes where that pays; every node then needs host memory for all experts.",
    ),
]
WavesOption = Annotated[
    str,
    typer.Option(
        "--waves",
        metavar="N|auto",
        help="Cut every rank's rows into waves, so that experts compute while rows are exchanged; auto: the fastest "
        "of 1 to 4, by prices. Never run on a GPU.",
    ),
]
Sends = Literal["rows", "tokens"]
SendsOption = Annotated[
    Sends,
    typer.Option(
        "--sends",
        help="What crosses nodes: a token once per node (DeepEP, HybridEP), or every row (Megatron's alltoall).",
    ),
]
DEFAULT_SENDS: Sends = PlanOptions.sends
"""Of every verb, as of every function: large runs across nodes use DeepEP or HybridEP."""
HistoryOption = Annotated[
    Path | None, typer.Option("--history", help="Loads of an earlier step (.npz), for the policy eplb-history.")
]
RanksPerNodeOption = Annotated[int, typer.Option("--ranks-per-node", help="Ranks per node: GPUs that NVLink connects.")]
DemoFlag = Annotated[bool, typer.Option("--demo", help="Use a generated step of Qwen3-30B-A3B shape.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadingFlags:
    """How to read a dump."""

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
        """Return the model and an iterator over the samples."""
        from equipoise.routes import stream_routes

        refuse_counted(dump)
        model = find_model(self.model, dump=dump, form=self.form)
        return model, stream_routes(
            dump, model=model, format=self.form, last_row=self.last_row, allow_short=self.allow_short
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingFlags:
    """How the samples of a step are packed into micro-steps of one or more EP groups."""

    SECTION: ClassVar[str] = "The schedule"
    ep: Annotated[int, typer.Option(help="Ranks of the expert-parallel group.")] = 8
    groups: Annotated[int, typer.Option(help="EP groups side by side, each with its own share of the samples.")] = 1
    schedule: Annotated[
        str,
        typer.Option(
            help=f"tokens:N (N is {TOKEN_BUDGET} if left out) or samples:N per rank and micro-step, or a .json file."
        ),
    ] = "tokens"
    mini_batches: Annotated[int, typer.Option(help="Optimizer steps per RL step.")] = 1
    cp: Annotated[int, typer.Option(help="Context-parallel ranks that share a sample, within the EP group.")] = 1
    sp: Annotated[int, typer.Option(help="Sequence-parallel ranks that share a micro-batch, within the group.")] = 1
    recompute: Annotated[bool, typer.Option(help="Whether old log-probs take a forward pass of their own.")] = True
    longest_first: Annotated[
        bool,
        typer.Option(
            "--longest-first",
            help="Run each window's longest micro-step first and the next longest last, to hide the transfers at its "
            "start and end.",
        ),
    ] = False

    def __post_init__(self) -> None:
        require_flags(self, "mini_batches", low=1, error=ScheduleError)
        require_flags(self, "ep", "groups", "cp", "sp", low=1, high=MAX_RANKS, error=TopologyError)
        require_int("--ep x --groups", self.ranks, low=1, high=MAX_RANKS, error=TopologyError)

    @property
    def ranks(self) -> int:
        """Source ranks of all EP groups."""
        return self.ep * self.groups

    @property
    def is_file(self) -> bool:
        """Whether the schedule is a file that a trainer wrote."""
        return self.schedule.endswith(".json")

    @property
    def has_whole_samples(self) -> bool:
        """Whether no sample is cut, so that histograms are enough."""
        return self.cp == self.sp == 1 and not self.is_file


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFlags:
    """The device, its nodes and its links."""

    SECTION: ClassVar[str] = "The machine"
    cluster: Annotated[
        str | None,
        typer.Option(
            "--cluster",
            help=f"Device preset: h100, h200, a100 or b200; {DEFAULT_CLUSTER}, or the profile's, if left out.",
        ),
    ] = None
    profile: Annotated[
        Path | None,
        typer.Option("--profile", help="Prices of your own GPU: the file that `equipoise calibrate -o` wrote."),
    ] = None
    ranks_per_node: RanksPerNodeOption = 8
    network_gbit: Annotated[
        float | None, typer.Option(help="Network of one GPU, one direction, in Gb/s; the preset's if left out.")
    ] = None
    nvlink_gbyte: Annotated[
        float | None, typer.Option(help="NVLink of one GPU, one direction, in GB/s; the preset's if left out.")
    ] = None

    def build_cluster(self, *, ep: int, nodes: int | None = None) -> Cluster:
        """Build the cluster of an EP group: what is given replaces the preset's figures."""
        require_flags(self, "ranks_per_node", low=1, error=TopologyError)
        changes: dict[str, Any] = {}
        for flag, rate, figure, unit in (
            ("--network-gbit", self.network_gbit, "network_bytes_per_s", GB / 8),
            ("--nvlink-gbyte", self.nvlink_gbyte, "nvlink_bytes_per_s", GB),
        ):
            if rate is not None:
                if not 0.001 <= rate <= 10**6:
                    raise TopologyError(f"{flag} is {rate:g}; it must be from 0.001 to 1000000")
                changes[figure] = round(rate * unit)
        name = self.cluster or DEFAULT_CLUSTER
        if self.profile is not None:
            name = self._find_preset(self.profile)
            changes["profile"] = str(self.profile.resolve())
        return Cluster.preset(name, nodes=nodes, ranks_per_node=self.ranks_per_node, ep=ep, **changes)

    def _find_preset(self, profile: Path) -> str:
        """Return the preset with the links of the profile's device: the named one, or the one of the same name."""
        from equipoise.cost import Profile

        device = Profile.read(profile).device
        fitting = presets_like(device)
        if self.cluster is None and not fitting:
            raise TopologyError(
                f"profile {profile} is of {device!r}, and no preset has that name; name the preset with the same links "
                f"and memory: --cluster {', '.join(preset_names())}"
            )
        if self.cluster is not None and fitting and self.cluster.lower() not in fitting:
            raise TopologyError(
                f"profile {profile} is of {device!r}, --cluster is {self.cluster!r}; give {fitting[-1]!r}, or leave "
                "--cluster out"
            )
        return self.cluster or fitting[-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultFlags:
    """Where a result goes besides the terminal."""

    SECTION: ClassVar[str] = "Results"
    out: Annotated[Path | None, typer.Option("-o", "--out", help="Also write the JSON document to this file.")] = None
    report: ReportOption = None
    force: ForceFlag = False
    as_json: JsonFlag = False

    def refuse_existing(self, *read: Path | None) -> None:
        """Raise before any work is done if a file cannot be written, or would replace one that is `read`."""
        refuse_existing(self.out, self.report, force=self.force, read=read)


def parse_waves(text: str) -> int | Literal["auto"]:
    """Parse `--waves`, or raise with its name."""
    if text == "auto":
        return "auto"
    if not (text.isascii() and text.isdigit()):
        raise InfeasiblePlanError(f"--waves is {text!r}; write a number from 1 to {MOST_WAVES}, or auto")
    return require_int("--waves", int(text), low=1, high=MOST_WAVES, error=InfeasiblePlanError)


def require_flags(
    group: object, *names: str, low: int, high: int | None = None, error: type[EquipoiseError] = InfeasiblePlanError
) -> None:
    """Raise `error` if one of the integer flags of a group is out of range; None means that it was not given."""
    for name in names:
        if (value := getattr(group, name)) is not None:
            require_int(f"--{name.replace('_', '-')}", value, low=low, high=high, error=error)


def find_model(name: str | None, *, dump: Path | None = None, form: str | None = None) -> ModelShape:
    """Return the model of a preset name or a HF config.json, or the one that a native store names."""
    from equipoise.routes import open_store, store
    from equipoise.routes.registry import detect, find_format, resolve_model

    if name is not None:
        return resolve_model(name)
    # Loads do not name their model, and no format describes them.
    if dump is not None and not npz_kind(dump):
        found = detect(dump) if form is None else find_format(form)
        if found in store.FORMATS:
            return open_store(dump).model
    raise RoutesError(f"{dump or 'this'} does not name its model; add --model with a preset, a HF id or a config.json")


def npz_kind(path: Path) -> Literal["counts", "loads", "plan", ""]:
    """Return which of our `.npz` files a path is, by its content; empty for any other file."""
    if not path.is_file():
        return ""
    try:
        file = np.load(path, allow_pickle=False)
        if not isinstance(file, np.lib.npyio.NpzFile):
            return ""
        with file:
            found = str(file["format"]) if "format" in file.files else ""
    except (*NPZ_ERRORS, OSError, ValueError, EOFError, KeyError, RuntimeError):
        # The reader of the file reports the damage.
        return ""
    kinds: tuple[Literal["counts", "loads", "plan"], ...] = ("counts", "loads", "plan")
    return next((kind for kind in kinds if found.startswith(f"equipoise-{kind}-")), "")


def refuse_counted(path: Path) -> None:
    """Raise if routes are needed and the file is one that was made from routes."""
    readers = {
        "counts": "histograms, not routes; equipoise convert --to loads, analyze and simulate read them",
        "loads": "loads, not routes; equipoise plan, analyze and simulate read them",
        "plan": "a plan, not routes; Plan.load reads it",
    }
    if kind := npz_kind(path):
        raise RoutesError(f"{path} holds {readers[kind]}")


def check_slots(slots: int | Iterable[int], *, cluster: Cluster, model: ModelShape) -> None:
    """Raise if one of the numbers of replica slots is negative, or more than a rank of the group can hold."""
    most, limit = most_slots(cluster, model)
    fix = "One slot is the usual choice" if most else "Give --slots 0, for placement alone"
    for number in (slots,) if isinstance(slots, int) else slots:
        if number < 0:
            raise InfeasiblePlanError(f"--slots is {number}; it must be 0 (placement alone) or more")
        if number > most:
            raise InfeasiblePlanError(f"--slots is {number}; a rank can hold at most {most}: {limit}. {fix}")


def most_slots(cluster: Cluster, model: ModelShape) -> tuple[int, str]:
    """Return the most replica slots that a rank can use, and what limits them: other ranks' experts, or memory."""
    owned = cluster.home_slots(model)
    others = model.experts - owned
    # Every slot has one buffer more than pulls run ahead.
    each = (PlanOptions().depth + 1) * replica_bytes(model, "update")
    fitting = cluster.memory_bytes // each
    if fitting >= others:
        return others, f"the model has {model.experts} experts, of which it owns {owned} at EP {cluster.ep}"
    return fitting, f"{cluster.name} has {cluster.memory_bytes / GB:.0f} GB, and a slot takes {each / GB:.2f} GB"


def refuse_existing(*paths: Path | None, force: bool, read: Sequence[Path | None] = ()) -> None:
    """Raise before any work is done if a file to write exists (without `force`), is also `read`, or is named twice.

    None is a file that was not asked for.
    """
    refuse_unwritable(*paths)
    taken = {path.resolve() for path in read if path is not None}
    for path in paths:
        if path is None:
            continue
        if not force and path.is_file() and path.stat().st_size:
            raise EquipoiseError(f"{path} already exists; add --force to replace it, or choose another name")
        if path.resolve() in taken:
            raise EquipoiseError(f"{path} would replace a file that is read, or be written twice; choose another name")
        taken.add(path.resolve())


def refuse_unwritable(*paths: Path | None) -> None:
    """Raise before any work is done if a file cannot be written where it is named; None was not asked for."""
    for path in paths:
        if path is None:
            continue
        if path.is_dir():
            raise EquipoiseError(f"{path} cannot be written: it is a folder; give the name of a file in it")
        if not path.parent.is_dir():
            raise EquipoiseError(f"{path} cannot be written: there is no folder {path.parent}; make it first")
        if not os.access(path.parent, os.W_OK):
            raise EquipoiseError(f"{path} cannot be written: no right to write to {path.parent}; choose another folder")


def require_installed(verb: str, *packages: str, extra: str) -> None:
    """Raise, naming the extra to install, if a verb needs a package that is not installed."""
    for package in packages:
        if find_spec(package) is None:
            raise AdapterError(
                f"equipoise {verb} needs {package}, which is not installed; run: pip install 'equipoise[{extra}]'"
            )

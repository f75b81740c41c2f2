"""Hardware profiles: measured or derived figures of a device, read from JSON files with a source for each.

File (`profiles/<name>.json`, format "equipoise-profile-2"), one JSON object; nanoseconds and bytes, and a `source` in
every section:
    device, kind     "measured" (`equipoise calibrate`), "derived" from a measured one, or "trial": tiny sizes on a
                     CPU, to try the measuring itself
    made_by, commit, driver, torch, date   what made the figures; of the measured profile where derived
    compute      a list of tables, one per expert shape:
                 hidden, expert_width    D and F of the expert
                 slots [S], rows [X]     the axes: non-empty slots and total rows of one rank, ascending
                 forward_ns [S][X]       forward of the expert block, groups uneven
                 update_ns [S][X]        forward and backward, input and weight gradients
                 even_*_ns [S][X]        the same on even groups, null where not measured; shown, not used
                 spread                  largest (p90 - p10) / median of any cell
    rows         bytes of rows per second, each row's bytes counted once: received_forward_bytes_per_s and
                 received_update_bytes_per_s, received rows put slot by slot and back; sent_forward_bytes_per_s and
                 sent_update_bytes_per_s, tokens spread to rows and rows combined
    attention    forward_flops_per_s, backward_flops_per_s: one layer's projections and causal attention; a pair of
                 tokens is counted once, backward as twice the forward operations
    pull         host_bytes_per_s, host_fixed_ns: pinned host memory to device; peer_*: another device of the node
    beside       host_slowdown_permille, peer_slowdown_permille: how much slower experts compute while a copy runs
    add          bytes_per_s: adding a returned gradient, two reads and one write counted
    exchange     weight_bytes_per_s, gradient_bytes_per_s: one expert out of its slot and another into it, at an edge;
                 across_bytes_per_s: to another node, with across_source; missing where not measured
    all_to_all   inside_share, across_share of the published link rates; fixed_ns per exchange
Only where several ranks measured at the same time (`equipoise calibrate --ranks`):
    ranks        count, nodes, and how far ranks differ: spread and median_spread over cells of the expert tables
    overheads    edge_fixed_ns: publish or collect of a layer without its experts' bytes, agreement included;
                 refresh_bytes_per_s: experts to the host store; counts_fixed_ns and counts_bytes_per_s: the counted
                 rows of all ranks to all ranks; prepared_rows_per_s: rows of dispatches that are made ahead;
                 window_fixed_ns: opening and closing a window in which nothing moves, missing in older files.
                 Without it they are free

Invariants (asserted by the tests):
1. Every section names its source; a file without one is refused.
2. Tables are used only after being made monotone: more rows or more slots never take less time.
3. A trial prices nothing: it is read only by those who ask for one.
"""

import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from equipoise.core import TopologyError
from equipoise.core.value import Value

FORMAT = "equipoise-profile-2"
KINDS = ("measured", "derived", "trial")
SECTIONS = ("rows", "attention", "pull", "beside", "add", "exchange", "all_to_all")
SHARED_SECTIONS = ("ranks", "overheads")
"""Of profiles that several ranks measured at the same time."""
SAME_NAMES = {
    "rows": (*(f"{side}_{stage}_bytes_per_s" for side in ("received", "sent") for stage in ("forward", "update")),),
    "pull": ("host_bytes_per_s", "peer_bytes_per_s", "host_fixed_ns", "peer_fixed_ns"),
    "beside": ("host_slowdown_permille", "peer_slowdown_permille"),
    "exchange": ("weight_bytes_per_s", "gradient_bytes_per_s"),
}
"""Figures by section whose names are those of `Profile`'s fields."""
OVERHEADS = ("edge_fixed_ns", "refresh_bytes_per_s", "counts_fixed_ns", "counts_bytes_per_s", "prepared_rows_per_s")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ComputeTable(Value):
    """Nanoseconds of one expert block (grouped GEMMs of all slots of a rank) over rows and non-empty slots."""

    hidden: int
    expert_width: int
    slots_S: np.ndarray
    rows_X: np.ndarray
    forward_ns_SX: np.ndarray
    update_ns_SX: np.ndarray
    """Forward and backward together."""

    @property
    def row_flops(self) -> int:
        """Forward floating-point operations of one row."""
        return 6 * self.hidden * self.expert_width


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Profile(Value):
    """One device's figures."""

    device: str
    kind: str
    tables: tuple[ComputeTable, ...]
    attention_forward_flops_per_s: int
    attention_backward_flops_per_s: int
    host_bytes_per_s: int
    peer_bytes_per_s: int
    host_fixed_ns: int
    peer_fixed_ns: int
    add_bytes_per_s: int
    received_forward_bytes_per_s: int
    """Received rows put slot by slot and back."""
    received_update_bytes_per_s: int
    sent_forward_bytes_per_s: int
    """Tokens spread to rows, and rows combined."""
    sent_update_bytes_per_s: int
    host_slowdown_permille: int
    """How much slower experts compute while a pull from the host runs."""
    peer_slowdown_permille: int
    weight_bytes_per_s: int
    """An expert's weights through the staging buffer of an edge."""
    gradient_bytes_per_s: int
    inside_permille: int
    """Share of the published NVLink rate that an all-to-all reaches, in thousandths."""
    across_permille: int
    exchange_fixed_ns: int
    """Fixed cost of one all-to-all."""
    is_shared: bool = False
    """Measured on several ranks at the same time, with what passes between them."""
    relocation_bytes_per_s: int = 0
    """Experts to another node; 0: not measured."""
    edge_fixed_ns: int = 0
    """Publish or collect of a layer without its experts' bytes; 0: not measured, as everything below."""
    refresh_bytes_per_s: int = 0
    """Experts to the host store."""
    counts_fixed_ns: int = 0
    counts_bytes_per_s: int = 0
    """Counted rows of all ranks to all ranks."""
    prepared_rows_per_s: int = 0
    """Rows of dispatches that are made ahead."""
    window_fixed_ns: int = 0
    """Opening and closing a window in which nothing moves."""

    def say_assumed(self, nodes: int) -> str:
        """Say in one line which figures between the ranks of an EP group on `nodes` nodes are assumed, if any."""
        if not self.is_shared:
            return (
                "Assumed, not measured: all-to-all, the link to peers, and relocation of experts between nodes; host "
                "store, agreement, counts and prepared dispatches are free (`equipoise calibrate --ranks` measures "
                "them)."
            )
        if nodes > 1 and not self.relocation_bytes_per_s:
            return (
                "Assumed, not measured: all-to-all and relocation of experts between nodes (`equipoise calibrate "
                "--ranks --nodes` measures them)."
            )
        return ""

    @classmethod
    def read(cls, name_or_path: str | Path, *, allow_trial: bool = False) -> "Profile":
        """Read a profile by preset name or from a file; a trial, whose figures mean nothing, only where allowed."""
        path = Path(name_or_path)
        known = profile_names()
        if str(name_or_path) in known:
            return _read_preset(str(name_or_path))
        if not path.exists():
            raise TopologyError(f"no hardware profile {str(name_or_path)!r}; known: {', '.join(known)}, or give a file")
        profile = cls.from_json(path.read_text(encoding="utf-8"), name=str(path))
        if profile.kind == "trial" and not allow_trial:
            raise TopologyError(
                f"profile {path} is a trial of the measuring itself, and its figures mean nothing; measure a GPU with "
                f"equipoise calibrate, without --trial, or use one of {', '.join(known)}"
            )
        return profile

    @classmethod
    def from_json(cls, text: str, *, name: str) -> "Profile":
        """Build a profile from the text of its file; `name` is for messages."""
        try:
            data = json.loads(text)
            if data["format"] != FORMAT:
                raise TopologyError(
                    f"profile {name}: format is {data['format']!r}, expected {FORMAT!r}; measure it again with "
                    "equipoise calibrate"
                )
            return cls._from_mapping(data, name)
        except (ValueError, KeyError, TypeError) as error:
            if isinstance(error, TopologyError):
                raise
            raise TopologyError(f"profile {name} is not a {FORMAT} file: {error!r}") from error

    @classmethod
    def _from_mapping(cls, data: Mapping[str, Any], name: str) -> "Profile":
        shared = [data[key] for key in SHARED_SECTIONS if key in data]
        for section in (*data["compute"], *(data[key] for key in SECTIONS), *shared):
            if not section.get("source"):
                raise TopologyError(f"profile {name}: a section has no source; every figure needs one")
        if data["kind"] not in KINDS:
            raise TopologyError(f"profile {name}: kind is {data['kind']!r}; it must be one of {', '.join(KINDS)}")
        attention, exchange = data["attention"], data["all_to_all"]
        return cls(
            device=data["device"],
            kind=data["kind"],
            tables=tuple(_table(entry, name) for entry in data["compute"]),
            attention_forward_flops_per_s=int(attention["forward_flops_per_s"]),
            attention_backward_flops_per_s=int(attention["backward_flops_per_s"]),
            add_bytes_per_s=int(data["add"]["bytes_per_s"]),
            **{name: int(data[section][name]) for section, names in SAME_NAMES.items() for name in names},
            inside_permille=max(round(1000 * exchange["inside_share"]), 1),
            across_permille=max(round(1000 * exchange["across_share"]), 1),
            exchange_fixed_ns=int(exchange["fixed_ns"]),
            is_shared="ranks" in data,
            relocation_bytes_per_s=int(data["exchange"].get("across_bytes_per_s", 0)),
            **{name: int(data["overheads"][name]) for name in OVERHEADS if "overheads" in data},
            window_fixed_ns=int(data.get("overheads", {}).get("window_fixed_ns", 0)),
        )


@functools.cache
def _read_preset(name: str) -> Profile:
    """A profile of the package, read once: every plan asks for one, and a warm plan takes only some milliseconds."""
    path = resources.files("equipoise.cost") / "profiles" / f"{name}.json"
    return Profile.from_json(path.read_text(), name=name)


@functools.cache
def profile_names() -> tuple[str, ...]:
    """Names of the profiles that come with the package."""
    folder = resources.files("equipoise.cost") / "profiles"
    return tuple(sorted(entry.name.removesuffix(".json") for entry in folder.iterdir() if entry.name.endswith(".json")))


def write_profile(profile: Mapping[str, Any], path: Path) -> None:
    """Write a profile's content as indented JSON, one line per table line."""
    text = json.dumps(profile, indent=2)
    flat = re.sub(
        r"\[\s*((?:[\d.]+|null)(?:,\s*(?:[\d.]+|null))*)\s*\]", lambda match: f"[{' '.join(match[1].split())}]", text
    )
    path.write_text(flat + "\n", encoding="utf-8")


def _table(entry: Mapping[str, Any], name: str) -> ComputeTable:
    slots, rows = np.array(entry["slots"], dtype=np.int64), np.array(entry["rows"], dtype=np.int64)
    if np.any(np.diff(slots) <= 0) or np.any(np.diff(rows) <= 0) or rows[0] < 1 or slots[0] < 1:
        raise TopologyError(f"profile {name}: slots and rows of a compute table must ascend from at least 1")
    tables = {}
    for key in ("forward_ns", "update_ns"):
        # Null where fewer rows than slots made a measurement impossible.
        raw = np.array([[round(ns or 0) for ns in line] for line in entry[key]], dtype=np.int64)
        if raw.shape != (len(slots), len(rows)):
            raise TopologyError(f"profile {name}: {key} has shape {raw.shape}, expected {(len(slots), len(rows))}")
        tables[key] = monotone(raw)
    return ComputeTable(
        hidden=int(entry["hidden"]),
        expert_width=int(entry["expert_width"]),
        slots_S=slots,
        rows_X=rows,
        forward_ns_SX=tables["forward_ns"],
        update_ns_SX=tables["update_ns"],
    )


def monotone(ns_SX: np.ndarray) -> np.ndarray:
    """Return the smallest table above `ns_SX` that never falls with more rows or more slots."""
    return np.maximum.accumulate(np.maximum.accumulate(ns_SX, axis=1), axis=0)

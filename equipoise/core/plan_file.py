"""Plans on disk: one `.npz` file per window and EP group, without pickled objects.

File, format "equipoise-plan-2"; all integers are stored in the narrowest dtype that holds them:
    format                 "equipoise-plan-2"
    facts                  one JSON object as text:
        policy             "equipoise" or the name of a baseline
        objective          "seconds" or "skew"
        slots              replica slots per rank
        cross_node         whether replicas may be outside their home's node
        persistent         whether replicas stay for the whole window (EPLB)
        waves              into how many waves every rank's rows are cut; 1 in older files, which leave it out
        estimated_share    share of the planned rows that was estimated
        static_seconds     predicted seconds of contiguous expert parallelism
        seconds            predicted seconds by part: compute, all_to_all, pull, return_, publish, collect, planning;
                           of transfers, what nothing hides
        bytes              bytes by path: peer, host, edge_inside, edge_across, all_to_all_inside, all_to_all_across
        cluster            every field of `Cluster`
        model              every field of `ModelShape`
        depth              visits ahead that pulls may start; null if the plan has no itinerary
    stage                  "recompute" or "update"
    load_MLRE              the planned rows; padding_MLRE, coverage_MLR, filled_MLR, layer_numbers_L if there are any
    home_LE, home_slot_LE  [L, E] home rank and slot
    start_ML               [M * L + 1] where the replicas of entry m * L + l begin
    expert_P, rank_P, rows_P   [P] replicas
    path_P2                [P, 2] path of the forward and the backward pull: 0 peer, 1 host
    ns_ML, closed_ns_ML    [M, L] predicted nanoseconds with and without replicas
    edge_ns_2L             [2, L] nanoseconds of each layer's publish and collect, hidden or not
    edge_slow_2L           [2, L] nanoseconds by which each of them slows concurrent compute
    micro_step_V, phase_V, layer_V, pulls_V, buffer_V, ready_from_V, resident_V   [V] itinerary, if depth is given

Files of format 1 are refused: they have no `edge_ns_2L`, and their seconds charge publish and collect in full
and returned gradients in fp32. The window must be planned again.

The same plan gives the same bytes. Loading constructs the plan, and so checks it again; whatever is wrong with a file
is an InfeasiblePlanError.
"""

import io
import json
import math
import zipfile
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import IO, Any

import numpy as np

from equipoise.core.cluster import Cluster
from equipoise.core.errors import EquipoiseError, InfeasiblePlanError
from equipoise.core.files import narrow, read_npz, whole_file
from equipoise.core.model import ModelShape
from equipoise.core.plan import Bytes, Itinerary, Objective, Plan, ReplicaTable, Seconds
from equipoise.core.value import require_choice, require_int
from equipoise.core.window import OPTIONAL, LoadMatrix

FORMAT = "equipoise-plan-2"
OLDER = {"equipoise-plan-1": "it charges publish and collect as if nothing hid them; plan the window again"}
"""Formats that are no longer read, and why."""
_FACTS = ("policy", "objective", "slots", "cross_node", "persistent", "waves", "estimated_share", "static_seconds")
_PARTS = ("seconds", "bytes", "cluster", "model", "depth")
_LOADS = ("load_MLRE", "stage")
_TABLE = ("start_ML", "expert_P", "rank_P", "rows_P", "path_P2")
_ENTRIES = ("home_LE", "home_slot_LE", "ns_ML", "closed_ns_ML", "edge_ns_2L", "edge_slow_2L")
_VISITS = ("micro_step_V", "phase_V", "layer_V", "pulls_V", "buffer_V", "ready_from_V", "resident_V")
_EPOCH = (1980, 1, 1, 0, 0, 0)
"""The time stamp of every member, so that the same plan gives the same bytes."""


def save_plan(plan: Plan, path: str | Path | IO[bytes]) -> None:
    """Write a plan to a path or an open binary file."""
    facts = {
        **{name: getattr(plan, name) for name in _FACTS},
        "seconds": asdict(plan.seconds),
        "bytes": asdict(plan.bytes),
        "cluster": {f.name: getattr(plan.cluster, f.name) for f in fields(plan.cluster)},
        "model": plan.model.figures(),
        "depth": None if plan.itinerary is None else plan.itinerary.depth,
    }
    arrays = {"format": np.array(FORMAT), "facts": np.array(json.dumps(facts, sort_keys=True))}
    arrays |= plan.loads.to_arrays()
    visits = () if plan.itinerary is None else _VISITS
    for source, names in ((plan, _ENTRIES), (plan.replica_table, _TABLE), (plan.itinerary, visits)):
        arrays |= {name: narrow(getattr(source, name)) for name in names}
    if isinstance(path, str | Path):
        with whole_file(path, error=InfeasiblePlanError) as draft:
            _write(arrays, draft)
    else:
        _write(arrays, path)


def _write(arrays: dict[str, Any], path: Path | IO[bytes]) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, array in arrays.items():
            buffer = io.BytesIO()
            np.lib.format.write_array(buffer, np.asarray(array, order="C"), allow_pickle=False)
            member = zipfile.ZipInfo(f"{name}.npy", date_time=_EPOCH)
            member.compress_type = zipfile.ZIP_DEFLATED
            file.writestr(member, buffer.getvalue())


def load_plan(path: str | Path) -> Plan:
    """Read a plan and check it again."""
    arrays = read_npz(path, wanted=FORMAT, error=InfeasiblePlanError, older=OLDER)
    try:
        facts = _read_facts(arrays)
        needed = {"format", "facts", *_LOADS, *_TABLE, *_ENTRIES, *(() if facts["depth"] is None else _VISITS)}
        wrong = sorted((set(arrays) ^ needed) - set(OPTIONAL))
        if wrong:
            state = "unknown" if wrong[0] in arrays else "missing"
            raise InfeasiblePlanError(f"array {wrong[0]!r} is {state}; a plan holds {', '.join(sorted(needed))}")
        return _build(arrays, facts)
    except (EquipoiseError, ValueError, KeyError, TypeError, IndexError, OverflowError, MemoryError) as error:
        if isinstance(error, InfeasiblePlanError):
            raise InfeasiblePlanError(f"{path}: {error}") from error
        raise InfeasiblePlanError(f"{path} is damaged or not a {FORMAT} file: {error}") from error


def _read_facts(arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    given = json.loads(str(arrays["facts"]))
    # Files of an earlier version were written before there were waves.
    facts = _object("facts", {"waves": 1, **given} if isinstance(given, dict) else given, {*_FACTS, *_PARTS})
    for name in ("estimated_share", "static_seconds"):
        facts[name] = _number(name, facts[name])
    for name, kind in (("policy", str), ("objective", str), ("cross_node", bool), ("persistent", bool)):
        if not isinstance(facts[name], kind):
            raise InfeasiblePlanError(f"{name} is {facts[name]!r}; it must be a {kind.__name__}")
    require_choice("objective", facts["objective"], Objective, error=InfeasiblePlanError)
    return facts


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise InfeasiblePlanError(f"{name} is {value!r}; it must be a number from 0")
    return float(value)


def _build(arrays: Mapping[str, np.ndarray], facts: Mapping[str, Any]) -> Plan:
    entries: dict[str, Any] = {name: arrays[name] for name in _ENTRIES}
    itinerary = None
    if facts["depth"] is not None:
        itinerary = Itinerary(depth=facts["depth"], **{name: arrays[name] for name in _VISITS})
    seconds = _object("seconds", facts["seconds"], {f.name for f in fields(Seconds)})
    moved = _object("bytes", facts["bytes"], {f.name for f in fields(Bytes)})
    return Plan(
        loads=LoadMatrix.from_arrays(arrays),
        cluster=_cluster(facts["cluster"]),
        model=ModelShape.from_figures(facts["model"]),
        seconds=Seconds(**{name: _number(f"seconds.{name}", value) for name, value in seconds.items()}),
        bytes=Bytes(
            **{n: require_int(f"bytes.{n}", value, low=0, error=InfeasiblePlanError) for n, value in moved.items()}
        ),
        replica_table=ReplicaTable(**{name: arrays[name] for name in _TABLE}),
        itinerary=itinerary,
        **entries,
        **{name: facts[name] for name in _FACTS},
    )


def _object(label: str, values: Any, names: set[str]) -> dict[str, Any]:
    """Return a JSON object that has exactly these keys."""
    if not isinstance(values, dict) or set(values) != names:
        raise InfeasiblePlanError(f"{label} must be an object with {', '.join(sorted(names))}")
    return values


def _cluster(given: Any) -> Cluster:
    # Files of an earlier version name no profile: theirs is the cluster's own.
    values = {"profile": "", **given} if isinstance(given, dict) else given
    values = _object("cluster", values, {f.name for f in fields(Cluster)})
    if not all(isinstance(values[name], str) for name in ("name", "device", "profile")):
        raise InfeasiblePlanError("cluster name, device and profile must be text")
    sources = tuple((str(figure), str(source)) for figure, source in values["sources"])
    return Cluster(**{**values, "node_R": tuple(values["node_R"]), "sources": sources})

"""Timelines of a result, simulated or measured, as a Chrome trace, which Perfetto opens beside one of torch.profiler.

The format (Trace Event Format, the JSON object form that torch.profiler writes too): `traceEvents` with complete
events ("ph": "X") that have name, cat, pid, tid, ts and dur in microseconds; metadata events ("ph": "M") name processes
and threads. Here a process is a rank of one timeline (a policy's), a thread one lane.

Invariants (asserted by the tests):
1. Every event of the result is one complete event, at the same microsecond.
2. Ranks of different timelines are different processes, in the order of the result; their names say whether the
   timeline is simulated or measured.
3. A bar in an unknown lane is refused by its name.
"""

from typing import Any

from equipoise.core import EquipoiseError
from equipoise.report import replay
from equipoise.report.time_charts import LANES, check_lanes

US = 1e6


def chrome_trace(document: dict[str, Any]) -> dict[str, Any]:
    """The trace of every timeline in the document of a simulation or of a rank replay."""
    timelines = _timelines(document)
    if not timelines:
        raise EquipoiseError(
            "this result has no timeline, so there is no trace to write; make one with: "
            "equipoise simulate ROUTES_OR_LOADS -o result.json"
        )
    try:
        for name, found in timelines.items():
            check_lanes(found, of=name)
    except ValueError as error:
        raise EquipoiseError(f"{error}; write the result again with this version") from error
    width = 1 + max(event["rank"] for found in timelines.values() for event in found)
    events: list[dict[str, Any]] = []
    for place, (name, found) in enumerate(timelines.items()):
        events += _names(name, sorted({event["rank"] for event in found}), first_pid=place * width)
        events += [_complete(event, first_pid=place * width) for event in found]
    return {"displayTimeUnit": "ms", "traceName": "equipoise", "traceEvents": events}


def _timelines(document: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Events by the name of their timeline; empty where the result has none."""
    if document.get("benchmark") == replay.FORMAT:
        return {f"measured, {name}": events for name, events in replay.replay_timelines(document).items()}
    policies = document.get("policies", ())
    return {f"simulated, {policy['policy']}": policy["timeline"] for policy in policies if policy["timeline"]}


def _names(timeline: str, ranks: list[int], *, first_pid: int) -> list[dict[str, Any]]:
    """Names of the processes and threads of one timeline."""
    named: list[dict[str, Any]] = []
    for rank in ranks:
        pid = first_pid + rank
        named.append(_metadata("process_name", pid, 0, {"name": f"{timeline}, rank {rank}"}))
        named.append(_metadata("process_sort_index", pid, 0, {"sort_index": pid}))
        named += [_metadata("thread_name", pid, tid, {"name": lane}) for tid, lane in enumerate(LANES)]
    return named


def _metadata(name: str, pid: int, tid: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "ts": 0, "args": args}


def _complete(event: dict[str, Any], *, first_pid: int) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": event["lane"],
        "name": event["name"],
        "pid": first_pid + event["rank"],
        "tid": LANES.index(event["lane"]),
        "ts": event["start_s"] * US,
        "dur": (event["end_s"] - event["start_s"]) * US,
        "args": {"rank": event["rank"]},
    }

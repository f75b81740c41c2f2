"""A simulated timeline as a Chrome trace, which Perfetto opens beside one of torch.profiler.

The format (Trace Event Format, the JSON object form that torch.profiler writes too): `traceEvents` with complete
events ("ph": "X") that have name, cat, pid, tid, ts and dur in microseconds; metadata events ("ph": "M") name processes
and threads. Here a process is a rank under one policy, a thread one lane.

Invariants (asserted by the tests):
1. Every event of the result is one complete event, at the same microsecond.
2. Ranks of different policies are different processes, in the order of the result.
"""

from typing import Any

from equipoise.core import EquipoiseError

LANES = ("compute", "all-to-all", "pull", "return")
US = 1e6


def chrome_trace(document: dict[str, Any]) -> dict[str, Any]:
    """The trace of every timeline in a simulation's document."""
    timed = [policy for policy in document.get("policies", ()) if policy["timeline"]]
    if not timed:
        raise EquipoiseError(
            "this result has no timeline, so there is no trace to write; make one with: "
            "equipoise simulate ROUTES_OR_LOADS -o result.json"
        )
    width = 1 + max(event["rank"] for policy in timed for event in policy["timeline"])
    events: list[dict[str, Any]] = []
    for place, policy in enumerate(timed):
        events += _names(policy, first_pid=place * width)
        events += [_complete(event, first_pid=place * width) for event in policy["timeline"]]
    return {"displayTimeUnit": "ms", "traceName": "equipoise simulation", "traceEvents": events}


def _names(policy: dict[str, Any], *, first_pid: int) -> list[dict[str, Any]]:
    """Names of the processes and threads of one policy."""
    named: list[dict[str, Any]] = []
    for rank in sorted({event["rank"] for event in policy["timeline"]}):
        pid = first_pid + rank
        named.append(_metadata("process_name", pid, 0, {"name": f"{policy['policy']}, rank {rank}"}))
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

"""What the node benchmark writes: one JSON document to which every run adds, with the tables and limits made of it.

    cases    by name: what it is, predicted parts of every policy, and all its runs
    links    an exchange beside pulls against the clock's rule (`node_links`)
    train    tokens per second of whole training steps (`node_train`)
    rows, parts, limits    made of these

Windows of a document are of one commit: what another commit measured is not added to them. Links and training steps say
their own commit.
"""

import json
import statistics
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.node_cases import FEW, NodeWork
from benchmarks.node_parts import PARTS
from benchmarks.results import Limit

OURS, LEVEL, ALONE, PRODUCTS = "equipoise, 1 slot", "uniform, prepared", "attention alone", "products alone"
PREPARED, DRAWN = "static, prepared", "uniform at random, prepared"
Document = dict[str, Any]


def open_document(path: Path | None, facts: Mapping[str, Any]) -> Document:
    """The document at `path`, or a new one where there is none.

    Args:
        facts: commit, machine and clock; the commit must be the document's
    """
    if path is None or not path.exists():
        return {"benchmark": "node", **facts, "neighbours": {}, "cases": {}, "links": [], "train": []}
    document: Document = json.loads(path.read_text())
    if document["commit"] != facts["commit"]:
        raise SystemExit(
            f"{path} holds results of commit {document['commit']}, these are of {facts['commit']}; give another --out"
        )
    return document


def add_runs(document: Document, work: NodeWork, runs: Mapping[str, list[dict[str, Any]]]) -> Document:
    """A copy with more runs of a case."""
    found = deepcopy(document)
    case = found["cases"].setdefault(
        work.name,
        {
            "stage": work.case.stage,
            "ranks": work.case.ranks,
            "nodes": work.cluster.num_ep_nodes,
            "is_bare": work.is_bare,
            "is_checkpointed": work.case.is_checkpointed,
            "is_small": work.case.tokens <= max(FEW),
            "predicted": {},
            "runs": {},
        },
    )
    case["predicted"] |= {policy.name: policy.predicted for policy in work.policies if policy.predicted}
    for policy, more in runs.items():
        case["runs"].setdefault(policy, []).extend(more)
    return found


def join(documents: list[Document]) -> Document:
    """One document with the results of several; windows must be of one commit."""
    found = deepcopy(documents[0])
    found["links"], found["train"] = [], []
    for one in documents:
        if one["cases"] and one["commit"] != found["commit"]:
            raise SystemExit(f"windows of commits {found['commit']} and {one['commit']} are not put together")
        for part in ("links", "train"):
            found[part] += [{**row, "commit": one["commit"]} for row in one[part]]
    for number, one in enumerate(documents[1:], 1):
        found["neighbours"] = one["neighbours"] | found["neighbours"]
        for name, case in one["cases"].items():
            known = found["cases"].setdefault(name, {**case, "runs": {}})
            known["predicted"] |= case["predicted"]
            for policy, runs in case["runs"].items():
                known["runs"].setdefault(policy, []).extend({**run, "document": number} for run in runs)
    return found


def write_document(path: Path, document: Document) -> None:
    """Write everything, with its tables and limits."""
    rows, parts, limits = summarise(document)
    judged = [{**asdict(one), "holds": one.holds} for one in limits]
    path.write_text(json.dumps({**document, "rows": rows, "parts": parts, "limits": judged}, indent=1) + "\n")


def summarise(document: Document) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[Limit]]:
    """Rows of medians, rows of parts, and what the benchmark promises of them."""
    rows: list[dict[str, Any]] = []
    parts: list[dict[str, Any]] = []
    limits = [
        Limit(name=f"a rank beside all {ranks} over alone", value=one["beside_ms"] / one["alone_ms"], at_most=1.03)
        for ranks, one in document["neighbours"].items()
    ]
    for name, case in document["cases"].items():
        medians = {policy: _median(runs, "window_s") for policy, runs in case["runs"].items()}
        predicted = {p: _with_rest(found, medians) for p, found in case["predicted"].items() if p in medians}
        for policy, runs in case["runs"].items():
            rows.append(_row(name, policy, runs, medians, predicted.get(policy, {})))
        for policy, found in predicted.items():
            parts += _part_rows(name, policy, case["runs"][policy], found)
        limits += _limits(name, case, medians, predicted)
    errors = [abs(row["error_pct"]) / 100 for row in rows if row["predicted_s"]]
    if errors:
        limits.append(Limit(name="mean error of all predictions", value=statistics.mean(errors), at_most=0.05))
    limits += [Limit(name=f"links: {one['what']}", value=one["over_rule"], at_most=1.05) for one in document["links"]]
    return rows, parts, limits


def _with_rest(predicted: Mapping[str, float], medians: Mapping[str, float]) -> dict[str, float]:
    """Predicted parts as they are measured: attention was measured alone, in a window of its own."""
    rest = predicted["accumulate"] + medians.get(ALONE, 0.0)
    return {**{part: predicted[part] for part in PARTS if part != "rest"}, "rest": rest}


def _row(
    case: str,
    policy: str,
    runs: list[dict[str, Any]],
    medians: Mapping[str, float],
    predicted: Mapping[str, float],
) -> dict[str, Any]:
    times, median = [run["window_s"] for run in runs], medians[policy]
    whole = sum(predicted.values())
    return {
        "case": case,
        "policy": policy,
        "window_s": round(median, 4),
        "spread_pct": round(100 * (max(times) - min(times)) / median, 1),
        "over_static": round(medians.get("static", medians.get("plain", 0.0)) / median, 3),
        "exposed_pct": round(100 * _median(runs, "exposed_s") / median, 2),
        "predicted_s": round(whole, 4),
        "error_pct": round(100 * (whole / median - 1), 1) if predicted else 0.0,
        # All that a window of experts alone takes beside its products: sorting, counts, exchanges.
        "beside_products_s": round(median - medians.get(PRODUCTS, median), 4),
    }


def _part_rows(
    case: str, policy: str, runs: list[dict[str, Any]], predicted: Mapping[str, float]
) -> Iterator[dict[str, Any]]:
    measured = [run["parts"] for run in runs if "parts" in run]
    for part in PARTS if measured else ():
        seconds = statistics.median(one[part] for one in measured)
        window_s = statistics.median(sum(one.values()) for one in measured)
        yield {
            "case": case,
            "policy": policy,
            "part": part,
            "measured_s": round(seconds, 4),
            "predicted_s": round(predicted[part], 4),
            "error_pct_of_window": round(100 * (predicted[part] - seconds) / window_s, 1),
        }


def _limits(
    name: str, case: Mapping[str, Any], medians: Mapping[str, float], predicted: Mapping[str, dict[str, float]]
) -> Iterator[Limit]:
    """What one case promises, as far as its policies were run."""
    if case["is_bare"]:
        if {PRODUCTS, "mapped", "prepared"} <= set(medians):
            mapped, prepared = (medians[policy] - medians[PRODUCTS] for policy in ("mapped", "prepared"))
            yield Limit(name=f"{name}: mapped over prepared", value=mapped / prepared, at_most=0.5)
        return
    if (most := _most_different(case["runs"])) is not None:
        yield Limit(name=f"{name}: gradients differ from static's by a share of", value=most, at_most=0.01)
    if case["nodes"] > 1:
        # Speed between declared nodes is that of sockets inside one machine, and says nothing.
        return
    errors = [abs(sum(found.values()) / medians[policy] - 1) for policy, found in predicted.items()]
    if errors and ALONE in medians:
        yield Limit(name=f"{name}: mean error of predictions", value=statistics.mean(errors), at_most=0.05)
    if OURS not in medians:
        return
    exposed = _median(case["runs"][OURS], "exposed_s") / medians[OURS]
    yield Limit(name=f"{name}: exposed transfers", value=exposed, at_most=0.01)
    least = 0.96 if case.get("is_small") else 0.98
    for level in (one for one in (LEVEL, DRAWN) if one in medians):
        yield Limit(name=f"{name}: share of {level}", value=medians[level] / medians[OURS], at_least=least)
    if case.get("is_small") and PREPARED in medians:
        # Where little can be gained, nothing may be lost.
        yield Limit(name=f"{name}: over {PREPARED}", value=medians[PREPARED] / medians[OURS], at_least=1.0)
    if "static" in medians and name.startswith("ESFT") and case["stage"] == "update":
        yield Limit(name=f"{name}: over static", value=medians["static"] / medians[OURS], at_least=1.15)


def _most_different(runs: Mapping[str, list[dict[str, Any]]]) -> float | None:
    """The largest relative difference of a policy's gradients from those of `static` on the same routes.

    Documents that were put together may have drawn other weights, and are not compared with each other.
    """
    keys = ("expert_gradients", "gate_gradients")
    if "static" not in runs or keys[0] not in runs["static"][0]:
        return None
    static = runs["static"][0]
    same = {
        policy: [run for run in many if run.get("document") == static.get("document")] for policy, many in runs.items()
    }
    others = [found for policy, many in same.items() if not policy.startswith(("uniform", ALONE)) for found in many]
    return max(abs(found[key] / static[key] - 1) for found in others for key in keys)


def _median(runs: list[dict[str, Any]], key: str) -> float:
    return float(statistics.median(run[key] for run in runs))

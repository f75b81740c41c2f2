"""The tables of `docs/results.md` and of the README, made from the committed results.

    python -m benchmarks.summary            # print them
    python -m benchmarks.summary --write    # put them between their markers, <!-- NAME --> and <!-- /NAME -->

Knows the JSON documents in `benchmarks/reports`. Measures nothing.

Invariants (asserted by the tests):
1. What stands between the markers is what this command makes.
2. Every limit that does not hold is shown as such.
"""

import argparse
import json
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from benchmarks.paper import RIVALS as PAPER_RIVALS
from benchmarks.results import ROOT

REPORTS = ROOT / "benchmarks" / "reports"
PAGES = ("README.md", "docs/results.md")
RIVALS = ("static", "eplb-oracle", "reactive", "equipoise")
PREDICTED = (
    ("ESFT law", 8, 65536),
    ("gpt-oss-20b", 8, 65536),
    ("ESFT law", 16, 65536),
    ("ESFT intent stacked x4", 32, 65536),
    ("ESFT intent stacked x4", 64, 65536),
    ("generated", 32, 131392),
    ("ESFT law", 16, 1024),
)
"""Windows of the planner's benchmark that are shown: (trace, EP, tokens per micro-step)."""


def main() -> None:
    """Print every table, or write them into the pages that have their markers."""
    parser = argparse.ArgumentParser(description="Tables of the documents, from committed results")
    parser.add_argument("--write", action="store_true", help="put the tables into README.md and docs/results.md")
    if not parser.parse_args().write:
        for name, table in TABLES.items():
            print(f"{name}\n\n{table()}\n")
        return
    for page in PAGES:
        path = ROOT / page
        path.write_text(filled(path.read_text(encoding="utf-8")), encoding="utf-8")


def filled(text: str) -> str:
    """The text with every table of ours between its markers."""
    for name, table in TABLES.items():
        between = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        content = table()
        text = between.sub(lambda match, content=content: f"{match[1]}{content}\n{match[2]}", text)
    return text


def node_table() -> str:
    """Windows of ranks that share one GPU: seconds, speed over static, exposed transfers, and what was predicted."""
    return _window_table("node_h200")


def small_table() -> str:
    """The same of micro-steps with few tokens."""
    return _window_table("node_small_h200")


def _window_table(report: str) -> str:
    lines = []
    for row in _windows(report):
        predicted = [f"{row['predicted_s']:.3f}", f"{row['error_pct']:+.1f}"] if row["predicted_s"] else ["", ""]
        figures = [f"{row['window_s']:.3f}", f"{row['spread_pct']:.1f}", f"{row['over_static']:.2f}"]
        lines.append([row["case"], row["policy"], *figures, f"{row['exposed_pct']:.1f}", *predicted])
    header = ["window", "policy", "seconds", "spread, %", "over static", "exposed, %", "predicted, s", "error, %"]
    return _table(header, lines)


def node_summary() -> str:
    """Speed over static of update windows, for the README."""
    rows = [row for row in _windows("node_h200") if not row["case"].endswith("recompute")]
    found = {(row["case"], row["policy"]): row["over_static"] for row in rows}
    policies = {
        "static, prepared": "static, prepared",
        "eplb-oracle": "EPLB oracle",
        "lplb": "LPLB",
        "reactive": "reactive",
        "equipoise, 1 slot": "**Equipoise**",
        "uniform at random, prepared": "uniform routes, at random",
        "uniform, prepared": "uniform routes, exactly equal",
    }
    lines = []
    for case in dict.fromkeys(case for case, _ in found):
        speeds = [found.get((case, policy)) for policy in policies]
        lines.append([case, *("" if speed is None else f"{speed:.2f}" for speed in speeds)])
    return _table(["recorded routes, expert sizes, ranks", *policies.values()], lines)


def parts_table() -> str:
    """Measured and predicted milliseconds of each part of a window, for the policies that are told apart by it."""
    shown, found = ("static, prepared", "lplb", "equipoise, 1 slot", "uniform at random, prepared"), {}
    for row in _read("node_h200")["parts"]:
        if row["policy"] in shown and not row["case"].endswith("experts alone"):
            both = f"{1e3 * row['measured_s']:.0f} / {1e3 * row['predicted_s']:.0f}"
            found.setdefault((row["case"], row["policy"]), {})[row["part"]] = both
    parts = list(next(iter(found.values())))
    return _table(["window", "policy", *parts], [[*key, *cells.values()] for key, cells in found.items()])


def links_table() -> str:
    """An exchange beside pulls, over what the clock's rule says."""
    lines = []
    for row in _read("node_h200")["links"]:
        lines.append([row["what"], *(f"{row[key]:.2f}" for key in ("ms", "exchange_ms", "pulls_ms", "over_rule"))])
    return _table(["measured", "ms", "exchange alone, ms", "pulls alone, ms", "over the rule"], lines)


def _windows(report: str) -> list[dict[str, Any]]:
    """Rows of whole windows of one declared node."""
    hidden = ("experts alone", "two nodes")
    rows = _read(report)["rows"]
    return [row for row in rows if not row["case"].endswith(hidden) and row["policy"] != "attention alone"]


def exchange_table() -> str:
    """What a level window of experts alone takes beside its products, by how rows travel."""
    rows = [row for row in _read("node_h200")["rows"] if row["beside_products_s"]]
    words = {
        "plain": "sorted and counted in the layer, all-to-all",
        "prepared": "dispatch prepared, all-to-all",
        "mapped": "dispatch prepared, rows read through mapped memory",
    }
    lines = [[words[row["policy"]], f"{1e3 * row['beside_products_s']:.0f}"] for row in rows if row["policy"] in words]
    return _table(["rows", "beside the products, ms of the window"], lines)


def replay_table() -> str:
    """MoE throughput in percent of balanced, measured rank by rank."""
    rows = _read("rank_replay_h200")["rows"]
    found = {(r["case"], r["stage"], r["policy"]): r for r in rows}
    cases = list(dict.fromkeys(r["case"] for r in rows))
    header = ["trace, shape", "stage", *RIVALS, "equipoise, with modelled all-to-all"]
    lines = []
    for case in cases:
        for stage in ("forward", "update"):
            cells = [f"{found[case, stage, policy]['pct measured']:.1f}" for policy in RIVALS]
            lines.append([case, stage, *cells, f"{found[case, stage, 'equipoise']['pct with all-to-all']:.1f}"])
    return _table(header, lines)


def predicted_table() -> str:
    """Predicted speed-up over static, one slot."""
    times = {
        (r["trace"], r["EP"], r["tokens"], r["policy"]): r["predicted_ms"]
        for r in _read("planner_cpu")["rows"]
        if r["table"] == "seconds" and r["slots"] == 1
    }
    policies = ("eplb-oracle", "lplb", "reactive", "equipoise", "balanced")
    lines = []
    for trace, ep, tokens in PREDICTED:
        static = times[trace, ep, tokens, "static"]
        speed = [f"{static / times[trace, ep, tokens, policy]:.2f}" for policy in policies]
        lines.append([trace, str(ep), f"{tokens:,}", *speed])
    return _table(["trace", "EP", "tokens", *policies], lines)


def paper_table() -> str:
    """The simulated comparison: least to most of every kind of case."""
    rows = [r for r in _read("paper_simulated")["rows"] if r["table"] == "comparison"]
    figures = {
        "over static": "over_static",
        "over oracle EPLB": "over_eplb-oracle",
        "over LPLB": "over_lplb",
        "over reactive": "over_reactive",
        "over reactive, its charges at zero": "over_reactive-free",
        "over oracle EPLB, the most possible (balanced)": "most_over_eplb-oracle",
        "of balanced": "of_balanced",
        "of balanced, compute alone": "compute_of_balanced",
        "whole step over static": "step_over_static",
        "whole step of balanced": "step_of_balanced",
    }
    kinds = list(dict.fromkeys((r["source"], r["crossing"]) for r in rows))
    lines = []
    for word, key in figures.items():
        cells = [_range(r[key] for r in rows if (r["source"], r["crossing"]) == kind) for kind in kinds]
        lines.append([word, *cells])
    return _table(["expert time", *(f"{source}, {crossing} cross nodes" for source, crossing in kinds)], lines)


def shifting_table() -> str:
    """Loads that fluctuate as the papers describe: least to most over the models, by width and crossing."""
    rows = _read("paper_shifting")["rows"]
    figures = {
        "fluctuation": "fluctuation",
        **{f"over {name}": f"over_{name}" for name in PAPER_RIVALS},
        "over eplb-oracle, the most possible (balanced)": "most_over_eplb-oracle",
        "of balanced": "of_balanced",
        "whole step over static": "step_over_static",
        "whole step over eplb-oracle": "step_over_eplb-oracle",
        "whole step over relibra": "step_over_relibra",
        "whole step of balanced": "step_of_balanced",
    }
    kinds = sorted({(r["EP"], r["crossing"]) for r in rows}, key=lambda kind: (kind[1] == "rows", kind[0]))
    lines = [
        [word, *(_range((r[key] for r in rows if (r["EP"], r["crossing"]) == kind), digits=3) for kind in kinds)]
        for word, key in figures.items()
    ]
    return _table(["expert time", *(f"EP{ranks}, {crossing} cross nodes" for ranks, crossing in kinds)], lines)


def memory_table() -> str:
    """Predicted and measured peaks of one rank's layers, in MiB."""
    found: dict[tuple[str, str], dict[str, str]] = {}
    for row in _read("memory_h200")["rows"]:
        cell = f"{row['predicted_MiB']:,.0f} / {row['measured_MiB']:,.0f} ({row['off_pct']:+.1f} %)"
        found.setdefault((row["model"], row["case"]), {})[row["pass"]] = cell
    header = ["layers of", "loads", *next(iter(found.values()))]
    return _table(header, [[*key, *cells.values()] for key, cells in found.items()])


def limits_table() -> str:
    """Every limit that a report misses, or how many there are if none is."""
    limits = [(limit, name) for name in JUDGED for limit in _read(name)["limits"]]
    lines = [_limit(limit, name) for limit, name in limits if not limit["holds"]]
    if not lines:
        return f"None: all {len(limits)} limits of the reports hold ({', '.join(JUDGED)})."
    return _table(["report", "what misses its limit", "value"], lines)


def packing_table() -> str:
    """Packing by experts with a plan: bytes across nodes and step over balanced's, beside the plan without it."""
    plans = ("plan, length", "plan, strict", "plan, experts", "plan, experts, 1 slot")
    found: dict[tuple[str, str, str], dict[str, str]] = {}
    for row in _read("packing_simulated")["rows"]:
        if row["plan"] in plans:
            case = (row["trace"], f"EP{row['EP']}", row["crossing"])
            found.setdefault(case, {})[row["plan"]] = f"{row['bytes']:.2f} / {1 / row['step']:.3f}"
    header = ["trace", "EP", "what crosses", *(name.removeprefix("plan, ") for name in plans)]
    return _table(header, [[*case, *(cells[name] for name in plans)] for case, cells in found.items()])


def waves_table() -> str:
    """Percent of balanced's throughput in one wave: the plan in one and in its best waves, and balanced in its own."""
    lines = []
    for row in _read("waves_simulated")["rows"]:
        case = [row["case"], f"EP{row['EP']}", row["crossing"], f"{row['static']:.0f}", f"{row['waves_1']:.0f}"]
        best = f"{row['waves_' + str(row['best'])]:.0f} ({row['best']})"
        rival = f"{row['balanced_best']:.0f} ({row['balanced_waves']})"
        lines.append([*case, best, rival, f"{row['links']:.2f}"])
    header = ["case", "EP", "what crosses", "static", "one wave", "best waves", "balanced, best waves", "links"]
    return _table(header, lines)


def bound_table() -> str:
    """Percent of rows that cross nodes in small batches: by chance, packed, and the least possible."""
    lines = []
    for row in _read("packing_bound")["rows"]:
        crossing = [f"{row[key]:.1f}" for key in ("by_chance", "packed", "optimum")]
        gained = f"{row['gained']:.0f} ({row['gained_least']:.0f} to {row['gained_most']:.0f})"
        lines.append([row["trace"], *crossing, gained])
    return _table(["trace", "by chance", "packed", "least possible", "of the way, % (worst to best draw)"], lines)


def coverage_table() -> str:
    """Percent of the gain over static that is left, by what is missing and how it is estimated; a column per case."""
    rows = [row for row in _read("coverage_simulated")["rows"] if not row["missing"].endswith("updates")]
    found = {_missing(row): dict[str, str]() for row in rows}
    for row in rows:
        found[_missing(row)][f"{row['trace']}, EP{row['EP']}"] = f"{row['kept']:.0f}"
    cases = list(dict.fromkeys(f"{row['trace']}, EP{row['EP']}" for row in rows))
    lines = [[*key, *(cells.get(case, "") for case in cases)] for key, cells in found.items()]
    return _table(["missing", "known, %", "estimate", *cases], lines)


def _missing(row: dict[str, Any]) -> tuple[str, str, str]:
    known = "" if row["missing"] == "any" else f"{100 * row['coverage']:.0f}"
    return ("" if row["missing"] == "any" else row["missing"], known, row["estimate"])


def stale_table() -> str:
    """Choices that differ after some updates, and percent of the gain left: least to most over seeds and widths."""
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for row in _read("coverage_simulated")["rows"]:
        if row["missing"].endswith("updates"):
            found.setdefault(row["missing"], {}).setdefault(row["estimate"], []).append(row)
    lines = []
    for updates, by_estimate in found.items():
        old, reacted = by_estimate["stale"], by_estimate["reactive"]
        kept, left = (_range((row["kept"] for row in rows), digits=0) for rows in (old, reacted))
        over = _range(row["over_static"] for row in old)
        lines.append([updates, _range(100 * row["choices"] for row in old), kept, over, left])
    header = ["routes are old by", "choices that differ, %", "gain left, %", "over static", "gain of reactive, %"]
    return _table(header, lines)


def transfer_table() -> str:
    """What pulls add, how fast they are, what they need."""
    transfer = _read("transfer_h200")
    lines = []
    for part, word in (
        ("pulls", "host pulls of 1 and 2 replicas per layer add, in %"),
        ("rates", "pull rate, in % of plain copies"),
        ("memory", "replica buffers, in % of the rank's experts"),
        ("layer", "balanced layer without replicas over a plain one, in %"),
    ):
        limits = transfer[part]["limits"]
        values = [limit["value"] for limit in limits]
        end = next(f"{w} {limit[k]:g}" for limit in limits for k, w in BOUNDS.items() if limit[k] is not None)
        held = f"{sum(limit['holds'] for limit in limits)} of {len(limits)}"
        lines.append([word, _range(values, digits=1), end, held])
    return _table(["measured on one H200", "least to most", "limit", "holds in"], lines)


JUDGED = (
    "node_h200",
    "node_small_h200",
    "memory_h200",
    "planner_cpu",
    "rank_replay_h200",
    "validation_h200",
    "paper_simulated",
    "paper_shifting",
    "packing_simulated",
    "coverage_simulated",
    "waves_simulated",
)
"""Reports whose limits are listed where they are missed."""
BOUNDS = {"at_least": "at least", "at_most": "at most"}
TABLES: dict[str, Callable[[], str]] = {
    "replay": replay_table,
    "node": node_table,
    "node summary": node_summary,
    "node parts": parts_table,
    "node links": links_table,
    "node small": small_table,
    "exchange": exchange_table,
    "predicted": predicted_table,
    "paper": paper_table,
    "shifting": shifting_table,
    "packing": packing_table,
    "packing bound": bound_table,
    "waves": waves_table,
    "coverage": coverage_table,
    "stale": stale_table,
    "memory": memory_table,
    "transfer": transfer_table,
    "misses": limits_table,
}


def _read(name: str) -> dict[str, Any]:
    return json.loads((REPORTS / f"{name}_202611.json").read_text())


def _range(values: Iterable[float], *, digits: int = 2) -> str:
    found = list(values)
    return f"{min(found):.{digits}f} to {max(found):.{digits}f}"


def _limit(limit: dict[str, Any], report: str) -> list[str]:
    bound = ", ".join(f"{word} {limit[key]:g}" for key, word in BOUNDS.items() if limit.get(key) is not None)
    return [report.replace("_", " "), limit["name"], f"{limit['value']:.4g}" + (f" ({bound})" if bound else "")]


def _table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [header, ["---"] * len(header), *lines]
    return named("\n".join(f"| {' | '.join(row)} |" for row in rows))


def named(text: str) -> str:
    """The text with the name that trainers give to the stage `recompute` of the reports."""
    return re.sub(r", recompute\b", ", log-prob", text)


if __name__ == "__main__":
    main()

"""A node of real ranks on one GPU: training windows of every policy, by the wall clock.

    python -m benchmarks.node calibrate profile.json                # prices of this node, on the machine with the GPU
    python -m benchmarks.node plan work.pkl --profile profile.json  # plans, where the planner is compiled
    python -m benchmarks.node run work.pkl --out node.json          # windows, on the machine with the GPU
    python -m benchmarks.node smoke                                 # tiny sizes on a CPU, to try the benchmark itself

Ranks are processes under CUDA's Multi-Process Service, each with the same small share of the processors. First the
benchmark shows that neighbours do not matter: a rank takes as long alone as beside all others, within 3 %. Clocks stay
as the machine sets them unless `--clock` is given; with few processors per rank the GPU stays below its power limit, so
that they do not fall. Ranks read each other's rows and experts in the memory of the one GPU: that link is rather too
fast than too slow for a rank of this size.
"""

import argparse
import gzip
import json
import os
import pickle
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.node_cases import NodeWork
from benchmarks.results import Limit, format_table, read_commit, read_machine, say_limit
from equipoise.core import Cluster
from equipoise.cost.model import CostModel
from equipoise.cost.profile import write_profile
from equipoise.launch import RankOptions, run_ranks

PERCENT = 5
"""Of the GPU's processors for each rank."""


@contextmanager
def mps(percent: int, clock: int | None) -> Iterator[None]:
    """Run ranks side by side: start the service, and end it whatever happens; lock the clock only where asked to."""
    if shutil.which("nvidia-cuda-mps-control") is None:
        raise SystemExit("nvidia-cuda-mps-control is not installed; ranks would take turns on the GPU")
    with tempfile.TemporaryDirectory(prefix="node-mps-") as folder:
        places = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        os.environ.update(places, CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=str(percent))
        subprocess.run(["nvidia-cuda-mps-control", "-d"], check=True)
        if clock is not None:
            subprocess.run(["nvidia-smi", f"-lgc={clock},{clock}"], check=True)
        try:
            yield
        finally:
            if clock is not None:
                subprocess.run(["nvidia-smi", "-rgc"], check=True)
            subprocess.run(["nvidia-cuda-mps-control"], input="quit\n", text=True, check=True)
            for name in (*places, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"):
                del os.environ[name]


def run_works(group: Any, works: list[NodeWork], rounds: int, device: str, *, show: Any) -> dict[str, Any]:
    """Run in every rank: show that neighbours do not matter, then all cases."""
    from benchmarks.node_ranks import neighbours, run_case

    found: dict[str, Any] = {"neighbours": neighbours(group) if device == "cuda" else {}, "cases": {}}
    show(f"neighbours: {found['neighbours']}")
    for work in works:
        begin = time.monotonic()
        # The first case is the one whose figures are quoted most; the others take one round.
        given = {
            "rounds": rounds if work.case is works[0].case and not work.is_bare else 1,
            "device": device,
            "tell": show,
            "is_bare": work.is_bare,
        }
        name = f"{work.case.name}{', experts alone' if work.is_bare else ''}"
        found["cases"][name] = run_case(group, work.case, work.policies, work.cluster, **given)
        # What is shown is kept: a run that is cut off has its finished cases.
        show(f"{name}: {time.monotonic() - begin:.1f} s", found)
    return found


def calibrate_node(ranks: int, commit: str | None) -> dict[str, Any]:
    """Measure the prices of ranks that share the GPU: the shapes and sizes of the cases alone."""
    from equipoise.calibrate.bench import Grid
    from equipoise.calibrate.ranks import calibrate_ranks

    full = Grid.full()
    grid = replace(
        full,
        shapes=((2048, 1408), (2048, 768), (2880, 2880)),
        slots=(4, 8, 18),
        rows=(1024, 8192, 16384, 32768, 65536),
        attention=full.attention[:1],
        tokens=(1024,),
        moved_rows=(32768,),
    )
    link = Cluster.preset("h200", nodes=1, ranks_per_node=ranks, ep=ranks).nvlink_bytes_per_s
    return calibrate_ranks(grid, ranks=ranks, nvlink_bytes_per_s=link, runs=5, commit=commit, tell=show_line)


def plan_works(ranks: int, tokens: int, profile: str | None, folder: Path | None) -> list[NodeWork]:
    """Plan every case."""
    from benchmarks import node_cases as cases
    from benchmarks.traces import FOLDER

    found = cases.build_cases(folder or FOLDER, ranks=ranks, tokens=tokens)
    chosen = {} if profile is None else {"profile": profile}
    cluster = Cluster.preset("h200", nodes=1, ranks_per_node=ranks, ep=ranks, **chosen)
    works = [NodeWork(case=found[0], policies=cases.exchanges_of(found[0], cluster), cluster=cluster, is_bare=True)]
    for case in (*found, cases.recomputed(found[0]), cases.checkpointed(found[0])):
        works.append(NodeWork(case=case, policies=cases.policies_of(case, cluster), cluster=cluster))
    return works


def summarise(found: dict[str, Any], works: list[NodeWork]) -> tuple[list[dict[str, Any]], list[Limit]]:
    """Rows of medians, and what the benchmark promises of them."""
    rows, limits = [], []
    alone, beside = (found["neighbours"].get(key, 1.0) for key in ("alone_ms", "beside_ms"))
    limits.append(Limit(name="a rank beside all others over alone", value=beside / alone, at_most=1.03))
    for work, (name, policies) in zip(works, found["cases"].items(), strict=True):
        medians = {policy: statistics.median(run["window_s"] for run in runs) for policy, runs in policies.items()}
        plans = {policy.name: policy.plan for policy in work.policies}
        # Attention is measured alone; a plan predicts the rest, but for rows' ways that are the same under all plans.
        cost = CostModel.of(work.cluster, work.case.model, stage=work.case.stage)
        micro_steps, layers, _, tokens, top_k = work.case.routes_MLRTK.shape
        same_s = medians.get("attention alone", 0.0) + micro_steps * layers * cost.sending_ns(tokens * top_k) / 1e9
        for policy, runs in policies.items():
            times = [run["window_s"] for run in runs]
            plan = plans.get(policy)
            rows.append(
                {
                    "case": name,
                    "policy": policy,
                    "window_s": round(medians[policy], 4),
                    "spread_pct": round(100 * (max(times) - min(times)) / medians[policy], 1),
                    "over_static": round(medians.get("static", medians.get("plain", 0.0)) / medians[policy], 3),
                    "exposed_pct": round(100 * statistics.median(r["exposed_s"] for r in runs) / medians[policy], 2),
                    "predicted_s": round(same_s + plan.seconds.total, 4) if plan is not None else 0.0,
                    # All that a window of experts alone takes beside its products: sorting, counts, exchanges.
                    "beside_products_s": round(medians[policy] - medians.get("products alone", medians[policy]), 4),
                }
            )
        if work.is_bare:
            rest = {policy: medians[policy] - medians["products alone"] for policy in ("plain", "prepared", "mapped")}
            limits.append(
                Limit(name=f"{name}: mapped over prepared", value=rest["mapped"] / rest["prepared"], at_most=0.5)
            )
            continue
        errors = [
            abs(same_s + plan.seconds.total - medians[policy]) / medians[policy]
            for policy, plan in plans.items()
            if plan is not None
        ]
        if not work.case.is_checkpointed:
            limits.append(Limit(name=f"{name}: mean error of predictions", value=statistics.mean(errors), at_most=0.05))
        ours = medians["equipoise, 1 slot"]
        limits.append(
            Limit(name=f"{name}: share of uniform, prepared", value=medians["uniform, prepared"] / ours, at_least=0.98)
        )
        if name.startswith("ESFT") and work.case.stage == "update":
            limits.append(Limit(name=f"{name}: over static", value=medians["static"] / ours, at_least=1.15))
    return rows, limits


def main() -> int:
    """Parse the command line and run a part of the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["calibrate", "plan", "run", "smoke"])
    parser.add_argument("work", nargs="?", type=Path, help="file with cases and plans; the profile to write")
    parser.add_argument("--profile", help="hardware profile of the node, from `equipoise calibrate --ranks`")
    parser.add_argument("--traces", type=Path, help="folder of the routing traces")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of a rank in a micro-step")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", type=int, help="run the first cases alone")
    parser.add_argument("--percent", type=int, default=PERCENT, help="of the GPU's processors for each rank")
    parser.add_argument("--clock", type=int, help="lock the GPU's clock at this many MHz; needs the right to")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--commit", help="of the source, where git cannot tell")
    args = parser.parse_args()
    if args.part == "calibrate":
        with mps(args.percent, args.clock):
            write_profile(calibrate_node(args.ranks, args.commit), args.work)
        return 0
    if args.part == "plan":
        works = plan_works(args.ranks, args.tokens, args.profile, args.traces)
        args.work.write_bytes(gzip.compress(pickle.dumps(works), 6))
        return 0
    if args.part == "smoke":
        works = smoke_works()
        found = run_ranks(run_works, 2, works, 1, "cpu", show=show_line)[0]
    else:
        works = pickle.loads(gzip.decompress(args.work.read_bytes()))[: args.only]
        ranks = works[0].case.ranks
        options = RankOptions(device="cuda", timeout_s=120.0)

        def show(line: str, found: dict[str, Any] | None = None) -> None:
            show_line(line)
            if found is not None and args.out is not None:
                write_document(args.out, found, works[: len(found["cases"])], args)

        with mps(args.percent, args.clock):
            found = run_ranks(run_works, ranks, works, args.rounds, "cuda", options=options, show=show)[0]
    rows, limits = summarise(found, works)
    print(format_table(rows))
    for limit in limits:
        print(say_limit(limit))
    return 0 if all(limit.holds for limit in limits) else 1


def write_document(path: Path, found: dict[str, Any], works: list[NodeWork], args: argparse.Namespace) -> None:
    """Write everything that was measured, with what it was measured on."""
    rows, limits = summarise(found, works)
    document = {
        "benchmark": "node",
        "commit": args.commit or read_commit(),
        "machine": f"{read_machine()}; {gpu_name()}; {args.percent} % of its processors per rank",
        "clock": f"locked at {args.clock} MHz" if args.clock else "as the machine sets it",
        "neighbours": found["neighbours"],
        "rows": rows,
        "runs": found["cases"],
        "limits": [{**asdict(one), "holds": one.holds} for one in limits],
    }
    path.write_text(json.dumps(document, indent=1) + "\n")


def show_line(line: object, *_: Any) -> None:
    """Print at once."""
    print(line, flush=True)


def gpu_name() -> str:
    """The GPU, as its driver calls it."""
    asked = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()


def smoke_works() -> list[NodeWork]:
    """Two ranks, two layers, a few tokens."""
    import numpy as np

    from benchmarks import node_cases as cases
    from equipoise.core import ModelShape

    model = ModelShape.preset("qwen3-30b-a3b", experts=8, layers=2, top_k=2, hidden=32, expert_width=16)
    rng = np.random.default_rng(0)
    shape = (2, 2, 2, 16)
    ids = np.argsort(rng.random((*shape, 8)) * np.arange(1, 9), axis=-1)[..., :2].astype(np.int64)
    case = cases.NodeCase(name="smoke", model=model, routes_MLRTK=ids)
    cluster = Cluster.preset("h200", nodes=1, ranks_per_node=2, ep=2)
    works = [NodeWork(case=case, policies=cases.exchanges_of(case, cluster), cluster=cluster, is_bare=True)]
    return [*works, NodeWork(case=case, policies=cases.policies_of(case, cluster), cluster=cluster)]


if __name__ == "__main__":
    sys.exit(main())

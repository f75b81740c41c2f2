"""A node of real ranks on one GPU: training windows of every policy, by the wall clock.

    python -m benchmarks.node calibrate profile.json                # prices of this node, on the machine with the GPU
    python -m benchmarks.node plan work.pkl --profile profile.json  # plans, where the planner is compiled
    python -m benchmarks.node run work.pkl --out node.json          # windows, on the machine with the GPU
    python -m benchmarks.node run work.pkl --out node.json --cases qwen "lite:static;reactive" --rounds 3
    python -m benchmarks.node links --out node.json                 # an exchange beside pulls
    python -m benchmarks.node train --out node.json                 # whole training steps
    python -m benchmarks.node join --add one.json two.json --out node.json
    python -m benchmarks.node smoke                                 # tiny sizes on a CPU, to try the benchmark itself

Ranks are processes under CUDA's Multi-Process Service, each with the same small share of the processors. First the
benchmark shows that neighbours do not matter: a rank takes as long alone as beside all others, within 3 %. Clocks stay
as the machine sets them unless `--clock` is given; with few processors per rank the GPU stays below its power limit, so
that they do not fall. Ranks read each other's rows and experts in the memory of the one GPU: that link is rather too
fast than too slow for a rank of this size. A run adds to the results that `--out` holds, after every policy.
"""

import argparse
import gzip
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from benchmarks import node_report as report
from benchmarks.node_cases import NodeWork
from benchmarks.results import format_table, read_commit, read_machine, say_limit
from equipoise.core import Cluster
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
        # NCCL joins ranks that share a GPU by sockets, where each names another host.
        places |= {"NCCL_HOSTID": "node", "NCCL_SOCKET_IFNAME": "lo"}
        os.environ.update(places, CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=str(percent))
        # `timeout` ends a run by a signal, which would leave the service behind.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
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


def run_works(
    group: Any, works: list[NodeWork], rounds: int, device: str, with_neighbours: bool, *, show: Any
) -> dict[str, Any]:
    """Run in every rank: show that neighbours do not matter, then the works, whose runs are shown as they are found."""
    from benchmarks.node_ranks import neighbours, run_case

    found = {str(group.size()): neighbours(group)} if with_neighbours else {}
    show(f"neighbours: {found}", None, found)
    for number, work in enumerate(works):
        begin = time.monotonic()
        run_case(group, work, rounds=rounds, device=device, tell=partial(_tell, show, number))
        show(f"{work.name}: {time.monotonic() - begin:.1f} s")
    return found


def _tell(show: Any, number: int, line: str, runs: dict[str, Any]) -> None:
    show(line, number, runs)


class Keeper:
    """Keeps what ranks show in a document, and in its file where there is one."""

    def __init__(self, document: report.Document, path: Path | None) -> None:
        self.document, self._path = document, path
        self._works: list[NodeWork] = []
        self._before: dict[int, report.Document] = {}

    def expect(self, works: list[NodeWork]) -> None:
        """Runs that are shown next are of these works."""
        self._works, self._before = works, {}

    def show(self, line: str, number: int | None = None, found: Any = None) -> None:
        """Print a line, and keep what was found: all runs so far of the work with that number, or else neighbours."""
        print(line, flush=True)
        if number is not None:
            before = self._before.setdefault(number, self.document)
            self.document = report.add_runs(before, self._works[number], found)
        elif found:
            self.document["neighbours"] |= found
        if self._path is not None:
            report.write_document(self._path, self.document)


def run_all(
    works: list[NodeWork], keeper: Keeper, *, rounds: int, device: Literal["cpu", "cuda"], context: Any = None
) -> None:
    """Run all works, those of equally many ranks and nodes in one launch.

    Args:
        context: of multiprocessing, in which ranks are started; spawn by default
    """
    launches: dict[tuple[int, int], list[NodeWork]] = {}
    for work in works:
        launches.setdefault((work.case.ranks, work.cluster.num_ep_nodes), []).append(work)
    for (ranks, nodes), same in launches.items():
        keeper.expect(same)
        is_gpu = device == "cuda"
        with_neighbours = is_gpu and nodes == 1 and str(ranks) not in keeper.document["neighbours"]
        options = RankOptions(device=device, timeout_s=120.0, backend="nccl" if is_gpu and nodes > 1 else "gloo")
        given = (same, rounds, device, with_neighbours)
        run_ranks(run_works, ranks, *given, options=options, show=keeper.show, context=context)


def calibrate_node(ranks: int, commit: str | None) -> dict[str, Any]:
    """Measure the prices of ranks that share the GPU: the shapes and sizes of the cases alone."""
    from equipoise.calibrate.bench import Grid
    from equipoise.calibrate.run import calibrate_ranks

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


def choose(works: list[NodeWork], cases: list[str]) -> list[NodeWork]:
    """The works that are asked for, in that order: `key`, or `key:policy;policy` for some policies; all by default."""
    known, chosen = {work.key: work for work in works}, []
    for one in cases or known:
        key, _, names = one.partition(":")
        if key not in known:
            raise SystemExit(f"no case {key!r} in the work file; it has {', '.join(known)}")
        policies = {policy.name: policy for policy in known[key].policies}
        for name in (asked := names.split(";") if names else list(policies)):
            if name not in policies:
                raise SystemExit(f"no policy {name!r} of case {key!r}; it has {'; '.join(policies)}")
        chosen.append(replace(known[key], policies=[policies[name] for name in asked]))
    return chosen


def main() -> int:
    """Parse the command line and run a part of the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["calibrate", "plan", "run", "links", "train", "join", "smoke"])
    parser.add_argument("work", nargs="?", type=Path, help="file with cases and plans; the profile to write")
    parser.add_argument("--profile", help="hardware profile of the node, from `equipoise calibrate --ranks`")
    parser.add_argument("--traces", type=Path, help="folder of the routing traces")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of a rank in a micro-step")
    parser.add_argument("--cases", nargs="*", default=[], help="keys, or key:policy;policy to run; modes of `train`")
    parser.add_argument("--rounds", type=int, default=1, help="turns of each policy, of two timed windows each")
    parser.add_argument("--steps", type=int, default=8, help="training steps of `train`, of which two warm up")
    parser.add_argument("--percent", type=int, default=PERCENT, help="of the GPU's processors for each rank")
    parser.add_argument("--clock", type=int, help="lock the GPU's clock at this many MHz; needs the right to")
    parser.add_argument("--out", type=Path, help="JSON file to write, or to add to")
    parser.add_argument("--add", nargs="*", type=Path, default=[], help="documents that `join` puts together")
    parser.add_argument("--commit", help="of the source, where git cannot tell")
    args = parser.parse_args()
    if args.part == "calibrate":
        with mps(args.percent, args.clock):
            write_profile(calibrate_node(args.ranks, args.commit), args.work)
        return 0
    if args.part == "plan":
        from benchmarks.node_cases import plan_works
        from benchmarks.traces import FOLDER

        given = {"ranks": args.ranks, "tokens": args.tokens, "profile": args.profile, "keys": args.cases}
        works = plan_works(args.traces or FOLDER, **given, show=show_line)
        args.work.write_bytes(gzip.compress(pickle.dumps(works), 6))
        return 0
    if args.part == "join":
        return finish(report.join([json.loads(path.read_text()) for path in args.add]), args.out)
    if args.part == "smoke":
        facts = {"commit": args.commit or read_commit(), "machine": read_machine(), "clock": "of a CPU"}
        keeper = Keeper(report.open_document(args.out, facts), args.out)
        run_all(smoke_works(), keeper, rounds=args.rounds, device="cpu")
        return finish(keeper.document, args.out)
    facts = {
        "commit": args.commit or read_commit(),
        "machine": f"{read_machine()}; {gpu_name()}; {args.percent} % of its processors per rank",
        "clock": f"locked at {args.clock} MHz" if args.clock else "as the machine sets it",
    }
    keeper = Keeper(report.open_document(args.out, facts), args.out)
    with mps(args.percent, args.clock):
        if args.part == "run":
            works = choose(pickle.loads(gzip.decompress(args.work.read_bytes())), args.cases)
            run_all(works, keeper, rounds=args.rounds, device="cuda")
        elif args.part == "links":
            from benchmarks.node_links import compare_links

            options = RankOptions(device="cuda", timeout_s=120.0)
            keeper.document["links"] = run_ranks(compare_links, args.ranks, "cuda", options=options)[0]
        else:
            from benchmarks.node_train import MODES, train_mode

            for mode in args.cases or MODES:
                keeper.document["train"] += train_mode(mode, steps=args.steps)
                keeper.show(f"trained: {mode}")
    return finish(keeper.document, args.out)


def finish(document: report.Document, path: Path | None) -> int:
    """Write the document, print its tables, and return 1 where a limit does not hold."""
    if path is not None:
        report.write_document(path, document)
    rows, parts, limits = report.summarise(document)
    for table in (rows, parts, document["links"], document["train"]):
        if table:
            print(format_table(table), end="\n\n")
    for limit in limits:
        print(say_limit(limit))
    return 0 if all(limit.holds for limit in limits) else 1


def show_line(line: object, *_: Any) -> None:
    """Print at once."""
    print(line, flush=True)


def gpu_name() -> str:
    """The GPU, as its driver calls it."""
    asked = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()


def smoke_works() -> list[NodeWork]:
    """Two ranks, and four on two declared nodes; two layers, a few tokens."""
    import numpy as np

    from benchmarks import node_cases as cases
    from equipoise.core import ModelShape

    model = ModelShape.preset("qwen3-30b-a3b", experts=8, layers=2, top_k=2, hidden=32, expert_width=16)
    rng = np.random.default_rng(0)
    ids = np.argsort(rng.random((2, 2, 4, 16, 8)) * np.arange(1, 9), axis=-1)[..., :2].astype(np.int64)
    one, two = (Cluster.preset("h200", nodes=nodes, ranks_per_node=2, ep=2 * nodes) for nodes in (1, 2))
    case = cases.NodeCase(name="smoke", model=model, routes_MLRTK=ids[:, :, :2])
    far = cases.NodeCase(name="smoke, two nodes", model=model, routes_MLRTK=ids)
    return [
        NodeWork(case=case, policies=cases.exchanges_of(case, one), cluster=one, key="exchange", is_bare=True),
        NodeWork(case=case, policies=cases.policies_of(case, one), cluster=one, key="lite"),
        NodeWork(
            case=cases.checkpointed(case), policies=cases.policies_of(case, one), cluster=one, key="checkpointing"
        ),
        NodeWork(case=far, policies=cases.crossings_of(far, two), cluster=two, key="nodes"),
    ]


if __name__ == "__main__":
    sys.exit(main())

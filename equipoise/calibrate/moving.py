"""Measurements of experts that move between ranks, and of what planning costs, taken by all ranks at the same time.

    pull        one expert out of a peer's mapped page
    relocation  experts that change ranks at a window's edge: stage, agree, write
    refresh     a rank's experts to the host store
    counts      the rows that every rank counted, to all ranks
    prepare     the dispatch of one layer, made ahead
    window      opened and closed, with nothing to move in it
The fixed part of each is the time of the same with an expert, or a window, of almost no bytes. Pulls are timed on the
device; everything else runs in threads beside training, so the host's clock tells.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import cycle
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from equipoise.calibrate.bench import Bench, Grid, Steps, measure
from equipoise.calibrate.between import median_over, open_node
from equipoise.calibrate.measures import random_experts
from equipoise.core import Cluster, ModelShape, Plan
from equipoise.core.options import TransferOptions
from equipoise.core.plan import Itinerary
from equipoise.layer.dispatch import SourceSplit, assign_slots, build_dispatch, sort_rows
from equipoise.layer.mapped import make_tables
from equipoise.layer.relay import NodeRanks
from equipoise.planning.background import owners_plan
from equipoise.planning.rows import RankRows
from equipoise.transfer.edges import Move, Relocator
from equipoise.transfer.engine import TransferEngine
from equipoise.transfer.host_store import HostStore, Refresher
from equipoise.transfer.nccl import choose_transport
from equipoise.transfer.node import NodeMemory, allocate_experts
from equipoise.transfer.pulls import MappedPath, Need
from equipoise.transfer.waits import Mark, OwnGroup, Transfer

MOVED = 16
"""Experts of each rank that change ranks, or are written to the host store, at once: enough bytes to take longer than
the ranks' agreement, which takes milliseconds and scatters."""
HOST_RUNS = 3
"""Times as many runs by the host's clock, which scatters more than a device's."""
TINY = (16, 16)
"""Hidden width and width of an expert of almost no bytes."""
COUNTED = (8, 48)
"""Micro-steps and layers of the window whose counts are exchanged."""
HOMES = 16
"""Experts of a rank in a prepared dispatch."""
TIMEOUT_S = 60.0
MOVING_STEPS = 5


class ExpertTimes(NamedTuple):
    """Nanoseconds of one pull, and of some experts of every rank relocated and refreshed."""

    pull: float
    weights: float
    gradients: float
    across: float
    """Weights to another node; as inside where there is none."""
    refresh: float


def measure_moving(
    grid: Grid, nvlink_bytes_per_s: int, *, group: Any, node_R: list[int], bench: Bench, steps: Steps
) -> dict[str, dict[str, Any]]:
    """Return the peer's part of the section `pull`, and the sections `exchange` and `overheads`.

    Every rank of `group` must call this. Figures are of the median rank.
    """
    found = []
    for shape, count in ((grid.expert_shape, MOVED), (TINY, 1)):
        times = time_experts(shape, count, group=group, node_R=node_R, bench=bench)
        found.append(ExpertTimes(*median_over(group, times)))
        steps.advance()
    own_group = OwnGroup(group, timeout_s=TIMEOUT_S)
    counts = [time_counts(own_group, shape, group=group, bench=bench) for shape in (COUNTED, (1, 1))]
    own_group.close()
    steps.advance()
    prepare = time_prepare(grid, group=group, bench=bench)
    steps.advance()
    window = time_window(group=group, node_R=node_R, bench=bench)
    steps.advance()
    whole_ns, empty_ns, prepare_ns, window_ns = median_over(group, [*counts, prepare, window])
    count_bytes = 8 * COUNTED[0] * COUNTED[1] * HOMES * group.size() ** 2
    size, tiny = grid.expert_params * bench.dtype.itemsize, found[1]
    # What is left once the fixed part is taken off; a device that is too fast to tell is not infinitely fast.
    beyond = ExpertTimes(*(max(large - small, 1.0) for large, small in zip(*found, strict=True)))
    pulled, moved = size / beyond.pull * 1e9, f"{MOVED} experts of {size} bytes of every rank"
    across: dict[str, Any] = {}
    if (nodes := len(set(node_R))) > 1:
        way = choose_transport("auto", group=group, device=bench.device, nodes=nodes)
        across["across_bytes_per_s"] = round(MOVED * size / beyond.across * 1e9)
        across["across_source"] = f"measured: {moved} to a rank of another node, by {way}"
    return {
        "pull": {
            "peer_bytes_per_s": min(round(pulled), nvlink_bytes_per_s),
            "peer_fixed_ns": round(tiny.pull),
            "source": f"peer: measured, pulls of one expert ({size} bytes) from pages of peers, on {group.size()} "
            f"ranks at once, at {round(pulled)} bytes/s, capped by the published link rate of {nvlink_bytes_per_s} "
            "bytes/s; fixed part by an expert of almost no bytes",
        },
        "exchange": {
            "weight_bytes_per_s": round(MOVED * size / beyond.weights * 1e9),
            "gradient_bytes_per_s": round(MOVED * 4 * grid.expert_params / beyond.gradients * 1e9),
            "source": f"measured: {moved} to the next rank of its node, through staging and with the ranks' "
            "agreement, beyond the fixed part in overheads; weights in the kernels' dtype, gradients in fp32",
            **across,
        },
        "overheads": {
            "edge_fixed_ns": round((tiny.weights + tiny.gradients) / 2),
            "refresh_bytes_per_s": round(MOVED * size / beyond.refresh * 1e9),
            "counts_fixed_ns": round(empty_ns),
            "counts_bytes_per_s": round(count_bytes / max(whole_ns - empty_ns, 1.0) * 1e9),
            "prepared_rows_per_s": round(max(grid.moved_rows) / prepare_ns * 1e9),
            "window_fixed_ns": round(window_ns),
            "source": f"measured on {group.size()} ranks at once, by the host's clock: mean of publish and collect of "
            f"a layer with experts of almost no bytes; {moved} to the host store; counts of a window of {COUNTED[0]} "
            f"micro-steps and {COUNTED[1]} layers to all ranks, bytes of all of them counted; one dispatch of "
            f"{max(grid.moved_rows)} rows, made ahead; a window of one layer, opened and closed, in which nothing "
            "moves",
        },
    }


def time_experts(shape: tuple[int, int], count: int, *, group: Any, node_R: list[int], bench: Bench) -> ExpertTimes:
    """Time everything that moves experts of one shape, `count` of every rank. Every rank of `group` must call this."""
    node = open_node(shape, slots=count, group=group, node_R=node_R, bench=bench)
    store = HostStore(node.layout, experts=node.num_experts, group=group, node_R=node_R, timeout_s=TIMEOUT_S)
    refresher, relocator = Refresher(node, store), Relocator(node)
    across = ring_moves(node_R, count, is_across=True)
    # Where every rank is a node of its own, all relocations leave it.
    inside = ring_moves(node_R, count) or across
    weights = node.homes[0].map(torch.Tensor.detach)
    gradients = allocate_experts(node.layout, count, torch.float32, device=node.device)
    timed = partial(time_on_host, group=group, bench=bench)

    def collect() -> None:
        # Ranks first agree that nobody pulls from the homes any more.
        node.agreement.largest([0], Transfer("collect", 0, path="p2p"))
        relocator.relocate("collect", 0, inside, gradients)

    times = ExpertTimes(
        pull=time_pull(node, count, bench),
        weights=timed(partial(relocator.relocate, "publish", 0, inside, weights)),
        gradients=timed(collect),
        across=timed(partial(relocator.relocate, "publish", 0, across, weights)),
        refresh=timed(partial(refresher.complete, version=1)),
    )
    refresher.close()
    store.close()
    node.close()
    return times


def ring_moves(node_R: list[int], count: int, *, is_across: bool = False) -> list[Move]:
    """Return moves of `count` experts of each rank to the next rank of its node, or to its like in the next node."""
    ranks, nodes = len(node_R), len(set(node_R))
    per_node, moves = ranks // nodes, list[Move]()
    for source in range(ranks):
        first = node_R[source] * per_node
        target = (source + per_node) % ranks if is_across else first + (source + 1 - first) % per_node
        moves += [Move(source * count + slot, source, slot, target, slot) for slot in range(count)]
    return [move for move in moves if move.source != move.target]


def time_pull(node: NodeMemory, count: int, bench: Bench) -> float:
    """Return the nanoseconds of pulling one expert, from one peer's page after another."""
    path, buffer = MappedPath(node), allocate_experts(node.layout, 1, node.layout.dtype, device=node.device)
    peers = [rank for rank in node.peers if rank != node.rank] or [node.rank]
    needs = cycle([{0: Need(0, rank * count + slot, rank, slot, "peer")} for slot in range(count) for rank in peers])

    def pull() -> None:
        path.pull(next(needs), buffer)

    if not bench.is_gpu:
        return measure(pull, bench).median_ns
    with torch.cuda.stream(torch.cuda.Stream()):
        return measure(pull, bench).median_ns


def time_on_host(work: Callable[[], object], *, group: Any, bench: Bench) -> float:
    """Return the median nanoseconds of work in which ranks wait for each other, by the host's clock."""
    times_ns = []
    for _ in range(HOST_RUNS * bench.runs + 1):
        dist.barrier(group)
        begin = time.perf_counter_ns()
        work()
        Mark.now(bench.device).block()
        times_ns.append(float(time.perf_counter_ns() - begin))
    return median(times_ns[1:])


def time_counts(own_group: OwnGroup, shape: tuple[int, int], *, group: Any, bench: Bench) -> float:
    """Return the nanoseconds of exchanging the counted rows of a window of so many micro-steps and layers."""
    rows = RankRows(load_MLE=np.ones((*shape, HOMES * group.size()), dtype=np.int64))
    return time_on_host(partial(own_group.gather, rows), group=group, bench=bench)


def time_prepare(grid: Grid, *, group: Any, bench: Bench) -> float:
    """Return the nanoseconds of making one dispatch ahead: the steps of `prepare_dispatch`, without a plan."""
    ranks, tokens = group.size(), max(grid.moved_rows) // grid.top_k
    ids_TK = torch.randint(HOMES * ranks, (tokens, grid.top_k))
    expert_E = torch.arange(HOMES * ranks)
    end_E = torch.bincount(ids_TK.reshape(-1), minlength=HOMES * ranks)
    nodes = NodeRanks((0,) * ranks, group.rank())
    split = SourceSplit(home_slot_E=expert_E, expert_H=expert_E, end_H=end_E, slot_H=expert_E)

    def prepare() -> None:
        send = sort_rows(assign_slots(ids_TK, split), num_ranks=ranks, width=HOMES)
        count_RRS = send.count_RS.expand(ranks, ranks, HOMES)
        dispatch = build_dispatch(send, count_RRS[:, group.rank()], home_slots=HOMES)
        tables = make_tables(dispatch.index_TK, count_RRS, dispatch.source_P, nodes=nodes, pad=1)
        replace(dispatch, mapped=tables, ids_TK=ids_TK).packed(is_pinned=bench.is_gpu)

    return time_on_host(prepare, group=group, bench=bench)


def time_window(*, group: Any, node_R: list[int], bench: Bench) -> float:
    """Return the nanoseconds of opening and closing a window in which every expert computes at its owner.

    The steps of `Balancer.begin` and `Balancer.end` in which ranks wait for each other.
    """
    engine = TransferEngine(
        [random_experts(1, TINY, bench)], group=group, node_R=node_R, options=TransferOptions(slots=0)
    )
    plan, mismatches_L = still_plan(node_R), torch.zeros(1, dtype=torch.int64, device=bench.device)

    def run() -> None:
        engine.open_window(plan)
        engine.close_window()
        dist.all_reduce(mismatches_L.cpu(), group=group)

    took_ns = time_on_host(run, group=group, bench=bench)
    engine.close()
    return took_ns


def still_plan(node_R: list[int]) -> Plan:
    """Return a plan of one layer and one micro-step that moves nothing, one expert per rank."""
    ranks, nodes = len(node_R), len(set(node_R))
    cluster = Cluster.preset("h200", nodes=nodes, ranks_per_node=ranks // nodes, ep=ranks)
    hidden, width = TINY
    sizes = {"experts": ranks, "layers": 1, "top_k": 1, "hidden": hidden, "expert_width": width}
    none_V, phase_V = np.zeros(2, dtype=np.int64), np.arange(2)
    visits = Itinerary(
        depth=1,
        micro_step_V=none_V,
        phase_V=phase_V,
        layer_V=none_V,
        pulls_V=none_V > 0,
        buffer_V=none_V,
        ready_from_V=phase_V,
        resident_V=none_V > 0,
    )
    made = owners_plan(1, cluster=cluster, model=ModelShape.preset("qwen3-30b-a3b", **sizes))
    return replace(made, itinerary=visits)

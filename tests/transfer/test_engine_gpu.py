"""The transfer engine on a CUDA device, shared by several processes: mapped and pinned pulls, bf16 parity, leaks."""

import functools
import gc
import os
import signal
import time

import pytest
import torch

from equipoise.core.options import TransferOptions
from equipoise.transfer.cuda_pages import CudaPager, Pin
from equipoise.transfer.node import ExpertWeights, NodeMemory
from equipoise.transfer.pages import share_pages
from equipoise.transfer.waits import Lane, Mark
from tests.layer.cases import cluster_of, model_of, random_routing, static_plan
from tests.layer.stack import Run, run_dense
from tests.transfer.own_ranks import KILLED, run_ranks
from tests.transfer.play import play_windows
from tests.transfer.training import run_both
from tests.transfer.windows import LAYOUTS, random_plan

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BF16 = {"device": "cuda", "dtype": torch.bfloat16}
BIG = 2**28


def free_bytes():
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def test_pages_are_seen_in_a_row_and_behind_several_others_and_are_freed():
    pager = CudaPager(torch.device("cuda", 0))
    # The first round loads kernels, which take memory for good.
    for is_measured in (False, True):
        free = free_bytes()
        fronts, shared = [pager.make(pager.granule) for _ in range(3)], pager.make(8 * pager.granule)
        rows = [pager.map([front, shared]).view(0, (9, pager.granule // 2), torch.bfloat16) for front in fronts]
        rows[0][1:].fill_(7)
        for number, row in enumerate(rows):
            row[0].fill_(number)
        assert [[int(row[0, -1]), int(row[1, 0]), int(row[8, -1])] for row in rows] == [[0, 7, 7], [1, 7, 7], [2, 7, 7]]
        assert not is_measured or free - free_bytes() == 11 * pager.granule, "each page exists once"
        for pages in (*fronts, shared):
            pages.release()
        del row
        rows.clear()
        assert not is_measured or free_bytes() == free


def test_marks_lanes_and_written_words_keep_their_order():
    device = torch.device("cuda", 0)
    lane, bytes_N = Lane(device), torch.zeros(8192, dtype=torch.uint8)
    pin, words = Pin(bytes_N, name="words", fix=""), bytes_N.view(torch.int64).numpy()
    source, target = torch.zeros(2**20, device=device), torch.zeros(2**20, device=device)
    torch.cuda._sleep(200_000_000)
    source.fill_(3)
    written = Mark.now(device)
    pin.write(words[5:6], 7)
    with lane.work(after=written):
        target.copy_(source)
        pin.write(words[6:7], 8)
        copied = Mark.now(device)
    assert not written.is_reached() and not copied.is_reached() and not words.any(), "nothing has waited"
    copied.hold_up(device)
    assert bool((target == 3).all())
    assert words[5:7].tolist() == [7, 8] and words.sum() == 15
    pin.close()
    pin.close()


CASES = {
    "plan": ("4 as one node", {"path": "plan"}),
    "peer": ("4 as one node", {"path": "peer"}),
    "host": ("4 as one node", {"path": "host", "is_checked": True}),
    "arena": ("4 as one node", {"path": "plan", "buffers": "arena"}),
    "two nodes": ("4 as two nodes", {"path": "plan"}),
    "arena, two nodes": ("4 as two nodes", {"path": "host", "buffers": "arena"}),
}


@pytest.mark.dist(4)
@pytest.mark.parametrize("case", CASES)
def test_windows_have_every_bit(pool, case):
    layout, transfer = CASES[case]
    plans = [random_plan(LAYOUTS[layout], seed=w, slots=2, fewest=1, micro_steps=3, layers=4) for w in range(3)]
    plans.append(random_plan(LAYOUTS[layout], seed=5, slots=2, fewest=1, micro_steps=3, layers=4, stage="recompute"))
    options = {"transfer": transfer, "kind": BF16, "has_bias": case == "arena"}
    results = pool.run(play_windows, 4, plans, options, timeout_s=120.0)
    paths = {path for moved in results for path in moved["bytes"]}
    wanted = {"plan": {"peer", "host", "store"}, "peer": {"peer"}, "host": {"peer", "host", "store"}}[transfer["path"]]
    assert paths == wanted | ({"p2p"} if "two nodes" in case else set())
    for moved in results:
        assert moved["pulls"] > 0 and moved["returns"] > 0 and moved["on_demand"] == 0
        assert moved["is_clean"], "mappings or descriptors are left"


@functools.cache
def planned(seed, slots, ranks=4):
    """Routes, and the planner's plan for them on two nodes, levelling rows whatever it costs."""
    import equipoise as eq
    from tests.planner import reference

    routing = random_routing(seed, ranks=ranks, experts=2 * ranks, tokens=200)
    given = {"cluster": cluster_of(ranks, nodes=2), "model": model_of(routing)}
    # The reference needs no compiling, and gives the same plan.
    made = eq.plan(routing.loads(), slots=slots, objective="skew", planner=reference.plan_layer, **given)
    return made, routing


@functools.cache
def exact(seed, slots, run_seed, ranks):
    _, routing = planned(seed, slots, ranks)
    return run_dense(routing, Run(seed=run_seed, device="cuda", dtype=torch.bfloat16))[0].expert_grads


def rms_error(outcomes, wanted):
    squares, count = 0.0, 0
    for layer, tensors in enumerate(wanted):
        # Owners are contiguous, so their gradients in rank order are in logical order.
        for got, tensor in zip(zip(*(o.expert_grads[layer] for o in outcomes), strict=True), tensors, strict=True):
            squares += float((torch.cat(got).double() - tensor.cpu()).square().sum())
            count += tensor.numel()
    return (squares / count) ** 0.5


def same_gradients(a, b):
    pairs = zip(a.expert_grads, b.expert_grads, strict=True)
    return all(torch.equal(x, y) for p, q in pairs for x, y in zip(p, q, strict=True))


@pytest.mark.dist(4)
@pytest.mark.parametrize("buffers", ["separate", "arena"])
@pytest.mark.parametrize("path", ["peer", "host"])
@pytest.mark.parametrize("slots", [0, 2], ids=["placement alone", "replicas"])
def test_training_in_bf16_is_static_training(pool, slots, path, buffers):
    check_training(pool, slots, path, buffers)


def check_training(pool, slots, path, buffers="auto", ranks=4):
    """Compare one window at owners and under the engine: outputs, and every gradient with its exact value."""
    plan, routing = planned(41, slots, ranks)
    assert plan.displaced_LE.any() and bool(len(plan.replica_table)) == bool(slots)
    run = Run(seed=2, device="cuda", dtype=torch.bfloat16, transfer={"path": path, "buffers": buffers})
    given = (plan, static_plan(routing, nodes=2), routing, run)
    results = [pool.run(run_both, ranks, *given, timeout_s=120.0) for _ in range(2 if slots else 1)]
    static, moved, sent = zip(*results[0], strict=True)
    assert not slots or any(path in bytes_by_path for bytes_by_path in sent)
    for a, b in zip(static, moved, strict=True):
        assert all(map(torch.equal, a.outputs, b.outputs)), "outputs differ"
        assert slots or all(map(torch.equal, a.hidden_grads, b.hidden_grads)), "input gradients differ"
        assert slots or same_gradients(a, b), "weight gradients differ"
    wanted = exact(41, slots, 2, ranks)
    ratio = rms_error(moved, wanted) / rms_error(static, wanted)
    print(f"slots {slots}, {path}, {buffers}: gradient error ratio {ratio:.4f}")
    assert ratio <= 1.1, f"gradient error ratio {ratio:.3f}"
    for again in results[1:]:
        for (_, a, _), (_, b, _) in zip(results[0], again, strict=True):
            assert same_gradients(a, b), "two runs differ"


def taken_on_device(group, options):
    """Device memory that experts and everything for moving them take, what the layout says, and what pages round up."""
    torch.zeros(1, device="cuda")
    free = free_bytes()
    shapes = (16, 2048, 2048), (16, 2048, 1024)
    homes = [ExpertWeights(*(torch.nn.Parameter(torch.zeros(s, **BF16)) for s in shapes)) for _ in range(2)]
    owned = sum(t.nbytes for layer in homes for t in layer.tensors())
    node = NodeMemory(homes, group=group, node_R=(0,), options=TransferOptions(slots=1, **options))
    pieces = 2 * node.layout.layers + 1 + 2 * (node.layout.depth + 1)
    found = free - free_bytes(), owned + node.layout.extra_bytes, pieces * 2 * 2**20
    node.close()
    return found


@pytest.mark.parametrize("options", [{}, {"grad_dtype": "float32"}, {"buffers": "separate"}], ids=str)
def test_what_is_allocated_on_the_device_is_what_the_layout_says(options):
    ((taken, forecast, slack),) = run_ranks(taken_on_device, 1, options)
    assert forecast <= taken <= forecast + slack, f"{taken:,} bytes of {forecast:,}"


def hold_and_die(group):
    """Map pages of all ranks, and be killed."""
    import torch.distributed as dist

    torch.zeros(1, device="cuda")
    pager = CudaPager(torch.device("cuda", 0))
    shared = share_pages([BIG], pager=pager, group=group, node_R=(0, 0), timeout_s=20)
    for spans in shared.spans.values():
        spans[0].view(0, (BIG,), torch.uint8).fill_(1)
    dist.barrier(group)
    os.kill(os.getpid(), signal.SIGKILL)


def test_killed_ranks_leave_no_device_memory():
    free = free_bytes()
    assert run_ranks(hold_and_die, 2) == [KILLED, KILLED]
    end = time.monotonic() + 20
    while free_bytes() < free - BIG // 4 and time.monotonic() < end:
        time.sleep(0.2)
    assert free_bytes() >= free - BIG // 4

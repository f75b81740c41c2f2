"""Shapes and bytes of transfers, before anything is allocated."""

import mmap
from pathlib import Path

import pytest
import torch

from equipoise.core import Cluster, ModelShape, TransferError
from equipoise.core.options import RowLimits, RowOffsets, TransferOptions, balance_bytes
from equipoise.transfer.mapped_rows import MappedRows
from equipoise.transfer.node import ExpertLayout, ExpertWeights, NodeMemory, allocate_experts, check_budget


def weights(*, slots=2, width=4, hidden=8, dtype=torch.float32, has_bias=False, device="cpu"):
    shapes = [(slots, 2 * width, hidden), (slots, hidden, width)]
    shapes += [(slots, 2 * width), (slots, hidden)] if has_bias else []
    return ExpertWeights(*(torch.zeros(*shape, dtype=dtype, device=device) for shape in shapes))


def qwen(**given):
    model = ModelShape.preset("qwen3-30b-a3b")
    sizes = {"slots": 1, "depth": 1, "grad_dtype": torch.float32, **given}
    shapes = ((2 * model.expert_width, model.hidden), (model.hidden, model.expert_width), None, None)
    return model, ExpertLayout(
        shapes=shapes, dtype=torch.bfloat16, layers=model.layers, home_slots=model.experts // 8, **sizes
    )


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("grad_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_all_memory_of_one_slot_of_a_real_model_is_under_two_percent(nodes, grad_dtype):
    model, layout = qwen(nodes=nodes, grad_dtype=grad_dtype)
    owned = model.layers * layout.bytes_of(layout.home_slots, layout.dtype)
    assert owned == model.layers * model.experts // 8 * model.expert_bytes
    wide = grad_dtype.itemsize // 2
    assert layout.replica_bytes == 2 * model.expert_bytes and layout.mailbox_bytes == wide * layout.replica_bytes
    assert layout.outbox_bytes + layout.landing_bytes == 4 * wide * model.expert_bytes
    parts = (layout.replica_bytes, layout.mailbox_bytes, layout.outbox_bytes, layout.landing_bytes)
    assert layout.extra_bytes == sum(parts) <= 0.02 * owned


@pytest.mark.parametrize("slots", [0, 1, 3])
@pytest.mark.parametrize("nodes", [1, 2, 4])
def test_the_forecast_is_what_the_layout_takes(nodes, slots):
    model, layout = qwen(nodes=nodes, slots=slots, grad_dtype=torch.bfloat16)
    cluster = Cluster.preset("h200", nodes=nodes, ranks_per_node=8 // nodes)
    assert balance_bytes(model, cluster=cluster, slots=slots, stage="update") == layout.extra_bytes


def mapped_bytes():
    """By kind, what this process has mapped of ours; a page that is mapped twice counts once."""
    found = {}
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, _, _, _, inode, *name = line.split()
        if name and name[0].startswith("/memfd:equipoise"):
            first, last = (int(part, 16) for part in place.split("-"))
            found[inode] = max(found.get(inode, 0), last - first)
    return sum(found.values())


def allocated(group, node_R, options):
    """Bytes that one rank really has allocated beyond its experts, what the layout says, and the same for rows."""
    homes = [weights(slots=8, width=256, hidden=512, dtype=torch.bfloat16).map(torch.nn.Parameter) for _ in range(2)]
    before = mapped_bytes()
    node = NodeMemory(homes, group=group, node_R=node_R, options=TransferOptions(slots=1, **options))
    layout, peers = node.layout, len(node.peers)
    is_apart = options["buffers"] == "separate"
    private = [t for buffer in node.buffers.slots for t in buffer.tensors()] if is_apart else []
    taken = mapped_bytes() - before + sum(t.nbytes for t in [*private, node._landing_N])
    # Homes exist anyway, and what peers share is theirs.
    owned = sum(t.nbytes for layer in homes for t in layer.tensors())
    taken -= peers * owned + (peers - 1) * (layout.mailbox_bytes + layout.outbox_bytes)
    # Every rank's pieces are whole pages: its experts' matrices, the rest, the cells.
    slack = peers * (2 * layout.layers + 2) * mmap.PAGESIZE + 4 * mmap.PAGESIZE
    mapped, limits = MappedRows(node, top_k=2), RowLimits(tokens=300, sent=600, computed=900)
    rows, rows_forecast = -mapped_bytes(), 0
    if layout.nodes == 1:
        mapped.reserve(limits)
        rows_forecast = peers * RowOffsets.of(limits.grown(), ranks=peers, row_bytes=1024, top_k=2).end
    rows += mapped_bytes()
    mapped.close()
    node.close()
    return taken, layout.extra_bytes, rows, rows_forecast, slack


@pytest.mark.dist(4)
@pytest.mark.parametrize("options", [{"buffers": "separate"}, {"buffers": "arena", "grad_dtype": "float32"}], ids=str)
@pytest.mark.parametrize("node_R", [(0, 0), (0, 1), (0, 0, 1, 1)], ids=str)
def test_what_is_allocated_is_what_the_forecast_says(pool, node_R, options):
    for taken, forecast, rows, rows_forecast, slack in pool.run(allocated, len(node_R), node_R, options):
        assert forecast > 20 * slack, "experts are too small to show anything"
        assert forecast <= taken <= forecast + slack
        assert rows_forecast <= rows <= rows_forecast + slack


def test_replica_slots_of_a_real_model_are_under_two_percent():
    model, layout = qwen(slots=2)
    owned = model.layers * layout.bytes_of(layout.home_slots, layout.dtype)
    assert layout.replica_bytes == 4 * model.expert_bytes and layout.mailbox_bytes == 2 * layout.replica_bytes
    assert layout.replica_bytes + layout.mailbox_bytes <= 0.02 * owned


def test_bytes_are_those_of_the_tensors_rounded_up_to_lines():
    layout = ExpertLayout.of([weights(has_bias=True)] * 3, TransferOptions(slots=3, depth=2, grad_dtype="float64"))
    assert layout.bytes_of(layout.home_slots, layout.dtype) == 2 * 64 * 4 + 2 * 32 * 4 + 2 * 8 * 4 + 2 * 8 * 4
    assert layout.outbox_bytes == 2 * layout.bytes_of(layout.home_slots, layout.dtype)
    buffer = allocate_experts(layout, 3, torch.float32)
    held = sum(-(-tensor.nbytes // 64) * 64 for tensor in buffer.tensors())
    assert layout.replica_bytes == 3 * held
    assert layout.num_mailboxes == 9


REFUSED = {
    "width": ([weights(), weights(width=5)], "layer index 1: an expert tensor is torch.float32 (2, 10, 8)"),
    "dtype": ([weights(), weights(dtype=torch.float64)], "layer index 1: an expert tensor is torch.float64"),
    "slots": ([weights(), weights(slots=3)], "all must be alike"),
    "bias": ([weights(), weights(has_bias=True)], "layer index 1: some layers have expert biases"),
    "device": ([weights(device="meta")], "is on meta; all must be on the CPU, or all on one CUDA device"),
    "nothing": ([], "no layer was given"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_layers_that_are_not_alike_are_refused(case):
    homes, words = REFUSED[case]
    with pytest.raises(TransferError) as raised:
        ExpertLayout.of(homes, TransferOptions(slots=1))
    assert words in str(raised.value)


def test_the_budget_is_inclusive_and_its_error_shows_the_sum():
    homes = [weights()]
    need = ExpertLayout.of(homes, TransferOptions(slots=1)).extra_bytes
    for budget in (None, need):
        options = TransferOptions(slots=1, budget_bytes=budget)
        check_budget(ExpertLayout.of(homes, options), options)
    options = TransferOptions(slots=1, budget_bytes=need - 1)
    with pytest.raises(TransferError, match=rf"1 slots at depth 1 need {need:,} bytes .* budget is {need - 1:,}"):
        check_budget(ExpertLayout.of(homes, options), options)


@pytest.mark.parametrize("bad", [{"slots": -1}, {"slots": 1, "depth": 0}, {"slots": 1, "timeout_s": 0.0}], ids=str)
def test_options_that_make_no_sense_are_refused(bad):
    with pytest.raises(TransferError, match="must be"):
        TransferOptions(**bad)

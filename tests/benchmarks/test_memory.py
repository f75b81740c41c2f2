"""The benchmark of memory, tried on the CPU: forecasts within its limit, and more where the rank is hot."""

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks import memory
from equipoise.core import ModelShape

SMALL = {"layers": 2, "hidden": 64, "expert_width": 48, "weight_bytes": 4}


@pytest.fixture
def fake_group():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=memory.RANKS)
    yield
    dist.destroy_process_group()


def test_forecasts_of_every_pass_are_close_and_hot_ranks_need_more(fake_group):
    model = ModelShape.preset("deepseek-v2-lite", **SMALL)
    found = {case: list(memory.run_case(model, case, tokens=128, device="cpu")) for case in ("level", "hot", "replica")}
    for rows in found.values():
        assert [row["pass"] for row in rows] == [name for name, _, _ in memory.PASSES]
        assert all(abs(row["off_pct"]) <= memory.LIMIT_PCT for row in rows if row["pass"] != "log-prob")
        kept, again, _ = (row["predicted_MiB"] for row in rows)
        assert again < kept
    for hot, level in zip(found["hot"], found["level"], strict=True):
        assert hot["rows"] > 1.5 * level["rows"] and hot["measured_MiB"] > 1.3 * level["measured_MiB"]
    replica, level = found["replica"][0], found["level"][0]
    assert replica["gradients_MiB"] > level["gradients_MiB"]

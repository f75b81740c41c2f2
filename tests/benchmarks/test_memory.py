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
    kept, again, scored = memory.run_case(model, "hot", tokens=128, device="cpu")
    assert [row["pass"] for row in (kept, again, scored)] == [name for name, _, _ in memory.PASSES]
    assert scored["predicted_MiB"] < again["predicted_MiB"] < kept["predicted_MiB"]
    level, replica = (next(memory.run_case(model, case, tokens=128, device="cpu")) for case in ("level", "replica"))
    assert all(abs(row["off_pct"]) <= memory.LIMIT_PCT for row in (kept, again, level, replica))
    assert kept["rows"] > 1.5 * level["rows"] and kept["measured_MiB"] > 1.3 * level["measured_MiB"]
    assert replica["gradients_MiB"] > level["gradients_MiB"]

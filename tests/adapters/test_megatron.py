"""What the Megatron-Core adapter refuses, by name, and the table of it; tests/megatron trains with it."""

import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from equipoise.adapters import megatron_model as model
from equipoise.adapters.megatron import distinct
from equipoise.adapters.protocol import check_group
from equipoise.core.errors import AdapterError

DOCS = Path(__file__).parents[2] / "docs" / "adapters.md"
PLAIN = {
    "moe_token_dispatcher_type": "alltoall",
    "cuda_graph_impl": "none",
    "expert_tensor_parallel_size": 1,
    "activation_func": torch.nn.functional.silu,
    "gated_linear_unit": True,
}
SET = {
    "moe_token_dispatcher_type": "flex",
    "cuda_graph_impl": "local",
    "expert_tensor_parallel_size": 2,
    "activation_func": torch.nn.functional.gelu,
    "moe_expert_capacity_factor": 1.0,
    "fp8": "hybrid",
}
"""Values that are refused, where True is none."""


def reasons_of(**fields):
    return list(model._config_reasons(SimpleNamespace(**{**PLAIN, **fields})))


def test_a_plain_configuration_is_not_refused():
    assert reasons_of() == []
    assert reasons_of(moe_expert_capacity_factor=None, fp8=None, glu_linear_offset=0.0) == []


@pytest.mark.parametrize("refusal", model.REFUSED, ids=lambda refusal: refusal.name)
def test_each_setting_is_refused_by_name_and_alone(refusal):
    (reason,) = reasons_of(**{refusal.setting: SET.get(refusal.setting, True)})
    assert reason.startswith(f"{refusal.name} is not supported ({refusal.setting}=")
    assert reason.endswith(refusal.fix)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("moe_router_padding_for_fp8", True),
        ("overlap_dispatch_backward_with_experts_wgrad", True),
        ("enable_cuda_graph", True),
        ("external_cuda_graph", True),
        ("gated_linear_unit", False),
        ("activation_func_clamp_value", 7.0),
        ("glu_linear_offset", 1.0),
        ("use_te_activation_func", True),
    ],
)
def test_other_fields_that_mean_the_same_are_refused_too(field, value):
    assert len(reasons_of(**{field: value})) == 1


class FullyShardedDataParallel(nn.Module):
    """Has the name of Megatron-FSDP's wrapper."""


def experts_with(name, width=4):
    experts = nn.Module()
    experts.add_module(name, nn.Linear(3, width))
    return SimpleNamespace(layer_number=2, experts=experts)


def test_what_a_model_is_made_of_is_refused_by_name():
    chunk = nn.Linear(1, 1)
    (wrapped,) = model._module_reasons([FullyShardedDataParallel()], [])
    assert wrapped.startswith("Megatron-FSDP is not supported (FullyShardedDataParallel)")
    (lora,) = model._module_reasons([chunk], [experts_with("linear_fc1_lora_a")])
    assert lora.startswith("LoRA on experts is not supported (layer 1: Module)")
    half = experts_with("linear_fc1")
    half.experts.linear_fc1.weight.requires_grad_(False)
    (frozen,) = model._module_reasons([chunk], [half])
    assert frozen.startswith("experts frozen in part is not supported (layer 1: Module)")
    (grouped,) = model._module_reasons([chunk], [experts_with("linear_fc1")])
    assert grouped.startswith("legacy grouped experts is not supported (layer 1: Module)")
    shapes = list(model._module_reasons([chunk], [experts_with("linear_fc1"), experts_with("linear_fc1", width=5)]))
    assert shapes[-1].startswith("experts of other shapes is not supported ((")


def test_another_version_and_a_name_that_is_gone_are_refused(monkeypatch):
    assert list(model._version_reasons()) == []
    monkeypatch.setattr(model, "VERSION", "0.20.0")
    (reason,) = model._version_reasons()
    assert reason == "megatron-core 0.20.0 is not between 0.16 and 0.19; use one of 0.16.1, 0.17.1, 0.18.2, 0.19.2"
    monkeypatch.setattr(model, "VERSION", "0.16.1")
    place = "megatron.core.transformer.moe.moe_layer:MoELayer"
    monkeypatch.setattr(model, "USED", {place: ("preprocess", "teleport")})
    (reason,) = model._version_reasons()
    assert reason == f"megatron-core 0.16.1: {place} has no teleport; use one of {', '.join(model.TESTED)}"


def test_the_tested_versions_are_those_of_the_make_target_and_of_the_documentation():
    newer = re.search(r"^MEGATRON := (.*)$", (DOCS.parents[1] / "Makefile").read_text(), re.MULTILINE)[1].split()
    assert ("0.16.1", *newer) == model.TESTED
    assert all(version in DOCS.read_text() for version in model.TESTED)


def test_the_documented_table_is_the_one_that_refuses():
    rows = [(one.name, f"`{one.setting}`", one.fix) for one in model.REFUSED]
    rows += [(name, "found in the model", fix) for name, fix in model.REFUSED_MODULES.items()]
    lines = ["| refused | setting | instead |", "|---|---|---|", *(f"| {' | '.join(row)} |" for row in rows)]
    assert "\n".join(lines) + "\n" in DOCS.read_text()


def test_an_expert_that_repeats_in_a_row_counts_once():
    ids = torch.tensor([[3, 1, 3], [2, 2, 2], [0, 1, 2], [-1, -1, -1]])
    assert distinct(ids).tolist() == [[1, 3, -1], [2, -1, -1], [0, 1, 2], [-1, -1, -1]]
    assert distinct(np.zeros((0, 3), dtype=np.int16)).shape == (0, 3)
    assert ids.tolist()[0] == [3, 1, 3], "the caller's routes stay as they are"


def test_an_ep_group_of_devices_alone_is_refused_with_the_fix():
    def none(device):
        raise RuntimeError(f"No backend type associated with device type {device.type}")

    with pytest.raises(AdapterError, match="backend='cpu:gloo,cuda:nccl' before initialize_model_parallel"):
        check_group(SimpleNamespace(_get_backend=none), advice="before initialize_model_parallel")
    check_group(SimpleNamespace(_get_backend=lambda device: object()), advice="")

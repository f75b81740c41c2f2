"""`equipoise train --compare` with ranks that share one GPU and exchange rows and experts by NCCL, on two nodes."""

import subprocess
import sys

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SMALL = {
    "backend": "nccl",
    "steps": 2,
    "model.layers": 2,
    "model.hidden": 256,
    "model.heads": 4,
    "model.experts": 32,
    "model.expert_width": 128,
    "warmup.steps": 8,
    "warmup.batch": 16,
    "rollout.prompts": 8,
    "rollout.samples": 4,
    "update.micro_batch": 2,
}


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_training_by_nccl_is_unchanged(ranks):
    places = {"ranks": ranks, "ranks_per_node": ranks // 2, "model.ranks_per_device": ranks}
    settings = [f"--set={name}={value}" for name, value in {**SMALL, **places}.items()]
    command = [sys.executable, "-m", "equipoise", "train", "--preset", "small-gpu", "--compare", "off,static,equipoise"]
    done = subprocess.run([*command, *settings], capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "training is unchanged", done.stdout
    assert f"up to {ranks} ranks share a GPU" in done.stdout

"""`equipoise train --compare` with ranks that share one GPU and exchange rows and experts by NCCL, on two nodes."""

import os
import subprocess
import sys
import time

import pytest
import torch

from equipoise.core import TransferError
from equipoise.rl.config import read_config
from equipoise.rl.train import Places, launch
from tests.pool import preloaded_context
from tests.rl.test_faults import Fault, faulty

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
    "warmup.steps": 60,
    "warmup.batch": 16,
    "rollout.prompts": 8,
    "rollout.samples": 4,
    "update.micro_batch": 2,
}


def settings_of(ranks):
    places = {"ranks": ranks, "ranks_per_node": ranks // 2, "model.ranks_per_device": ranks}
    return [f"{name}={value}" for name, value in {**SMALL, **places}.items()]


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_training_by_nccl_is_unchanged(ranks):
    command = [sys.executable, "-m", "equipoise", "train", "--preset", "small-gpu", "--compare", "off,static,equipoise"]
    settings = [f"--set={setting}" for setting in settings_of(ranks)]
    done = subprocess.run([*command, *settings], capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "training is unchanged", done.stdout
    assert f"up to {ranks} ranks share a GPU" in done.stdout


def test_a_killed_rank_ends_the_run_by_name(tmp_path):
    config, begin = read_config("small-gpu", settings=settings_of(4)), time.monotonic()
    with pytest.raises(TransferError, match="rank 1 died of SIGKILL; resume from the last checkpoint"):
        launch(faulty, config, Places(out=tmp_path), Fault("kill", "update", os.getpid()), context=preloaded_context())
    assert time.monotonic() - begin < 240, "others waited for the time-out of 300 s"

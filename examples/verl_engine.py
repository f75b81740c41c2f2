"""verl's Megatron engine with balanced experts, in a small loop of one's own on four GPUs.

    VERL_USE_EXTERNAL_MODULES=equipoise.adapters.verl \
        torchrun --nproc-per-node=4 examples/verl_engine.py FOLDER_OF_A_HF_MOE_MODEL

In verl's trainer the same variable and `router_replay.mode=R3` are all that is needed: its workers make the engine as
`main` does. Tokens, routes and the loss stand for what a rollout returns. Our tests run this file on four CPU ranks.
"""

import sys
from typing import Any

import torch
import torch.distributed as dist
import verl  # imports the modules that the variable names
from tensordict import TensorDict
from verl.utils import tensordict_utils
from verl.workers.config import HFModelConfig, McoreEngineConfig, McoreOptimizerConfig
from verl.workers.config.engine import EngineRouterReplayConfig
from verl.workers.engine.base import EngineRegistry

RANKS, STEPS, LENGTHS, RESPONSE = 4, 2, (9, 14, 6, 11), 4
LAYERS, EXPERTS, TOP_K, VOCAB = 4, 8, 2, 96  # of the model: decoder layers, routed experts, experts per token
SETTINGS = {"temperature": 1.0, "use_dynamic_bsz": False, "micro_batch_size_per_gpu": 2, "enable_routing_replay": True}
# "skew" levels rows whatever it costs; real training keeps the default, which weighs seconds.
EQUIPOISE = {"cluster": "h200", "slots": 1, "objective": "skew"}


def rollout() -> TensorDict:
    """Return samples as verl's rollouts have them: routes of every token but the last, [T - 1, layers, top-k]."""
    popular = torch.logspace(0, -2, EXPERTS)
    ids = [torch.multinomial(popular.expand((n - 1) * LAYERS, -1), TOP_K).view(n - 1, LAYERS, TOP_K) for n in LENGTHS]
    parts = {
        "input_ids": [torch.randint(VOCAB, (length,)) for length in LENGTHS],
        "loss_mask": [torch.arange(length) >= length - RESPONSE for length in LENGTHS],
        "routed_experts": [one.to(torch.int16) for one in ids],
    }
    data = {name: torch.nested.as_nested_tensor(part, layout=torch.jagged) for name, part in parts.items()}
    data["response_mask"] = torch.ones(len(LENGTHS), RESPONSE, dtype=torch.bool)
    batch = TensorDict(data, batch_size=len(LENGTHS))
    tensordict_utils.assign_non_tensor(batch, **SETTINGS)
    return batch


def loss_of(model_output: dict[str, Any], data: TensorDict, dp_group: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    """Return the negative log-likelihood of responses, normalized as verl's losses are."""
    tokens, ranks = (tensordict_utils.get_non_tensor_data(data, key, None) for key in ("batch_num_tokens", "dp_size"))
    return -(model_output["log_probs"].values() * data["loss_mask"].values()).sum() / tokens * ranks, {}


def main(model_path: str) -> None:
    """Make the engine as verl's workers do, and train some steps."""
    engine = EngineRegistry.new(
        model_type="language_model",
        backend="megatron",
        model_config=HFModelConfig(path=model_path),
        engine_config=McoreEngineConfig(
            expert_model_parallel_size=RANKS,
            router_replay=EngineRouterReplayConfig(mode="R3"),
            override_mcore_model_config={"equipoise": EQUIPOISE},
        ),
        optimizer_config=McoreOptimizerConfig(lr=1e-5),
        checkpoint_config=None,
    )
    engine.initialize()
    for step in range(STEPS):
        with engine.train_mode():
            loss = engine.train_batch(rollout(), loss_of)["loss"]
        done = engine.handle.balancer.report
        if dist.get_rank() == 0:
            moved = f"{done.displaced} experts displaced, {done.replicas} replicas"
            print(f"verl {verl.__version__}, step {step}: loss {sum(loss):.3f}, {moved}")


if __name__ == "__main__":
    dist.init_process_group("cpu:gloo,cuda:nccl")
    torch.cuda.set_device(dist.get_rank())
    main(sys.argv[1])

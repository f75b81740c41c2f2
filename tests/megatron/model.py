"""A small real GPTModel in a layout of four ranks: built, wrapped and optimized by Megatron-Core, run by its schedules.

1. `parallel(layout)` sets up Megatron's groups; `build(layout)` makes the model's chunks, DDP and optimizer.
2. `record(run, batches)` runs the routers in RECORD mode and returns the ids of every micro-step and layer.
3. `gradients(run, batches, ids)` replays them, `update(run)` runs the optimizer; `Trained` holds what came out.
"""

import functools
import re
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn

from tests.megatron.grouped import grouped_mlp_modules
from tests.megatron.layouts import Layout

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}
VOCABULARY, LENGTH, SAMPLES, MICRO_STEPS = 96, 16, 2, 4
SEED = 1234
Ids = list[list[Tensor]]
"""[T, K] ids of this rank by micro-step and layer, layers in ascending global number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A model with its optimizer on one rank."""

    layout: Layout
    config: TransformerConfig
    chunks: list[Any]
    """Wrapped in `DistributedDataParallel`."""
    optimizer: Any

    @property
    def layers(self) -> list[list[MoELayer]]:
        """MoE layers of every chunk; `layer_number` counts from 1 over the whole model."""
        return [[module for module in chunk.modules() if isinstance(module, MoELayer)] for chunk in self.chunks]

    @property
    def numbers(self) -> tuple[int, ...]:
        """This rank's MoE layers by global number from 0, ascending."""
        return tuple(sorted(layer.layer_number - 1 for chunk in self.layers for layer in chunk))

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield all parameters of this rank, named with their chunk."""
        for index, chunk in enumerate(self.chunks):
            for name, parameter in chunk.named_parameters():
                # Wrappers put "module." before a name, one more in bf16 than in float64.
                yield f"chunk {index} {name.replace('module.', '')}", parameter

    def expert_parameters(self) -> dict[tuple[int, int, str], nn.Parameter]:
        """Return expert parameters by global layer and expert number and name."""
        return {
            (layer.layer_number - 1, *named_expert(layer, name)): parameter
            for chunk in self.layers
            for layer in chunk
            for name, parameter in layer.experts.named_parameters()
        }

    @contextmanager
    def routing(self, action: RouterReplayAction) -> Iterator[None]:
        """Let this model's routers record or replay; Megatron's own switch knows the model that was built last."""
        replays = [layer.router.router_replay for chunk in self.layers for layer in chunk]
        for replay in replays:
            replay.set_router_replay_action(action)
        try:
            yield
        finally:
            for replay in replays:
                replay.clear_router_replay_action()
                replay.clear_indices()

    def gather_parameters(self) -> None:
        """Finish a gather of parameters that would run under the next forward pass. Every rank must call this."""
        if self.layout.is_overlapped:
            for chunk in self.chunks:
                chunk.start_param_sync(force_sync=True)


def named_expert(layer: MoELayer, name: str) -> tuple[int, str]:
    """Return an expert's global number, and its parameter's name in it, of a parameter's name in `layer.experts`.

    Grouped or not: `local_experts.1.linear_fc1.weight` and `linear_fc1.weight1` are the same.
    """
    one_by_one, product, grouped = re.fullmatch(r"(?:local_experts\.(\d+)\.)?(linear_fc\d)\.weight(\d*)", name).groups()
    return layer.local_expert_indices[int(one_by_one or grouped)], f"{product}.weight"


@dataclass(slots=True)
class Trained:
    """What a training run gave on one rank."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    shards: list[Tensor] = field(default_factory=list)
    """This rank's shards of master weights and moments."""
    gradients: dict[Any, Tensor] = field(default_factory=dict)
    """Of every expert parameter in the first step."""
    reports: list[Any] = field(default_factory=list)
    """Of the windows."""
    addresses: list[list[int]] = field(default_factory=list)
    """After every step."""

    def differences(self, other: "Trained") -> list[str]:
        """Name everything that is not equal bit for bit."""
        found = [name for name in ("losses", "norms") if getattr(self, name) != getattr(other, name)]
        found += [name for name, weight in self.weights.items() if not torch.equal(weight, other.weights[name])]
        pairs = zip(self.shards, other.shards, strict=True)
        return found + [f"shard {index}" for index, (one, two) in enumerate(pairs) if not torch.equal(one, two)]


@functools.cache
def kept_group(ranks: tuple[int, ...], purpose: str | None, backend: str | None) -> Any:
    """Make a group once per process: each keeps threads as long as autograd keeps the models that knew it."""
    return dist.new_group(list(ranks), backend=backend, group_desc=purpose)


@contextmanager
def kept_groups() -> Iterator[None]:
    """Let Megatron make its groups from kept ones; its state is taken down at the end. Every rank must call this."""

    def keep(ranks: Sequence[int], *, backend: str | None = None, group_desc: str | None = None, **_: Any) -> Any:
        with patch.object(dist, "new_group", new_group):
            return kept_group(tuple(ranks), group_desc, backend)

    new_group, initialize = dist.new_group, parallel_state.initialize_model_parallel

    def initialize_with_kept(*args: Any, **options: Any) -> None:
        with patch.object(dist, "new_group", keep):
            initialize(*args, **options)

    try:
        with patch.object(parallel_state, "initialize_model_parallel", initialize_with_kept):
            yield
    finally:
        with patch.object(dist, "destroy_process_group"):
            parallel_state.destroy_model_parallel()
        RouterReplay.clear_global_router_replay_instances()


@contextmanager
def parallel(layout: Layout) -> Iterator[None]:
    """Set up Megatron's state for a layout, and take it down. Every rank must call this."""
    with kept_groups():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tp,
            pipeline_model_parallel_size=layout.pp,
            virtual_pipeline_model_parallel_size=layout.vpp,
            expert_model_parallel_size=layout.ep,
            expert_tensor_parallel_size=1,
        )
        yield


def build(layout: Layout) -> Run:
    """Make the model with DDP and the distributed optimizer. Every rank must call this, inside `parallel`.

    Megatron-Core optimizes no float64 parameters, so the reference has no optimizer.
    """
    RouterReplay.clear_global_router_replay_instances()
    torch.manual_seed(SEED)
    tensor_parallel.model_parallel_cuda_manual_seed(SEED, force_reset_rng=True)
    config = configure(layout)
    chunks = [_chunk(layout, config, index) for index in range(layout.vpp or 1)]
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=layout.dtype == "bf16",
        use_distributed_optimizer=True,
        overlap_grad_reduce=layout.is_overlapped,
        overlap_param_gather=layout.is_overlapped,
        bucket_size=20_000 if layout.is_overlapped else None,
    )
    wrapped = [
        DistributedDataParallel(config, ddp, chunk, disable_bucketing=index > 0) for index, chunk in enumerate(chunks)
    ]
    config.finalize_model_grads_func = finalize_model_grads
    if layout.is_overlapped:
        config.no_sync_func = wrapped[0].no_sync
    if layout.dtype == "fp64":
        return Run(layout=layout, config=config, chunks=wrapped, optimizer=None)
    options = OptimizerConfig(
        optimizer="adam",
        lr=0.01,
        bf16=config.bf16,
        params_dtype=config.params_dtype,
        use_distributed_optimizer=True,
        overlap_param_gather=layout.is_overlapped,
        clip_grad=1.0,
    )
    optimizer = get_megatron_optimizer(options, wrapped)
    config.grad_scale_func = optimizer.scale_loss
    return Run(layout=layout, config=config, chunks=wrapped, optimizer=optimizer)


def configure(layout: Layout) -> TransformerConfig:
    """Return Megatron's configuration."""
    dtype = DTYPES[layout.dtype]
    recompute: dict[str, Any] = {
        None: {},
        "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        "selective": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
    }[layout.recompute]
    shared: dict[str, Any] = {"moe_router_load_balancing_type": "none"}
    if layout.has_shared_experts:
        shared = {"moe_shared_expert_intermediate_size": 32, "moe_aux_loss_coeff": 0.01}
    return TransformerConfig(
        num_layers=4,
        hidden_size=layout.hidden,
        num_attention_heads=4,
        ffn_hidden_size=64,
        moe_ffn_hidden_size=layout.width,
        num_moe_experts=layout.experts,
        moe_layer_freq=[0] * layout.num_dense + [1] * (4 - layout.num_dense),
        moe_router_topk=layout.top_k,
        moe_router_dtype="fp64" if layout.dtype == "fp64" else "fp32",
        moe_token_dispatcher_type="alltoall",
        moe_enable_routing_replay=True,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=F.silu,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        normalization="RMSNorm",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        init_method_std=0.1,
        use_cpu_initialization=True,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=layout.dtype == "bf16",
        tensor_model_parallel_size=layout.tp,
        sequence_parallel=layout.tp > 1,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=1,
        # gloo still reads what it sends when the schedule would free it; a CUDA stream keeps the two in order.
        deallocate_pipeline_outputs=layout.pp > 1 and layout.vpp is None,
        # Two stages in turn are each other's next and previous: messages in one batch would be taken for one another.
        overlap_p2p_comm=layout.vpp is not None,
        batch_p2p_comm=layout.vpp is None,
        **recompute,
        **shared,
    )


def _chunk(layout: Layout, config: TransformerConfig, index: int) -> nn.Module:
    stage = {"vp_stage": index} if layout.vpp else {}
    kind = patch.object(LocalSpecProvider, "grouped_mlp_modules", grouped_mlp_modules)
    with kind if layout.is_grouped else nullcontext():
        if layout.num_dense:
            layers = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
        else:
            layers = get_gpt_layer_local_spec(num_experts=layout.experts, normalization="RMSNorm")
    model = GPTModel(
        config,
        layers,
        vocab_size=VOCABULARY,
        max_sequence_length=LENGTH,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, **stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, **stage),
        parallel_output=False,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
        **stage,
    )
    _fill(model)
    return Float16Module(config, model) if config.bf16 else model


@torch.no_grad()
def _fill(model: nn.Module) -> None:
    """Fill every matrix by its name in the whole model, so that layouts agree; make the first experts the busiest."""
    places, experts = {}, {}
    for path, module in model.named_modules():
        if isinstance(module, TransformerLayer):
            places[path] = f"layer {module.layer_number}"
        if isinstance(module, MoELayer):
            for name, parameter in module.experts.named_parameters():
                experts[parameter] = "layer {} expert {} {}".format(module.layer_number, *named_expert(module, name))
    ranks = parallel_state.get_tensor_model_parallel_world_size()
    rank = parallel_state.get_tensor_model_parallel_rank()
    draw = torch.Generator()
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2:
            continue
        paths = sorted((path for path in places if name.startswith(f"{path}.")), key=len)
        words = [*map(places.get, paths), name.removeprefix(f"{paths[-1]}." if paths else "")]
        draw.manual_seed(zlib.crc32(experts.get(parameter, " ".join(words)).encode()))
        shape, is_split = list(parameter.shape), ranks > 1 and getattr(parameter, "tensor_model_parallel", False)
        if is_split and parameter not in experts:
            shape[parameter.partition_dim] *= ranks
        whole = torch.randn(shape, generator=draw) * 0.1
        parameter.copy_(whole if whole.shape == parameter.shape else whole.chunk(ranks, parameter.partition_dim)[rank])
        if name.endswith("router.weight"):
            parameter *= torch.logspace(0.7, -0.3, len(parameter))[:, None]


Batch = tuple[int, Tensor, Tensor]
"""(micro-step, tokens [samples, length], labels)"""


def batches(number: int) -> list[Batch]:
    """Return this rank's micro-batches of one training step."""
    place = parallel_state.get_data_parallel_rank()
    draw = torch.Generator()
    found = []
    for micro_step in range(MICRO_STEPS):
        draw.manual_seed(SEED + 1000 * number + 10 * micro_step + place)
        text = torch.randint(VOCABULARY, (SAMPLES, LENGTH + 1), generator=draw)
        found.append((micro_step, text[:, :-1], text[:, 1:]))
    return found


def record(run: Run, steps: Sequence[list[Batch]]) -> list[Ids]:
    """Return the ids that the routers choose for every step. Every rank must call this."""
    recorded = []
    with run.routing(RouterReplayAction.RECORD):
        for one in steps:
            seen: dict[tuple[int, int], Tensor] = {}
            forward_backward(run, one, seen=seen, forward_only=True)
            recorded.append([[seen[m, number] for number in run.numbers] for m in range(MICRO_STEPS)])
    return recorded


def gradients(run: Run, one: list[Batch], ids: Ids, *, window: Any = None) -> list[float]:
    """Run forward and backward on replayed routes up to reduced gradients; return the losses. Every rank calls this.

    Args:
        window: a context that encloses the passes
    """
    for chunk in run.chunks:
        chunk.zero_grad_buffer()
    if run.optimizer is not None:
        run.optimizer.zero_grad()
    with run.routing(RouterReplayAction.REPLAY_FORWARD), window or nullcontext():
        return forward_backward(run, one, ids=ids)


def update(run: Run) -> float:
    """Run the optimizer on the gradients that are there; return their norm. Every rank must call this."""
    is_done, norm, _ = run.optimizer.step()
    assert is_done, "the optimizer skipped a step"
    return float(norm)


def forward_backward(
    run: Run, one: list[Batch], *, ids: Ids | None = None, seen: dict | None = None, forward_only: bool = False
) -> list[float]:
    """Let Megatron's schedule run all micro-steps; return the losses, none where no loss is computed."""

    def forward_step(data: Iterator[Batch], chunk: Any) -> tuple[Tensor, Any]:
        micro_step, tokens, labels = next(data)
        layers = [module for module in chunk.modules() if isinstance(module, MoELayer)]
        for layer in layers if ids is not None else ():
            replayed = ids[micro_step][run.numbers.index(layer.layer_number - 1)]
            layer.router.router_replay.set_target_indices(replayed)
        places = torch.arange(tokens.shape[1]).expand_as(tokens)
        output = chunk(tokens, places, None)
        for layer in layers if seen is not None else ():
            seen[micro_step, layer.layer_number - 1] = layer.router.router_replay.get_recorded_indices().clone()

        def loss_of(logits: Tensor) -> tuple[Tensor, dict[str, float]]:
            logits = logits if logits.dtype == torch.float64 else logits.float()
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
            return loss, {"loss": loss.item()}

        return output, loss_of

    data = [iter(one) for _ in run.chunks]
    answers = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=data if len(data) > 1 else data[0],
        model=run.chunks if len(data) > 1 else run.chunks[0],
        num_microbatches=len(one),
        seq_length=LENGTH,
        micro_batch_size=SAMPLES,
        forward_only=forward_only,
    )
    return [answer["loss"] for answer in answers]


def masters(run: Run) -> list[Tensor]:
    """Return this rank's shards of master weights."""
    parts = run.optimizer.chained_optimizers
    return [p.detach() for part in parts for group in part.optimizer.param_groups for p in group["params"]]


def moments(run: Run) -> list[Tensor]:
    """Return this rank's shards of the optimizer's moments, which its first step makes."""
    states = [state for part in run.optimizer.chained_optimizers for state in part.optimizer.state.values()]
    return [state[name] for name in ("exp_avg", "exp_avg_sq") for state in states if name in state]

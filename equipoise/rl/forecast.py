"""What a run would need and gain, from its settings alone: memory per rank, and a plan for a generated step.

Modelled, not measured: weights and optimizer by their sizes, activations by received rows, seconds by the cost model.
Needs neither weights nor GPUs; plans here and now, so it imports the planner.

Invariants (asserted by the tests):
1. Every preset can be forecast on a laptop.
2. Fewer ranks than the settings ask for, or than devices can hold, are refused with what to do.
"""

from dataclasses import dataclass

from equipoise.core import ModelShape
from equipoise.rl.config import TrainConfig
from equipoise.rl.environment import find_torchrun

GIB = 2**30
_BYTES = {"float32": 4, "bfloat16": 2}
_COPIES = 4
"""Weights, gradients and AdamW's two moments, all in the model's dtype."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """A run, described before it starts."""

    ranks: int
    parameters: int
    trained_gib: float
    """Weights, gradients and optimizer of one rank: its experts and everything that is not an expert."""
    rollout_gib: float
    """The whole copy that makes rollouts, on every rank."""
    replica_gib: float
    received_gib: float
    """Rows received in the busiest micro-step, as planned."""
    limit_gib: float
    host_gib: float
    """Host memory of one node: the store of all experts, which weight sync and checkpoints read."""
    skew_before: float
    skew_after: float
    static_s: float
    planned_s: float
    tokens: int
    """Generated tokens that were planned for, of one window."""

    @property
    def total_gib(self) -> float:
        """All of it, on one rank."""
        return self.trained_gib + self.rollout_gib + self.replica_gib + self.received_gib

    def lines(self) -> list[str]:
        """The forecast in words."""
        fit = "fits" if self.total_gib <= self.limit_gib else "DOES NOT FIT"
        return [
            f"forecast for {self.ranks} ranks, {self.parameters / 1e9:.3g} B parameters (modelled, nothing was run)",
            f"  memory per rank  {self.total_gib:.1f} GiB of {self.limit_gib:.0f}, {fit}: weights, gradients and "
            f"optimizer {self.trained_gib:.1f}, rollout copy {self.rollout_gib:.1f}, replica slots "
            f"{self.replica_gib:.2f}, received rows {self.received_gib:.2f}",
            f"  host memory      {self.host_gib:.1f} GiB on each node, for the store of all experts",
            f"  plan             skew {self.skew_before:.2f} before, {self.skew_after:.2f} after; expert layers of one "
            f"update window of {self.tokens} tokens {self.static_s:.3f} s, planned {self.planned_s:.3f} s",
        ]


def too_few(config: TrainConfig) -> str | None:
    """Why this machine, or torchrun, has too few ranks or devices for the settings; None where all is well."""
    torchrun = find_torchrun()
    if config.ranks < config.fewest_ranks:
        return (
            f"setting ranks is {config.ranks}; these settings need at least {config.fewest_ranks} (fewest_ranks): "
            "start them on that many GPUs with torchrun, or use another preset"
        )
    if torchrun is not None and torchrun.ranks != config.ranks:
        there = torchrun.ranks
        return f"setting ranks is {config.ranks}, torchrun started {there}; start as many, or --set ranks={there}"
    if config.model.device != "cuda" or torchrun is not None:
        return None
    import torch

    there = torch.cuda.device_count() * config.model.ranks_per_device
    if there >= config.ranks:
        return None
    return (
        f"{config.ranks} ranks on GPUs were asked for; this machine holds {there} (devices: "
        f"{torch.cuda.device_count()}, ranks on each: {config.model.ranks_per_device}). Start them "
        "with torchrun on more machines, or use --preset tiny"
    )


def forecast(config: TrainConfig) -> Forecast:
    """Describe a run from its settings; plans one generated update window."""
    from equipoise.cost.model import replica_bytes
    from equipoise.loads import count_loads, generate_counts, rank_loads, schedule_samples, skew_ML
    from equipoise.loads.forecast import row_bytes
    from equipoise.planner import plan
    from equipoise.rl.layout import build_cluster

    shape = shape_of(config)
    cluster = build_cluster(config, shape)
    samples = config.rank_samples // config.update.mini_batches * cluster.ep
    counts = generate_counts(shape, samples=samples, mean_tokens=max(2, config.rollout.max_new_tokens // 2))
    window = schedule_samples(
        counts.tokens_B, ranks=cluster.ep, samples_per_micro_step=config.update.micro_batch, stage="update"
    )
    loads = count_loads(counts, window)
    planned = plan(loads, cluster=cluster, model=shape, slots=config.balance.slots, objective=config.balance.objective)
    width, experts = _BYTES[config.model.dtype], shape.experts * shape.layers * shape.expert_params
    dense = dense_parameters(config, shape)
    return Forecast(
        ranks=config.ranks,
        parameters=experts + dense,
        trained_gib=(experts / cluster.ep + dense) * width * _COPIES / GIB,
        rollout_gib=(experts + dense) * width / GIB,
        replica_gib=2 * config.balance.slots * replica_bytes(shape, "update") / GIB,
        received_gib=int(planned.rank_load_MLR.max()) * row_bytes("update", shape) / GIB,
        limit_gib=cluster.memory_bytes / GIB,
        host_gib=experts * width / GIB if config.balance.mode == "equipoise" else 0.0,
        skew_before=float(skew_ML(rank_loads(loads)).mean()),
        skew_after=float(skew_ML(planned.rank_load_MLR).mean()),
        static_s=planned.static_seconds,
        planned_s=planned.seconds.total,
        tokens=int(window.num_tokens_MR.sum()),
    )


def shape_of(config: TrainConfig) -> ModelShape:
    """The shape of the configured model: of its checkpoint where one is there, else of the given sizes."""
    if config.model.path:
        return ModelShape.from_config(config.model.path)
    from equipoise.rl.model import family_config

    shape = ModelShape.from_config(family_config(config.model).to_dict(), name=config.model.family)
    return shape.replace(weight_bytes=_BYTES[config.model.dtype])


def dense_parameters(config: TrainConfig, shape: ModelShape) -> int:
    """Weights that every rank has: attention, routers, shared experts, embeddings and head (untied)."""
    per_layer = shape.attention_params + shape.hidden * shape.experts + shape.shared_experts * shape.expert_params
    return shape.hidden_layers * per_layer + 2 * config.model.vocabulary * shape.hidden

"""verl's own Megatron engine on four CPU ranks, plain and balanced: every rank runs this.

Test parts: a model built from Megatron's configuration instead of by a bridge, causal attention over packed sequences,
and stand-ins for what asks for a GPU.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from equipoise.core.errors import EquipoiseError
from tests.megatron.names import names_only

with names_only():
    import verl
    from tensordict import TensorDict
    from verl.utils import tensordict_utils
    from verl.utils.megatron import router_replay_utils
    from verl.utils.megatron.router_replay_patch import RouterReplay, RouterReplayAction
    from verl.utils.megatron_utils import register_megatron_training_hooks
    from verl.workers.config.engine import EngineRouterReplayConfig, McoreEngineConfig
    from verl.workers.engine.base import EngineRegistry
    from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead

    from equipoise.adapters import verl as adapter

from equipoise.adapters import megatron, megatron_model
from tests.megatron import model, shims
from tests.megatron.layouts import Layout
from tests.megatron.life import attributes
from tests.megatron.model import SEED, VOCABULARY, Run, Trained, build, masters, moments, parallel
from tests.pool import kept_worker

LENGTHS = (9, 14, 6, 11)
"""Tokens of the samples of a rank, two per micro-step."""
RESPONSE = 4
"""Tokens of every response."""
EQUIPOISE = {"cluster": "h200", "slots": 0, "objective": "skew", "planning_timeout_s": 180.0}


class PackedAttention(nn.Module):
    """Causal attention in every sequence of a packed batch."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, packed_seq_params: Any, **__: Any) -> Tensor:
        ends = packed_seq_params.cu_seqlens_q_padded.tolist()
        found = []
        for start, end in pairwise(ends):
            parts = (tensor[start:end].transpose(0, 1) for tensor in (query, key, value))
            found.append(F.scaled_dot_product_attention(*parts, is_causal=True).transpose(0, 1))
        return torch.cat(found).flatten(1)


def packed_spec(*args: Any, **options: Any) -> Any:
    """Return Megatron's layers with attention over packed sequences."""
    spec = LOCAL_SPEC(*args, **options)
    spec.submodules.self_attention.submodules.core_attention = PackedAttention
    return spec


LOCAL_SPEC = model.get_gpt_layer_local_spec


class BuiltHere:
    """What the tests' engines do without a bridge."""

    def initialize_here(self, layout: Layout) -> Run:
        with patch.object(model, "get_gpt_layer_local_spec", packed_spec):
            run = build(layout)
        self.tf_config, self.module, self.optimizer = run.config, run.chunks, run.optimizer
        for chunk in run.chunks:
            # verl computes log-probs from each TP rank's part of the vocabulary.
            megatron_model.bare(chunk).output_layer.gather_output = False
        register_megatron_training_hooks(self.module, self.optimizer)
        return run


class PlainEngine(BuiltHere, MegatronEngineWithLMHead):
    """verl's engine."""


class TriedEngine(BuiltHere, adapter.BalancedEngine):
    """The adapter's engine."""


def make(kind: type, layout: Layout, mode: str, *, fills: bool = False, **options: Any) -> Any:
    """Make an engine as verl's worker does, its model and optimizer offloaded between passes."""
    engine_config = McoreEngineConfig(
        tensor_model_parallel_size=layout.tp,
        expert_model_parallel_size=layout.ep,
        router_replay=EngineRouterReplayConfig(mode=mode),
        override_mcore_model_config={"equipoise": EQUIPOISE | ({"fill_free_rows": True} if fills else {})},
        param_offload=True,
        optimizer_offload=True,
        **options,
    )
    return made_by(kind, engine_config)


def made_by(kind: type, engine_config: Any) -> Any:
    """Make an engine of this configuration, for a model that needs no files."""
    model_config = SimpleNamespace(
        hf_config=SimpleNamespace(architectures=["GPTModel"]),
        mtp=SimpleNamespace(enable=False),
        tokenizer=SimpleNamespace(pad_token_id=0),
        model_type="language_model",
    )
    return kind(model_config, engine_config, None, None)


def batch(number: int, layout: Layout, *, routes: torch.dtype | None, ahead: int = 0) -> TensorDict:
    """Return this rank's batch of one step, with routes of every token but a sample's last, as a rollout has them.

    Args:
        ahead: 1 where the loss leaves the last token's logits out, as verl's losses do
    """
    draw = torch.Generator().manual_seed(SEED + 100 * number + parallel_state.get_data_parallel_rank())
    texts = [torch.randint(VOCABULARY, (length,), generator=draw) for length in LENGTHS]
    places = [torch.arange(length) + ahead for length in LENGTHS]
    masks = [(one >= len(one) - RESPONSE) & (one < len(one)) for one in places]
    data = {
        "input_ids": torch.nested.as_nested_tensor(texts, layout=torch.jagged),
        "loss_mask": torch.nested.as_nested_tensor(masks, layout=torch.jagged),
        "response_mask": torch.ones(len(LENGTHS), RESPONSE, dtype=torch.bool),
    }
    if routes is not None:
        # The first experts are the busiest.
        weights = torch.logspace(0, -2, layout.experts)
        ids = [
            torch.multinomial(weights.expand((length - 1) * 4, -1), layout.top_k, generator=draw)
            .view(length - 1, 4, layout.top_k)
            .to(routes)
            for length in LENGTHS
        ]
        data["routed_experts"] = torch.nested.as_nested_tensor(ids, layout=torch.jagged)
    found = TensorDict(data, batch_size=len(LENGTHS))
    tensordict_utils.assign_non_tensor(
        found,
        temperature=1.0,
        use_dynamic_bsz=False,
        micro_batch_size_per_gpu=2,
        enable_routing_replay=True,
    )
    return found


def loss_of(model_output: dict, data: TensorDict, dp_group: Any) -> tuple[Tensor, dict]:
    """Return the negative log-likelihood of responses, normalized as verl's losses are."""
    tokens = tensordict_utils.get_non_tensor_data(data, key="batch_num_tokens", default=None)
    ranks = tensordict_utils.get_non_tensor_data(data, key="dp_size", default=None)
    return -(model_output["log_probs"].values() * data["loss_mask"].values()).sum() / tokens * ranks, {}


def train(engine: Any, run: Run, mode: str, layout: Layout, *, ahead: int = 0) -> Trained:
    """Train two steps as verl's worker does: log-probs, then the update; everything is offloaded between them."""
    done, windows = Trained(), []

    def note() -> None:
        handle = getattr(engine, "handle", None)
        if handle is not None and all(handle.balancer.report is not seen for seen in windows):
            windows.append(handle.balancer.report)
        tensors = [buffer.param_data for chunk in run.chunks for buffer in chunk.expert_parallel_buffers]
        assert all(tensor.untyped_storage().nbytes() == 0 for tensor in tensors), "offloaded between passes"

    for number, dtype in enumerate([torch.int16, torch.int64]):
        data = batch(number, layout, routes=dtype if mode == "R3" else None, ahead=ahead)
        with engine.eval_mode():
            found = engine.infer_batch(data)
        note()
        if mode == "R2":
            data["routed_experts"] = found["model_output"]["routed_experts"]
        log_probs = found["model_output"]["log_probs"].values()
        done.losses += (log_probs * data["loss_mask"].values() if ahead else log_probs).tolist()
        with engine.train_mode():
            found = engine.train_batch(data, loss_of)
        note()
        done.losses += found["loss"]
        done.norms.append(float(found["metrics"].get("grad_norm", 0.0)))
    engine.to("cuda")
    done.reports = windows
    done.weights = {name: parameter.detach().clone() for name, parameter in run.named_parameters()}
    done.shards = [tensor.clone() for tensor in (*masters(run), *moments(run))]
    return done


@contextmanager
def cpu_verl(layout: Layout) -> Iterator[None]:
    """Run verl on CPUs, and take back at the end what it patches in Megatron-Core."""
    classes = (TransformerConfig, TopKRouter, MoEAlltoAllTokenDispatcher)
    before = [dict(vars(one)) for one in classes]
    with ExitStack() as stack:
        stack.enter_context(shims.cpu_megatron())
        stack.enter_context(parallel(layout))
        stack.enter_context(patch.object(router_replay_utils, "device_name", "cpu"))
        on_cpu = torch.empty

        def unpinned(*args: Any, pin_memory: bool = False, **options: Any) -> Tensor:
            return on_cpu(*args, **options)

        stack.enter_context(patch.object(torch, "empty", unpinned))
        stack.enter_context(patch.object(adapter, "install", partial(megatron.install, worker=kept_worker())))
        try:
            yield
        finally:
            RouterReplay.router_instances.clear()
            for one, kept in zip(classes, before, strict=True):
                for name in [name for name, value in vars(one).items() if kept.get(name) is not value]:
                    setattr(one, name, kept[name]) if name in kept else delattr(one, name)


@contextmanager
def noted_rows() -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Note which rows windows are told of, and which ones routers replay then, both by micro-step and layer."""
    said: list[Tensor] = []
    done: list[Tensor] = []
    submit, choose = megatron.MegatronHandle.submit, RouterReplay.get_replay_topk

    def note_routes(handle: Any, routes: Any, **options: Any) -> None:
        said.extend(ids for by_layer in routes for ids in by_layer)
        submit(handle, routes, **options)

    def note_rows(replay: Any, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        scores, ids = choose(replay, *args, **options)
        if replay.router_replay_action == RouterReplayAction.REPLAY_FORWARD:
            done.append(ids)
        return scores, ids

    with (
        patch.object(megatron.MegatronHandle, "submit", note_routes),
        patch.object(RouterReplay, "get_replay_topk", note_rows),
    ):
        yield said, done


def train_with_verl(group: Any, layout: Layout, mode: str) -> dict[str, Any]:
    """Train with verl's engine and with the adapter's, and compare."""
    with cpu_verl(layout):
        engine = make(PlainEngine, layout, mode)
        expected = train(engine, engine.initialize_here(layout), mode, layout)
        engine = make(TriedEngine, layout, mode)
        run = engine.initialize_here(layout)
        with noted_rows() as (said, done):
            found = train(engine, run, mode, layout)
        megatron.uninstall(engine.handle)
        registered = EngineRegistry.get_engine_cls("language_model", "megatron")
        return {
            "differences": found.differences(expected),
            "losses": len(expected.losses),
            "norms": expected.norms,
            "micro-steps": [len(report.planned_ML) for report in found.reports],
            "displaced": [report.displaced for report in found.reports],
            "other rows": sum(int(((ids >= 0) & (ids != used)).sum()) for ids, used in zip(said, done, strict=True)),
            "unknown rows": sum(int((ids < 0).all(dim=1).sum()) for ids in said),
            "is registered": registered is adapter.BalancedEngine,
        }


@contextmanager
def given_by_hand(windows: Sequence[dict[tuple[int, int], Any]]) -> Iterator[None]:
    """Let routers replay the experts that windows gave to rows, in the order in which they ran."""
    entries = [(m, layer) for m in range(len(LENGTHS) // 2) for layer in range(4)]
    fills = iter([window.get(entry) for window in windows for entry in entries])
    choose = RouterReplay.get_replay_topk

    def put(replay: Any, scores: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        found, ids = choose(replay, scores, *args, **options)
        if replay.router_replay_action != RouterReplayAction.REPLAY_FORWARD:
            return found, ids
        filled = next(fills)
        ids = ids if filled is None else filled.put(ids)
        return scores.gather(1, ids), ids

    with patch.object(RouterReplay, "get_replay_topk", put):
        yield
    assert not list(fills), "every visit of a window is one of the plain model"


def fill_in_verl(group: Any, layout: Layout, mode: str) -> dict[str, Any]:
    """Train in windows that fill rows, then plainly with the same experts given to them; compare what counts."""
    windows: list[dict[tuple[int, int], Any]] = []
    begin = megatron.MegatronHandle.begin

    def note(handle: Any) -> None:
        begin(handle)
        windows.append(dict(handle.balancer.filled))

    with cpu_verl(layout):
        engine = make(TriedEngine, layout, mode, fills=True)
        with patch.object(megatron.MegatronHandle, "begin", note):
            found = train(engine, engine.initialize_here(layout), mode, layout, ahead=1)
        megatron.uninstall(engine.handle)
        engine = make(PlainEngine, layout, mode)
        with given_by_hand(windows):
            expected = train(engine, engine.initialize_here(layout), mode, layout, ahead=1)
        return {
            "differences": found.differences(expected),
            "losses": found.losses,
            "dispatch": {report.dispatch for report in found.reports},
            "as planned": all(report.is_as_planned for report in found.reports),
            "displaced": sum(report.displaced for report in found.reports),
            "filled rows": sum(report.filled_rows for report in found.reports),
        }


def refuse_in_verl(group: Any, layout: Layout) -> dict[str, Any]:
    """Make engines and run batches that must be refused, some of them on one rank alone; return errors and changes."""
    with cpu_verl(layout):
        errors = {"replay off": error_of(partial(make, TriedEngine, layout, "disabled"))}
        with patch.object(verl, "__version__", "0.8.0"):
            errors["another verl"] = error_of(partial(make, TriedEngine, layout, "R3"))
        engine = make(TriedEngine, layout, "R3")
        run = engine.initialize_here(layout)
        data = batch(0, layout, routes=None)
        tensordict_utils.assign_non_tensor(data, enable_routing_replay=False)
        engine.infer_batch(data)
        before = attributes(run)
        for name, change in CASES.items():
            data = batch(0, layout, routes=torch.int16)
            with change(engine, data) or nullcontext():
                errors[name] = error_of(partial(engine.infer_batch, data))
        after = attributes(run)
        changed = [place for place in before.keys() | after.keys() if before.get(place) is not after.get(place)]
        return {"errors": errors, "changed": changed, "is installed": engine.handle is not None}


def error_of(work: Callable[[], Any]) -> str:
    """Return the error with which something is refused."""
    try:
        work()
    except EquipoiseError as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def drop_routes(data: TensorDict) -> None:
    """Leave rank 2 without routes."""
    if dist.get_rank() == 2:
        del data["routed_experts"]


def other_routes(change: Callable[[Tensor], Tensor]) -> Callable[[Any, TensorDict], None]:
    """Change the routes of every sample on rank 2 alone."""

    def apply(_: Any, data: TensorDict) -> None:
        if dist.get_rank() == 2:
            parts = [change(ids) for ids in data["routed_experts"].unbind()]
            data["routed_experts"] = torch.nested.as_nested_tensor(parts, layout=torch.jagged)

    return apply


def _filling(engine: Any, **config: Any) -> Any:
    stack = ExitStack()
    stack.enter_context(_options(engine, **EQUIPOISE, fill_free_rows=True))
    for name, value in config.items():
        stack.enter_context(patch.object(engine.tf_config, name, value))
    return stack


def _options(engine: Any, **options: Any) -> Any:
    return patch.dict(engine.engine_config.override_mcore_model_config, equipoise=options)


CASES: dict[str, Callable[[Any, TensorDict], Any]] = {
    "no routes": lambda _, data: drop_routes(data),
    "too few rows": other_routes(lambda ids: ids[:-1]),
    "too few layers": other_routes(lambda ids: ids[:, :3]),
    "ids out of range": other_routes(lambda ids: ids + 9),
    "another width": other_routes(lambda ids: ids[:, :, :1]),
    "z-loss": lambda engine, _: _filling(engine, moe_z_loss_coeff=1e-3),
    "experts do not divide": lambda engine, _: patch.object(engine.tf_config, "num_moe_experts", 9),
    "another Megatron": lambda *_: patch.object(megatron_model, "VERSION", "0.20.0"),
    "unknown option": lambda engine, _: _options(engine, cluster="h200", slot=1),
    "no cluster": lambda engine, _: _options(engine),
}

"""What the tests of this room run on every rank."""

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from equipoise.adapters import megatron
from equipoise.adapters.megatron import MegatronHandle
from equipoise.balancer import BalancerOptions
from equipoise.core import Cluster, ModelShape
from equipoise.routes import read_routes, write_routes
from tests.megatron import model, shims
from tests.megatron.layouts import Layout
from tests.megatron.model import (
    Batch,
    Ids,
    Run,
    Trained,
    batches,
    build,
    gradients,
    masters,
    moments,
    parallel,
    record,
    update,
)
from tests.pool import kept_worker

STEPS = 3


def stored(run: Run, recorded: Sequence[Ids]) -> list[Ids]:
    """Write recorded ids to the native store and return what is read back."""
    config = run.config
    shape = ModelShape(
        name="small",
        experts=config.num_moe_experts,
        top_k=config.moe_router_topk,
        layer_numbers=run.numbers,
        hidden_layers=config.num_layers,
        hidden=config.hidden_size,
        expert_width=config.moe_ffn_hidden_size,
    )
    found = []
    with TemporaryDirectory() as folder:
        for number, ids in enumerate(recorded):
            path = Path(folder) / f"step_{number}.eqr"
            dump = [dict(zip(run.numbers, layers, strict=True)) for layers in ids]
            write_routes(read_routes(dump, model=shape, format="megatron-replay"), path)
            read = read_routes(path)
            found.append(
                [
                    [torch.from_numpy(s.token_ids(0, s.num_tokens)[:, n]) for n in range(len(run.numbers))]
                    for s in read.samples
                ]
            )
    return found


def prepare(layout: Layout) -> tuple[list[list[Batch]], list[Ids]]:
    """Return the batches of every step, and the routes that the model chooses for them before it is trained."""
    steps = [batches(number) for number in range(STEPS)]
    run = build(layout)
    recorded = record(run, steps)
    return steps, stored(run, recorded) if run.numbers else recorded


def train(
    run: Run, steps: Sequence[list[Batch]], routes: Sequence[Ids], handle: MegatronHandle | None = None
) -> Trained:
    """Train on these steps, in windows where there is a handle. Every rank must call this."""
    done = Trained()
    for number, (one, ids) in enumerate(zip(steps, routes, strict=True)):
        done.losses += gradients(run, one, ids, window=None if handle is None else handle.window(ids))
        if number == 0:
            done.gradients = expert_gradients(run)
        done.norms.append(update(run))
        done.addresses.append(addresses(run))
        if handle is not None:
            done.reports.append(handle.balancer.report)
    run.gather_parameters()
    done.weights = {name: parameter.detach().clone() for name, parameter in run.named_parameters()}
    done.shards = [tensor.clone() for tensor in (*masters(run), *moments(run))]
    return done


def expert_gradients(run: Run) -> dict:
    """Copy the accumulated gradient of every expert parameter of this rank."""
    return {key: parameter.main_grad.clone() for key, parameter in run.expert_parameters().items()}


def train_twice(group: Any, layout: Layout, tamper: str) -> list[str]:
    """Train the unmodified model twice, the second time not quite unmodified, and name what differs."""
    with shims.cpu_megatron(), parallel(layout):
        steps, routes = prepare(layout)
        plain = train(build(layout), steps, routes)
        again = build(layout)
        if tamper == "swapped experts":
            _swap_experts(again)
        if tamper == "another route":
            routes[1][2][0][5] = routes[1][2][0][5].flip(0) ^ 1
        return train(again, steps, routes).differences(plain)


@torch.no_grad()
def _swap_experts(run: Run) -> None:
    """Exchange the weights of this rank's first two experts in one layer, also in the optimizer's master copies."""
    experts = run.layers[0][0].experts.local_experts
    for one, two in zip(experts[0].parameters(), experts[1].parameters(), strict=True):
        kept = one.clone()
        one.copy_(two)
        two.copy_(kept)
    run.optimizer.reload_model_params()


def float64_gradients(layout: Layout, plain: Run, batch: list[Batch], ids: Ids) -> dict:
    """Return the gradient of every expert parameter that the same model has in float64."""
    run = build(replace(layout, dtype="fp64", is_overlapped=False))
    weights = dict(plain.named_parameters())
    with torch.no_grad():
        for name, parameter in run.named_parameters():
            parameter.copy_(weights[name])
    with shims.applied(shims.float64_softmax):
        gradients(run, batch, ids)
    return expert_gradients(run)


def errors_of_three_steps(group: Any, layout: Layout) -> dict[str, Any]:
    """Train the unmodified model and one with replicas; return each expert's squared errors against float64.

    Those of three steps are added, each against float64 at the weights that the model has then.
    """
    with shims.cpu_megatron(), parallel(layout):
        steps, routes = prepare(layout)
        found: dict[str, Any] = {"replicas": []}
        for name in ("plain", "balanced"):
            run = build(layout)
            handle = install(run, slots=1, weights="in place") if name == "balanced" else None
            sums = Counter[Any]()
            for one, ids in zip(steps, routes, strict=True):
                exact = float64_gradients(layout, run, one, ids)
                gradients(run, one, ids, window=None if handle is None else handle.window(ids))
                sums.update(squared_errors(expert_gradients(run), exact))
                update(run)
                run.gather_parameters()
                if handle is not None:
                    found["replicas"].append(handle.balancer.report.replicas)
            if handle is not None:
                megatron.uninstall(handle)
            found[name] = dict(sums)
        return found


def install(run: Run, *, slots: int, weights: str, max_displaced: int | None = None, waves: int = 1) -> MegatronHandle:
    """Install balanced experts that level rows whatever it costs, so that plans move experts."""
    cluster = Cluster.preset("h200", nodes=1, ranks_per_node=run.layout.ep)
    options = BalancerOptions(
        slots=slots,
        max_displaced=max_displaced,
        objective="skew",
        waves=waves,
        rows="auto" if waves == 1 else "collective",
        timeout_s=60.0,
        planning_timeout_s=180.0,
    )
    return megatron.install(run.chunks, cluster=cluster, options=options, weights=weights, worker=kept_worker())


def time_closed_gate(group: Any, layout: Layout, length: int, rounds: int) -> dict[str, Any]:
    """Time the unmodified model and one whose plans move nothing, in turn, then count what each of them calls.

    Returns: by model, seconds of each round (wall, processor, processor of the training thread), operators of torch by
        name (calls, own microseconds) and calls of Python functions
    """
    torch.set_num_threads(1)
    with patch.object(model, "LENGTH", length), shims.cpu_megatron(), parallel(layout):
        steps, routes = prepare(layout)
        runs = {"plain": build(layout), "closed": build(layout)}
        handle = install(runs["closed"], slots=0, weights="in place", max_displaced=0)
        found: dict[str, Any] = {name: {"s": []} for name in runs}

        def in_turn(around: Callable[[str], AbstractContextManager[Any]]) -> None:
            handle.submit(routes[0])
            time.sleep(1.0)  # planned meanwhile, as during a rollout
            for name, run in runs.items():
                dist.barrier()
                with around(name):
                    gradients(run, steps[0], routes[0], window=handle.window() if name == "closed" else None)
            report = handle.balancer.report
            assert report.displaced == report.replicas == 0, "the gate is open"
            assert report.dispatch == "prepared"

        @contextmanager
        def timed(name: str) -> Iterator[None]:
            clocks = (time.perf_counter, time.process_time, time.thread_time)
            before = [clock() for clock in clocks]
            yield
            found[name]["s"].append([clock() - then for clock, then in zip(clocks, before, strict=True)])

        @contextmanager
        def operators(name: str) -> Iterator[None]:
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
                yield
            kept = (one for one in profile.key_averages() if one.key.startswith(("aten::", "c10d::", "gloo:")))
            found[name]["operators"] = {one.key: (one.count, one.self_cpu_time_total) for one in kept}

        @contextmanager
        def calls(name: str) -> Iterator[None]:
            count = Counter[str]()
            sys.setprofile(lambda frame, event, _: count.update([event]))
            yield
            sys.setprofile(None)
            found[name]["python_calls"] = count["call"]

        # The first round loads what runs for the first time.
        in_turn(lambda name: nullcontext())
        for _ in range(rounds):
            in_turn(timed)
        in_turn(operators)
        in_turn(calls)
        megatron.uninstall(handle)
    return found


def compare(group: Any, layout: Layout) -> dict[str, Any]:
    """Train the unmodified model, then the same with placement alone, then one step with replicas.

    Of the two ways to keep weights placement has one and replicas the other; bf16 exchanges them.
    """
    ways = ("in place", "copy") if layout.dtype == "fp32" else ("copy", "in place")
    with shims.cpu_megatron(), parallel(layout):
        steps, routes = prepare(layout)
        plain = build(layout)
        exact = float64_gradients(layout, plain, steps[0], routes[0])
        expected = train(plain, steps, routes)
        placed = build(layout)
        handle = install(placed, slots=0, weights=ways[0])
        before = addresses(placed)
        found = train(placed, steps, routes, handle)
        megatron.uninstall(handle)
        spread = build(layout)
        handle = install(spread, slots=1, weights=ways[1], waves=layout.waves)
        leveled = train(spread, steps[:1], routes[:1], handle)
        megatron.uninstall(handle)
        return {
            "differences": found.differences(expected),
            "norms": expected.norms,
            # The optimizer's moments, last in the list, are there after the first step.
            "moved": [one[: len(before)] != before or one != found.addresses[0] for one in found.addresses],
            "displaced": sum(report.displaced for report in found.reports),
            "replicas": leveled.reports[0].replicas,
            "on demand": [report.counts["on_demand"] for report in (*found.reports, *leveled.reports)],
            "as planned": [report.is_as_planned for report in (*found.reports, *leveled.reports)],
            "errors": squared_errors(leveled.gradients, exact),
            "plain errors": squared_errors(expected.gradients, exact),
        }


def squared_errors(found: dict, exact: dict) -> dict:
    """Return the sum of squared errors of every expert gradient against float64."""
    return {key: float((found[key].double() - reference).square().sum()) for key, reference in exact.items()}


def addresses(run: Run) -> list[int]:
    """Return the address of every parameter, accumulated gradient, buffer of DDP and shard of the optimizer."""
    parameters = [parameter for _, parameter in run.named_parameters()]
    buffers = [buffer for chunk in run.chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    tensors = [*parameters, *(parameter.main_grad for parameter in parameters)]
    tensors += [tensor for buffer in buffers for tensor in (buffer.param_data, buffer.grad_data)]
    return [tensor.data_ptr() for tensor in (*tensors, *masters(run), *moments(run))]


def try_shims(group: Any) -> dict[str, Any]:
    """Apply the stand-ins, remove them, and apply them where targets have changed."""
    targets = [(owner, name) for shim in shims.SHIMS for owner, name, _ in shim()]
    before = {place: vars(place[0]).get(place[1]) for place in targets}
    with shims.cpu_megatron():
        assert torch.zeros(1, device="cuda").type() == "torch.cuda.FloatTensor"
    left = [name for (owner, name), kept in before.items() if vars(owner).get(name) is not kept]

    def maybe_move_tensor_to_cpu(tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    with patch.object(shims.token_dispatcher, "maybe_move_tensor_to_cpu", maybe_move_tensor_to_cpu):
        changed = _refusal()
    with patch.object(shims.param_and_grad_buffer, "dist_all_gather_func"):
        del shims.param_and_grad_buffer.dist_all_gather_func
        missing = _refusal()
    return {"left": left, "changed": changed, "missing": missing}


def _refusal() -> str:
    try:
        with shims.cpu_megatron():
            return ""
    except shims.ShimError as error:
        return str(error)

"""A model's life around its windows, on every rank: offload, checkpoints, uninstall, an error of one rank."""

import gc
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)
from megatron.core.distributed import DistributedDataParallel

from equipoise.adapters import megatron, megatron_model
from equipoise.core.errors import EquipoiseError
from equipoise.core.options import balance_bytes
from equipoise.layer.dispatch import prepared_bytes
from tests.adapters.test_megatron import SET
from tests.megatron import shims
from tests.megatron.layouts import Layout
from tests.megatron.model import Run, build, gradients, parallel, update
from tests.megatron.work import install, prepare, train

FAILING = 2
"""The rank that fails."""


class PlantedError(Exception):
    """What the failing rank raises."""


def offload_and_save(group: Any, layout: Layout) -> dict[str, Any]:
    """Offload and reload between windows, save while installed; compare with a run that never saw a balancer."""
    with shims.cpu_megatron(), parallel(layout):
        steps, routes = prepare(layout)
        plain = build(layout)
        losses = train(plain, steps, routes).losses
        run = build(layout)
        handle = install(run, slots=0, weights="copy")
        found = train(run, steps[:1], routes[:1], handle).losses
        with handle.suspended():
            offloaded = offload(run)
        found += train(run, steps[1:], routes[1:], handle).losses
        saved, expected = checkpoint(run), checkpoint(plain)
        megatron.uninstall(handle)
        return {
            "offloaded": offloaded,
            "same losses": found == losses,
            "entries": len(expected),
            "differences": [name for name in expected if not _is_equal(saved.pop(name), expected[name])] + list(saved),
        }


def offload(run: Run) -> int:
    """Free the memory of all of DDP's buffers, as trainers do before a rollout, and bring it back; return the bytes."""
    buffers = [buffer for chunk in run.chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    for buffer in buffers:
        # Megatron's own copy would be the same memory on a CPU.
        buffer.param_data_cpu = buffer.param_data.clone()
        buffer.offload_to_cpu()
    tensors = [tensor for buffer in buffers for tensor in (buffer.param_data, buffer.grad_data)]
    assert all(tensor.untyped_storage().nbytes() == 0 for tensor in tensors), "nothing was freed"
    for buffer in buffers:
        buffer.reload_from_cpu()
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def checkpoint(run: Run) -> dict[str, Any]:
    """Return what Megatron would write, model and optimizer, by key and place."""
    found: dict[str, Any] = {}
    model = {f"model{index}": chunk.sharded_state_dict() for index, chunk in enumerate(run.chunks)}
    only = model["model0"] if len(run.chunks) == 1 else model
    optimizer = run.optimizer.sharded_state_dict(only, metadata={"distrib_optim_sharding_type": "dp_reshardable"})
    for path, value in _leaves({"model": model, "optimizer": optimizer}):
        if isinstance(value, ShardedTensor | ShardedTensorFactory):
            found[f"{path} {value.key} {getattr(value, 'global_offset', '')}"] = value.data.clone()
        elif isinstance(value, ShardedObject):
            found.update({f"{path} {value.key} {inner}": leaf for inner, leaf in _leaves(value.data)})
        elif isinstance(value, LocalNonpersistentObject):
            found.update({f"{path} {inner}": leaf for inner, leaf in _leaves(value.unwrap())})
        else:
            found[path] = value.clone() if torch.is_tensor(value) else value
    return found


def _leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(tree, dict | list | tuple):
        for name, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from _leaves(value, f"{path}/{name}")
    else:
        yield path, tree


def _is_equal(one: Any, two: Any) -> bool:
    return torch.equal(one, two) if torch.is_tensor(one) else one == two


def come_and_go(group: Any, layout: Layout, weights: str) -> dict[str, Any]:
    """Install, train a step, uninstall; say which attribute is another object than before, and what it took."""
    with shims.cpu_megatron(), parallel(layout):
        steps, routes = prepare(layout)
        run = build(layout)
        train(run, steps[:1], routes[:1])  # what Megatron itself makes in its first step is there now
        before, held = attributes(run), held_bytes()
        handle = install(run, slots=1, weights=weights)
        changed = [place for place, value in attributes(run).items() if before.get(place) is not value]
        installed = held_bytes() - held
        train(run, steps[1:2], routes[1:2], handle)
        trained = held_bytes() - held
        window = next(iter(handle.balancer.layers.values())).window
        tables = prepared_bytes(window.plan, is_mapped=True)
        extra, refusal = dict(handle.extra_bytes), ""
        try:
            with handle.suspended():
                pass
        except EquipoiseError as error:
            refusal = str(error)
        model, cluster = handle.balancer.model, handle.balancer.cluster
        limit = balance_bytes(model, cluster=cluster, slots=1, stage="update", depth=handle.balancer.options.depth)
        owned = sum(parameter.nbytes for parameter in run.expert_parameters().values())
        megatron.uninstall(handle)
        after = attributes(run)
        left = [place for place in before.keys() | after.keys() if before.get(place) is not after.get(place)]
        return {
            "changed": changed,
            "left": sorted(left),
            "extra": extra,
            "limit": limit,
            "experts": owned,
            "installed": installed,
            "trained": trained,
            "tables": tables,
            "suspended": refusal,
        }


def held_bytes() -> int:
    """Measure the bytes of this rank: its tensors, and its part of the memory its node shares. Every rank calls."""
    gc.collect()
    dist.barrier()
    mapped, ends = [], dict[str, int]()
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, offset, _, inode, *name = line.split(maxsplit=5)
        if name and ("memfd:equipoise" in name[0] or "torch_" in name[0]):
            start, end = (int(place, 16) for place in span.split("-"))
            mapped.append((start, end))
            # A file may be mapped more than once; its memory exists once.
            ends[inode] = max(ends.get(inode, 0), int(offset, 16) + end - start)
    storages = [one.untyped_storage() for one in gc.get_objects() if issubclass(type(one), torch.Tensor)]
    own = {storage.data_ptr(): storage.nbytes() for storage in storages}
    private = sum(size for at, size in own.items() if not any(start <= at < end for start, end in mapped))
    dist.barrier()
    return private + sum(ends.values()) // dist.get_world_size()


def attributes(run: Run) -> dict[str, Any]:
    """Return every attribute of every module, entries of its dicts one by one, and of the configuration."""
    found: dict[str, Any] = {}
    for index, chunk in enumerate(run.chunks):
        for path, module in chunk.named_modules():
            for name, value in vars(module).items():
                entries = value.items() if isinstance(value, dict) else [("", value)]
                # Some keys are parameters.
                names = {key: key if isinstance(key, str | int) else id(key) for key, _ in entries}
                found.update({f"{index} {path} {name} {names[key]}": entry for key, entry in entries})
    return found | {f"config {name}": value for name, value in vars(run.config).items()}


def fail(group: Any, layout: Layout) -> dict[str, Any]:
    """Let one rank raise at the end of its last backward pass; then train anew, from the checkpoint before."""
    with shims.cpu_megatron(), parallel(layout):
        steps, routes = prepare(layout)
        expected = train(build(layout), steps, routes)
        run = build(layout)
        handle = install(run, slots=1, weights="in place")
        start, error = time.monotonic(), "none"
        try:
            with planted(run, is_failing=dist.get_rank() == FAILING):
                gradients(run, steps[0], routes[0], window=handle.window(routes[0]))
                update(run)
        except (PlantedError, EquipoiseError) as raised:
            error = f"{type(raised).__name__}: {raised}"
        seconds = time.monotonic() - start
        megatron.uninstall(handle)
        # A rank that ends a test alone would leave the others waiting.
        dist.barrier()
        again = build(layout)
        handle = install(again, slots=0, weights="in place")
        found = train(again, steps, routes, handle)
        megatron.uninstall(handle)
        return {"error": error, "seconds": seconds, "differences": found.differences(expected)}


@contextmanager
def planted(run: Run, *, is_failing: bool) -> Iterator[None]:
    """Raise in the failing rank when its last micro-step has run backward through all experts."""
    calls = []

    def count(gradient: torch.Tensor) -> None:
        calls.append(gradient)
        if len(calls) == 4:
            raise PlantedError("planted")

    embedding = next(parameter for name, parameter in run.named_parameters() if "word_embeddings" in name)
    hook = embedding.register_hook(count) if is_failing else None
    yield
    assert hook is None, "the failing rank did not fail"


def release(group: Any, layout: Layout) -> list[tuple[int, bool]]:
    """Train one step and return the layers whose gradients DDP was told of, and whether the window was open then."""
    told, tell = [], megatron.LentMoE.release

    def note(lent: megatron.LentMoE, chunk: Any) -> bool:
        told.append((lent.index, lent._handle.balancer.is_open))
        return tell(lent, chunk)

    with shims.cpu_megatron(), parallel(layout), patch.object(megatron.LentMoE, "release", note):
        steps, routes = prepare(layout)
        run = build(layout)
        handle = install(run, slots=0, weights="copy")
        train(run, steps[:1], routes[:1], handle)
        megatron.uninstall(handle)
    return told


def repeat_ids(group: Any, layout: Layout) -> dict[str, Any]:
    """Replay rows in which experts repeat, as trainers pad them, and compare with the unmodified model."""
    with shims.cpu_megatron(), parallel(layout):
        steps, routes = prepare(layout)
        for ids in (ids for step in routes for by_layer in step for ids in by_layer):
            ids[::3] = ids[::3, :1].clone()
            ids[1::5] = 0
        plain, run = build(layout), build(layout)
        expected = train(plain, steps[:2], routes[:2])
        handle = install(run, slots=0, weights="in place")
        found = train(run, steps[:2], routes[:2], handle)
        megatron.uninstall(handle)
        return {
            "differences": found.differences(expected),
            "displaced": sum(report.displaced for report in found.reports),
        }


def train_beside_dense_stage(group: Any, layout: Layout) -> dict[str, Any]:
    """Train a pipeline whose first stage has no experts, and compare with the unmodified model."""
    with shims.cpu_megatron(), parallel(layout):
        steps, routes = prepare(layout)
        expected = train(build(layout), steps, routes)
        run = build(layout)
        handle = install(run, slots=0, weights="copy")
        found = train(run, steps, routes, handle)
        with handle.suspended():
            counted, extra = list(handle.micro_steps), sum(handle.extra_bytes.values())
        megatron.uninstall(handle)
        return {
            "differences": found.differences(expected),
            "layers": len(handle.found.layers),
            "displaced": sum(report.displaced for report in found.reports if report is not None),
            "micro-steps": counted,
            "extra": extra,
        }


def refuse_install(group: Any, layout: Layout) -> dict[str, Any]:
    """Try to install on a real model with each thing that is refused; return the errors, and what was changed."""
    with shims.cpu_megatron(), parallel(layout):
        run = build(layout)
        before, errors = attributes(run), dict[str, str]()
        cases = {one.name: setting(run, one.setting) for one in megatron_model.REFUSED}
        cases |= {"Megatron-FSDP": sharded(run), "LoRA on experts": adapted(run)}
        cases["capacity factor on one rank"] = setting(run, "moe_expert_capacity_factor", is_set=dist.get_rank() == 2)
        for name, case in cases.items():
            with case:
                try:
                    install(run, slots=1, weights="copy")
                except EquipoiseError as error:
                    errors[name] = str(error)
        after = attributes(run)
        changed = [place for place in before.keys() | after.keys() if before.get(place) is not after.get(place)]
        return {"errors": errors, "changed": changed}


def setting(run: Run, name: str, *, is_set: bool = True) -> AbstractContextManager:
    """Set a field of a real configuration to a value that is refused; some exist in newer versions alone."""
    return patch.object(run.config, name, SET.get(name, True), create=True) if is_set else nullcontext()


class FullyShardedDataParallel(DistributedDataParallel):
    """Has the name of Megatron-FSDP's wrapper, which needs GPUs."""


@contextmanager
def sharded(run: Run) -> Iterator[None]:
    """Wrap the model as if by Megatron-FSDP."""
    run.chunks[0].__class__ = FullyShardedDataParallel
    yield
    run.chunks[0].__class__ = DistributedDataParallel


@contextmanager
def adapted(run: Run) -> Iterator[None]:
    """Put a LoRA adapter beside a product of the last layer's experts."""
    linear = run.layers[-1][-1].experts.local_experts[0].linear_fc1
    linear.lora_a = torch.nn.Linear(4, 2)
    yield
    del linear.lora_a

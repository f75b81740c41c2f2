"""What Megatron-Core needs to run on CPUs over gloo: one function per stand-in, applied only inside `cpu_megatron()`.

Each function yields (owner, name, replacement) and raises `ShimError` where its target is not as it was when the
function was written. Checked with megatron-core 0.16.1.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import wraps
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import param_and_grad_buffer
from megatron.core.tensor_parallel import random as parallel_random
from megatron.core.transformer.moe import moe_utils, token_dispatcher
from megatron.core.transformer.torch_norm import WrappedTorchNorm

Patch = tuple[Any, str, Any]
MISSING = object()
CPU = torch.device("cpu")


class ShimError(Exception):
    """Megatron-Core or torch has changed where a stand-in is needed."""


def streams_and_events() -> Iterator[Patch]:
    """Give the token dispatcher, checkpoints and schedules streams that do nothing."""
    for name in ("Stream", "Event", "current_stream", "default_stream"):
        yield torch.cuda, name, InertStream
    yield torch.cuda, "stream", lambda stream: nullcontext(stream)
    yield torch.Tensor, "record_stream", lambda self, stream: None


class InertStream:
    """A stream and an event on which everything is done already."""

    def __init__(self, *args: Any, **options: Any) -> None:
        pass

    def record_event(self, event: Any = None) -> "InertStream":
        return event or self

    def wait_stream(self, stream: Any) -> None:
        pass

    wait_event = record = wait = wait_stream

    def synchronize(self) -> None:
        pass


def devices() -> Iterator[Patch]:
    """Allocate on the CPU what is asked for on the current GPU."""
    yield torch.cuda, "current_device", lambda: CPU
    yield torch.Tensor, "cuda", lambda self, *args, **options: self
    for name in ("empty", "zeros", "ones", "full", "tensor", "arange"):
        yield torch, name, _on_cpu(getattr(torch, name))


def _on_cpu(factory: Callable) -> Callable:
    @wraps(factory)
    def make(*args: Any, device: Any = None, **options: Any) -> Any:
        is_cuda = device is not None and torch.device(device).type == "cuda"
        return factory(*args, device=CPU if is_cuda else device, **options)

    return make


def tensor_types() -> Iterator[Patch]:
    """Give CPU tensors the type names that the optimizers compare with."""
    named = torch.Tensor.type

    def name_as_cuda(self: torch.Tensor, *args: Any, **options: Any) -> Any:
        return named(self, *args, **options) if args or options else named(self).replace("torch.", "torch.cuda.", 1)

    yield torch.Tensor, "type", name_as_cuda


def random_states() -> Iterator[Patch]:
    """Keep the states of the CPU's generator where those of the GPU's are kept."""
    _require(parallel_random._get_cuda_rng_state, "device", "clone", "graph_safe")
    _require(parallel_random._set_cuda_rng_state, "new_state", "device", "graph_safe")
    yield torch.cuda, "get_rng_state", torch.get_rng_state
    yield torch.cuda, "manual_seed", torch.manual_seed
    yield parallel_random, "_get_cuda_rng_state", lambda *args, **options: torch.get_rng_state()
    yield parallel_random, "_set_cuda_rng_state", lambda state, *args, **options: torch.set_rng_state(state)


def router_product() -> Iterator[Patch]:
    """Name the product that is missing without Transformer Engine, so that the router takes torch's."""
    if "te_general_gemm" not in inspect.getsource(moe_utils.RouterGatingLinearFunction):
        raise ShimError("the router's product does not ask for te_general_gemm any more; remove `router_product`")
    yield moe_utils, "te_general_gemm", None


def split_sizes() -> Iterator[Patch]:
    """Give the exchange of rows its split sizes as lists: CPU tensors are left as they are, and gloo takes none."""
    _require(token_dispatcher.maybe_move_tensor_to_cpu, "tensor", "as_numpy", "record_stream")

    def as_list(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.tolist() if as_numpy and torch.is_tensor(tensor) else tensor

    yield token_dispatcher, "maybe_move_tensor_to_cpu", as_list


def coalesced_collectives() -> Iterator[Patch]:
    """Run a bucket's collectives one by one, and let its handle wait for all of them: gloo does not coalesce."""
    _require(param_and_grad_buffer._coalescing_manager, "group", "device", "async_ops")
    begun: list[list] = []

    @contextmanager
    def keep_works(group: Any = None, device: Any = None, async_ops: bool = False) -> Iterator[Any]:
        begun.append([])
        yield SimpleNamespace(wait=lambda works=begun[-1]: [work.wait() for work in works])
        begun.pop()

    def kept(collective: Callable) -> Callable:
        def run(*args: Any, async_op: bool = False, **options: Any) -> Any:
            work = collective(*args, async_op=async_op, **options)
            if async_op:
                begun[-1].append(work)
            return work

        return run

    yield param_and_grad_buffer, "_coalescing_manager", keep_works
    yield param_and_grad_buffer, "dist_all_gather_func", kept(dist.all_gather_into_tensor)
    yield param_and_grad_buffer, "dist_reduce_scatter_func", kept(dist.reduce_scatter_tensor)


def device_calls() -> Iterator[Patch]:
    """Answer calls that only a GPU's driver could."""
    for name in ("synchronize", "empty_cache"):
        yield torch.cuda, name, lambda *args, **options: None
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved"):
        yield torch.cuda, name, lambda *args, **options: 0
    for name in ("range_push", "range_pop"):
        yield torch.cuda.nvtx, name, lambda *args, **options: None


def norms() -> Iterator[Patch]:
    """Let torch's norms run under sequence parallelism: their parameters' gradients are summed over the TP group."""
    new = WrappedTorchNorm.__new__
    if "sequence parallel not supported" not in inspect.getsource(new):
        raise ShimError("WrappedTorchNorm takes sequence parallelism now; remove `norms`")

    def make(cls: type, config: Any, *args: Any, **options: Any) -> Any:
        is_parallel, config.sequence_parallel = config.sequence_parallel, False
        try:
            norm = new(cls, config, *args, **options)
        finally:
            config.sequence_parallel = is_parallel
        for parameter in norm.parameters():
            parameter.sequence_parallel = is_parallel
        return norm

    yield WrappedTorchNorm, "__new__", make


SHIMS = (
    streams_and_events,
    devices,
    tensor_types,
    random_states,
    router_product,
    split_sizes,
    coalesced_collectives,
    device_calls,
    norms,
)


def float64_softmax() -> Iterator[Patch]:
    """Keep float64 scores in float64: the router asks for float32. For the reference only."""
    softmax = torch.softmax

    def keep_float64(input: torch.Tensor, *args: Any, dtype: Any = None, **options: Any) -> torch.Tensor:
        return softmax(input, *args, dtype=torch.float64 if input.dtype == torch.float64 else dtype, **options)

    yield torch, "softmax", keep_float64


@contextmanager
def cpu_megatron() -> Iterator[None]:
    """Apply every stand-in, and remove all of them at the end."""
    with ExitStack() as stack:
        for shim in SHIMS:
            stack.enter_context(applied(shim))
        yield


@contextmanager
def applied(shim: Callable[[], Iterator[Patch]]) -> Iterator[None]:
    """Apply one stand-in, and remove it at the end."""
    with ExitStack() as stack:
        for owner, name, new in shim():
            stack.enter_context(_replaced(owner, name, new))
        yield


def _replaced(owner: Any, name: str, new: Any) -> AbstractContextManager:
    """Replace an attribute; `te_general_gemm` alone may be missing."""
    if not hasattr(owner, name) and name != "te_general_gemm":
        raise ShimError(f"{owner.__name__}.{name} does not exist any more; its stand-in must change")

    @contextmanager
    def replaced() -> Iterator[None]:
        kept = vars(owner).get(name, MISSING)
        setattr(owner, name, new)
        try:
            yield
        finally:
            if kept is MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, kept)

    return replaced()


def _require(function: Callable, *names: str) -> None:
    found = tuple(inspect.signature(function).parameters)
    if found != names:
        raise ShimError(f"{function.__name__} takes {found}, its stand-in was written for {names}")

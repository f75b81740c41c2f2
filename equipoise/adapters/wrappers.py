"""What DDP, FSDP2 and peft do to a model whose experts are installed: what to leave alone, and what is averaged.

Install first, then wrap. An expert's gradient is complete at its owner, summed over the EP group, so no wrapper may
broadcast, shard or reduce it:
    DDP     reads the names to leave alone from the model when it is built (`ignored_by_ddp`)
    FSDP2   is told: `fully_shard(module, ignored_params=set(handle.expert_parameters.values()))`
Both divide the gradients of everything else by their number of ranks, so experts' gradients are divided by it too
(`gradient_divisor`). A wrapper that took experts is refused by name when the model first runs (`check_untouched`).
So are adapters of experts (`has_adapters`): balanced experts would compute without them, silently.

Checked with torch 2.13 and peft 0.21. Private names: `_ddp_params_and_buffers_to_ignore`, `_module_parameters` and
`_get_active_ddp_module` of DDP, and `_get_fsdp_state` of FSDP2.
"""

from collections.abc import Callable, Iterable, Mapping

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from equipoise.core.errors import AdapterError

_IGNORED = "_ddp_params_and_buffers_to_ignore"
_ADVICE = (
    "install before wrapping, wrap the transformers model itself in DDP, and give fully_shard "
    "ignored_params=set(handle.expert_parameters.values()); load this model's weights again, because they were changed"
)


ADAPTED = "has LoRA adapters; merge them, or adapt attention and other dense weights alone"
"""What is said of experts or a router with adapters, after its name."""


def has_adapters(module: nn.Module) -> bool:
    """Whether peft has put low-rank or other adapters, or a copy to be trained, around a module or into it."""
    kept = {"base_layer", "original_module"}  # where peft's wrappers keep what they wrap
    return any("lora_" in name or name.rpartition(".")[2] in kept for name, _ in module.named_modules())


def ignored_by_ddp(model: nn.Module, names: Iterable[str]) -> Callable[[], None]:
    """Make a DDP that is built around `model` from now on leave parameters alone; returns a call that undoes it."""
    before = vars(model).get(_IGNORED)
    setattr(model, _IGNORED, [*(before or ()), *names])

    def undo() -> None:
        delattr(model, _IGNORED)
        if before is not None:
            setattr(model, _IGNORED, before)

    return undo


def check_untouched(model: nn.Module, experts: Mapping[str, Tensor], *, lent: Iterable[Tensor]) -> None:
    """Raise if a wrapper has taken a parameter of the experts; call it inside the model's forward.

    Args:
        experts: the installed parameters by name
        lent: the full parameters that they stand for
    """
    for name, parameter in experts.items():
        path, _, field = name.rpartition(".")
        module = model.get_submodule(path)
        there = module._parameters.get(field)
        if there is parameter:
            continue
        if has_adapters(module):
            raise AdapterError(f"`{path}` {ADAPTED}")
        what = "taken out of its module" if there is None else f"replaced by a {type(there).__name__}"
        raise AdapterError(f"`{name}` was {what} after install, as FSDP and tensor parallelism do; {_ADVICE}")
    ddp = DistributedDataParallel._get_active_ddp_module()
    if ddp is None:
        return
    taken = {id(parameter) for parameter in ddp._module_parameters}
    for name, parameter in experts.items():
        if id(parameter) in taken:
            raise AdapterError(f"`{name}` is managed by DDP, which has copied rank 0's experts to all ranks; {_ADVICE}")
    if any(id(parameter) in taken for parameter in lent):
        raise AdapterError(f"DDP was built around the model before its experts were installed; {_ADVICE}")


def gradient_divisor(model: nn.Module) -> float:
    """Return what DDP or FSDP2 divides gradients by, 1 without them; call it inside the model's forward."""
    divisors = set()
    ddp = DistributedDataParallel._get_active_ddp_module()
    if ddp is not None:
        divisors.add(float(ddp.process_group.size()))
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for group in module._get_fsdp_state()._fsdp_param_groups:
                divisors.add(float(group.gradient_divide_factor or group.mesh_info.mesh.size()))
    if len(divisors) > 1:
        raise AdapterError(
            f"gradients are divided by {sorted(divisors)} in different parts of the model, so those of experts have no "
            "one divisor; use one mesh and one divide factor for all of it"
        )
    return divisors.pop() if divisors else 1.0


def whole(tensor: Tensor) -> Tensor:
    """Return a tensor of a state dict as a whole; every rank of its mesh must call this where FSDP2 shards it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def copy_whole(target: Tensor, source: Tensor) -> None:
    """Copy a whole tensor to one that FSDP2 may have sharded."""
    if isinstance(target, DTensor):
        source = distribute_tensor(source, target.device_mesh, target.placements, src_data_rank=None)
    target.copy_(source)

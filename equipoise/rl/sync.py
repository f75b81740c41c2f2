"""Weight sync: canonical weights of the learner into the rollout copy, proved by fingerprint.

Steps:
1. The learner gives the whole model in canonical order. Where a balancer moves experts, they come from the node's host
   store, which is first completed with the experts of all nodes; else owners' experts are gathered. What is not sharded
   is the rank's own.
2. Every rank copies it into its rollout copy.
3. Every rank takes the fingerprints of what it holds itself, on its device: each expert it owns, and everything that is
   not sharded. Only fingerprints travel.
4. Every rank compares the same parts of its copy. One that differs stops training on every rank, by name.

Knows state dicts. Does not know samples or plans.

Invariants (asserted by the tests):
1. A displaced, stale or damaged expert in the store or in a copy is an error on every rank, which names the tensor, the
   experts, whose copy it is and who owns them.
2. Whatever the mode, the copy holds the bits of the whole model.
"""

import hashlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from equipoise.core.errors import TransferError
from equipoise.rl.fingerprint import fingerprints
from equipoise.rl.layout import Layout, gather_objects
from equipoise.rl.learner import Learner, Part

Held = Mapping[Part, Sequence[int]]
"""What a rank holds, each with its fingerprints: one per expert, or one where it is not sharded."""


def sync_weights(learner: Learner, target: nn.Module, layout: Layout) -> str:
    """Copy the learner's weights into `target` and return their hash. Every rank must call this."""
    copy_weights(learner.state_dict(), target)
    parts_R: list[Held] = gather_objects(owned_fingerprints(learner.owned_parts()), layout)
    troubles = gather_objects(find_trouble(dict(target.state_dict()), parts_R), layout)
    for rank, trouble in enumerate(troubles):
        if trouble:
            raise TransferError(
                f"weight sync: the rollout copy of rank {rank} has {trouble}; stop and resume from the last checkpoint"
            )
    words = sorted(repr((part, tuple(found))) for parts in parts_R for part, found in parts.items())
    return hashlib.sha256("".join(words).encode()).hexdigest()


@torch.no_grad()
def copy_weights(state: Mapping[str, Tensor], target: nn.Module) -> None:
    """Copy a whole model's weights into another one."""
    for name, tensor in target.state_dict().items():
        # Whoever reads the copy, such as its fingerprint, waits for what is copied from pinned memory.
        tensor.copy_(state[name], non_blocking=True)


def owned_fingerprints(parts: Mapping[Part, Tensor]) -> dict[Part, list[int]]:
    """Fingerprints of what one rank holds."""
    found = {part: fingerprints(tensor if part.experts else tensor[None]) for part, tensor in parts.items()}
    return {part: values.tolist() for part, values in found.items()}


def find_trouble(copy: Mapping[str, Tensor], parts_R: Sequence[Held]) -> str:
    """Say which part of a copy is not what its owner holds; empty where all are.

    Args:
        copy: the state dict of the rollout copy
        parts_R: of every rank, in rank order
    """
    sharded = {part.name: part.experts > 0 for parts in parts_R for part in parts}
    found = {name: fingerprints(copy[name] if is_cut else copy[name][None]) for name, is_cut in sharded.items()}
    listed = {name: values.tolist() for name, values in found.items()}
    for rank, parts in enumerate(parts_R):
        for part, wanted in parts.items():
            there = listed[part.name][part.first :][: max(1, part.experts)]
            wrong = [part.first + at for at, (one, other) in enumerate(zip(there, wanted, strict=True)) if one != other]
            if wrong:
                return (
                    f"experts {wrong} of `{part.name}` that are not those rank {rank} owns"
                    if part.experts
                    else f"a `{part.name}` that is not that of rank {rank}"
                )
    return ""

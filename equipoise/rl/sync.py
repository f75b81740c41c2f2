"""Weight sync: canonical weights of the learner into the rollout copy, proved by hash.

Steps:
1. The owners' experts are gathered in canonical order; every rank copies the whole model into its rollout copy.
2. Every rank hashes what it holds itself: its owned experts, and everything that is not sharded.
3. Every rank hashes the same parts of the copy. A part that differs from its owner's hash stops training by name.

Knows state dicts. Does not know samples or plans.

Invariants (asserted by the tests):
1. A displaced, stale or damaged expert in the copy is an error that names the tensor, the rank and the experts.
2. Whatever the mode, the copy holds the bits of the whole model.
"""

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from equipoise.core.errors import TransferError
from equipoise.rl.layout import Layout


def sync_weights(learner: Any, target: nn.Module, layout: Layout) -> str:
    """Copy the learner's weights into `target` and return their hash. Every rank must call this."""
    state = learner.state_dict()
    with torch.no_grad():
        for name, tensor in target.state_dict().items():
            tensor.copy_(state[name])
    hashes = _owned_hashes(learner, layout)
    check_copy(dict(target.state_dict()), hashes)
    every = sorted(digest for by_part in hashes for digest in by_part.values())
    return hashlib.sha256("".join(every).encode()).hexdigest()


def check_copy(copy: Mapping[str, Tensor], hashes: list[dict[tuple[str, int, int], str]]) -> None:
    """Raise unless every part that a rank hashed is the same in the copy.

    Args:
        copy: the state dict of the rollout copy
        hashes: per rank, (tensor name, first expert, number of experts; 0 for all of it) to its hash
    """
    for rank, by_part in enumerate(hashes):
        for (name, first, count), digest in by_part.items():
            part = copy[name][first : first + count] if count else copy[name]
            if tensor_hash(part) != digest:
                where = f"experts {first}..{first + count - 1} of " if count else ""
                raise TransferError(
                    f"weight sync: {where}`{name}` in the rollout copy is not what rank {rank} owns; "
                    "stop and resume from the last checkpoint"
                )


def tensor_hash(tensor: Tensor) -> str:
    """Hash of a tensor's bytes, whatever its dtype and device."""
    content = tensor.detach().contiguous().cpu().flatten().view(torch.uint8).numpy()
    return hashlib.blake2b(content.tobytes(), digest_size=16).hexdigest()


def _owned_hashes(learner: Any, layout: Layout) -> list[dict[tuple[str, int, int], str]]:
    """Every rank's hashes of what it owns, in rank order. Every rank must call this."""
    mine = {part: tensor_hash(tensor) for part, tensor in learner.owned_parts().items()}
    found: list[dict[tuple[str, int, int], str]] = [{} for _ in range(layout.ranks)]
    dist.all_gather_object(found, mine, group=layout.world)
    return found

"""`Connection`: the ranks of a group, connected once more over gloo, for transfers alone.

A rank that gives up leaves collectives that others have entered, and a group whose ranks have made different numbers of
calls never finishes another one. So what transfers agree on, and what crosses nodes, does not use the group of the
training: after a failure that group is as usable as before, and an engine that starts anew has a connection of its own.

Knows torch.distributed. Does not know what it carries, nor who watches the time. The connection is not registered with
torch: `new_group` would need a call of ranks outside it. The ranks meet in the store of the group they have.

Invariants (asserted by the tests):
1. A rank that leaves an exchange alone holds up neither its own end nor the training's group.
2. A connection may be closed as soon as it is made, whatever the other ranks still do.
"""

import threading
import uuid
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from equipoise.core.errors import TransferError


class Message(NamedTuple):
    """A tensor on its way between this rank and another; both sides list theirs in the same order."""

    tensor: torch.Tensor
    """Contiguous, on the CPU."""
    peer: int
    is_leaving: bool


class Connection:
    """One rank's end."""

    def __init__(self, group: Any, *, timeout_s: float) -> None:
        """Connect. Every rank of `group` must call this.

        Args:
            group: the ranks to connect; able to move CPU tensors
            timeout_s: after which what was left alone is given up for good
        """
        self._gloo = connect(group, timeout_s=timeout_s)

    def start_largest(self, values: torch.Tensor) -> Any:
        """Replace values by the largest of all ranks; returns the work. Every rank must call this."""
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX
        return self._gloo.allreduce([values], options)

    def start(self, messages: Sequence[Message]) -> list[Any]:
        """Send and receive; returns the works, one per message."""
        return [
            (self._gloo.send if message.is_leaving else self._gloo.recv)([message.tensor], message.peer, 0)
            for message in messages
        ]

    def abandon(self, works: Sequence[Any]) -> None:
        """Leave works that may never end; they are held until they have, so that nothing waits for them."""
        leave(self._gloo, works)

    def close(self) -> None:
        """Take part in nothing any more. Closing twice is allowed."""
        self._gloo = None


def connect(group: Any, *, timeout_s: float) -> Any:
    """Return a gloo group of the same ranks that nothing else uses. Every rank of `group` must call this."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    name = torch.frombuffer(bytearray(uuid.uuid4().bytes), dtype=torch.uint8)
    try:
        dist.broadcast(name, group=group, group_src=0)
        store = dist.PrefixStore(f"equipoise/{bytes(name.tolist()).hex()}", group.get_group_store())
        gloo = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout_s))
        # A rank that closed before the others have connected would break off their connecting.
        gloo.barrier().wait()
    except RuntimeError as error:
        raise TransferError(f"rank {rank}: the group's {size} ranks could not be connected: {error}") from error
    return gloo


def leave(gloo: Any, works: Sequence[Any]) -> None:
    """Hold a connection in the background until works have ended or timed out.

    Gloo cannot be interrupted, and its destructor waits.
    """
    threading.Thread(target=_hold, args=(gloo, list(works)), name="equipoise-left", daemon=True).start()


def _hold(gloo: Any, works: Sequence[Any]) -> None:
    for work in works:
        with suppress(RuntimeError):
            work.wait()
    del gloo

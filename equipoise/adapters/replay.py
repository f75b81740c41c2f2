"""`Turn`: the name and the routes of one forward pass, travelling with its data; and what routers really chose.

Knows ids by MoE layer index. Does not know frameworks, modules or plans.

A turn is made once per forward and given to every layer call, so that a layer that is computed again in backward
finds the same routes, whatever turn has become current meanwhile.

Invariants (asserted by the tests):
1. A row whose id is given is computed with it; a row of a token with an id of -1 is routed by the model itself.
2. Ids of a wrong shape, or outside the model's experts, are refused by layer before they are used.
3. A layer that is computed again in backward is neither recorded nor counted a second time.
4. Rows of several calls are recorded in call order, layer by layer: a generation with KV cache gives one row per token.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils.module_tracker import ModuleTracker

from equipoise.core import ModelShape
from equipoise.core.errors import RoutesError

_TRACKER = ModuleTracker()
"""Asked only whether a backward is running; it tracks nothing."""

RouteIds: TypeAlias = Tensor | Sequence[Any]
"""[L, T, K] ids as one tensor or array, or one [T, K] per MoE layer; -1 where the model shall route itself."""


@dataclass(slots=True)
class ReplayCounters:
    """What replay did since the counters were made. Kept on the device; reading one waits for it."""

    calls: int = 0
    """Router calls, recomputation in backward left out."""
    _given: Any = field(default_factory=lambda: torch.zeros((), dtype=torch.int64))
    _used: Any = field(default_factory=lambda: torch.zeros((), dtype=torch.int64))
    _differing: Any = field(default_factory=lambda: torch.zeros((), dtype=torch.int64))

    @property
    def given_rows(self) -> int:
        """Rows whose expert was given."""
        return int(self._given)

    @property
    def used_rows(self) -> int:
        """Rows that reached the experts with the id that was given; equal to `given_rows` where replay is exact."""
        return int(self._used)

    @property
    def differing_rows(self) -> int:
        """Given rows whose expert the model would not have chosen itself."""
        return int(self._differing)

    @property
    def rows(self) -> tuple[int, int, int]:
        """Given, used and differing rows so far."""
        return self.given_rows, self.used_rows, self.differing_rows

    @property
    def differing_share(self) -> float:
        """Differing rows of all given ones; 0 where none was given."""
        return self.differing_rows / max(1, self.given_rows)

    def count_choice(self, given_TK: Tensor, own_TK: Tensor) -> None:
        """Add one router call."""
        known_TK = known_tokens(given_TK)[:, None].expand_as(given_TK)
        is_own_TK = (given_TK[:, :, None] == own_TK[:, None, :]).any(dim=2)
        self._given = self._given.to(given_TK.device) + known_TK.sum()
        self._differing = self._differing.to(given_TK.device) + (known_TK & ~is_own_TK).sum()

    def count_use(self, given_TK: Tensor, used_TK: Tensor) -> None:
        """Add what one layer's experts were called with."""
        used = known_tokens(given_TK)[:, None] & (given_TK == used_TK)
        self._used = self._used.to(given_TK.device) + used.sum()


class Recorded:
    """The ids that routers chose, by MoE layer, call by call."""

    def __init__(self, layers: int) -> None:
        self._calls_L: list[list[Tensor]] = [[] for _ in range(layers)]

    def add(self, layer: int, ids_TK: Tensor) -> None:
        """Keep one router call."""
        self._calls_L[layer].append(ids_TK.detach())

    @property
    def num_calls(self) -> int:
        """Forward passes recorded."""
        return len(self._calls_L[0])

    @property
    def ids_LTK(self) -> Tensor:
        """[L, T, K] all rows in call order; of one forward, the order in which the router saw its tokens."""
        return torch.stack([torch.cat(calls) for calls in self._whole()])

    def by_sample(self, num_samples: int) -> Tensor:
        """[B, T, L, K] rows of each sample, where every call had the same samples in the same order."""
        by_layer = []
        for calls in self._whole():
            parts = [ids_TK.view(num_samples, -1, ids_TK.shape[-1]) for ids_TK in calls]
            by_layer.append(torch.cat(parts, dim=1))
        return torch.stack(by_layer, dim=2)

    def _whole(self) -> list[list[Tensor]]:
        counts = [len(calls) for calls in self._calls_L]
        if not counts[0] or len(set(counts)) != 1:
            raise RoutesError(f"routers were called {counts} times by layer; record whole forward passes")
        return self._calls_L


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One forward pass: which micro-step it is, which routes it replays, where its choices are kept."""

    counters: ReplayCounters
    micro_step: int | None = None
    """None where no plan is followed."""
    ids_L: tuple[Tensor, ...] | None = None
    """Per MoE layer [T, K]; None: the model routes itself."""
    recorded: Recorded | None = None

    def choose(self, layer: int, own_TK: Tensor) -> Tensor:
        """Return the ids to use, given what the model's router chose itself."""
        is_first = not is_in_backward()
        self.counters.calls += is_first
        ids_TK = own_TK
        if self.ids_L is not None:
            given_TK = self.given(layer, own_TK)
            ids_TK = torch.where(known_tokens(given_TK)[:, None], given_TK, own_TK)
            if is_first:
                self.counters.count_choice(given_TK, own_TK)
        if self.recorded is not None and is_first:
            self.recorded.add(layer, ids_TK)
        return ids_TK

    def use(self, layer: int, used_TK: Tensor) -> None:
        """Count what the experts were called with."""
        if self.ids_L is not None and not is_in_backward():
            self.counters.count_use(self.given(layer, used_TK), used_TK)

    def given(self, layer: int, like_TK: Tensor) -> Tensor:
        """[T, K] ids given to one layer, or an error if they are for other tokens."""
        assert self.ids_L is not None, "only a turn that replays has ids"
        given_TK = self.ids_L[layer]
        if given_TK.shape != like_TK.shape:
            raise RoutesError(
                f"MoE layer index {layer}: ids were given for {list(given_TK.shape)} tokens and choices, the router "
                f"saw {list(like_TK.shape)}; give one row per token, padding too, in the order of the flattened batch"
            )
        return given_TK


def known_tokens(ids_TK: Tensor) -> Tensor:
    """[T] bool, whether a token's experts are all given."""
    return (ids_TK >= 0).all(dim=1)


def is_in_backward() -> bool:
    """Whether this runs inside autograd's backward, as the second forward of activation checkpointing does."""
    return _TRACKER.is_bw


def check_ids(ids: RouteIds, *, model: ModelShape, device: Any) -> tuple[Tensor, ...]:
    """Return ids per layer on `device`, or an error naming the layer that does not fit the model."""
    if len(ids) != model.layers:
        raise RoutesError(f"ids were given for {len(ids)} MoE layers; {model.name!r} has {model.layers}")
    return tuple(_check_layer(torch.as_tensor(ids[n]), n, model).to(device) for n in range(model.layers))


def _check_layer(ids_TK: Tensor, layer: int, model: ModelShape) -> Tensor:
    if ids_TK.ndim != 2 or ids_TK.shape[1] != model.top_k or ids_TK.is_floating_point():
        raise RoutesError(
            f"MoE layer index {layer}: ids have shape {list(ids_TK.shape)} and dtype {ids_TK.dtype}; "
            f"give integers [T, {model.top_k}]"
        )
    ids_TK = ids_TK.to(torch.int64)
    if ids_TK.numel() and (int(ids_TK.min()) < -1 or int(ids_TK.max()) >= model.experts):
        bad = int(ids_TK.min()) if int(ids_TK.min()) < -1 else int(ids_TK.max())
        raise RoutesError(
            f"MoE layer index {layer}: expert {bad} does not exist; ids are 0..{model.experts - 1}, or -1 where the "
            "model shall route itself"
        )
    return ids_TK

"""What adapters share: replay of routes, micro-batches, windows, experts cut to their owners, a trainer's options.

An adapter is a module with `inspect` (find MoE layers and what is unsupported), `install` (put balanced experts in
their place, or refuse on every rank), `uninstall` (restore the model exactly), `routes_from` and `schedule_from`.

A `ForwardPass` is made once per forward pass and given to every layer call, so that a layer that is computed again in
backward finds the same routes, whichever pass is current then. Rows are in the order in which a router sees them: the
batch flattened, sample after sample, padding included.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.module_tracker import ModuleTracker

from equipoise.core import ModelShape, PaddingPolicy, Piece, RoutesError, SampleRoutes, Schedule, ScheduleError, Stage
from equipoise.core.cluster import presets_like
from equipoise.core.errors import AdapterError
from equipoise.core.options import BalancerOptions
from equipoise.planning.rows import FreeTokens

_TRACKER = ModuleTracker()
"""Tells whether a backward pass is running; it tracks nothing."""

FILL = "fill_free_rows"
"""The option of trainers that asks windows to fill rows that reach no loss."""

RouteIds: TypeAlias = Tensor | Sequence[Any]
"""[L, T, K] ids as one tensor or array, or one [T, K] per MoE layer; -1 where the model routes itself."""


@dataclass(slots=True)
class ReplayCounters:
    """Counts of replayed rows, kept on the device; reading one synchronizes."""

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
class ForwardPass:
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
        assert self.ids_L is not None, "only a pass that replays has ids"
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
    """Return whether this runs inside autograd's backward, as the second forward of activation checkpointing does."""
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroBatch:
    """One rank's micro-step: samples side by side with padding, or one behind the other in a single packed row."""

    input_ids: Any
    """[B, S] token ids as the model gets them."""
    samples: tuple[int, ...]
    """Number of each sample among those of the step, in order of the batch."""
    lengths: tuple[int, ...]
    """Tokens of each sample that are forwarded."""
    routes: tuple[SampleRoutes | None, ...] = ()
    """The recorded routes of each sample; None or left out: unknown."""
    starts: tuple[int, ...] = ()
    """First forwarded token of each sample; left out: 0."""
    attention_mask: Any = None
    """[B, S] true at tokens, false at padding; None: padding is at the end of each row."""
    padding_policy: PaddingPolicy = "arange"
    """Which experts padding rows get: `arange`, `first`, `unknown` (the model routes them itself), or `spread`: none
    here, the least loaded ones in a window that is given `free_tokens`."""

    def __post_init__(self) -> None:
        for name in ("lengths", "routes", "starts"):
            given = getattr(self, name)
            if given and len(given) != len(self.samples):
                raise ScheduleError(f"{name} names {len(given)} samples, the micro-batch has {len(self.samples)}")
        tokens = int(self.token_BS.sum())
        if tokens != sum(self.lengths):
            raise ScheduleError(
                f"lengths add up to {sum(self.lengths)} tokens, the attention mask shows {tokens}; give the number of "
                "tokens that are forwarded"
            )

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the batch."""
        rows, columns = np.shape(self.input_ids)
        return rows, columns

    @property
    def token_BS(self) -> np.ndarray:
        """[B, S] bool, where tokens are."""
        if self.attention_mask is not None:
            return np.asarray(self.attention_mask).astype(bool)
        rows, columns = self.shape
        if rows == len(self.lengths):
            return np.arange(columns)[None, :] < np.asarray(self.lengths)[:, None]
        return (np.arange(rows * columns) < sum(self.lengths)).reshape(rows, columns)

    @property
    def num_padding(self) -> int:
        """Padding tokens that are forwarded and dispatched."""
        return self.token_BS.size - sum(self.lengths)

    def pieces(self, *, micro_step: int, rank: int) -> list[Piece]:
        """The samples' token ranges, as a schedule lists them."""
        starts = self.starts or (0,) * len(self.samples)
        ranges = zip(self.samples, starts, self.lengths, strict=True)
        return [Piece(sample, start, start + length, micro_step, rank) for sample, start, length in ranges if length]


def routes_from(batch: MicroBatch, *, model: ModelShape) -> np.ndarray:
    """Lay out the recorded routes of a micro-batch as its router will see the tokens.

    Returns: [L, T, K] int64 ids, T = B x S; -1 where a route is unknown
    """
    ids_TLK = np.full((batch.token_BS.size, model.layers, model.top_k), -1, dtype=np.int64)
    is_token_T = batch.token_BS.reshape(-1)
    known = [_sample_rows(batch, index, model) for index in range(len(batch.samples))]
    if known:
        ids_TLK[is_token_T] = np.concatenate(known)
    ids_TLK[~is_token_T] = _padding_rows(batch, model)
    return ids_TLK.transpose(1, 0, 2)


def free_tokens(batch: MicroBatch) -> np.ndarray:
    """Mark the rows of a micro-batch that reach no loss where attention is causal: padding, and samples' last tokens.

    Returns: [T] bool, T = B x S, for a window's `free`; a sample without routes is not known to end
    """
    is_last = []
    for index, length in enumerate(batch.lengths):
        routes, start = batch.routes[index] if batch.routes else None, batch.starts[index] if batch.starts else 0
        ends = routes is not None and start + length == routes.num_tokens
        is_last.append((np.arange(length) == length - 1) & ends)
    is_token_T = batch.token_BS.reshape(-1)
    is_free_T = ~is_token_T
    is_free_T[is_token_T] = np.concatenate([*is_last, np.zeros(0, dtype=np.bool_)])
    return is_free_T


def schedule_from(batches: Sequence[Sequence[MicroBatch]], *, stage: Stage = "update") -> Schedule:
    """Describe a trainer's own micro-batches as a schedule.

    Args:
        batches: batches[m][r] is forwarded by rank r in micro-step m
    """
    ranks = {len(by_rank) for by_rank in batches}
    if len(ranks) != 1:
        raise ScheduleError(f"micro-steps have batches for {sorted(ranks)} ranks; give one of every rank in each")
    pieces = [
        piece
        for m, by_rank in enumerate(batches)
        for r, batch in enumerate(by_rank)
        for piece in batch.pieces(micro_step=m, rank=r)
    ]
    policies = {batch.padding_policy for by_rank in batches for batch in by_rank}
    if len(policies) != 1:
        raise ScheduleError(f"micro-batches pad in different ways, {sorted(policies)}; use one padding_policy")
    padding_MR = np.array([[batch.num_padding for batch in by_rank] for by_rank in batches])
    return Schedule.of(
        pieces,
        ranks=ranks.pop(),
        stage=stage,
        micro_steps=len(batches),
        padding_MR=padding_MR,
        padding_policy=policies.pop(),
    )


def _sample_rows(batch: MicroBatch, index: int, model: ModelShape) -> np.ndarray:
    """[T, L, K] ids of one sample's forwarded tokens."""
    start, length = batch.starts[index] if batch.starts else 0, batch.lengths[index]
    routes = batch.routes[index] if batch.routes else None
    if routes is None:
        return np.full((length, model.layers, model.top_k), -1, dtype=np.int64)
    if routes.ids_TLK.shape[1:] != (model.layers, model.top_k):
        raise RoutesError(
            f"sample {routes.name!r}: routes have layers and choices {routes.ids_TLK.shape[1:]}, {model.name!r} has "
            f"{(model.layers, model.top_k)}"
        )
    routes.check_ids(model.experts)
    return routes.token_ids(start, start + length)


def _padding_rows(batch: MicroBatch, model: ModelShape) -> np.ndarray:
    """[P, L, K] ids of the padding tokens, as `loads.filling` counts them."""
    shape = (batch.num_padding, model.layers, model.top_k)
    if batch.padding_policy in ("unknown", "spread"):
        return np.full(shape, -1)
    if batch.padding_policy == "first":
        return np.broadcast_to(np.arange(model.top_k), shape)
    place_PL = np.arange(batch.num_padding)[:, None] * model.hidden_layers + np.array(model.layer_numbers)
    return (place_PL[:, :, None] * model.top_k + np.arange(model.top_k)) % model.experts


def cut(full: Tensor, group: Any) -> Tensor:
    """Return a copy of the experts this rank owns, [E / R, ...]."""
    owned = full.shape[0] // dist.get_world_size(group)
    return full.detach()[dist.get_rank(group) * owned :][:owned].clone()


def gather(shard: Tensor, group: Any, *, to: int | None = None) -> Tensor | None:
    """Concatenate the owners' experts, [E, ...]. Every rank of `group` must call this.

    Args:
        shard: [E / R, ...] experts this rank owns, or anything else kept per owned expert
        to: the only rank of the group that gets the result; None: every rank does

    Returns: [E, ...] on the shard's device, or None on a rank that gets nothing
    """
    # As bytes and on the host: gloo moves neither every dtype nor every device.
    mine = shard.detach().contiguous().cpu().flatten().view(torch.uint8)
    is_target = to in (None, dist.get_rank(group))
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))] if is_target else None
    if to is None:
        dist.all_gather(parts, mine, group=group)
    else:
        dist.gather(mine, parts, dst=dist.get_global_rank(group, to), group=group)
    if parts is None:
        return None
    full = torch.cat(parts).view(shard.dtype)
    return full.view(-1, *shard.shape[1:]).to(shard.device)


class Windowed(ABC):
    """A handle whose windows go around a `with` block; one that is left with an error ends on all ranks of the node."""

    @abstractmethod
    def submit(self, routes: Any, *, stage: Stage = "update", free: FreeTokens | None = None) -> None:
        """Plan the next window in the background. Every rank must call this."""

    @abstractmethod
    def begin(self) -> None:
        """Begin the window that was submitted first. Every rank must call this."""

    @abstractmethod
    def end(self) -> None:
        """End the window: gradients go to their owners."""

    @abstractmethod
    def abort(self, reason: str) -> None:
        """Give up the open window, on all ranks of the node: uninstall, load a checkpoint and install again."""

    @contextmanager
    def window(self, routes: Any = None, *, stage: Stage = "update", free: FreeTokens | None = None) -> Iterator[None]:
        """Begin and end a window around a `with` block; submits `routes` first where given."""
        if routes is not None:
            self.submit(routes, stage=stage, free=free)
        self.begin()
        try:
            yield
        except BaseException as error:
            self.abort(f"left the window with an error: {error!r}")
            raise
        self.end()


def check_group(group: Any, *, advice: str) -> None:
    """Refuse an EP group without a CPU backend: plans and counts are exchanged between CPUs.

    Args:
        advice: when this framework needs the process group to be made
    """
    try:
        group._get_backend(torch.device("cpu"))
    except RuntimeError as error:
        raise AdapterError(
            "the EP group cannot move CPU tensors; call torch.distributed.init_process_group with "
            f"backend='cpu:gloo,cuda:nccl' {advice} ({error})"
        ) from error


def fills_free(given: Mapping[str, Any]) -> bool:
    """Return whether a trainer's configuration says under `equipoise` that windows fill rows that reach no loss."""
    value = given.get(FILL, False)
    if not isinstance(value, bool):
        raise AdapterError(f"equipoise.{FILL} is {value!r}; give true or false")
    return value


def trainer_options(given: Mapping[str, Any], *, example: str) -> tuple[str, BalancerOptions]:
    """Return the cluster preset and the options of what a trainer's configuration says under `equipoise`.

    Args:
        given: `cluster`, by default a preset of this GPU, what `fills_free` reads, and fields of `BalancerOptions`
        example: how a user of this trainer names a cluster
    """
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    preset = given.get("cluster") or next(iter(presets_like(device)), None)
    if preset is None:
        raise AdapterError(f"no cluster preset is made of {device}; give one as {example}")
    options = {name: value for name, value in given.items() if name not in ("cluster", FILL)}
    unknown = sorted(set(options) - {field.name for field in fields(BalancerOptions)})
    if unknown:
        raise AdapterError(f"equipoise.{unknown[0]} is no option; give cluster, {FILL} and fields of BalancerOptions")
    return preset, BalancerOptions(**options)

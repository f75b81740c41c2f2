"""What adapters share that hook into a model: how a forward pass reaches its layers, and windows over working copies.

    LayerHooks    one decoder layer: finds its forward pass, enters home weights, hands rows to the balanced experts
    Passes        names, replays and records the forward passes of a model
    CopiedMoE     one MoE layer whose framework shards experts: in windows they compute on a working copy
    CopyHandle    all of them: begin, end and leave windows, uninstall

A forward pass travels as a keyword argument, bound outside whatever is checkpointed, so that a layer that is computed
again in backward finds the micro-step and the routes of its own pass.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

from torch import Tensor, nn

from equipoise.adapters.protocol import ForwardPass, Recorded, ReplayCounters, RouteIds, Windowed, check_ids
from equipoise.balancer import Balancer
from equipoise.core import ModelShape, Stage
from equipoise.core.errors import AdapterError
from equipoise.core.plan import Visit
from equipoise.layer.experts import BalancedExperts
from equipoise.planning.rows import FreeTokens, WindowRoutes
from equipoise.planning.worker import PlanWorker
from equipoise.transfer.node import ExpertWeights

FORWARD_PASS = "equipoise_forward_pass"
"""The keyword argument that carries a forward pass to the layers."""


class LayerHooks:
    """The hooks of one decoder layer, and the forward pass it is in."""

    def __init__(self, *, index: int | None) -> None:
        """Serve one layer.

        Args:
            index: of the MoE layer in plans and routes; None for a dense layer
        """
        self.index = index
        self.current: ForwardPass | None = None
        self.balanced: BalancedExperts | None = None
        """The balanced experts of the layer, where they are to compute."""
        self._home: ExpertWeights | None = None

    def enter(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Before the decoder layer: take the pass, and enter the home weights before attention."""
        self.current = kwargs.pop(FORWARD_PASS, None)
        if self.balanced is not None:
            self._home = self.balanced.enter(self._visit())
        return args, kwargs

    def choose(self, own_TK: Tensor) -> Tensor | None:
        """After the router: return the ids that replace its own; None where they stay."""
        if self.current is None or self.index is None:
            return None
        ids_TK = self.current.choose(self.index, own_TK)
        return None if ids_TK is own_TK else ids_TK

    def count_use(self, ids_TK: Tensor) -> None:
        """Before the experts: count the ids that reached them."""
        if self.current is not None and self.index is not None:
            self.current.use(self.index, ids_TK)

    def _visit(self) -> Visit:
        if self.current is None or self.current.micro_step is None or self.index is None:
            raise AdapterError(
                f"MoE layer index {self.index} was called outside a micro-step; put `with handle.micro_step(m, ...):` "
                "around the model's forward, inside a window of the balancer"
            )
        return Visit(self.current.micro_step, "forward", self.index)

    def _take_home(self) -> ExpertWeights | None:
        """Return what `enter` entered, once."""
        home, self._home = self._home, None
        return home


class Passes:
    """Names the forward passes of one model, for the layers that are hooked."""

    def __init__(
        self, model: nn.Module, *, shape: ModelShape, before_forward: Callable[[], None] | None = None
    ) -> None:
        """
        Args:
            before_forward: called at the beginning of every forward of a micro-step
        """
        self.counters = ReplayCounters()
        self._model, self._shape, self._before_forward = model, shape, before_forward
        self._current: ForwardPass | None = None
        self._removers: list[Any] = []

    @contextmanager
    def forward_pass(
        self, micro_step: int | None, *, ids: RouteIds | None = None, record: bool = False
    ) -> Iterator[Any]:
        """Name the forward passes of a `with` block; gives a `Recorded` where asked to record, else None."""
        if self._current is not None:
            raise AdapterError("a forward pass is being replayed or recorded already; leave that `with` block first")
        recorded = Recorded(self._shape.layers) if record else None
        device = next(self._model.parameters()).device
        ids_L = None if ids is None else check_ids(ids, model=self._shape, device=device)
        self._current = ForwardPass(counters=self.counters, micro_step=micro_step, ids_L=ids_L, recorded=recorded)
        try:
            yield recorded
        finally:
            self._current = None

    def replay(self, ids: RouteIds, *, record: bool = False) -> Any:
        """`with routers.replay(ids):` every forward in the block uses these ids, see `RouteIds`."""
        return self.forward_pass(None, ids=ids, record=record)

    def record(self) -> Any:
        """`with routers.record() as recorded:` keeps what the model chooses."""
        return self.forward_pass(None, record=True)

    def hooked(self, *removers: Any) -> None:
        """Note hooks that `unwrap` is to take out."""
        self._removers += removers

    def unwrap(self) -> None:
        """Take the hooks out; a backward that recomputes layers must be over. Unwrapping twice is allowed."""
        for remover in self._removers:
            remover.remove()
        self._removers = []

    def start(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Before the decoder layers, or each of them: pass the current forward pass on with the data."""
        if self._current is None:
            return args, kwargs
        if self._before_forward is not None:
            self._before_forward()
        return args, {**kwargs, FORWARD_PASS: self._current}


class CopiedMoE(ABC):
    """One MoE layer whose framework keeps experts sharded, and the balanced experts that compute in windows."""

    copy: BalancedExperts
    """Computes on a working copy of this rank's experts."""

    @abstractmethod
    def put(self) -> None:
        """Take the framework's place; outside windows it is called as before."""

    @abstractmethod
    def restore(self) -> None:
        """Give the framework its place back."""

    @abstractmethod
    def check(self, model: nn.Module, path: str) -> None:
        """Raise if something else than this would compute at its place, `path`, in the model."""

    @abstractmethod
    def fill(self) -> None:
        """Copy this rank's experts, as they are now, to the working copy. Every rank must call this."""

    @abstractmethod
    def begin(self) -> None:
        """Compute with balanced experts from now on."""

    @abstractmethod
    def leave(self) -> None:
        """Compute as the framework does from now on."""

    @abstractmethod
    def end(self) -> None:
        """Leave, and hand the window's gradients to the framework's parameters. Every rank must call this."""

    @property
    def extra_bytes(self) -> int:
        """Bytes of the working copy."""
        return sum(tensor.nbytes for tensor in self.copy.home.tensors())


class CopyHandle(Windowed):
    """A sharded model whose experts are balanced in windows, on working copies, seen from one rank."""

    KEPT: ClassVar[str]
    """Attribute of an installed model that holds its handle."""

    def __init__(
        self, model: nn.Module, layers: Mapping[str, CopiedMoE], *, routers: Passes, balancer: Balancer
    ) -> None:
        """
        Args:
            layers: by module path, in the order of plans
        """
        self.model, self.routers, self.balancer = model, routers, balancer
        self._layers = dict(layers)
        self._is_failed = False

    def put(self, worker: PlanWorker | None) -> None:
        """Attach the balancer, then change the model, which cannot fail."""
        self.balancer.attach({path: layer.copy for path, layer in self._layers.items()}, worker=worker)
        for layer in self._layers.values():
            layer.put()
        setattr(self.model, self.KEPT, self)

    @property
    def counters(self) -> ReplayCounters:
        """Router calls and replayed rows so far."""
        return self.routers.counters

    @property
    def extra_bytes(self) -> Mapping[str, int]:
        """Bytes of this rank beyond what the framework holds, by what they are for."""
        copies = sum(layer.extra_bytes for layer in self._layers.values())
        moving = {"balancer": self.balancer.extra_bytes, "rows in place of all-to-all": self.balancer.row_bytes}
        return {"working copy of the weights": copies, **moving}

    def micro_step(self, micro_step: int, *, ids: RouteIds | None = None, record: bool = False) -> Any:
        """Wrap the forward pass of one micro-step in a `with` block; backward may run later, also checkpointed.

        Args:
            micro_step: its number in the window
            ids: what this rank's tokens replay, see `RouteIds`; None: the model routes itself
            record: give a `Recorded`, which then holds the ids that were used
        """
        return self.routers.forward_pass(micro_step, ids=ids, record=record)

    def submit(self, routes: WindowRoutes, *, stage: Stage = "update", free: FreeTokens | None = None) -> None:
        """Plan the next window in the background. Every rank must call this.

        Args:
            routes: routes[m] are the ids [L, T, K] that this rank replays in micro-step m; -1 where unknown
            free: as `Balancer.submit` takes it
        """
        self.balancer.submit(routes, stage=stage, free=free)

    def begin(self) -> None:
        """Begin the window that was submitted first. Every rank must call this."""
        if self._is_failed:
            raise AdapterError("a window was left with an error; uninstall, load a checkpoint and install again")
        if self.balancer.is_open:
            raise AdapterError("a window is open; end it before the next begins")
        for path, layer in self._layers.items():
            layer.check(self.model, path)
        for layer in self._layers.values():
            layer.fill()
        # A working copy need not return: the sharded parameters stay at their owners.
        self.balancer.begin(with_weights=False)
        for layer in self._layers.values():
            layer.begin()

    def end(self) -> None:
        """End the window: gradients go to their owners and into `grad` of the sharded parameters."""
        self.balancer.end()
        for layer in self._layers.values():
            layer.end()

    def abort(self, reason: str) -> None:
        """Give up the open window, on all ranks of the node: uninstall, load a checkpoint and install again."""
        self._is_failed = True
        for layer in self._layers.values():
            layer.leave()
        self.balancer.abort(reason)

    def uninstall(self) -> None:
        """Restore the model and free what was added. Every rank must call this, with no window open."""
        if self.balancer.is_open and not self._is_failed:
            raise AdapterError("cannot uninstall: a window of the balancer is open; end it first")
        self.routers.unwrap()
        for layer in self._layers.values():
            layer.restore()
        delattr(self.model, self.KEPT)
        self.balancer.close()

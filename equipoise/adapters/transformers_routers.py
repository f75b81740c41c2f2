"""`Routers` wraps the routers of one transformers model for record and replay: ids are replaced, gates are live.

How a forward pass reaches a layer, also when the layer is computed again in backward:
1. A pre-hook of the module that holds the decoder layers adds the current pass to the keyword arguments, which every
   decoder layer gets. `GradientCheckpointingLayer` binds them outside the function that it checkpoints.
2. A pre-hook of each decoder layer takes the pass out again, so that attention never sees it.
3. A hook of the router replaces ids, and gates by those of the new ids; a pre-hook of the experts counts their use.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from equipoise.adapters.protocol import ForwardPass, Recorded, ReplayCounters, RouteIds, check_ids
from equipoise.adapters.transformers_model import FAMILIES, Family, Found, inspect
from equipoise.core.errors import AdapterError
from equipoise.core.plan import Visit
from equipoise.layer.experts import BalancedExperts
from equipoise.transfer.node import ExpertWeights

FORWARD_PASS = "equipoise_forward_pass"
"""The keyword argument that carries a forward pass to the layers."""


class LayerHooks:
    """The hooks of one decoder layer, and the forward pass it is in."""

    def __init__(self, family: Family, *, index: int | None) -> None:
        """Serve one layer.

        Args:
            index: of the MoE layer in plans and routes; None for a dense layer
        """
        self._family, self.index = family, index
        self.current: ForwardPass | None = None
        self.balanced: BalancedExperts | None = None
        """The balanced experts of the layer, where they are installed."""
        self._home: ExpertWeights | None = None

    def enter(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Before the decoder layer: take the pass, and enter the home weights before attention."""
        self.current = kwargs.pop(FORWARD_PASS, None)
        if self.balanced is not None:
            self._home = self.balanced.enter(self._visit())
        return args, kwargs

    def route(self, module: nn.Module, args: Any, output: tuple[Tensor, Tensor, Tensor]) -> Any:
        """After the router: replace its ids by those of the pass, with gates from the live logits."""
        if self.current is None or self.index is None:
            return None
        logits_TE, _, own_TK = output
        ids_TK = self.current.choose(self.index, own_TK)
        if ids_TK is own_TK:
            return None
        return logits_TE, self._family.gates(module, logits_TE, ids_TK), ids_TK

    def use(self, module: nn.Module, args: tuple[Tensor, Tensor, Tensor]) -> None:
        """Before the experts: count the ids that reached them."""
        if self.current is not None and self.index is not None:
            self.current.use(self.index, args[1])

    def compute(self, hidden_TD: Tensor, ids_TK: Tensor, gates_TK: Tensor) -> Tensor:
        """In place of the experts' own function: apply the balanced experts."""
        assert self.balanced is not None, "chosen only where balanced experts are installed"
        home, self._home = self._home, None
        return self.balanced(hidden_TD, ids_TK, gates_TK, self._visit(), home=home)

    def _visit(self) -> Visit:
        if self.current is None or self.current.micro_step is None or self.index is None:
            raise AdapterError(
                f"MoE layer index {self.index} was called outside a micro-step; put `with handle.micro_step(m, ...):` "
                "around the model's forward, inside a window of the balancer"
            )
        return Visit(self.current.micro_step, "forward", self.index)


class Routers:
    """The wrapped routers of one model."""

    def __init__(
        self, model: nn.Module, *, found: Found | None = None, before_forward: Callable[[], None] | None = None
    ) -> None:
        """Hook into the model; `unwrap` takes the hooks out.

        Args:
            before_forward: called at the beginning of every forward of a micro-step
        """
        self.found = found or inspect(model)
        self.counters = ReplayCounters()
        self._model, self._before_forward = model, before_forward
        self._current: ForwardPass | None = None
        family, base = FAMILIES[self.found.family], model.get_submodule(self.found.base_path)
        by_path = {layer.path: layer for layer in self.found.layers}
        self._removers = [base.register_forward_pre_hook(self._start, with_kwargs=True)]
        self.layers: list[LayerHooks] = []
        prefix = f"{self.found.base_path}." if self.found.base_path else ""
        for number, module in enumerate(base.layers):
            path = f"{prefix}layers.{number}"
            is_moe = path in by_path
            layer = LayerHooks(family, index=len(self.layers) if is_moe else None)
            self._removers.append(module.register_forward_pre_hook(layer.enter, with_kwargs=True))
            if is_moe:
                self.layers.append(layer)
                router = model.get_submodule(by_path[path].router_path)
                experts = model.get_submodule(by_path[path].experts_path)
                self._removers.append(router.register_forward_hook(layer.route, prepend=True))
                self._removers.append(experts.register_forward_pre_hook(layer.use))

    @contextmanager
    def forward_pass(
        self, micro_step: int | None, *, ids: RouteIds | None = None, record: bool = False
    ) -> Iterator[Any]:
        """Name the forward passes of a `with` block; gives a `Recorded` where asked to record, else None."""
        if self._current is not None:
            raise AdapterError("a forward pass is being replayed or recorded already; leave that `with` block first")
        recorded = Recorded(len(self.layers)) if record else None
        device = next(self._model.parameters()).device
        ids_L = None if ids is None else check_ids(ids, model=self.found.shape, device=device)
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

    def unwrap(self) -> None:
        """Take the hooks out; a backward that recomputes layers must be over. Unwrapping twice is allowed."""
        for remover in self._removers:
            remover.remove()
        self._removers = []

    def _start(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Before the decoder layers: pass the current forward pass on with the data."""
        if self._current is None:
            return args, kwargs
        if self._before_forward is not None:
            self._before_forward()
        return args, {**kwargs, FORWARD_PASS: self._current}


def wrap_routers(model: nn.Module) -> Routers:
    """Wrap the routers of a model whose experts stay as they are; `Routers.unwrap` undoes it."""
    return Routers(model)


@contextmanager
def record(model: nn.Module) -> Iterator[Recorded]:
    """Record what the routers of a model choose; a generation with KV cache adds rows call by call."""
    routers = Routers(model)
    try:
        with routers.record() as recorded:
            yield recorded
    finally:
        routers.unwrap()


@contextmanager
def replay(model: nn.Module, ids: RouteIds) -> Iterator[ReplayCounters]:
    """Replay given ids in a model whose experts stay as they are."""
    layers = model.base_model.layers if hasattr(model, "base_model") else ()
    if model.training and any(getattr(layer, "gradient_checkpointing", False) for layer in layers):
        raise AdapterError(
            "under gradient checkpointing backward needs the routes again: use wrap_routers(model), and unwrap() when "
            "backward is over"
        )
    routers = Routers(model)
    try:
        with routers.replay(ids):
            yield routers.counters
    finally:
        routers.unwrap()

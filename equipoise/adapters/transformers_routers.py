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

from equipoise.adapters.hooks import LayerHooks, Passes
from equipoise.adapters.protocol import Recorded, ReplayCounters, RouteIds
from equipoise.adapters.transformers_model import FAMILIES, Family, Found, inspect
from equipoise.core.errors import AdapterError


class RouterHooks(LayerHooks):
    """The hooks of one decoder layer of a family of transformers."""

    def __init__(self, family: Family, *, index: int | None) -> None:
        """
        Args:
            index: of the MoE layer in plans and routes; None for a dense layer
        """
        super().__init__(index=index)
        self._family = family

    def route(self, module: nn.Module, args: Any, output: tuple[Tensor, Tensor, Tensor]) -> Any:
        """After the router: replace its ids by those of the pass, with gates from the live logits."""
        logits_TE, _, own_TK = output
        ids_TK = self.choose(own_TK)
        return None if ids_TK is None else (logits_TE, self._family.gates(module, logits_TE, ids_TK), ids_TK)

    def use(self, module: nn.Module, args: tuple[Tensor, Tensor, Tensor]) -> None:
        """Before the experts: count the ids that reached them."""
        # Outside forward passes a sharded model calls its experts without arguments.
        if self.current is not None:
            self.count_use(args[1])

    def compute(self, hidden_TD: Tensor, ids_TK: Tensor, gates_TK: Tensor) -> Tensor:
        """In place of the experts' own function: apply the balanced experts."""
        assert self.balanced is not None, "chosen only where balanced experts are installed"
        return self.balanced(hidden_TD, ids_TK, gates_TK, self._visit(), home=self._take_home())


class Routers(Passes):
    """The wrapped routers of one model."""

    def __init__(
        self, model: nn.Module, *, found: Found | None = None, before_forward: Callable[[], None] | None = None
    ) -> None:
        """Hook into the model; `unwrap` takes the hooks out.

        Args:
            before_forward: called at the beginning of every forward of a micro-step
        """
        self.found = found or inspect(model)
        super().__init__(model, shape=self.found.shape, before_forward=before_forward)
        family, base = FAMILIES[self.found.family], model.get_submodule(self.found.base_path)
        by_path = {layer.path: layer for layer in self.found.layers}
        self.hooked(base.register_forward_pre_hook(self.start, with_kwargs=True))
        self.layers: list[RouterHooks] = []
        prefix = f"{self.found.base_path}." if self.found.base_path else ""
        for number, module in enumerate(base.layers):
            path = f"{prefix}layers.{number}"
            is_moe = path in by_path
            layer = RouterHooks(family, index=len(self.layers) if is_moe else None)
            self.hooked(module.register_forward_pre_hook(layer.enter, with_kwargs=True))
            if is_moe:
                self.layers.append(layer)
                router = model.get_submodule(by_path[path].router_path)
                experts = model.get_submodule(by_path[path].experts_path)
                self.hooked(router.register_forward_hook(layer.route, prepend=True))
                self.hooked(experts.register_forward_pre_hook(layer.use))


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

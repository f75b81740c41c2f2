"""From the layer axis of a wire to global layer numbers: named by the recording, or told by its length.

Knows the model's layers. Does not know rows.

Invariants (asserted by the tests):
1. An unnamed axis has all decoder layers or the MoE layers; any other length is an error that names the numbers.
2. A named axis may have some of the model's layers, in any order.
3. Dense layers are set apart, hash-routed layers are kept, MTP layers are never part of a recording.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from equipoise.core import ModelShape, RoutesError
from equipoise.routes.recording import Recording


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerMap:
    """From the wire's layer axis to global layer numbers."""

    numbers: tuple[int, ...]
    """Global numbers of the MoE layers on the wire, ascending: the L axis of the routes."""
    wire_L: tuple[int, ...]
    """Place of each of them on the wire."""
    dense: tuple[tuple[int, int], ...] = ()
    """(place, global number) of the dense layers on the wire; they hold no routes."""


def map_recording(recording: Recording, model: ModelShape) -> LayerMap:
    """Map the layer axis of one recording; errors name its sample."""
    try:
        if recording.layer_numbers is None:
            return map_layers(recording.rows.shape[1], model)
        return map_named_layers(recording.layer_numbers, model)
    except RoutesError as error:
        raise RoutesError(f"sample {recording.name!r}: {error}") from error


def map_layers(num_wire_layers: int, model: ModelShape) -> LayerMap:
    """Map a wire's unnamed layer axis by its length: all decoder layers, or the MoE layers in order."""
    if num_wire_layers == model.hidden_layers:
        return map_named_layers(range(num_wire_layers), model)
    if num_wire_layers == model.layers:
        return map_named_layers(model.layer_numbers, model)
    hint = "a capture of some layers only, such as one pipeline stage's, must name them"
    if model.mtp_layers and num_wire_layers - model.mtp_layers in (model.hidden_layers, model.layers):
        hint = f"are the {model.mtp_layers} MTP layers in it? They are never part of recorded routes: cut them off"
    raise RoutesError(
        f"{num_wire_layers} layers on the wire; {model.name!r} has {model.hidden_layers} decoder layers, "
        f"{model.layers} of them MoE; {hint}"
    )


def map_named_layers(numbers: Sequence[int], model: ModelShape) -> LayerMap:
    """Map a wire's layer axis whose global layer numbers are known; they may be some of the model's layers."""
    strangers = sorted(n for n in set(numbers) if not 0 <= n < model.hidden_layers)
    if strangers or len(set(numbers)) != len(numbers):
        wrong = f"layer {strangers[0]}" if strangers else "a layer twice"
        raise RoutesError(
            f"the recording names {wrong}; {model.name!r} has decoder layers 0..{model.hidden_layers - 1}"
        )
    moe = set(model.layer_numbers)
    kept = sorted((number, place) for place, number in enumerate(numbers) if number in moe)
    if not kept:
        raise RoutesError(f"the recording names no MoE layer of {model.name!r}, only {sorted(numbers)}")
    return LayerMap(
        numbers=tuple(number for number, _ in kept),
        wire_L=tuple(place for _, place in kept),
        dense=tuple((place, number) for place, number in enumerate(numbers) if number not in moe),
    )

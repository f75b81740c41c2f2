"""A model's figures as JSON content and back."""

import json

import pytest

from equipoise.core import ModelShape, TopologyError
from equipoise.core.model import preset_names


@pytest.mark.parametrize("name", preset_names())
def test_figures_through_json_make_the_shape_again(name):
    shape = ModelShape.preset(name)
    assert ModelShape.from_figures(json.loads(json.dumps(shape.figures()))) == shape


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"colour": 1}, "'colour' is unknown"),
        ({"experts": "8"}, "experts must be a whole number"),
        ({"layer_numbers": 3}, "layer_numbers must be a list"),
        ({"hash_layers": ["0"]}, "hash_layers must be a whole number"),
        ({"name": None}, "name must be str"),
        ({"expert_bias": 1}, "expert_bias must be bool"),
    ],
    ids=lambda v: v if isinstance(v, str) else next(iter(v)),
)
def test_wrong_figures_are_named(change, message):
    with pytest.raises(TopologyError, match=message):
        ModelShape.from_figures({**ModelShape.preset("olmoe").figures(), **change})


def test_a_missing_figure_is_named():
    figures = ModelShape.preset("olmoe").figures()
    del figures["hidden"]
    with pytest.raises(TopologyError, match="'hidden' is missing"):
        ModelShape.from_figures(figures)

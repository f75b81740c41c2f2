"""Tiny models, routes with unknown rows, and the round trip that every engine form must survive."""

import numpy as np

from equipoise.core import ModelShape, Routes, SampleRoutes, Segment
from equipoise.routes.interpret import interpret
from equipoise.routes.source import Source
from tests.routes.writers import write_form


def model_of(*, experts=8, top_k=2, layer_numbers=(1, 2), hidden_layers=3):
    return ModelShape(
        name="tiny",
        experts=experts,
        top_k=top_k,
        layer_numbers=layer_numbers,
        hidden_layers=hidden_layers,
        hidden=16,
        expert_width=8,
    )


def read(form, dump, model):
    return list(form.read(Source.of(dump), model))


def round_trip(form, routes, path):
    write_form(form, routes, path)
    assert form.matches(Source.of(path))
    stream = interpret(form.read(Source.of(path), routes.model), model=routes.model)
    return Routes.of(list(stream), model=routes.model, layer_numbers=stream.layer_numbers)


def distinct_ids(rng, rows, model):
    scores = rng.random((rows, model.layers, model.experts))
    return np.argsort(scores, axis=2)[:, :, : model.top_k].astype(np.uint16)


def routes_of(model, *, tokens=True, unknown=True, segments=False, seed=0):
    rng = np.random.default_rng(seed)
    samples = []
    for b, rows in enumerate((5, 1, 9)):
        known = np.ones((rows, model.layers), dtype=bool)
        known[rows // 2, -1] = not unknown
        samples.append(
            SampleRoutes(
                name=f"sample {b}",
                ids_TLK=np.where(known[:, :, None], distinct_ids(rng, rows, model), 0),
                num_tokens=rows + 1,
                known_TL=None if known.all() else known,
                tokens_T=rng.integers(0, 1000, rows + 1) if tokens else None,
                segments=(Segment(start=0, stop=1, weight_version="3"), Segment(start=1, stop=rows, weight_version="4"))
                if segments and rows > 1
                else (),
            )
        )
    return Routes.of(samples, model=model)


MODELS = {
    "dense-first": model_of(),
    "all-moe": model_of(layer_numbers=(0, 1), hidden_layers=2),
    "uint16": model_of(experts=300, top_k=4),
}

"""Good recordings, and ways to break one thing in them."""

from dataclasses import replace

import numpy as np

from equipoise.core import ModelShape
from equipoise.routes.doctor.diagnosis import diagnose
from equipoise.routes.interpret import Recording

MODEL = ModelShape(
    name="small", experts=64, top_k=4, layer_numbers=(1, 2, 3), hidden_layers=4, hidden=8, expert_width=8, mtp_layers=1
)


def draw_ids(rng, shape, experts, top_k):
    """Distinct ids, uniformly drawn: [*shape, top_k]."""
    return rng.random((*shape, experts)).argpartition(top_k, axis=-1)[..., :top_k]


def good(model=MODEL, *, samples=4, tokens=100, seed=0, dtype=np.int16, layers="all"):
    """Good recordings: T-1 rows, dense layers zero, token ids, one version."""
    rng = np.random.default_rng(seed)
    recordings = []
    for i in range(samples):
        length = tokens + 7 * i
        rows = draw_ids(rng, (length - 1, model.layers), model.experts, model.top_k)
        if layers == "all":
            rows, moe = np.zeros((length - 1, model.hidden_layers, model.top_k), dtype=np.int64), rows
            rows[:, list(model.layer_numbers)] = moe
        recordings.append(
            Recording(
                name=f"s{i}",
                rows=rows.astype(dtype),
                num_tokens=length,
                tokens=rng.integers(0, 1000, length),
                weight_version="v7",
            )
        )
    return recordings


def edit(recordings, index, change):
    """A copy of the recordings in which `change` has edited the rows of one of them in place."""
    rows = recordings[index].rows.copy()
    change(rows)
    return [replace(r, rows=rows) if i == index else r for i, r in enumerate(recordings)]


def fired(recordings, model=MODEL, **kwargs):
    return diagnose(recordings, model=model, **kwargs).fired

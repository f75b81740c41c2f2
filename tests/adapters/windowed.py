"""What ranks share in the tests of models that their framework has sharded; imports no framework."""

import contextlib
import io
import runpy
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist

import equipoise.torch
from equipoise.core.errors import AdapterError


def made_routes(shape, *, step, micro_steps, tokens):
    """[micro-step] ids [L, T, K] of this rank, most of them of the first experts."""
    make = torch.Generator().manual_seed(100 * step + dist.get_rank())
    size = (micro_steps, shape.layers, tokens, shape.experts)
    return (torch.rand(size, generator=make) - torch.linspace(0.0, 2.0, shape.experts)).topk(shape.top_k).indices


def objects(model):
    """What install may change and uninstall must restore, by identity."""
    found = {}
    for path, module in model.named_modules():
        for kind in ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks"):
            # Bound methods are made anew at every look: those of one object are equal.
            found[path, kind] = list(getattr(module, kind).values())
        found[path, "parameters"] = [id(parameter) for parameter in module._parameters.values()]
        found[path, "attributes"] = {name: id(value) for name, value in vars(module).items()}
    return found


def refusal(work):
    """What an adapter says where it refuses."""
    try:
        work()
    except AdapterError as error:
        return str(error)
    return "accepted"


def run_example(group, name):
    """Run a whole file of `examples` on this rank, as the ranks that it would start; return what it prints."""
    printed = io.StringIO()
    with (
        patch.object(equipoise.torch, "run_ranks", lambda train, ranks: [train(group)]),
        contextlib.redirect_stdout(printed),
    ):
        runpy.run_path(str(Path(__file__).parents[2] / "examples" / name), run_name="__main__")
    return printed.getvalue().splitlines()

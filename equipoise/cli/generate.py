"""Generate a workload with the measured properties of real routing, where no recording is at hand.

equipoise generate --model qwen3-30b-a3b --samples 64 --tokens 2048 -o routes.eqr
equipoise generate --model deepseek-v3 --samples 16 --tokens 8192 --length-sigma 0 --seed 7 -o routes.eqr
"""

from pathlib import Path
from typing import Annotated

import typer

from equipoise.cli.options import ForceFlag, JsonFlag, find_model, refuse_existing
from equipoise.cli.output import print_json, progress, screen


def generate(
    model: Annotated[str, typer.Option("--model", help="Model preset such as qwen3-30b-a3b, or a HF config.json.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="The store to write, for example routes.eqr.")],
    samples: Annotated[int, typer.Option(help="Samples of the step.")] = 64,
    tokens: Annotated[int, typer.Option(help="Mean tokens of a sample.")] = 2048,
    length_sigma: Annotated[float, typer.Option(help="Spread of the log-normal length; 0: all equal.")] = 0.6,
    domains: Annotated[int, typer.Option(help="Kinds of prompts, each with hot experts of its own.")] = 4,
    seed: Annotated[int, typer.Option(help="Same seed, same workload.")] = 0,
    step: Annotated[int, typer.Option(help="RL step: popularity drifts with it.")] = 0,
    force: ForceFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Generate a workload like real rollouts."""
    from equipoise.cli.convert import write_store
    from equipoise.core import RoutesError
    from equipoise.core.value import require_int
    from equipoise.loads import generate_samples
    from equipoise.loads.generator import LIMITS

    refuse_existing(out, force=force)
    least, most = LIMITS["mean_tokens"]
    require_int("--tokens", tokens, low=least, high=most, error=RoutesError)
    shape = find_model(model)
    stream = generate_samples(
        shape, samples=samples, mean_tokens=tokens, length_sigma=length_sigma, domains=domains, seed=seed, step=step
    )
    with progress("generating") as show:
        written = write_store(
            out, stream, model=shape, layer_numbers=shape.layer_numbers, show=lambda done, _: show(done, samples)
        )
    screen(as_json=as_json).print(written.words())
    if as_json:
        print_json(written.to_dict())

"""Schedule a dump and count the loads of every window: what the planner takes.

equipoise loads routes.eqr --ep 32 --schedule tokens:16384 -o loads.npz
equipoise loads counts.npz --ep 8 --mini-batches 2 --no-recompute -o loads.npz

One file per window. Where a step has several, their place and stage go into the names: loads-0-recompute.npz,
loads-1-update.npz.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from equipoise.cli.options import ForceFlag, JsonFlag, Packing, Reading, refuse_existing
from equipoise.cli.output import print_json, screen

if TYPE_CHECKING:
    from equipoise.core import LoadMatrix


def loads(
    dump: Annotated[Path, typer.Argument(help="Rollouts in any form, or a counts .npz file.", show_default=False)],
    out: Annotated[Path, typer.Option("-o", "--out", help="The loads to write, for example loads.npz.")],
    *,
    reading: Reading,
    packing: Packing,
    force: ForceFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Count the loads of a step, window by window."""
    from equipoise.cli.step_loads import load_step, refuse_loads

    refuse_existing(out, force=force, read=[dump])
    refuse_loads(dump)
    shape, windows = load_step(dump, reading, packing)
    paths = [_window_path(out, i, window) if len(windows) > 1 else out for i, window in enumerate(windows)]
    made = {}
    for path, window in zip(paths, windows, strict=True):
        # A file is one EP group's: it does not say how wide that is, and a plan takes all its ranks for one.
        for g, group in enumerate(window.split_groups(packing.ep)):
            made[path.with_stem(f"{path.stem}-group{g}") if packing.groups > 1 else path] = group
    refuse_existing(*made, force=force)
    written = []
    for path, window in made.items():
        window.save(path)
        written.append({"out": str(path), "stage": window.stage, **_figures(window)})
        screen(as_json=as_json).print(f"{path}: {_words(window)}", soft_wrap=True)
    if as_json:
        print_json({"model": shape.name, "windows": written})


def _window_path(out: Path, place: int, window: "LoadMatrix") -> Path:
    return out.with_name(f"{out.stem}-{place}-{window.stage}{out.suffix}")


def _words(window: "LoadMatrix") -> str:
    from equipoise.report.words import plural

    figures = _figures(window)
    counts = (plural(figures[name], name[:-1].replace("_", "-")) for name in ("micro_steps", "layers", "ranks", "rows"))
    return ", ".join((window.stage, *counts))


def _figures(window: "LoadMatrix") -> dict[str, int]:
    return {
        "micro_steps": window.num_micro_steps,
        "layers": window.num_layers,
        "ranks": window.num_ranks,
        "rows": int(window.load_MLRE.sum()),
    }

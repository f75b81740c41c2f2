"""Measure this machine's GPU into a hardware profile, or check a profile against it.

    equipoise calibrate -o profile.json
    equipoise calibrate --check profile.json
    equipoise calibrate --ranks 8 -o node.json
    equipoise calibrate --ranks 8 --shapes 2048x768,2880x2880 --rows 1024,8192,32768 --slots 1,8,16 -o node.json

Takes about a minute on an H200, and needs torch and a CUDA device. With --ranks it starts that many ranks (or joins
those of torchrun), which measure at the same time, and measures what needs several ranks, too. The profile names its
device, driver, torch and commit, its spread, and a source for each figure. `--check` measures a sample; exit code 1 if
a figure is further off than the limit, twice. What is measured and how: docs/calibrate.md.
"""

import json
import re
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from equipoise.cli.options import ForceFlag, JsonFlag, refuse_existing, require_installed
from equipoise.cli.output import print_json, progress, screen, show_check
from equipoise.core import Cluster, TopologyError
from equipoise.core.cluster import preset_names, presets_like
from equipoise.core.value import plural

if TYPE_CHECKING:
    from rich.console import Console


def calibrate(
    out: Annotated[Path | None, typer.Option("-o", "--out", help="The profile to write.")] = None,
    check: Annotated[Path | None, typer.Option("--check", help="A profile to check instead.")] = None,
    limit: Annotated[float, typer.Option(min=0.1, help="Largest deviation of a checked figure, in percent.")] = 10.0,
    cluster: Annotated[
        str | None, typer.Option(help="Preset with the link rates, if the device's name does not tell.")
    ] = None,
    runs: Annotated[int, typer.Option(min=1, help="Timed runs of each case.")] = 9,
    commit: Annotated[str | None, typer.Option(help="Commit of the source, if git cannot tell.")] = None,
    ranks: Annotated[
        int | None, typer.Option(help="Measure on so many ranks at once; all figures are medians.")
    ] = None,
    nodes: Annotated[int, typer.Option(min=1, help="Nodes that the ranks form.")] = 1,
    shapes: Annotated[str | None, typer.Option(help="Expert shapes, as 2048x768,2880x2880 (hidden x width).")] = None,
    rows: Annotated[str | None, typer.Option(help="Row counts of the expert tables, as 1024,8192.")] = None,
    slots: Annotated[str | None, typer.Option(help="Slot counts of the expert tables, as 1,8,16.")] = None,
    tokens: Annotated[str | None, typer.Option(help="Sequence lengths of the attention, as 1024.")] = None,
    trial: Annotated[
        bool, typer.Option("--trial", help="Tiny sizes on the CPU, to try the command; cannot price anything.")
    ] = False,
    force: ForceFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Measure this GPU, or check a profile against it."""
    if (out is None) == (check is None):
        raise TopologyError("give either -o FILE to write a profile, or --check FILE to check one")
    refuse_existing(out, force=force)
    if cluster is not None:
        Cluster.preset(cluster)
    # A wrong name is reported before a missing GPU.
    filed = None if check is None else _read_profile(check, is_trial=trial, ranks=ranks)
    sizes = _read_sizes({"--shapes": shapes, "--rows": rows, "--slots": slots, "--tokens": tokens})
    if filed is not None and sizes:
        raise TopologyError("a check measures a sample of the profile; leave --shapes, --rows, --slots, --tokens out")
    require_installed("calibrate", "torch", extra="torch")

    def measure() -> dict[str, Any]:
        from equipoise import calibrate as room
        from equipoise.calibrate.run import require_gpu, sample_of

        if not trial:
            require_gpu()
        grid = replace(room.Grid.smoke() if trial else room.Grid.full(), **sizes)
        if filed is not None:
            grid = sample_of(filed, grid)
        link, network = (10**12, 10**12) if trial else _link_rates(cluster)
        given: dict[str, Any] = {"nvlink_bytes_per_s": link, "runs": runs, "device": "cpu" if trial else "cuda"}
        with progress("measuring") as show:
            if ranks is None:
                return room.calibrate(grid, **given, commit=commit, tell=show)
            given |= {"ranks": ranks, "nodes": nodes, "network_bytes_per_s": network}
            return room.calibrate_ranks(grid, **given, commit=commit, tell=show)

    from equipoise.launch import find_torchrun

    is_first = ranks is None or (place := find_torchrun()) is None or place.rank == 0
    console = screen(as_json=as_json)
    if filed is None:
        assert out is not None, "one of the two was given"
        document, is_good = measure(), True
        if is_first:
            _write_profile(document, out, console)
    else:
        document = _check_profile(filed, measure, limit=limit / 100)
        if is_first:
            show_check(document, console)
        is_good = document["is_good"]
    if as_json and is_first:
        print_json(document)
    raise typer.Exit(0 if is_good else 1)


def _read_sizes(given: dict[str, str | None]) -> dict[str, Any]:
    """Return the fields of a `Grid` that options choose."""
    sizes: dict[str, Any] = {}
    for option, text in given.items():
        if text is None:
            continue
        form = r"\d+x\d+" if option == "--shapes" else r"\d+"
        if not re.fullmatch(rf"{form}(,{form})*", text) or "0" in re.split("[,x]", text):
            example = "2048x768,2880x2880" if option == "--shapes" else "8,16,32"
            raise TopologyError(f"{option} is {text!r}; give numbers above 0 with commas between them, as {example}")
        numbers = [tuple(map(int, part.split("x"))) for part in text.split(",")]
        sizes[option[2:]] = tuple(numbers) if option == "--shapes" else tuple(sorted({one for (one,) in numbers}))
    return sizes


def _read_profile(path: Path, *, is_trial: bool, ranks: int | None) -> dict[str, Any]:
    """Read the content of a profile that `Profile` accepts; what measured it must check it."""
    from equipoise.cost import Profile

    try:
        kind = Profile.read(path, allow_trial=True).kind
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise TopologyError(f"profile {path} cannot be read: {error.strerror or error}") from error
    if (kind == "trial") != is_trial:
        raise TopologyError(
            f"profile {path} is {kind}; {'leave --trial out' if is_trial else 'add --trial'} to check it"
        )
    if content.get("ranks", {}).get("count") != ranks:
        fix = f"give --ranks {content['ranks']['count']}" if "ranks" in content else "leave --ranks out"
        raise TopologyError(f"profile {path} was not measured with {plural(ranks or 1, 'rank')}; {fix} to check it")
    return content


def _link_rates(cluster: str | None) -> tuple[int, int]:
    """Return the published rates of link and network, of the named preset or of the one the device's name contains."""
    import torch

    device = torch.cuda.get_device_name()
    fitting = presets_like(device)
    if cluster is None and not fitting:
        raise TopologyError(f"no cluster preset is named like {device!r}; give --cluster, one of {preset_names()}")
    preset = Cluster.preset(cluster or fitting[-1])
    return preset.nvlink_bytes_per_s, preset.network_bytes_per_s


def _write_profile(measured: dict[str, Any], path: Path, console: "Console") -> None:
    from equipoise.core.files import whole_file
    from equipoise.cost.profile import write_profile

    with whole_file(path) as draft:
        write_profile(measured, draft)
    lines = [f"{measured['device']}, driver {measured['driver']}, torch {measured['torch']}"]
    for table in measured["compute"]:
        flops = 6 * table["hidden"] * table["expert_width"] * table["rows"][-1]
        fastest = max(flops / line[-1] / 1e3 for line in table["forward_ns"])
        lines.append(
            f"experts {table['hidden']} x {table['expert_width']}: {fastest:.3g} TFLOP/s forward at "
            f"{table['rows'][-1]} rows, largest spread of a cell {table['spread']:.1%}"
        )
    host_rate, slower = measured["pull"]["host_bytes_per_s"], measured["beside"]["host_slowdown_permille"] / 10
    lines.append(f"pulls: {host_rate / 1e9:.3g} GB/s from the host, compute beside them {slower:.1f} % slower")
    for line in (*lines, f"Written: {path}"):
        console.print(line, soft_wrap=True)


def _check_profile(filed: dict[str, Any], measure: Callable[[], dict[str, Any]], *, limit: float) -> dict[str, Any]:
    """Compare a profile's content with what is measured now, for JSON; `limit` is the largest deviation, as a share.

    A figure that is off is measured once more.
    """
    from equipoise.calibrate.run import compare, nearer

    fresh = measure()
    deviations = compare(filed, fresh)
    if not all(one.holds(limit) for one in deviations):
        deviations = nearer(deviations, compare(filed, measure()))
    return {
        "device": fresh["device"],
        "filed_device": filed["device"],
        "limit_pct": round(100 * limit, 3),
        "is_good": all(one.holds(limit) for one in deviations),
        "figures": [
            {**asdict(one), "deviation_pct": round(100 * one.share, 2), "is_good": one.holds(limit)}
            for one in deviations
        ],
    }

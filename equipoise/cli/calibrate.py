"""Measure the GPU at hand into a hardware profile, or check a profile against it.

equipoise calibrate -o profile.json
equipoise calibrate --check profile.json

Takes about a minute on an H200 and needs torch and a CUDA device. The profile names its device, driver, torch and
commit, its spread, and a source for each figure. `--check` measures a sample anew; exit code 1 where a figure is
further off than the limit. What is measured and how: docs/calibrate.md.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from equipoise.cli.options import ForceFlag, JsonFlag, refuse_existing, require_torch
from equipoise.cli.output import print_json, progress, screen

if TYPE_CHECKING:
    from rich.console import Console

    from equipoise.calibrate.run import Deviation


def calibrate(
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Where the profile goes.")] = None,
    check: Annotated[Path | None, typer.Option("--check", help="A profile to check instead.")] = None,
    limit: Annotated[float, typer.Option(min=0.1, help="Largest deviation of a checked figure, in percent.")] = 10.0,
    cluster: Annotated[
        str | None, typer.Option(help="Preset with the link rates, if not by the device's name.")
    ] = None,
    runs: Annotated[int, typer.Option(min=1, help="Timed runs of each case.")] = 9,
    commit: Annotated[str | None, typer.Option(help="Commit of the source, where git cannot tell.")] = None,
    trial: Annotated[
        bool, typer.Option("--trial", help="Tiny sizes on the CPU, to try the command; prices nothing.")
    ] = False,
    force: ForceFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Measure this GPU, or check a profile against it."""
    from equipoise.core import Cluster, TopologyError

    if (out is None) == (check is None):
        raise TopologyError("give either -o FILE to write a profile, or --check FILE to check one")
    refuse_existing(out, force=force)
    if cluster is not None:
        Cluster.preset(cluster)
    # What was filed is read before a GPU is asked for: a wrong name is the user's, a missing GPU the machine's.
    filed = None if check is None else _read(check, is_trial=trial)
    require_torch("calibrate")

    def measure() -> dict[str, Any]:
        return _measure(filed, cluster=cluster, runs=runs, commit=commit, is_trial=trial)

    console = screen(as_json=as_json)
    if filed is None:
        assert out is not None, "one of the two was given"
        document, is_good = measure(), True
        _write(document, out, console)
    else:
        document = check_document(filed, measure, limit=limit / 100)
        show_check(document, console)
        is_good = document["is_good"]
    if as_json:
        print_json(document)
    raise typer.Exit(0 if is_good else 1)


def _measure(
    filed: dict[str, Any] | None, *, cluster: str | None, runs: int, commit: str | None, is_trial: bool
) -> dict[str, Any]:
    """Measure everything, or the sample of a filed profile to check."""
    from equipoise.calibrate import Grid
    from equipoise.calibrate import calibrate as measure
    from equipoise.calibrate.run import require_gpu, sample_of

    if not is_trial:
        require_gpu()
    grid = Grid.smoke() if is_trial else Grid.full()
    if filed is not None:
        grid = sample_of(filed, grid)
    device, link = ("cpu", 10**12) if is_trial else ("cuda", _link_rate(cluster))
    with progress("measuring") as tell:
        return measure(grid, nvlink_bytes_per_s=link, runs=runs, device=device, commit=commit, tell=tell)


def _link_rate(cluster: str | None) -> int:
    """Published rate of the link to a peer, of the preset that is named or that the device's name contains."""
    import torch

    from equipoise.core import Cluster, TopologyError
    from equipoise.core.cluster import preset_names, presets_like

    device = torch.cuda.get_device_name()
    fitting = presets_like(device)
    if cluster is None and not fitting:
        raise TopologyError(f"no cluster preset is named like {device!r}; give --cluster, one of {preset_names()}")
    return Cluster.preset(cluster or fitting[-1]).nvlink_bytes_per_s


def _read(path: Path, *, is_trial: bool) -> dict[str, Any]:
    """Read a profile's content, after `Profile` has found nothing wrong with it; a trial is checked by a trial."""
    import json

    from equipoise.core import TopologyError
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
    return content


def _write(measured: dict[str, Any], output: Path, console: "Console") -> None:
    from equipoise.core.files import whole_file
    from equipoise.cost.profile import write_profile

    with whole_file(output) as draft:
        write_profile(measured, draft)
    console.print(f"{measured['device']}, driver {measured['driver']}, torch {measured['torch']}", soft_wrap=True)
    for table in measured["compute"]:
        flops = 6 * table["hidden"] * table["expert_width"] * table["rows"][-1]
        rates = [flops / line[-1] / 1e3 for line in table["forward_ns"]]
        console.print(
            f"experts {table['hidden']} x {table['expert_width']}: {max(rates):.3g} TFLOP/s forward at "
            f"{table['rows'][-1]} rows, largest spread of a cell {table['spread']:.1%}",
            soft_wrap=True,
        )
    pull = measured["pull"]
    slower = measured["beside"]["host_slowdown_permille"] / 10
    console.print(
        f"pulls: {pull['host_bytes_per_s'] / 1e9:.3g} GB/s from the host, compute beside them {slower:.1f} % slower",
        soft_wrap=True,
    )
    console.print(f"written: {output}", soft_wrap=True)


def check_document(filed: dict[str, Any], measure: Callable[[], dict[str, Any]], *, limit: float) -> dict[str, Any]:
    """The comparison as one JSON document; `limit` as a share. What is off is measured once more."""
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
        "figures": [_figure(one, limit) for one in deviations],
    }


def _figure(one: "Deviation", limit: float) -> dict[str, Any]:
    return {
        "name": one.name,
        "filed": one.filed,
        "measured": one.measured,
        "deviation_pct": round(100 * one.share, 2),
        "is_judged": one.is_judged,
        "is_good": one.holds(limit),
    }


def show_check(document: dict[str, Any], console: "Console") -> None:
    """Print the comparison as a table, and the verdict in words."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from equipoise.report.page import plural

    table = Table(title=f"profile of {document['filed_device']} on {document['device']}", box=SIMPLE_HEAD, padding=0)
    for column in ("figure", "filed", "now", "deviation %", "verdict"):
        table.add_column(column, justify="left" if column in ("figure", "verdict") else "right")
    for one in document["figures"]:
        verdict = "" if not one["is_judged"] else "good" if one["is_good"] else "FINDING"
        figures = (f"{one['filed']:.4g}", f"{one['measured']:.4g}", f"{one['deviation_pct']:+.1f}")
        table.add_row(one["name"], *figures, verdict)
    console.print(table)
    beyond = plural(sum(not one["is_good"] for one in document["figures"]), "figure")
    words = "the profile holds" if document["is_good"] else f"{beyond} off, twice: measure the device again"
    console.print(f"{words}; limit {document['limit_pct']:g} %", soft_wrap=True)

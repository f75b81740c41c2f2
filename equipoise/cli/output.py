"""What users see: tables on standard output, progress and warnings on standard error, one JSON document last.

1. The terminal: the console, progress bars, warnings, and what happens when standard output cannot be written.
2. Results: files first, then the tables, then the JSON line.
3. Tables of an analysis, a plan, a diagnosis, a checked profile and a page. They fit into 80 columns.
"""

import errno
import functools
import io
import json
import math
import os
import select
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich import box
from rich.console import Console, Group
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from equipoise.core.errors import EquipoiseError
from equipoise.core.files import whole_file
from equipoise.core.value import STAGE_WORDS, plural

if TYPE_CHECKING:
    from equipoise.cli.options import ResultFlags
    from equipoise.core import Plan
    from equipoise.loads.forecast import MemoryForecast
    from equipoise.loads.skew import Distribution
    from equipoise.report import Page
    from equipoise.routes.doctor import Diagnosis, Finding
    from equipoise.sim.analysis import Analysis, Prediction, StageAnalysis

MIB, GIB = 2**20, 2**30
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_UNITS = {"seconds": 1.0, "milliseconds": 1e3}
BLOCKS = [chr(0x2581 + i) for i in range(8)]
"""Bars of eight heights."""
SECONDS_NAMES = {
    "compute": "compute, busiest rank",
    "all_to_all": "all-to-all",
    "pull": "pulls that nothing hides",
    "return_": "returns that nothing hides",
    "publish": "publish that nothing hides",
    "collect": "collect that nothing hides",
    "planning": "planning on the critical path",
}
BYTES_NAMES = {
    "peer": "replicas, GPU to GPU",
    "host": "replicas, from host memory",
    "edge_inside": "displaced experts, inside nodes",
    "edge_across": "displaced experts, across nodes",
    "all_to_all_inside": "rows, inside nodes",
    "all_to_all_across": "rows, across nodes",
}


class _Screen(Console):
    """A console that leaves a closed pipe to `guarded`: rich would exit with code 1, which means findings."""

    def on_broken_pipe(self) -> None:
        """Raise what rich has caught."""
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


def screen(*, as_json: bool) -> Console:
    """Return the console for tables: standard output, or nothing if a program reads the JSON line."""
    # Without markup: shapes such as [T, L, K] and file names are text, not styles.
    return _Screen(quiet=as_json, highlight=False, markup=False)


@contextmanager
def progress(message: str) -> Iterator[Callable[[int, int], None]]:
    """Show a bar on standard error if that is a terminal; yields a function to call with (done, total).

    A total of 0 means that it is not known.
    """
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(message, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total or None)


def warn(message: str) -> None:
    """Print one line on standard error that is no part of the result."""
    typer.echo(f"equipoise: {message}", err=True)


def print_json(document: dict[str, Any]) -> None:
    """Print one JSON document as one line, the last of standard output."""
    typer.echo(json.dumps(document, allow_nan=False))


def write_json(document: Any, path: Path, *, indent: int | None = None) -> None:
    """Write one JSON document to a file, or raise saying why that failed."""
    with whole_file(path) as draft:
        draft.write_text(json.dumps(document, allow_nan=False, indent=indent) + "\n", encoding="utf-8")


def guarded(verb: Callable[..., None]) -> Callable[..., None]:
    """Wrap a verb: a closed standard output ends it with exit code 0, a full disk behind it is an error.

    Result files do not get here: `whole_file` already raises our own errors for them.
    """

    @functools.wraps(verb)
    def call(*args: Any, **given: Any) -> None:
        try:
            verb(*args, **given)
            sys.stdout.flush()
        except OSError as error:
            # EPIPE of another pipe, between processes, is a real error.
            if error.errno == errno.EPIPE and not _has_reader():
                _drop_output()
                raise typer.Exit(0) from None
            if error.errno in _DISK_FULL and error.filename is None:
                _drop_output()
                raise EquipoiseError(f"standard output cannot be written: {error.strerror}") from error
            raise

    return call


def _has_reader() -> bool:
    """Whether the other end of standard output is still open."""
    try:
        descriptor = sys.stdout.fileno()
    except io.UnsupportedOperation:
        # Not a file of the system: whoever replaced it reads it.
        return True
    poll = select.poll()
    # Errors are reported whatever events are asked for.
    poll.register(descriptor, 0)
    return not any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def _drop_output() -> None:
    """Discard what is still buffered: Python would try to write it at exit, and print an error."""
    with Path(os.devnull).open("w") as nothing:
        os.dup2(nothing.fileno(), sys.stdout.fileno())


def publish(result: Any, show: Callable[[Console], None], *, title: str, results: "ResultFlags") -> None:
    """Write the files of a result that were asked for, print what `show` prints, then the JSON line.

    Files are written first, because a reader of our output, such as head, may close it before the last line.
    """
    written = []
    if results.out is not None:
        write_json(result.to_dict(), results.out, indent=1)
        written.append(f"Written: {results.out}")
    if results.report is not None:
        from equipoise.report import write_report

        write_report(result, results.report, title=title)
        written.append(f"Written: {results.report}; open it in a browser, no network needed")
    console = screen(as_json=results.as_json)
    show(console)
    for line in written:
        console.print(line, soft_wrap=True)
    if results.as_json:
        print_json(result.to_dict())


def build_table(
    columns: Iterable[str],
    rows: Iterable[Sequence[str | Text]] = (),
    *,
    num_text: int = 1,
    title: str | None = None,
    has_rule: bool = True,
) -> Table:
    """Build a table; columns too wide for the terminal are folded, never cut, so that no digit is lost.

    The first `num_text` columns hold text, aligned to the left; the others hold numbers. `has_rule` separates the names
    of the columns from the rows.
    """
    style = box.SIMPLE_HEAD if has_rule else None
    table = Table(title=title, title_justify="left", box=style, pad_edge=False, padding=(0, 1, 0, 0))
    for i, name in enumerate(columns):
        table.add_column(name, justify="left" if i < num_text else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def build_list(rows: Mapping[str, str | Text], *, style: str = "") -> Table:
    """Build a list of names and what is said about each."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style=style or "bold")
    grid.add_column(style=style)
    for name, text in rows.items():
        grid.add_row(f"  {name}", text)
    return grid


def sparkline(values: Sequence[float], *, low: float, high: float) -> str:
    """Draw one bar per value, from `low` to `high`."""
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[round((min(max(v, low), high) - low) * scale)] for v in values)


def show_analysis(analysis: "Analysis", console: Console, *, source: str) -> None:
    """Print an analysis: the answer first, then seconds, skew and memory."""
    model, cluster = analysis.model, analysis.cluster
    console.print(Text(f"{source}: {model.name} on {cluster.name}, EP {cluster.ep}", style="bold"))
    layers = f"{len(analysis.layer_numbers)} MoE layers of {model.experts} experts, top-{model.top_k}"
    console.print(f"{layers}, {model.experts // cluster.ep} experts per rank")
    # Rounded down, so that 100 % means all.
    known = f"{math.floor(analysis.coverage * 1000) / 10:g} %"
    rows = f"{_short_count(analysis.rows)} rows, {analysis.padding:.1%} of them padding"
    filled = f", {analysis.filled:.2%} of the rows filled" if analysis.filled else ""
    console.print(f"{plural(analysis.micro_steps, 'micro-step')}, {rows}, routes known: {known}{filled}")
    console.print(f"{analysis.schedule}\n" if analysis.schedule else "")
    console.print(analysis_answer(analysis))

    console.print(_heading("Time in expert layers per step", f"{seconds_unit(analysis)}, all predicted"))
    console.print(seconds_table(analysis, width=console.width))
    console.print(seconds_notes(analysis))

    for name, stage, planned in _distinct_stages(analysis):
        console.print(_heading(f"Skew, {name}", "busiest rank / mean rank, in rows; 1.00 is level"))
        console.print(_widths_table(stage, cluster.ep, planned))
        means = [layer.mean for layer in stage.skew.dispatched.layers()]
        console.print(_heading(f"Skew by layer, {name}", f"at EP {stage.skew.ranks}, over micro-steps"))
        console.print("  " + sparkline(means, low=1.0, high=max(means)))
        console.print(_layers_table(stage, analysis.layer_numbers, columns=max(1, (console.width - 2) // 19)))

    console.print(_heading("Memory for rows", "counted rows, modelled bytes"))
    console.print(_memory_list(analysis.memory, analysis.memory_group))


def analysis_answer(analysis: "Analysis") -> Table:
    """Say how much is lost, what a plan would give back, and whether that is worth it."""
    from equipoise.sim.result import WORTH

    seconds, trial = analysis.seconds, analysis.trial
    share = f"{_time(seconds.lost_seconds)} of {_time(seconds.now.total)}, {seconds.share(seconds.lost_seconds):.1%}"
    answer: dict[str, str | Text] = {"lost": f"{share} of the time in expert layers per step"}
    if trial is None:
        answer["plan"] = Text(f"none tried: {analysis.no_trial}", style="yellow")
        return build_list(answer)
    saved = f"saves {_time(seconds.saved_seconds)}, {seconds.share(seconds.saved_seconds):.1%}"
    beyond = seconds.share(seconds.saved_seconds - seconds.lost_seconds)
    if seconds.lost_seconds and beyond >= 0.0005:
        saved += f" (all that is lost, and {beyond:.1%} beyond it)"
    slots = plural(trial.slots, "replica slot") if trial.slots else "placement alone"
    memory = f"{slots}, {trial.buffer_bytes / MIB:.0f} MiB per GPU"
    verdict = (saved, "bold green")
    if not analysis.worth_it:
        verdict = (f"not worth it here: {saved}, less than {WORTH:.0%}", "bold yellow")
    answer["plan"] = Text.assemble(verdict, f", with {memory}")
    # Skew of the stage that takes longest.
    longest = max(analysis.stages, key=lambda name: analysis.stages[name].seconds.now.total)
    before, after = trial.skew_before(longest).mean, trial.skew_after(longest).mean
    if trial.row_page_bytes:
        answer["rows"] = f"{trial.row_page_bytes / MIB:.0f} MiB more per GPU, read in place by ranks of the node"
    answer["skew"] = f"mean {before:.2f} now, {after:.2f} with the plan ({STAGE_WORDS[longest]})"
    return build_list(answer)


def seconds_unit(analysis: "Analysis") -> str:
    """Return the unit of the table: milliseconds for steps of less than a second."""
    return "seconds" if analysis.seconds.now.total >= 1 else "milliseconds"


def seconds_table(analysis: "Analysis", *, width: int) -> Group:
    """Show seconds now, if balanced and with a plan, by stage and part; in two tables if one is too wide."""
    scale = _UNITS[seconds_unit(analysis)]
    planned = ["planned", "saved"] if analysis.trial is not None else []
    rows = [["  stage", "part", "now", "balanced", "lost", "lost, %", *planned]]
    for name, stage in analysis.stages.items():
        for i, cells in enumerate(_part_rows(stage.seconds, scale)):
            rows.append(["" if i else f"  {STAGE_WORDS[name]}", *cells])
    rows.append(["  step", "total", *_seconds_cells(analysis.seconds, "total", scale)])
    return Group(*_split_table(rows, num_text=2, width=width))


def _split_table(rows: Sequence[Sequence[str]], *, num_text: int, width: int) -> Iterator[Table]:
    """Yield tables with as many columns of numbers as fit beside those of text; the last row is bold."""
    # A column is as wide as its widest cell and a space; the frame takes two more.
    sizes = [max(map(len, column)) + 1 for column in zip(*rows, strict=True)]
    names, columns = list(range(num_text)), list(range(num_text, len(sizes)))
    while columns:
        fitting = len(columns)
        while fitting > 1 and 2 + sum(sizes[i] for i in (*names, *columns[:fitting])) > width:
            fitting -= 1
        head, *body, last = [[row[i] for i in (*names, *columns[:fitting])] for row in rows]
        table = build_table(head, body, num_text=num_text)
        table.add_row(*last, style="bold")
        yield table
        del columns[:fitting]


def _part_rows(seconds: "Prediction", scale: float) -> Iterator[list[str]]:
    """Yield the cells of each part; transfers only with a plan."""
    from equipoise.sim.analysis import transfer_seconds

    yield ["compute", *_seconds_cells(seconds, "compute", scale)]
    if seconds.has_all_to_all:
        yield ["all-to-all", *_seconds_cells(seconds, "all_to_all", scale)]
    if seconds.planned is not None:
        moved = transfer_seconds(seconds.planned) * scale
        yield ["transfers", "", "", "", "", _decimals(moved), _decimals(-moved)]


def _seconds_cells(seconds: "Prediction", part: str, scale: float) -> list[str]:
    now, balanced = getattr(seconds.now, part) * scale, getattr(seconds.balanced, part) * scale
    # Single parts of `balanced` may take longer than now; the step as a whole never gains by that.
    lost = seconds.lost_seconds * scale if part == "total" else now - balanced
    cells = [_decimals(now), _decimals(balanced), _decimals(lost), f"{lost / now:.1%}" if now else "-"]
    if seconds.planned is not None:
        planned = getattr(seconds.planned, part) * scale
        cells += [_decimals(planned), _decimals(now - planned)]
    return cells


def seconds_notes(analysis: "Analysis") -> Table:
    """Say whose figures the seconds are predicted with, and what is assumed."""
    profile, seconds, trial = analysis.profile, analysis.seconds, analysis.trial
    made = "measured" if profile.kind == "measured" else "derived from an H200's measured figures"
    notes = {"compute": f"{profile.device}, {made}; busiest rank, against mean rank"}
    if seconds.has_all_to_all:
        share = "a measured" if profile.is_shared else "an assumed"
        notes["all-to-all"] = f"busiest link at {share} share of its published rate, against even spread"
        notes["sends"] = {
            "tokens": "assumed: a token once to each node and rank, as in DeepEP; Megatron's alltoall: --sends rows",
            "rows": "assumed: every row on its own, as in Megatron's alltoall; DeepEP: --sends tokens",
        }[analysis.sends]
    else:
        notes["all-to-all"] = "not priced: source ranks are not the ranks of the EP group"
    if trial is not None:
        notes["transfers"] = "pulls, returns, publish and collect of experts that nothing hides"
        if trial.estimated_share:
            notes["estimated"] = f"{trial.estimated_share:.1%} of the rows, whose routes are unknown"
    if seconds.planned is not None and seconds.planned.all_to_all < seconds.balanced.all_to_all:
        notes["planned"] = "sends less than an even spread: replicas take rows of their own rank first"
    if assumed := profile.say_assumed(analysis.cluster.num_ep_nodes):
        notes["assumed"] = assumed.removeprefix("Assumed, not measured: ")
    notes["left out"] = "attention, optimizer, rollout; compute and all-to-all do not overlap"
    return build_list(notes, style="dim")


Planned = list[tuple[str, "Distribution"]]
"""Skew with a plan, and the name of its row."""


def _distinct_stages(analysis: "Analysis") -> list[tuple[str, "StageAnalysis", Planned]]:
    """Return the stages to draw: a single one if both have the same micro-steps."""
    stages, trial = list(analysis.stages.items()), analysis.trial
    if len(stages) == 2 and stages[0][1].skew.dispatched == stages[1][1].skew.dispatched:
        rows = (
            [] if trial is None else [(f"planned, {STAGE_WORDS[name]}", trial.skew_after(name)) for name, _ in stages]
        )
        return [("both stages alike", stages[1][1], rows)]
    return [
        (STAGE_WORDS[name], stage, [] if trial is None else [("planned", trial.skew_after(name))])
        for name, stage in stages
    ]


def _widths_table(stage: "StageAnalysis", ep: int, planned: Planned) -> Table:
    """Show the skew at every EP width; the step's own is marked, and followed by the plan's."""

    def figures(distribution: "Distribution") -> list[str]:
        return [f"{x:.2f}" for x in (distribution.mean, distribution.p50, distribution.p95, distribution.max)]

    has_padding = stage.skew.dispatched != stage.skew.without_padding
    more = ["mean without padding"] if has_padding else []
    table = build_table(["  EP width", "mean", "p50", "p95", "max", *more], num_text=0)
    for width, distribution in sorted({ep: stage.skew.dispatched, **dict(stage.widths)}.items()):
        if width != ep:
            table.add_row(str(width), *figures(distribution))
            continue
        unpadded = [f"{stage.skew.without_padding.mean:.2f}"] if has_padding else []
        table.add_row(f"> {width}", *figures(distribution), *unpadded, style="bold")
        for name, after in planned:
            table.add_row(f"  {name}", *figures(after), style="green")
    return table


def _layers_table(stage: "StageAnalysis", numbers: Sequence[int], *, columns: int) -> Table:
    """Show the mean and the worst skew of every layer, in as many columns as fit; the worst tenth is red."""
    layers = stage.skew.dispatched.layers()
    means = [layer.mean for layer in layers]
    columns = min(columns, 5, len(layers))
    num_rows = math.ceil(len(layers) / columns)
    threshold = sorted(means)[-max(1, len(means) // 10)]
    table = build_table(["  layer", "mean", "max"] * columns, num_text=0, has_rule=False)
    for row in range(num_rows):
        cells: list[Text] = []
        for i in range(row, len(layers), num_rows):
            style = "bold red" if means[i] >= threshold else ""
            figures = (f"{means[i]:.2f}", f"{layers[i].max:.2f}")
            cells += [Text(str(numbers[i]), "dim"), *(Text(figure, style) for figure in figures)]
        table.add_row(*cells)
    return table


def _memory_list(memory: "MemoryForecast", group: int) -> Table:
    place, rows = memory.place, memory.rows_R
    where = f"{STAGE_WORDS[place.stage]} window {place.window}, micro-step {place.micro_step}, layer {place.layer}"
    facts: dict[str, str | Text] = {
        "peak": f"{memory.peak_rows:,} rows, {memory.peak_bytes / GIB:.2f} GiB, activations {memory.activations}",
        "parts": ", ".join(f"{name} {size / GIB:.2f}" for name, size in memory.parts.items() if size) + " GiB",
        "where": f"{where}, rank {place.rank}{f', EP group {group}' if group else ''}",
        "by rank": f"{min(rows):,} to {max(rows):,} rows at worst  {sparkline(rows, low=0, high=max(rows))}",
    }
    if memory.limit_bytes is None:
        facts["verdict"] = Text("no limit given; add --memory-gib", style="yellow")
    elif memory.fits:
        facts["verdict"] = Text(f"fits into {memory.limit_bytes / GIB:g} GiB", style="green")
    else:
        facts["verdict"] = Text(f"does not fit into {memory.limit_bytes / GIB:g} GiB", style="bold red")
        fixes = [f"{fix.peak_bytes / GIB:.2f} GiB  {fix.message}" for fix in memory.fixes]
        none = "none of balance, smaller micro-steps, recomputing or a larger EP is enough alone"
        facts["fix"] = "\n".join(fixes) or none
    return build_list(facts)


def show_plan(plan: "Plan", figures: dict[str, Any], console: Console, *, source: str) -> None:
    """Print what a plan saves, its seconds by part, what it moves and what it keeps in memory.

    `figures` is the plan's JSON document, `source` the name of its loads.
    """
    from equipoise.sim.result import WORTH

    cluster, loads = plan.cluster, plan.loads
    console.print(Text(f"{source}: {plan.model.name} on {cluster.name}, {plan.policy}, by {plan.objective}", "bold"))
    ranks = f"{plural(cluster.ep, 'rank')} on {plural(cluster.num_ep_nodes, 'node')}"
    size = f"{plural(loads.num_micro_steps, 'micro-step')} of {plural(loads.num_layers, 'layer')}"
    console.print(f"{ranks}, {size}, {STAGE_WORDS[loads.stage]} pass")
    if figures["pairs"] is not None:
        console.print(f"what crosses nodes is reduced by the pairs of {figures['pairs']}", soft_wrap=True)
    console.print()

    static_s, saved_s, entries = plan.static_seconds, plan.saved_seconds, loads.num_micro_steps * loads.num_layers
    before, after = figures["skew_before"], figures["skew_after"]
    share = saved_s / static_s if static_s else 0.0
    saved = Text(f"{saved_s * 1e3:.3f} ms, {share:.1%}", "bold green")
    if share < WORTH:
        saved = Text(f"{saved_s * 1e3:.3f} ms, {share:.1%}: not worth it here, less than {WORTH:.0%}", "bold yellow")
    facts: dict[str, str | Text] = {
        "skew": f"{before:.4f} now, {after:.4f} planned (mean of busiest / mean rank, in rows)",
        "seconds": f"{static_s * 1e3:.3f} ms now, {plan.seconds.total * 1e3:.3f} ms planned",
        "saved": saved,
        "homes": f"{figures['displaced']:,} of {plan.displaced_LE.size:,} experts displaced",
        "replicas": f"{figures['replicas']:,} in {entries:,} micro-steps and layers",
        "memory": f"{figures['slot_bytes_per_rank'] / MIB:,.0f} MiB per rank (replica slots: {plan.slots})",
        "peak": _say_peak(figures["memory"]),
    }
    if plan.waves > 1:
        waves_s = figures["one_wave_seconds"] - plan.seconds.total
        facts["waves"] = f"{plan.waves}, which save {waves_s * 1e3:.3f} ms of that; never run on a GPU"
    if plan.estimated_share > 0:
        facts["estimated"] = f"{plan.estimated_share:.1%} of the rows, whose routes are unknown"
        if plan.itinerary is not None and not plan.persistent:
            facts["if wrong"] = _say_worst(plan)
    console.print(build_list(facts))
    for title, part, names, scale in (
        ("Predicted milliseconds", "seconds", SECONDS_NAMES, 1e3),
        ("Moved MiB, all ranks", "bytes", BYTES_NAMES, 1 / MIB),
    ):
        values = figures[part]
        table = build_table([f"  {title}", ""])
        for name, label in names.items():
            if values[name]:
                table.add_row(f"  {label}", f"{values[name] * scale:,.3f}")
        table.add_row("  total", f"{values['total'] * scale:,.3f}", style="bold")
        console.print(table)


def _say_peak(memory: dict[str, Any]) -> str:
    place, parts = memory["place"], ", ".join(f"{name} {n / GIB:.2f}" for name, n in memory["parts"].items() if n)
    where = f"rank {place['rank']}, micro-step {place['micro_step']}, layer {place['layer']}"
    return f"{memory['peak_bytes'] / GIB:.2f} GiB ({parts}), {where}, activations {memory['activations']}"


def _say_worst(plan: "Plan") -> str:
    from equipoise.sim.replay import overhead_seconds, owners_LR, plan_work, replica_rows_MLR

    factor, rows = int(owners_LR(plan).max()), int(replica_rows_MLR(plan).max())
    most = f"{factor} times static's busiest rank's rows" if factor > 1 else "static's busiest rank's rows"
    transfers_ms = overhead_seconds(plan_work(plan)) * 1e3
    return f"at most {most} and {rows:,} more on a rank, and {transfers_ms:.3f} ms of transfers"


def show_diagnosis(diagnosis: "Diagnosis", console: Console) -> None:
    """Print a diagnosis: check, verdict, share, first place, what to do; empty columns are left out."""
    colors = {"good": "green", "finding": "bold red", "skipped": "dim"}
    columns = {
        "check": [Text(finding.check) for finding in diagnosis.findings],
        "verdict": [Text(finding.verdict, style=colors[finding.verdict]) for finding in diagnosis.findings],
        "share": [Text(_share(finding)) for finding in diagnosis.findings],
        "first place": [Text(finding.first_place) for finding in diagnosis.findings],
        "what to do": [Text(f.advice) if f.advice else Text(f.detail, style="dim") for f in diagnosis.findings],
    }
    shown = {name: cells for name, cells in columns.items() if any(cells)}
    title = f"{diagnosis.num_samples:,} samples, {diagnosis.num_rows:,} rows"
    table = build_table(shown, zip(*shown.values(), strict=True), num_text=len(shown), title=title)
    for column in table.columns[:2]:
        column.no_wrap = True
    console.print(table)
    for finding in diagnosis.findings:
        if finding.rate_L:
            console.print(f"{finding.check} by layer: {' '.join(f'{rate:.3f}' for rate in finding.rate_L)}")
    fired = diagnosis.fired
    console.print("good" if diagnosis.ok else f"{plural(len(fired), 'finding')}: {', '.join(fired)}")


def show_check(document: dict[str, Any], console: Console) -> None:
    """Print how far the figures of a profile are from what was measured now."""
    rows = []
    for one in document["figures"]:
        verdict = "" if not one["is_judged"] else "good" if one["is_good"] else "FINDING"
        figures = (f"{one['filed']:.4g}", f"{one['measured']:.4g}", f"{one['deviation_pct']:+.1f}")
        rows.append((one["name"], verdict, *figures))
    title = f"profile of {document['filed_device']} on {document['device']}"
    console.print(build_table(["figure", "verdict", "filed", "now", "deviation %"], rows, num_text=2, title=title))
    wrong = plural(sum(not one["is_good"] for one in document["figures"]), "figure")
    verdict = "the profile holds" if document["is_good"] else f"{wrong} off, twice: measure the device again"
    console.print(f"{verdict}; limit {document['limit_pct']:g} %", soft_wrap=True)


def show_page(page: "Page", console: Console) -> None:
    """Print the summary of a page."""
    from equipoise.report import summarise

    for place, block in enumerate(summarise(page, width=max(40, console.width - 1))):
        console.print(Text(("\n" if place else "") + block.heading, style="bold"))
        for line in block.lines:
            console.print(Text(line), soft_wrap=True)


def _share(finding: "Finding") -> str:
    """Return '3.1% of rows', and never 0 % of something that happened."""
    if not finding.total:
        return ""
    number = "<0.1%" if 0 < finding.share < 0.001 else f"{finding.share:.1%}"
    return f"{number} of {finding.unit}"


def _heading(title: str, note: str) -> Text:
    return Text.assemble("\n", (title, "bold"), "  ", (note, "dim"))


def _decimals(value: float) -> str:
    """Return two decimals, and no minus before a zero."""
    return f"{round(value, 2) + 0.0:.2f}"


def _time(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 10 else f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


def _short_count(number: int) -> str:
    for unit, size in (("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return str(number)

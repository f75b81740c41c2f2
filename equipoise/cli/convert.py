"""Convert recorded routes into the native store, histograms or loads; pack samples; or generate a workload.

    equipoise convert rollouts.jsonl --model qwen3-30b-a3b -o routes.eqr
    equipoise convert routes.eqr --to loads --schedule tokens:16384 -o loads.npz
    equipoise convert routes.eqr --to counts --pairs -o counts.npz
    equipoise convert --formats

    equipoise pack rollouts.jsonl --model qwen3-30b-a3b --ep 16 -o schedule.json
    equipoise pack trainer.eqr --ep 16 --schedule tokens:16384 -o packed.json

    equipoise generate --model qwen3-30b-a3b -o generated.eqr
    equipoise generate --model deepseek-v3 --samples 16 --tokens 512 -o small.eqr

The store is mapped and checksummed. Histograms are enough to plan, and thousands of times smaller than routes. Loads
are what the planner reads: one file per window and EP group, such as loads-0-recompute.npz and loads-1-update.npz if a
step has several.

Packing decides which rank forwards which sample in which micro-step, by the samples' experts. --schedule says how they
are packed so far: by a rule, or as in a trainer's own file, whose limits are kept. What is written is a file that
--schedule of other verbs reads.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from equipoise.cli.options import (
    ActivationsOption,
    ForceFlag,
    JsonFlag,
    MemoryOption,
    PackingFlags,
    RanksPerNodeOption,
    ReadingFlags,
    find_model,
    npz_kind,
    refuse_existing,
)
from equipoise.cli.output import build_table, print_json, progress, screen
from equipoise.core import EquipoiseError, ModelShape, RoutesError, SampleRoutes, ScheduleError
from equipoise.core.value import plural, require_int

if TYPE_CHECKING:
    from equipoise.core import Schedule
    from equipoise.loads import Packing

Target = Literal["store", "counts", "loads"]


def convert(
    dump: Annotated[
        Path | None,
        typer.Argument(help="Rollouts: a file or folder in any format, or a counts .npz file.", show_default=False),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="The file to write: routes.eqr, counts.npz, loads.npz.")
    ] = None,
    to: Annotated[
        Target | None,
        typer.Option("--to", help="What to write; left out, a name that ends in .eqr is a store."),
    ] = None,
    *,
    reading: ReadingFlags,
    pairs: Annotated[
        bool,
        typer.Option(
            "--pairs",
            help="With --to counts: also count which experts are chosen together, for `plan --pairs` and `simulate "
            "--sends tokens`.",
        ),
    ] = False,
    packing: PackingFlags,
    formats: Annotated[bool, typer.Option("--formats", help="List the formats that can be read, and exit.")] = False,
    force: ForceFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Convert recorded routes into a store, histograms or loads."""
    if formats:
        if dump is not None or out is not None:
            raise EquipoiseError(f"--formats only lists formats; leave out {dump or out}, or --formats to convert")
        _list_formats(as_json=as_json)
        return
    if dump is None or out is None:
        raise EquipoiseError("give a DUMP and a file to write with -o; or --formats to list what can be read")
    target = _find_target(to, out, pairs=pairs, packing=packing)
    # A store may replace the store that it is made of: it is written beside it first.
    refuse_existing(out, force=force, read=[] if target == "store" else [dump])
    if target == "store":
        model, stream = reading.stream(dump)
        with progress("reading") as show:
            document = write_store(out, stream, model=model, layer_numbers=stream.layer_numbers, show=show)
        screen(as_json=as_json).print(_describe_store(document))
    elif target == "counts":
        document = _write_counts(dump, out, reading, pairs=pairs, as_json=as_json)
    else:
        document = _write_loads(dump, out, reading, packing, force=force, as_json=as_json)
    if as_json:
        print_json(document)


def generate(
    model: Annotated[
        str, typer.Option("--model", help="Model preset such as qwen3-30b-a3b, its HF id, or a config.json.")
    ],
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
        document = write_store(
            out, stream, model=shape, layer_numbers=shape.layer_numbers, show=lambda done, _: show(done, samples)
        )
    screen(as_json=as_json).print(_describe_store(document))
    if as_json:
        print_json(document)


def _find_target(to: Target | None, out: Path, *, pairs: bool, packing: PackingFlags) -> Target:
    """Return what to write, or raise if it is not known or an option has no effect on it."""
    if to is None and out.suffix != ".eqr":
        raise EquipoiseError(
            f"{out} does not say what to write; add --to store, --to counts or --to loads (without --to, a name that "
            "ends in .eqr is a store)"
        )
    target = to or "store"
    if pairs and target != "counts":
        raise EquipoiseError(f"--pairs has no effect on {target}; add --to counts, or leave --pairs out")
    plain = PackingFlags()
    if target != "loads" and packing != plain:
        changed = [f.name for f in fields(packing) if getattr(packing, f.name) != getattr(plain, f.name)]
        flags = ", ".join("--no-recompute" if name == "recompute" else f"--{name}" for name in changed)
        raise ScheduleError(
            f"{flags.replace('_', '-')} schedules samples, and --to {target} does not; give --to loads, or leave it out"
        )
    return target


def write_store(
    path: Path,
    samples: Iterable[SampleRoutes],
    *,
    model: ModelShape,
    layer_numbers: Sequence[int],
    show: Callable[[int, int], None],
) -> dict[str, Any]:
    """Write every sample to a new store, and return what was written, for JSON.

    A new store replaces an old one only when it is complete. `show` is called with (samples done, 0) after each sample.
    """
    from equipoise.core.files import whole_file
    from equipoise.routes.store import StoreWriter

    count = tokens = 0
    with whole_file(path) as draft, StoreWriter(draft, model=model, layer_numbers=layer_numbers) as writer:
        for count, sample in enumerate(samples, start=1):
            writer.append(sample)
            tokens += sample.num_tokens
            show(count, 0)
        if not count:
            raise RoutesError("the dump holds no sample; is it the right file?")
    size = path.stat().st_size
    return {"out": str(path), "model": model.name, "samples": count, "tokens": tokens, "bytes": size}


def _describe_store(document: dict[str, Any]) -> str:
    return "{samples:,} samples, {tokens:,} tokens of {model} -> {out} ({mb:,.1f} MB)".format(
        **document, mb=document["bytes"] / 1e6
    )


def _write_counts(dump: Path, out: Path, reading: ReadingFlags, *, pairs: bool, as_json: bool) -> dict[str, Any]:
    """Write the histograms of a dump, and say which routes are unknown."""
    from equipoise.cli.step_loads import count_dump
    from equipoise.loads import save_counts

    counts = count_dump(dump, reading, pairs=pairs)
    save_counts(counts, out)
    figures = {
        "samples": len(counts),
        "tokens": int(counts.tokens_B.sum()),
        "rows": int(counts.count_BLE.sum()),
        "padding_rows": 0 if counts.padding_BLE is None else int(counts.padding_BLE.sum()),
        "unknown": 0 if counts.unknown_BL is None else int(counts.unknown_BL.sum()),
    }
    # A sample that lacks a route in every layer lacks its last token's, which most engines do not record.
    lacking = 0 if counts.unknown_BL is None else int((counts.unknown_BL.min(axis=1) > 0).sum())
    whose = "each sample's last token" if lacking == len(counts) else f"the last token of {plural(lacking, 'sample')}"
    screen(as_json=as_json).print(
        "{samples:,} samples, {tokens:,} tokens, {rows:,} rows in all layers, {padding_rows:,} of padding; "
        "{unknown:,} routes unknown".format(**figures)
        + (f" ({whose} has none)" if lacking else "")
    )
    return {"out": str(out), "model": counts.model.name, **figures}


def _write_loads(
    dump: Path, out: Path, reading: ReadingFlags, packing: PackingFlags, *, force: bool, as_json: bool
) -> dict[str, Any]:
    """Write the loads of a step: one file per window, and per EP group if there are several."""
    from equipoise.cli.step_loads import open_step

    if npz_kind(dump) == "loads":
        raise ScheduleError(f"{dump} holds loads, which are scheduled already; equipoise plan reads them as they are")
    source = open_step(dump, reading, packing)
    windows = source.windows(packing.ep, None)
    files = {}
    for i, window in enumerate(windows):
        path = out.with_stem(f"{out.stem}-{i}-{window.stage}") if len(windows) > 1 else out
        # A plan takes all ranks of a file for one EP group, so every group has its own file.
        for g, group in enumerate(window.split_groups(packing.ep)):
            files[path.with_stem(f"{path.stem}-group{g}") if packing.groups > 1 else path] = group
    refuse_existing(*files, force=force)
    written = []
    for path, loads in files.items():
        loads.save(path)
        sizes = {"micro_steps": loads.num_micro_steps, "layers": loads.num_layers, "ranks": loads.num_ranks}
        figures = {**sizes, "rows": int(loads.load_MLRE.sum())}
        written.append({"out": str(path), "stage": loads.stage, **figures})
        counts = [plural(number, name[:-1].replace("_", "-")) for name, number in figures.items()]
        screen(as_json=as_json).print(f"{path}: {', '.join((loads.stage, *counts))}", soft_wrap=True)
    return {"model": source.model.name, "windows": written}


def _list_formats(*, as_json: bool) -> None:
    from equipoise.routes.registry import FORMATS

    rows = [(form.name, form.summary) for form in FORMATS]
    screen(as_json=as_json).print(build_table(["format", "what it is"], rows, num_text=2, title="Formats of routes"))
    if as_json:
        print_json({"formats": [{"name": name, "summary": summary} for name, summary in rows]})


def _describe_packed(given: "Schedule", made: "Packing") -> dict[str, Any]:
    """Return what packing did to one window, for JSON: shares and limits before and after."""
    from equipoise.loads import PackingLimits

    return {
        "stage": given.stage,
        "samples": len(given.pieces),
        "micro_steps": given.micro_steps,
        "how": made.how,
        "given_crossing": made.given_crossing,
        "crossing": made.crossing,
        "given_limits": PackingLimits.of(given)._asdict(),
        "limits": PackingLimits.of(made.schedule)._asdict(),
    }


def pack(
    dump: Annotated[Path, typer.Argument(help="Rollouts in any format, or a counts .npz file.", show_default=False)],
    *,
    out: Annotated[Path, typer.Option("-o", "--out", help="The schedule to write, for example schedule.json.")],
    reading: ReadingFlags,
    packing: PackingFlags,
    ranks_per_node: RanksPerNodeOption = 8,
    memory_gib: MemoryOption = None,
    activations: ActivationsOption = "kept",
    force: ForceFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Pack samples by their experts, so that rows stay in their node."""
    from equipoise.cli.step_loads import check_packing, pack_given, read_samples, schedule_step, token_policy
    from equipoise.loads import MemoryLimit, write_schedules
    from equipoise.loads.forecast import limit_in_bytes

    if npz_kind(dump) == "loads":
        raise ScheduleError(f"{dump} holds loads, which are scheduled already; give the samples")
    refuse_existing(out, force=force, read=(dump, Path(packing.schedule) if packing.is_file else None))
    samples = read_samples(dump, reading, packing)
    check_packing(packing, samples.model)
    limit, found = limit_in_bytes(memory_gib), list[dict[str, Any]]()
    model = samples.model.replace(layers=len(samples.layer_numbers))
    memory = None
    if limit is not None:
        memory = MemoryLimit(limit_bytes=limit, model=model, ep=packing.ep, activations=activations)

    def packed(given: "tuple[Schedule, ...]") -> "tuple[Schedule, ...]":
        made = pack_given(samples, given, packing, ranks_per_node=ranks_per_node, memory=memory)
        found.extend(map(_describe_packed, given, made))
        return tuple(each.schedule for each in made)

    schedules = schedule_step(packing, samples, policy=token_policy(samples), pack=packed)
    write_schedules(schedules, out)
    if as_json:
        print_json({"out": str(out), "windows": found})
        return
    console = screen(as_json=as_json)
    table = build_table(["  window", "samples", "micro-steps", "rows across, given", "packed", "how"])
    for window in found:
        sizes, shares = ("samples", "micro_steps"), ("given_crossing", "crossing")
        figures = *(str(window[name]) for name in sizes), *(f"{window[name]:.1%}" for name in shares)
        table.add_row(f"  {window['stage']}", *figures, window["how"])
    console.print(table)
    console.print("Rows across: with homes that follow the samples, before replicas.", soft_wrap=True)
    console.print(f"Written: {out}", soft_wrap=True)

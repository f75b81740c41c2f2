"""Bring a dump of any form into the native store: mapped, checksummed, quick to read again.

equipoise ingest rollouts.jsonl --model qwen3-30b-a3b -o routes.eqr
equipoise ingest step_12/ --model path/to/config.json --format slime -o routes.eqr
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from equipoise.cli.options import DumpArgument, ForceFlag, JsonFlag, Packing, Reading, count_dump, refuse_existing
from equipoise.cli.output import print_json, progress, screen
from equipoise.core import ModelShape, RoutesError, SampleRoutes
from equipoise.core.files import whole_file
from equipoise.routes.store import StoreWriter

if TYPE_CHECKING:
    from equipoise.core import LoadMatrix, RouteCounts


# Count a dump into histograms: enough to plan, thousands of times smaller than the routes.
#
# equipoise count routes.eqr -o counts.npz
# equipoise count rollouts.jsonl --model qwen3-30b-a3b --pairs -o counts.npz


def count(
    dump: DumpArgument,
    out: Annotated[Path, typer.Option("-o", "--out", help="The histograms to write, for example counts.npz.")],
    *,
    reading: Reading,
    pairs: Annotated[
        bool,
        typer.Option(
            "--pairs",
            help="Also count which experts are chosen together, for `plan --pairs` and `simulate` with --sends tokens.",
        ),
    ] = False,
    force: ForceFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Count a dump into histograms."""
    from equipoise.loads import save_counts

    refuse_existing(out, force=force, read=[dump])
    counts = count_dump(dump, reading, pairs=pairs)
    save_counts(counts, out)
    figures = {
        "samples": len(counts),
        "tokens": int(counts.tokens_B.sum()),
        "rows": int(counts.count_BLE.sum()),
        "padding_rows": 0 if counts.padding_BLE is None else int(counts.padding_BLE.sum()),
        "unknown": 0 if counts.unknown_BL is None else int(counts.unknown_BL.sum()),
    }
    screen(as_json=as_json).print(
        "{samples:,} samples, {tokens:,} tokens, {rows:,} rows in all layers, {padding_rows:,} of padding; "
        "{unknown:,} routes unknown".format(**figures)
        + _last_tokens(counts)
    )
    if as_json:
        print_json({"out": str(out), "model": counts.model.name, **figures})


def _last_tokens(counts: "RouteCounts") -> str:
    """Which samples lack the route of a token in every layer: their last one, which most engines do not record."""
    from equipoise.report.page import plural

    lacking = 0 if counts.unknown_BL is None else int((counts.unknown_BL.min(axis=1) > 0).sum())
    if not lacking:
        return ""
    whose = "each sample's last token" if lacking == len(counts) else f"the last token of {plural(lacking, 'sample')}"
    return f" ({whose} has none)"


# Schedule a dump and count the loads of every window: what the planner takes.
#
# equipoise loads routes.eqr --ep 32 --schedule tokens:16384 -o loads.npz
# equipoise loads counts.npz --ep 8 --mini-batches 2 --no-recompute -o loads.npz
#
# One file per window. Where a step has several, their place and stage go into the names: loads-0-recompute.npz,
# loads-1-update.npz.


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
    from equipoise.report.page import plural

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


# List the forms in which routes can be read and written.
#
# equipoise formats
# equipoise formats --json


def formats(as_json: JsonFlag = False) -> None:
    """List the forms in which routes can be read and written."""
    from rich.table import Table

    from equipoise.routes.registry import FORMATS

    table = Table("form", "what it is", "written to", title="Forms of recorded routes", title_justify="left")
    for form in FORMATS:
        table.add_row(form.name, form.summary, " ".join(form.suffixes))
    screen(as_json=as_json).print(table)
    if as_json:
        listed = [{"name": f.name, "summary": f.summary, "suffixes": list(f.suffixes)} for f in FORMATS]
        print_json({"formats": listed})


# Write samples to a new native store as they come, and say what was written.
#
# Shared by `ingest` and `generate`. A file which is replaced is lost only to a whole one.


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What a store holds."""

    path: Path
    model: ModelShape
    samples: int
    tokens: int

    def words(self) -> str:
        """One line for the terminal."""
        size = self.path.stat().st_size / 1e6
        return f"{self.samples:,} samples, {self.tokens:,} tokens of {self.model.name} -> {self.path} ({size:,.1f} MB)"

    def to_dict(self) -> dict[str, Any]:
        """The same, for JSON."""
        return {
            "out": str(self.path),
            "model": self.model.name,
            "samples": self.samples,
            "tokens": self.tokens,
            "bytes": self.path.stat().st_size,
        }


def write_store(
    path: Path,
    samples: Iterable[SampleRoutes],
    *,
    model: ModelShape,
    layer_numbers: Sequence[int],
    show: Callable[[int, int], None],
) -> Written:
    """Write every sample to a new store; `show` is called with (samples done, 0) after each."""
    count = tokens = 0
    with whole_file(path) as draft, StoreWriter(draft, model=model, layer_numbers=layer_numbers) as writer:
        for count, sample in enumerate(samples, start=1):
            writer.append(sample)
            tokens += sample.num_tokens
            show(count, 0)
        if not count:
            raise RoutesError("the dump holds no sample; is it the right file?")
    return Written(path=path, model=model, samples=count, tokens=tokens)


def ingest(
    dump: DumpArgument,
    out: Annotated[Path, typer.Option("-o", "--out", help="The store to write, for example routes.eqr.")],
    *,
    reading: Reading,
    force: ForceFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Bring a dump of any form into the native store."""

    refuse_existing(out, force=force)
    shape, stream = reading.stream(dump)
    with progress("reading") as show:
        written = write_store(out, stream, model=shape, layer_numbers=stream.layer_numbers, show=show)
    screen(as_json=as_json).print(written.words())
    if as_json:
        print_json(written.to_dict())

"""Count a dump into histograms: enough to plan, thousands of times smaller than the routes.

equipoise count routes.eqr -o counts.npz
equipoise count rollouts.jsonl --model qwen3-30b-a3b --pairs -o counts.npz
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from equipoise.cli.options import DumpArgument, ForceFlag, JsonFlag, Reading, count_dump, refuse_existing
from equipoise.cli.output import print_json, screen

if TYPE_CHECKING:
    from equipoise.core import RouteCounts


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
    from equipoise.report.words import plural

    lacking = 0 if counts.unknown_BL is None else int((counts.unknown_BL.min(axis=1) > 0).sum())
    if not lacking:
        return ""
    whose = "each sample's last token" if lacking == len(counts) else f"the last token of {plural(lacking, 'sample')}"
    return f" ({whose} has none)"

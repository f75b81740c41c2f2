"""Bring a dump of any form into the native store: mapped, checksummed, quick to read again.

equipoise ingest rollouts.jsonl --model qwen3-30b-a3b -o routes.eqr
equipoise ingest step_12/ --model path/to/config.json --format slime -o routes.eqr
"""

from pathlib import Path
from typing import Annotated

import typer

from equipoise.cli.options import (
    DumpArgument,
    ForceFlag,
    FormatOption,
    JsonFlag,
    LastRowOption,
    ModelOption,
    Reading,
    ShortFlag,
    refuse_existing,
)
from equipoise.cli.output import print_json, progress, screen


def ingest(
    dump: DumpArgument,
    out: Annotated[Path, typer.Option("-o", "--out", help="The store to write, for example routes.eqr.")],
    model: ModelOption = None,
    form: FormatOption = None,
    last_row: LastRowOption = "recorded",
    allow_short: ShortFlag = False,
    force: ForceFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Bring a dump of any form into the native store."""
    from equipoise.cli.storing import write_store

    refuse_existing(out, force=force)
    reading = Reading(model=model, form=form, last_row=last_row, allow_short=allow_short)
    shape, stream = reading.stream(dump)
    with progress("reading") as show:
        written = write_store(out, stream, model=shape, layer_numbers=stream.layer_numbers, show=show)
    screen(as_json=as_json).print(written.words())
    if as_json:
        print_json(written.to_dict())

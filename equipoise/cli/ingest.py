"""Bring a dump of any form into the native store: mapped, checksummed, quick to read again.

equipoise ingest rollouts.jsonl --model qwen3-30b-a3b -o routes.eqr
equipoise ingest step_12/ --model path/to/config.json --format slime -o routes.eqr
"""

from pathlib import Path
from typing import Annotated

import typer

from equipoise.cli.options import DumpArgument, ForceFlag, JsonFlag, Reading, refuse_existing
from equipoise.cli.output import print_json, progress, screen


def ingest(
    dump: DumpArgument,
    out: Annotated[Path, typer.Option("-o", "--out", help="The store to write, for example routes.eqr.")],
    *,
    reading: Reading,
    force: ForceFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Bring a dump of any form into the native store."""
    from equipoise.cli.storing import write_store

    refuse_existing(out, force=force)
    shape, stream = reading.stream(dump)
    with progress("reading") as show:
        written = write_store(out, stream, model=shape, layer_numbers=stream.layer_numbers, show=show)
    screen(as_json=as_json).print(written.words())
    if as_json:
        print_json(written.to_dict())

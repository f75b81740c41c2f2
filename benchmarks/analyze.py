"""Time of `equipoise analyze` from the native store: 512 samples x 8k tokens of Qwen3-30B-A3B shape within 60 s.

    python -m benchmarks.analyze
    python -m benchmarks.analyze --samples 32 --tokens 2048

What bounds it: every byte of the store is checked (crc32) and counted once, 1.6 GB at full size; then every layer of
both stages is planned. The ceiling is reading the file and its checksum alone, given beside the result as `ceiling_s`.

Method:
1. `equipoise generate` writes a store to a temporary folder, which is removed afterwards.
2. `equipoise analyze STORE --json` runs twice, each time in a new process: first with an empty folder for compiled
   kernels (`first_s`, what a fresh machine needs once), then with what the first run left there (`analyze_s`).
3. Each document is read back from the last line; both must be equal, and their rows tokens x layers x K x stages.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.results import ROOT, Limit, publish
from equipoise.core import ModelShape

MODEL = "qwen3-30b-a3b"
LIMIT_S = 60.0


def main() -> int:
    """Write a store, analyse it in a new process, publish."""
    parser = argparse.ArgumentParser(description="Time of equipoise analyze from the native store")
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of each sample")
    parser.add_argument("--folder", type=Path, help="where to make the temporary folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        store = Path(folder) / "routes.eqr"
        size = ["--samples", str(options.samples), "--tokens", str(options.tokens), "--length-sigma", "0"]
        generate_s, _ = run_verb("generate", "--model", MODEL, *size, "-o", str(store))
        ceiling_s = read_and_check(store)
        kernels = {"NUMBA_CACHE_DIR": str(Path(folder) / "kernels")}
        first_s, first = run_verb("analyze", str(store), "--ep", "8", "--cluster", "h100", env=kernels)
        analyze_s, document = run_verb("analyze", str(store), "--ep", "8", "--cluster", "h100", env=kernels)
        megabytes = store.stat().st_size / 1e6
    model = ModelShape.preset(MODEL)
    expected = options.samples * (options.tokens - 1) * model.layers * model.top_k * len(document["stages"])
    if first != document:
        raise SystemExit("two runs on one store gave two documents; no time is published")
    if document["rows"] != expected:
        raise SystemExit(f"analyze counted {document['rows']} rows, the store holds {expected}; no time is published")
    row = {
        "samples": options.samples,
        "tokens": options.tokens,
        "store_MB": megabytes,
        "generate_s": generate_s,
        "first_s": first_s,
        "analyze_s": analyze_s,
        "ceiling_s": ceiling_s,
        "share_of_ceiling": ceiling_s / analyze_s,
        "skew_mean": document["stages"]["update"]["skew"]["mean"],
        "saved_share": document["seconds"]["saved"]["share"],
    }
    limits = [Limit(name="seconds of equipoise analyze", value=analyze_s, at_most=LIMIT_S)]
    note = (
        "seconds are wall time of a new process; first_s compiles every kernel, analyze_s finds them compiled; "
        "skew in rows at EP 8, saved_share predicted"
    )
    return publish("analyze", [row], limits=limits, note=note)


def run_verb(*arguments: str, env: Mapping[str, str] | None = None) -> tuple[float, dict[str, Any]]:
    """Run one verb in a new process with `env` added to the environment; return its seconds and its JSON document."""
    code = "from equipoise.cli import main; main()"
    start = time.perf_counter()
    command = [sys.executable, "-c", code, *arguments, "--json"]
    environment = {**os.environ, **(env or {})}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - start
    if done.returncode:
        raise SystemExit(f"equipoise {' '.join(arguments)} ended with {done.returncode}: {done.stderr.strip()}")
    document: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return seconds, document


def read_and_check(path: Path) -> float:
    """Seconds to read a file and take its checksum, the least any reader of it can need."""
    start = time.perf_counter()
    checksum = 0
    with path.open("rb") as file:
        while block := file.read(4 * 2**20):
            checksum = zlib.crc32(block, checksum)
    return time.perf_counter() - start


if __name__ == "__main__":
    raise SystemExit(main())

"""Time of `equipoise analyze` from the native store: 512 samples x 8k tokens of Qwen3-30B-A3B shape within 60 s.

    python -m benchmarks.analyze
    python -m benchmarks.analyze --samples 32 --tokens 2048

What bounds it: every byte of the store is checked (crc32) and counted once, 1.6 GB at full size. The ceiling is reading
the file and its checksum alone, given beside the result as `ceiling_s`.

Method:
1. `equipoise generate` writes a store to a temporary folder, which is removed afterwards.
2. `equipoise analyze STORE --json` runs in a new process, so that start-up and compiling count. Its document is read
   back from the last line, and its rows are compared with tokens x layers x K x stages.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
import zlib
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
        analyze_s, document = run_verb("analyze", str(store), "--ep", "8", "--cluster", "h100")
        megabytes = store.stat().st_size / 1e6
    model = ModelShape.preset(MODEL)
    expected = options.samples * (options.tokens - 1) * model.layers * model.top_k * len(document["stages"])
    if document["rows"] != expected:
        raise SystemExit(f"analyze counted {document['rows']} rows, the store holds {expected}; no time is published")
    row = {
        "samples": options.samples,
        "tokens": options.tokens,
        "store_MB": megabytes,
        "generate_s": generate_s,
        "analyze_s": analyze_s,
        "ceiling_s": ceiling_s,
        "share_of_ceiling": ceiling_s / analyze_s,
        "skew_mean": document["stages"]["update"]["skew"]["mean"],
    }
    limits = [Limit(name="seconds of equipoise analyze", value=analyze_s, at_most=LIMIT_S)]
    note = "seconds are wall time of a new process, start-up and compiling included; skew in rows at EP 8"
    return publish("analyze", [row], limits=limits, note=note)


def run_verb(*arguments: str) -> tuple[float, dict[str, Any]]:
    """Run one verb in a new process; return its seconds and its JSON document."""
    code = "from equipoise.cli import main; main()"
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments, "--json"], cwd=ROOT, capture_output=True, text=True, check=False
    )
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

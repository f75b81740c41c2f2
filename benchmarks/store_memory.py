"""Memory of counting a large native store: anonymous memory above start, mapped pages not counted.

    python -m benchmarks.store_memory --gib 2
    python -m benchmarks.store_memory --gib 0.0625 --tokens 2048

What bounds it: nothing but one sample and the histograms needs to be in anonymous memory, beside the compiler (numba,
about 40 MB). A histogram takes L x E x 8 bytes per sample, here 49 KB, as much as the routes of 128 tokens: with
samples of less than about 800 tokens the histograms of a 2 GB store alone pass the limit. The ceiling of the rate is
that of `zlib.crc32`, the store's checksum, over the same file, which is given beside it.

Method:
1. A store of Qwen3-30B-A3B shape is written to a temporary folder, which is removed afterwards. A block of random
   routes is shifted from sample to sample.
2. A new process opens and counts it. "Start" is after the imports of that process, before numba is imported and before
   the store is opened; RssAnon of /proc/self/status is read every 2 ms and after every sample.
3. The counted rows are compared with tokens x layers x K.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.results import ROOT, Limit, publish
from equipoise.core import ModelShape, SampleRoutes
from equipoise.loads.count import count_routes
from equipoise.routes.store import StoreWriter, open_store

MODEL = "qwen3-30b-a3b"
LIMIT_MB = 400.0
INTERVAL_S = 0.002


def main() -> int:
    """Write a store, count it in a new process, publish."""
    parser = argparse.ArgumentParser(description="Memory of counting a large native store")
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of each sample")
    parser.add_argument("--folder", type=Path, help="where to make the temporary folder")
    parser.add_argument("--count", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.count:
        print(json.dumps(count_and_watch(options.count)))
        return 0
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        path = Path(folder) / "routes.eqr"
        write_s = write_store(path, size=int(options.gib * 2**30), tokens=options.tokens)
        row = {"store_MB": path.stat().st_size / 1e6, "write_s": write_s, **count_in_new_process(path)}
    limits = [Limit(name="anonymous memory above start in MB", value=row["above_start_MB"], at_most=LIMIT_MB)]
    return publish("store_memory", [row], limits=limits, note="MB are 10^6 bytes; rates in MB per second of file")


def write_store(path: Path, *, size: int, tokens: int) -> float:
    """Write a store of at least `size` bytes and return the seconds it took."""
    model = ModelShape.preset(MODEL)
    rng = np.random.default_rng(0)
    shape = (tokens, model.layers, model.top_k)
    block = rng.permuted(np.arange(np.prod(shape), dtype=np.int64) % model.experts).astype(np.uint8).reshape(shape)
    start = time.perf_counter()
    with StoreWriter(path, model=model) as writer:
        while path.stat().st_size < size:
            ids = np.roll(block, len(writer), axis=0)
            writer.append(SampleRoutes(name=f"sample {len(writer)}", ids_TLK=ids, num_tokens=tokens + 1))
    return time.perf_counter() - start


def count_in_new_process(path: Path) -> dict[str, Any]:
    """`count_and_watch` where nothing but the imports has used memory yet."""
    command = [sys.executable, "-m", "benchmarks.store_memory", "--count", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def count_and_watch(path: Path) -> dict[str, Any]:
    """Count a store and watch this process's anonymous memory."""
    assert "numba" not in sys.modules, "start must be before numba is imported"
    watch = Watch()
    start = time.perf_counter()
    with watch:
        routes = open_store(path)
        counts = count_routes(routes, progress=lambda *_: watch.look())
    count_s = time.perf_counter() - start
    rows = int((counts.tokens_B - 1).sum()) * routes.model.layers * routes.model.top_k
    assert int(counts.count_BLE.sum()) == rows, "every row must be counted once"
    megabytes = path.stat().st_size / 1e6
    return {
        "samples": len(counts),
        "above_start_MB": (watch.peak - watch.start) / 1e6,
        "count_s": count_s,
        "rate": megabytes / count_s,
        "crc_rate": megabytes / _crc_seconds(path),
    }


class Watch:
    """The peak of this process's anonymous memory while the context is open."""

    def __init__(self) -> None:
        self.start = self.peak = anonymous_bytes()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        self.look()

    def look(self) -> None:
        self.peak = max(self.peak, anonymous_bytes())

    def _run(self) -> None:
        while not self._done.wait(INTERVAL_S):
            self.look()


def anonymous_bytes() -> int:
    """RssAnon of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("RssAnon:"))
    return int(line.split()[1]) * 1024


def _crc_seconds(path: Path) -> float:
    start = time.perf_counter()
    with path.open("rb") as file:
        while piece := file.read(4 * 2**20):
            zlib.crc32(piece)
    return time.perf_counter() - start


if __name__ == "__main__":
    sys.exit(main())

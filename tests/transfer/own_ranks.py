"""Processes of a test's own, for what would break shared workers: ranks that are killed or give up in mid-collective.

They are forked from a server that has torch loaded, so that starting a few costs little.
"""

import gc
import multiprocessing
import pickle
import signal
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path

from tests.pool import be_another_host

KILLED = "killed"


def run_ranks(function, world_size, *args, timeout_s=300.0, backend="gloo"):
    """Call `function(group, *args)` on fresh ranks; return each one's result, or KILLED where it was killed."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "tests.transfer.windows"])
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        started = []
        for rank in range(world_size):
            ours, theirs = context.Pipe(duplex=False)
            where = (rank, world_size, str(Path(folder) / "store"), backend)
            process = context.Process(target=_serve, args=(theirs, where, pickle.dumps((function, args))), daemon=True)
            process.start()
            theirs.close()
            started.append((process, ours))
        try:
            end = time.monotonic() + timeout_s
            return [_answer(process, pipe, end - time.monotonic()) for process, pipe in started]
        finally:
            for process, pipe in started:
                process.kill()
                process.join()
                pipe.close()


def _answer(process, pipe, left_s):
    assert pipe.poll(max(left_s, 0.0)), "a rank neither answered nor ended"
    try:
        is_good, value = pickle.loads(pipe.recv_bytes())
    except EOFError:
        process.join(60)
        assert process.exitcode == -signal.SIGKILL, f"a rank ended with {process.exitcode}"
        return KILLED
    assert is_good, value
    return value


def _serve(pipe, where, call):
    import torch
    import torch.distributed as dist

    gc.freeze()
    torch.set_num_threads(1)
    rank, world_size, store, backend = where
    limit = timedelta(seconds=300)
    be_another_host(rank)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=limit)
    try:
        function, args = pickle.loads(call)
        answer = pickle.dumps((True, function(dist.group.WORLD, *args)))
    except Exception:  # noqa: BLE001  # the test shows it, whatever it is
        answer = pickle.dumps((False, traceback.format_exc()))
    pipe.send_bytes(answer)

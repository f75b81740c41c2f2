"""`StartedPlanner`: a rank's planning process, started early, with its kernels compiled while something else runs.

The planner's kernels are compiled once per machine, which takes half a minute; afterwards they are read from disk in a
few seconds. Either way it happens while the model warms up, not in the first step.

Knows the worker and a made-up window. Does not know training.

Invariants (asserted by the tests):
1. `ready` returns a worker whose next window is planned without compiling.
2. Waiting for it is told, never silent.
3. After `forget` a window is planned as the first one of a run is.
"""

import threading
import time

import numpy as np

from equipoise.core import Cluster, LoadMatrix, ModelShape
from equipoise.core.errors import EquipoiseError
from equipoise.planning.options import BalancerOptions
from equipoise.planning.worker import PlanWorker
from equipoise.rl.config import Mode, TrainConfig
from equipoise.rl.events import Event, Show
from equipoise.rl.layout import build_cluster
from equipoise.rl.learner import balancer_options

_WORDS = "compiling planner kernels, once per machine"
_PATIENCE_S = 2.0


def start_planner(
    config: TrainConfig, model: ModelShape, *, mode: Mode, worker: PlanWorker | None = None
) -> "StartedPlanner | None":
    """Start a planning process where the mode plans; returns at once."""
    if mode != "equipoise":
        return None
    return StartedPlanner(build_cluster(config, model), model, balancer_options(config), worker=worker)


class StartedPlanner:
    """One rank's planning process."""

    def __init__(
        self, cluster: Cluster, model: ModelShape, options: BalancerOptions, *, worker: PlanWorker | None = None
    ) -> None:
        """Start the process and have it plan a made-up window; returns at once.

        Args:
            worker: a process to use, left running on close; an own one by default
        """
        self._is_own = worker is None
        self.worker = PlanWorker() if worker is None else worker
        self._task = (cluster, model, options)
        self._trouble: EquipoiseError | None = None
        self._thread = threading.Thread(target=self._plan, daemon=True)
        self._thread.start()

    def ready(self, show: Show) -> PlanWorker:
        """Wait until the kernels are compiled, telling so where it takes a while."""
        begin = time.monotonic()
        self._thread.join(_PATIENCE_S)
        while self._thread.is_alive():
            show(Event("progress", {"words": _WORDS, "done": int(time.monotonic() - begin), "total": 0}))
            self._thread.join(1.0)
        if self._trouble is not None:
            raise self._trouble
        return self.worker

    def forget(self) -> None:
        """Plan the next window as if it were the first; between windows only.

        Plans start from the homes of the one before. A run that goes on from a checkpoint has none before, so one that
        does not stop there forgets its own: both then make the same plans, and so the same bits.
        """
        self.worker.call("open", *self._task)

    def close(self) -> None:
        """End the process, where it is an own one."""
        if self._is_own:
            self.worker.close()

    def _plan(self) -> None:
        cluster, model, _ = self._task
        rng = np.random.default_rng(0)
        load_MLRE = rng.integers(1, 100, size=(2, model.layers, cluster.ep, model.experts))
        loads = LoadMatrix(load_MLRE, layer_numbers_L=np.array(model.layer_numbers))
        try:
            self.worker.call("open", *self._task)
            self.worker.call("whole", loads, [self.worker.call("share", loads, range(1))])
            # The second window starts from the first one's homes, which is another path of the search.
            self.worker.call("whole", loads, [])
        except EquipoiseError as error:
            self._trouble = error

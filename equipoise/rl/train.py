"""RL post-training of a Mixture-of-Experts model, balanced by foresight: the loop, and a whole run around it.

One step (`Trainer.step`), the same on every rank:
1. sync: canonical weights are copied to the rollout copy, or sent to the outside engine, and compared by fingerprints.
2. rollout: the copy answers this rank's questions and records its routes. Rows are counted as samples end, and windows
   of recompute planned in the background as soon as they are known, while long answers are still being made.
3. announce: the first update window is planned too,
4. reward: while answers are judged and advantages computed.
5. recompute: old log-probs, forward only, replaying the routes.
6. update: GRPO, one optimizer step per window; the next window is planned meanwhile.
7. metrics.

A whole run (`run`) leaves in its folder:
    config.toml               every setting
    metrics.jsonl             one line per step
    events.jsonl              one line per event between them: stages, forecasts of memory, notes, the end
    summary.json              what was learnt and balanced, and where files are
    checkpoints/step-000010   see `checkpoint`; its `model` is a HF checkpoint
With `record`, the routes of every step go to a folder of their own, as vLLM's HTTP form writes them, with the model's
`config.json` in a folder `model` beside them: `equipoise doctor FOLDER --model FOLDER/model/config.json`.
"""

import json
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from equipoise.adapters.transformers import inspect
from equipoise.core import LoadMatrix, ModelShape, Stage, TopologyError, TransferError
from equipoise.core.errors import EquipoiseError, TrainingError
from equipoise.core.files import whole_file
from equipoise.cost import CostModel
from equipoise.launch import RankDiedError, RankOptions, Ranks, RankSilentError, run_ranks
from equipoise.planning.worker import PlanWorker
from equipoise.rl.checkpoint import Checkpoints
from equipoise.rl.config import Mode, TrainConfig, build_cluster, write_config
from equipoise.rl.learner import Learner, balancer_options, push_weights, sync_weights, warm_up
from equipoise.rl.metrics import RankFigures, RunEvent, Show, Sinks, also_written, ignore, read_lines, step_metrics
from equipoise.rl.model import build_like, build_model, copy_model, open_tokenizer
from equipoise.rl.rollout import Engine, Outside, RecordedRollouts, Request, Sample, Sampler, to_routes
from equipoise.rl.stages import StageClock, Stages, Window, group_advantages
from equipoise.rl.task import CharTokenizer, Question, find_reward, open_task
from equipoise.routes import write_routes

_PATIENCE_S = 2.0
"""How long the planner's kernels may compile before the wait is shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experience:
    """One rank's rollout of one step."""

    questions: list[Question]
    samples: list[Sample]
    """A question's samples have adjacent indices."""
    ended: list[int]
    """Indices of the samples in the order in which they ended."""


class Trainer:
    """One rank of a training run."""

    def __init__(
        self,
        model: nn.Module,
        config: TrainConfig,
        ranks: Ranks,
        *,
        mode: Mode | None = None,
        show: Show = ignore,
        worker: PlanWorker | None = None,
    ) -> None:
        """Make the rollout copy and move the experts to their owners. Every rank must call this.

        Args:
            model: the whole model with the weights to start from, the same on every rank
            mode: other than the configured one, in a comparison
            worker: a planning process to use; None: start one
        """
        self.config, self.ranks, self._show = config, ranks, show
        self.task, self.reward = open_task(config.task), find_reward(config.task.reward)
        self.tokenizer = open_tokenizer(config.model)
        self.reference = copy_model(model) if config.update.kl else None
        self.engine: Sampler | RecordedRollouts | Engine
        if source := config.rollout.source:
            outside = Outside(config=config.rollout, model=inspect(model).shape, tokenizer=self.tokenizer)
            self.engine = Engine(source, outside) if source.startswith("http") else RecordedRollouts(source, outside)
        else:
            self.engine = Sampler(copy_model(model), config=config.rollout, tokenizer=self.tokenizer)
        self.num_parameters = sum(parameter.numel() for parameter in model.parameters())
        self.learner = Learner(model, config, ranks, mode=mode or config.balance.mode, worker=worker)
        cluster = build_cluster(config, self.learner.shape)
        stages: tuple[Stage, ...] = ("recompute", "update")
        self._costs = {stage: CostModel.of(cluster, self.learner.shape, stage=stage) for stage in stages}
        self.stages = Stages(self.learner, config, ranks, reference=self.reference, foresee=self._foresee)
        self._clock, self._step = StageClock(), 0
        self.experience: Experience | None = None
        """The last step's rollout."""

    def step(self, step: int, *, given: Experience | None = None) -> dict[str, Any]:
        """Train one step and return its metrics. Every rank must call this.

        In a comparison a rollout is `given`, to train on instead of an own one.
        """
        self.stages.open_step()
        self._clock, self._step = StageClock(), step
        if given is None:
            experience = self._roll_out(step)
        else:
            experience = given
            for index in given.ended:
                self.stages.take(index, given.samples[index])
        self.experience, samples = experience, experience.samples
        self.stages.announce()

        self._begin(step, "reward")
        count = self.config.rollout.samples
        questions = [experience.questions[index // count] for index in range(len(samples))]
        responses = [self.tokenizer.decode(sample.response_T.tolist()) for sample in samples]
        answered = list(zip(questions, responses, strict=True))
        rewards = [self.reward(question.prompt, response, question.answer) for question, response in answered]
        advantage_B = group_advantages(rewards, samples=count)

        self._begin(step, "recompute")
        windows, old = self.stages.recompute()
        self._begin(step, "update")
        self.stages.update(windows, old, advantage_B)

        figures = RankFigures(
            tally=self.stages.tally,
            rewards=rewards,
            num_right=sum(response == question.answer for question, response in answered),
            known_rows=sum(sample.known_rows for sample in samples),
            rows=sum(sample.ids_TLK.shape[0] * sample.ids_TLK.shape[1] for sample in samples),
            tokens=sum(len(sample.tokens_T) for sample in samples),
            rollout_kl=_rollout_kl(self.stages.trained, windows, old),
            stage_s=self._clock.stop(),
        )
        return step_metrics(step, self.ranks.gather(figures), ep=self.config.group_ranks, costs=self._costs)

    def _roll_out(self, step: int) -> Experience:
        """Give the rollout copy the current weights and let it answer this rank's questions."""
        version = ""
        if isinstance(self.engine, Sampler):
            self._begin(step, "sync")
            version = sync_weights(self.learner, self.engine.model, self.ranks)[:12]
        elif isinstance(self.engine, Engine):
            self._begin(step, "sync")
            version = push_weights(self.learner, self.engine.weights, self.ranks, step=step)
        self._begin(step, "rollout")
        share = self.config.rollout.prompts // self.ranks.size
        questions = self.task.questions(self.config.rollout.prompts, seed=self.config.seed, step=step)
        first = self.ranks.rank * share
        request = Request(
            step=step,
            first=first,
            questions=questions[first : first + share],
            seed=seed_of(self.config.seed, step, self.ranks.rank),
            weight_version=version,
        )
        found: dict[int, Sample] = {}
        for index, sample in self.engine.generate(request):
            found[index] = sample
            self.stages.take(index, sample)
        samples = [found[index] for index in range(len(found))]
        return Experience(questions=list(request.questions), samples=samples, ended=list(found))

    def _begin(self, step: int, stage: str) -> None:
        self._clock.begin(stage)
        self._show(RunEvent("stage", {"step": step, "name": stage, "rank": self.ranks.rank}))

    def _foresee(self, need: dict[str, Any]) -> None:
        self._show(RunEvent("memory", {"step": self._step, **need}))

    def state(self) -> dict[str, Tensor]:
        """Return this rank's entries of a checkpoint."""
        state = self.learner.training_state()
        if self.reference is not None:
            state |= {f"reference.{name}": tensor for name, tensor in self.reference.state_dict().items()}
        return {**state, f"random.{self.ranks.rank}": torch.get_rng_state()}

    def needs(self, name: str) -> bool:
        """Whether this rank loads an entry of a checkpoint."""
        return self.reference is not None if name.startswith("reference.") else self.learner.needs(name)

    def restore(self, step: int, tensors: Mapping[str, Tensor]) -> None:
        """Continue from the next step to train and the tensors of a checkpoint.

        Under another number of ranks than it was saved with, random states do not fit: each rank then begins with one
        that depends on seed, step and rank.
        """
        self.learner.load_training_state(tensors)
        if self.reference is not None:
            reference = {
                name.removeprefix("reference."): tensor
                for name, tensor in tensors.items()
                if name.startswith("reference.")
            }
            self.reference.load_state_dict(reference)
        random = tensors.get(f"random.{self.ranks.rank}")
        if random is None:
            torch.manual_seed(seed_of(self.config.seed, step, self.ranks.rank))
        else:
            torch.set_rng_state(random)

    def close(self) -> None:
        """Restore the whole model and free everything else. Every rank must call this."""
        self.learner.close()


def seed_of(*parts: int) -> int:
    """Return one seed from several numbers; sums of them would collide."""
    return int(np.random.SeedSequence(list(parts)).generate_state(1, np.uint64)[0] >> 1)


def _rollout_kl(samples: Sequence[Sample], windows: Sequence[Window], old: Sequence[Sequence[Tensor]]) -> float:
    """Return the mean k3 estimate of the KL between the engine's log-probs and recompute's, on response tokens.

    Args:
        windows: of the update, whose micro-batches hold the samples in order
        old: recompute's log-probs, by window and micro-batch
    """
    engine = [sample.log_probs_T for sample in samples if sample.log_probs_T is not None]
    if len(engine) < len(samples):
        return 0.0
    pairs = zip(chain.from_iterable(old), chain.from_iterable(windows), strict=True)
    trainer = torch.cat([old_T[batch.is_response_T] for old_T, batch in pairs]).cpu()
    gap = trainer.float() - torch.from_numpy(np.concatenate(engine)).float()
    return float((torch.expm1(gap) - gap).mean())


class StartedPlanner:
    """One rank's planning process, started early: its kernels compile while the model warms up.

    They are compiled once per machine, which takes half a minute; later runs load them from disk in a few seconds.
    """

    def __init__(self, config: TrainConfig, model: ModelShape, *, worker: PlanWorker | None = None) -> None:
        """Start the process and let it plan a random window; returns at once. A given one is left running on close."""
        self._is_own = worker is None
        self.worker = PlanWorker() if worker is None else worker
        self._task = (build_cluster(config, model), model, balancer_options(config))
        self._error: EquipoiseError | None = None
        self._thread = threading.Thread(target=self._plan, daemon=True)
        self._thread.start()

    def ready(self, show: Show) -> PlanWorker:
        """Wait until the kernels are compiled, and show the wait where it takes long."""
        begin = time.monotonic()
        self._thread.join(_PATIENCE_S)
        while self._thread.is_alive():
            message = "compiling planner kernels, once per machine"
            show(RunEvent("progress", {"message": message, "done": int(time.monotonic() - begin), "total": 0}))
            self._thread.join(1.0)
        if self._error is not None:
            raise self._error
        return self.worker

    def forget(self) -> None:
        """Plan the next window as if it were the first; between windows only.

        Plans start from the homes of the one before. A run resumed from a checkpoint has none, so that one which does
        not stop there must forget its own: both then make the same plans, and so the same bits.
        """
        self.worker.call("forget")

    def close(self) -> None:
        """End the process, unless it was given."""
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
            self._error = error


def start_planner(
    config: TrainConfig, model: ModelShape, *, mode: Mode, worker: PlanWorker | None = None
) -> StartedPlanner | None:
    """Start a planning process where the mode plans; returns at once."""
    return StartedPlanner(config, model, worker=worker) if mode == "equipoise" else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """The folders that a run reads and writes."""

    out: Path
    record: Path | None = None
    is_resumed: bool = False


def launch(
    function: Callable[..., Any], config: TrainConfig, *args: Any, show: Show = ignore, context: Any = None
) -> Any:
    """Call `function(config, ranks, show, *args)` on every rank and return the first rank's result.

    Under torchrun this process is one of the ranks, and the result is its own.

    Args:
        function: a module-level function, such as `run`
        show: called here with the first rank's events
        context: of multiprocessing; spawn by default
    """
    options = RankOptions(backend=config.backend, device=config.model.device, timeout_s=config.timeout_s, threads=None)
    stage = ""

    def watch(event: RunEvent) -> None:
        nonlocal stage
        if event.kind == "stage":
            stage = f"; the run was in stage {event.values['name']} of step {event.values['step']}"
        show(event)

    try:
        given = (function, config, args)
        return run_ranks(_on_rank, config.ranks, *given, options=options, show=watch, context=context)[0]
    except (RankDiedError, RankSilentError) as error:
        raise TransferError(f"{error}; resume from the last checkpoint{stage}") from error


def _on_rank(group: Any, function: Callable[..., Any], config: TrainConfig, args: Sequence[Any], *, show: Show) -> Any:
    import transformers

    # Progress bars of other libraries would be drawn through our table.
    transformers.utils.logging.disable_progress_bar()
    sharing = config.model.ranks_per_device
    if config.backend == "nccl" and sharing > 1:
        words = (
            f"up to {sharing} ranks share a GPU: NCCL joins them as different hosts, by sockets (NCCL_HOSTID is set)"
        )
        show(RunEvent("note", {"message": words}))
    return function(config, build_ranks(config, group), show, *args)


def build_ranks(config: TrainConfig, world: Any = None) -> Ranks:
    """Make the groups of a run from `world`, by default the default group. Every rank must call this."""
    size = dist.get_world_size(world)
    if size != config.ranks:
        raise TopologyError(f"setting ranks is {config.ranks}, but {size} ranks were started; make them equal")
    return Ranks.build(world, ep=config.group_ranks, timeout_s=config.timeout_s)


def prepare(config: TrainConfig, out: Path) -> None:
    """Make `out` the folder of a new run: empty it and write the settings.

    Before any rank starts, so that a run which ends in its first moments can be resumed like any other.
    """
    try:
        for entry in out.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()
    except OSError as error:
        raise TrainingError(f"--out {out} cannot be emptied ({error}); give another folder") from error
    _write_file(out / "config.toml", write_config(config))


def run(
    config: TrainConfig, ranks: Ranks, show: Show, places: Places, worker: PlanWorker | None = None
) -> dict[str, Any]:
    """Train from beginning to end. Every rank must call this; the first one returns the summary.

    A planning process is started unless one is given.
    """
    if ranks.is_first:
        show = also_written(show, places.out / "events.jsonl")
    # Step 1: build the model, or resume from the newest checkpoint.
    facts = {"seed": config.seed, "mode": config.balance.mode, "model": config.model.path or config.model.family}
    checkpoints = Checkpoints(places.out / "checkpoints", ranks, facts=facts, keep=config.checkpoint.keep)
    newest = checkpoints.newest() if places.is_resumed else None
    if newest is None:
        model = build_model(config.model, seed=config.seed)
    else:
        model = build_like(newest / "model", config.model)
    planner = start_planner(config, inspect(model).shape, mode=config.balance.mode, worker=worker)
    if newest is None:
        show_warm_up(model, config, ranks, show)
    # Every rank waits for its planner here, so that none waits for another's inside a step.
    ready = None if planner is None else planner.ready(show)
    trainer = Trainer(model, config, ranks, show=show, worker=ready)
    first = 0
    if newest is not None:
        first, tensors = checkpoints.load(newest, needs=trainer.needs)
        trainer.restore(first, tensors)

    # Step 2: show and write what is about to run.
    _show_start(trainer, places, show, first=first)
    if places.is_resumed:
        message = f"resumed from {newest}, next is step {first}"
        if newest is None:
            message = "there is no checkpoint yet: training begins from the start"
        elif first >= config.steps:
            message = f"{newest} is the end of the run: all {config.steps} steps are trained; more: --set steps=N"
        show(RunEvent("note", {"message": message}))
    sinks = None
    if ranks.is_first:
        _write_file(places.out / "config.toml", write_config(config))
        sinks = Sinks(places.out, config.track, first_step=first, settings=msgspec.to_builtins(config))

    # Step 3: train step by step.
    for step in range(first, config.steps):
        metrics = trainer.step(step)
        if sinks is not None:
            sinks.write(metrics)
        show(RunEvent("metrics", metrics))
        if places.record is not None:
            _record(places.record, trainer, step)
        every = config.checkpoint.every
        if (every and (step + 1) % every == 0) or step + 1 == config.steps:
            show(RunEvent("stage", {"step": step, "name": "checkpoint", "rank": ranks.rank}))
            _save(checkpoints, trainer, step + 1)
            if planner is not None:
                planner.forget()

    # Step 4: summarize, and free everything.
    summary = {}
    if sinks is not None:
        sinks.close()
        summary = _summary(places)
        _write_file(places.out / "summary.json", json.dumps(summary, indent=1) + "\n")
    trainer.close()
    if planner is not None:
        planner.close()
    show(RunEvent("end", summary))
    return summary


def show_warm_up(model: nn.Module, config: TrainConfig, ranks: Ranks, show: Show) -> None:
    """Warm up and show the progress. Every rank must call this."""

    def show_progress(done: int, loss: float) -> None:
        values = {"message": "warm-up", "done": done, "total": config.warmup.steps, "loss": loss}
        show(RunEvent("progress", values))

    task, tokenizer = open_task(config.task), open_tokenizer(config.model)
    warm_up(model, config, ranks, task=task, tokenizer=tokenizer, show=show_progress)


def _show_start(trainer: Trainer, places: Places, show: Show, *, first: int) -> None:
    config, shape = trainer.config, trainer.learner.shape
    facts = {
        "model": config.model.path or config.model.family,
        "parameters": trainer.num_parameters,
        "layers": shape.layers,
        "experts": shape.experts,
        "top_k": shape.top_k,
        "ranks": config.ranks,
        "nodes": config.ranks // config.node_ranks,
        "mode": config.balance.mode,
        "first": first,
        "steps": config.steps,
        "out": str(places.out),
    }
    show(RunEvent("start", facts))
    if config.model.path and isinstance(trainer.tokenizer, CharTokenizer):
        show(RunEvent("note", {"message": f"tokenizer: {trainer.tokenizer.description}"}))


def _save(checkpoints: Checkpoints, trainer: Trainer, step: int) -> None:
    """Write a checkpoint. Every rank must call this."""
    weights = trainer.learner.state_dict()

    def save_model(path: Path) -> None:
        trainer.learner.save_model(path, weights)
        trainer.tokenizer.save(path)

    checkpoints.save(step, trainer.state(), save_model=save_model)


def _record(folder: Path, trainer: Trainer, step: int) -> None:
    """Write one step's routes of all ranks, in vLLM's HTTP form. Every rank must call this."""
    assert trainer.experience is not None, "a step was trained"
    world, ranks = trainer.ranks.world, trainer.ranks
    parts: list[list[Sample]] | None = [[] for _ in range(ranks.size)] if ranks.is_first else None
    dist.gather_object(trainer.experience.samples, parts, dst=dist.get_global_rank(world, 0), group=world)
    if parts is None:
        return
    (folder / "model").mkdir(parents=True, exist_ok=True)
    trainer.learner.model.config.save_pretrained(folder / "model")
    # Without the version of the weights: a folder of several steps would otherwise look like a mixture of them.
    samples = [replace(sample, weight_version="") for part in parts for sample in part]
    write_routes(to_routes(samples, trainer.learner.shape), folder / f"step-{step:06d}.jsonl", format="vllm-http")


def _summary(places: Places) -> dict[str, Any]:
    """Summarize the whole run from its metrics file, so that a resumed run gives the same summary."""
    steps = read_lines(places.out / "metrics.jsonl")
    quarter = max(1, len(steps) // 4)
    first, last = steps[:quarter], steps[-quarter:]

    def mean(part: list[dict[str, Any]], name: str) -> float:
        return float(np.mean([step[name] for step in part]))

    return {
        "steps": len(steps),
        "reward_first_quarter": mean(first, "reward"),
        "reward_last_quarter": mean(last, "reward"),
        "right_first_quarter": mean(first, "right_share"),
        "right_last_quarter": mean(last, "right_share"),
        "skew_before": mean(steps, "skew_before"),
        "skew_after": None if steps[0]["skew_after"] is None else mean(steps, "skew_after"),
        "coverage": mean(steps, "coverage"),
        "replayed_rows": sum(step["replayed_rows"] for step in steps),
        "checked_windows": sum(step["checked_windows"] for step in steps),
        "out": str(places.out),
        "record": None if places.record is None else str(places.record),
    }


def _write_file(path: Path, content: str) -> None:
    with whole_file(path, error=TrainingError) as draft:
        draft.write_text(content, encoding="utf-8")

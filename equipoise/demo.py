"""Show what uneven experts cost and what balancing gives back, in three acts, on a laptop in under two minutes.

    python -m equipoise.demo out/demo.html

1. A generated step with the measured properties of real routing, on a described cluster: what is lost, what a plan
   saves. Predicted.
2. Real training on two local ranks: a random Qwen3-MoE learns by GRPO from recorded rollouts, with static expert
   parallelism, with Equipoise, and with placement alone. Seconds and tokens per second are measured; what was learnt is
   compared. Two ranks never get as uneven by themselves as sixteen, so the recorded routes are made as uneven as those
   of act 1.
3. One page with both. Its path is the last line.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np

from equipoise.core import Cluster, ModelShape
from equipoise.report import write_report
from equipoise.report.comparison import DEMO_FORMAT, measured_answer, measured_conditions
from equipoise.sim.summary import wrap_text

if TYPE_CHECKING:
    from equipoise.rl.compare import Comparison
    from equipoise.rl.config import TrainConfig
    from equipoise.sim.analysis import Analysis

RANKS, LARGEST_SHARE = 2, 0.95
WIDTH = 80
"""Columns of a line in the terminal."""
SETTINGS: dict[str, Any] = {
    "steps": 6,
    "ranks": RANKS,
    # Experts so large that their products take most of the time.
    "model": {"layers": 2, "hidden": 384, "heads": 8, "experts": 16, "top_k": 4, "expert_width": 768},
    "rollout": {"prompts": 32, "samples": 8},
    "update": {"mini_batches": 1, "micro_batch": 64},
    # Plans are priced for a described GPU, and this machine is none: level rows, then measure whether that paid.
    "balance": {"objective": "skew"},
}


def predict(*, samples: int = 512, layers: int | None = None) -> "Analysis":
    """Act 1: analyse a generated step of Qwen3-30B-A3B, EP 16 on two nodes of H100s."""
    from equipoise.loads import TokenPolicy, count_step, generate_counts, step_schedules
    from equipoise.sim import analyze_loads

    model = ModelShape.preset("qwen3-30b-a3b")
    model = model if layers is None else model.replace(layers=layers)
    cluster = Cluster.preset("h100", ep=16)
    counts = generate_counts(model, samples=samples, mean_tokens=4096)
    policy = TokenPolicy(last_token="drop")
    windows = step_schedules(counts.tokens_B, ranks=cluster.ep, mini_batches=2, token_budget=32768, policy=policy)
    return analyze_loads(count_step(counts, windows, ep=cluster.ep), model=model, cluster=cluster, sends="tokens")


def train(settings: Mapping[str, Any], *, skew: float, show: Any, context: Any = None) -> "Comparison":
    """Act 2: train on recorded rollouts whose routes give the first of two ranks `skew` times the mean rows.

    `show` is called with what happens, see `rl.metrics.RunEvent`.
    """
    from equipoise.launch import temporary_folder
    from equipoise.rl.compare import run_comparison
    from equipoise.rl.config import build_config
    from equipoise.rl.train import launch

    with temporary_folder() as folder:
        config = build_config({**settings, "rollout": {**settings["rollout"], "source": str(folder)}})
        record_rollouts(config, folder, share=min(skew / RANKS, LARGEST_SHARE))
        modes = ("static", "equipoise")
        comparison: Comparison = launch(run_comparison, config, modes, show=show, context=context)
    return comparison


def record_rollouts(config: "TrainConfig", folder: Path, *, share: float) -> None:
    """Write the rollouts of every step: half of the answers right, `share` of the rows at the first rank's experts."""
    from equipoise.rl.rollout import Sample, to_routes
    from equipoise.rl.task import CharTokenizer, open_task
    from equipoise.routes import write_routes

    sizes = {name: getattr(config.model, name) for name in ("layers", "experts", "top_k", "hidden", "expert_width")}
    shape, tokenizer = ModelShape.preset("qwen3-30b-a3b", **sizes), CharTokenizer()
    rng = np.random.default_rng(config.seed)
    for step in range(config.steps):
        samples: list[Sample] = []
        for question in open_task(config.task).questions(config.rollout.prompts, seed=config.seed, step=step):
            for number in range(config.rollout.samples):
                right, prompt = question.answer, tokenizer.encode(question.prompt)
                wrong = "".join(rng.permutation(list("0123456789"))[: len(right)])
                answer = [*tokenizer.encode(wrong if number % 2 else right), tokenizer.end]
                tokens_T = np.array([*prompt, *answer])
                sample = Sample(
                    name=f"sample {len(samples)}",
                    tokens_T=tokens_T,
                    num_prompt=len(prompt),
                    ids_TLK=draw_routes(len(tokens_T) - 1, shape, share=share, rng=rng),
                    experts=shape.experts,
                )
                samples.append(sample)
        write_routes(to_routes(samples, shape), folder / f"step-{step:06d}.jsonl", format="vllm-http")


def draw_routes(tokens: int, shape: ModelShape, *, share: float, rng: np.random.Generator) -> np.ndarray:
    """Draw [T, L, K] distinct experts, each choice in the first half of them with probability `share`."""
    half = shape.experts // RANKS
    size = (tokens, shape.layers)
    orders = [rng.random((*size, half)).argsort(axis=2)[:, :, : shape.top_k] + rank * half for rank in range(RANKS)]
    is_hot_TLK = rng.random((*size, shape.top_k)) < share
    return np.where(is_hot_TLK, *orders)


def run(path: Path, out: TextIO) -> None:
    """Play the three acts and write the page."""

    def say(*lines: str) -> None:
        out.write("".join(f"{line}\n" for line in wrap_text(lines, WIDTH)))
        out.flush()

    say("Act 1. A step of Qwen3-30B-A3B with the measured properties of real routing, on 16 H100s (predicted) ...")
    analysis = predict()
    document = analysis.to_dict()
    from equipoise.report.analysis import analysis_page

    trial, seconds = analysis.trial, analysis.seconds
    assert trial is not None and seconds.planned is not None, "a plan was asked for"
    before, after = trial.skew_before("update").mean, trial.skew_after("update").mean
    say(
        f"  {analysis_page(document, title='').answer}",
        f"  The busiest GPU has {before:.2f} times the mean load now, {after:.2f} times with the plan: expert layers "
        f"would be {seconds.now.total / seconds.planned.total:.2f} times as fast.",
        "",
        f"Act 2. Real training on {RANKS} ranks of this machine, routes as uneven as in act 1 (measured) ...",
    )

    def show(event: Any) -> None:
        if event.kind == "note":
            say(f"  {event.values['message']}")

    comparison = train(SETTINGS, skew=before, show=show)
    measured = comparison.to_dict()
    say(*(f"  {line}" for line in measured_lines(measured)))
    say(*(f"  {line}" for line in measured_conditions(measured)), "")

    write_report({"format": DEMO_FORMAT, "analysis": document, "comparison": measured}, path, title="the demo")
    say("Act 3. One page with both; it opens in any browser, without a network:")
    # Not wrapped: a path may hold spaces.
    out.write(f"{path.resolve()}\n")
    if not comparison.is_good:
        raise SystemExit(1)


def measured_lines(document: Mapping[str, Any]) -> list[str]:
    """Return the speed of every mode and the sentence about them; whatever was measured is said."""
    lines = [
        f"{leg['name']:>22}{leg['step_s']:>7.2f} s/step{leg['tokens_per_s']:>8,.0f} tokens/s"
        f"  busiest/mean rank {leg['skew']:.2f}"
        for leg in document["legs"]
    ]
    slow, fast = document["legs"][0], document["legs"][1]
    lines.append(measured_answer(dict(document)))
    if fast["step_s"] >= slow["step_s"]:
        lines.append("It did not pay here: other programs on these cores, or cores that share one, change such times.")
    return lines


if __name__ == "__main__":
    target = Path(sys.argv[1] if len(sys.argv) > 1 else "out/demo.html")
    target.parent.mkdir(parents=True, exist_ok=True)
    run(target, sys.stdout)

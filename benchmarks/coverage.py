"""What is left of the gain where routes are incomplete, old or missing; simulated.

    python -m benchmarks.coverage
    python -m benchmarks.coverage --write benchmarks/reports/coverage_simulated_202611

Plans are made from what is known of a window and priced with the rows that really come, because dispatch follows the
actual routes: a wrong plan costs time, never a row. `kept` is the share of the gain over static that is left, in
percent: 100 is the plan that knows every route, below 0 the window is slower than static. `static`, and `reactive`,
which looks at each layer's rows after its router, do not depend on what was recorded.

Update windows of 8 layers at EP8, EP16 and EP32 on 8-GPU H200 nodes with 400 Gb/s per GPU, 1 replica slot, every row
crossing nodes on its own. Samples are every second recorded sequence, drawn in turns and mixed to a batch of 1,024, and
dealt to ranks and micro-steps in that order, as in `benchmarks.packing`; loads are multiplied to 4,096 tokens a sample.
What is missing:
    samples    whole samples, drawn at random; least and most of two draws are shown
    prompts    the first tokens of every sample, as prefix caching leaves them (answers of gpt-oss have no recorded
               prompt: their own first tokens are left out)
    forecast   everything: only an earlier window was counted, of the other recorded sequences of the same domain
    foreign    everything, and the earlier window was of another domain
Estimates of the missing rows:
    source     each source's known rows of the micro-step, scaled up
    window     as the window's known rows of the layer: what `plan` does
    seen       as the missing rows of an earlier window were, of the other recorded sequences: what a balancer does
               after its first window
Prices are those of the planner's other benchmarks: kernels measured on one H200, all-to-all modelled; no cluster was
run.

Old policies (`stale`): models of about a million parameters (4 layers of 32 experts, top-4) are trained by
`equipoise train`'s own loop on its arithmetic, and forward the same 512 samples after 0, 1, 2, 4 and 8 further updates,
of 512 samples each. Plans are made from the routes of update 0 and priced with the later ones, in the shape of
gpt-oss-20b. `choices` is the share of (token, layer, choice) that differ; `reactive` plans after the router, so age
does not matter to it. These models are small, and learn with a rate that large ones do not bear.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.packing import POLICY, batch_of
from benchmarks.paper_cases import EXPERTS, MEAN_TOKENS, cluster_of, count_samples
from benchmarks.results import Limit, format_table, publish, read_commit, read_machine, say_limit
from benchmarks.traces import FOLDER, Trace, stacked
from equipoise.core import Cluster, LoadMatrix, ModelShape, RouteCounts, Schedule
from equipoise.core.plan import Plan
from equipoise.cost.clock import replay
from equipoise.loads import count_loads, schedule_tokens
from equipoise.planner import plan
from equipoise.sim.replay import plan_work

Row = dict[str, Any]
NOTE = "simulated: kernels and transfers measured on one H200, all-to-all modelled, no cluster was run"
SHARES = (1.0, 0.95, 0.9, 0.75, 0.5)
UPDATES = (0, 1, 2, 4, 8)
RECORDINGS = {
    "gpt-oss-20b": ("gptoss20b_decode_routes", "", (8, 16)),
    "gpt-oss-20b composed": ("gptoss20b_decode_routes", "", (16,)),
    "DeepSeek-V2-Lite, intent": ("dsv2lite_esft_routes", "intent_", (8, 16, 32)),
    "DeepSeek-V2-Lite, law": ("dsv2lite_esft_routes", "law_", (16,)),
}
"""File, its arrays' prefix, and widths."""
FOREIGN = {"DeepSeek-V2-Lite, intent": "DeepSeek-V2-Lite, law", "DeepSeek-V2-Lite, law": "DeepSeek-V2-Lite, intent"}
DRAWS = 2


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Recorded:
    """Every second sequence of a recording, as the samples of one window."""

    trace: Trace
    offsets: np.ndarray
    half: int
    counts: RouteCounts
    schedule: Schedule

    @classmethod
    def of(cls, name: str, ranks: int, half: int) -> "Recorded":
        """Read a recording and draw the batch of one of its halves."""
        file_name, prefix, _ = RECORDINGS[name]
        with np.load(FOLDER / f"{file_name}.npz", allow_pickle=False) as file:
            model = ModelShape.preset("gpt-oss-20b" if not prefix else "deepseek-v2-lite")
            trace = Trace(name=name, model=model, ids_TLK=file[f"{prefix}ids"].astype(np.int64))
            offsets = file[f"{prefix}offsets"]
        if name.endswith("composed"):
            trace = replace(stacked(trace, EXPERTS, overlapping=True), name=name)
        counts = batch_of(trace, [count_samples(trace, offsets)[half::2]], ranks)
        budget = int(max(counts.tokens_B.mean() * 8, counts.tokens_B.max()))
        schedule = schedule_tokens(counts.tokens_B, ranks=ranks, token_budget=budget, policy=POLICY)
        return cls(trace=trace, offsets=offsets, half=half, counts=counts, schedule=schedule)

    def loads(self, known_BLE: np.ndarray | None = None) -> LoadMatrix:
        """Count the window, or what is known of it, at 4,096 tokens a sample."""
        counts = self.counts
        if known_BLE is not None:
            unknown_BL = counts.tokens_B[:, None] - known_BLE.sum(axis=2) // counts.model.top_k
            counts = replace(counts, count_BLE=known_BLE, unknown_BL=unknown_BL)
        counted = count_loads(counts, self.schedule)
        factor = MEAN_TOKENS / counts.tokens_B.mean()
        rows_MLRE = np.rint(counted.load_MLRE * factor).astype(np.int64)
        return LoadMatrix(rows_MLRE, coverage_MLR=counted.coverage_MLR)

    def without_samples(self, share: float, draw: int) -> np.ndarray:
        """[B, L, E] the rows of random samples that have at most this share of all tokens."""
        order_B = np.random.default_rng(draw).permutation(len(self.counts.tokens_B))
        sum_B = self.counts.tokens_B[order_B].cumsum()
        kept = order_B[sum_B <= share * sum_B[-1]]
        known_BLE = np.zeros_like(self.counts.count_BLE)
        known_BLE[kept] = self.counts.count_BLE[kept]
        return known_BLE

    def without_prompts(self, share: float) -> np.ndarray:
        """[B, L, E] the rows of the last tokens of each sample, this share of them."""
        spans = list(pairwise(self.offsets.tolist()))[self.half :: 2]
        kept = [np.arange(stop - int((stop - start) * share), stop) for start, stop in spans]
        ends = replace(self.trace, ids_TLK=self.trace.ids_TLK[np.concatenate(kept)])
        offsets = np.concatenate([[0], np.cumsum([len(tokens) for tokens in kept])])
        return batch_of(ends, [count_samples(ends, offsets)], self.schedule.ranks).count_BLE


class Judge:
    """Prices plans with the rows that really come."""

    def __init__(self, live: LoadMatrix, model: ModelShape, cluster: Cluster) -> None:
        self.live, self.model, self.cluster = live, model, cluster
        whole = self.plan(live)
        self.static_s, self.gain_s = whole.static_seconds, whole.static_seconds - whole.seconds.total

    def plan(self, loads: LoadMatrix, policy: str = "equipoise", **given: Any) -> Plan:
        """Plan with one slot."""
        return plan(loads, cluster=self.cluster, model=self.model, slots=1, policy=policy, **given)

    def row(self, made: Plan) -> Row:
        """What a plan promises, what it takes, and what is left of the gain."""
        seconds = replay([plan_work(made, live=self.live)]).seconds.total
        return self._judged(made.static_seconds / made.seconds.total if made.seconds.total else 1.0, seconds)

    def without_records(self, policy: str) -> Row:
        """The same of a policy that looks at the rows that really come, and at nothing before."""
        seconds = self.plan(self.live, policy).seconds.total
        return self._judged(self.static_s / seconds, seconds)

    def _judged(self, promised: float, seconds: float) -> Row:
        kept = 100 * (self.static_s - seconds) / self.gain_s
        return {"promised": promised, "over_static": self.static_s / seconds, "kept": kept}


def main() -> int:
    """Compare, train and compare, publish."""
    parser = argparse.ArgumentParser(description="Plans from incomplete or old routes, simulated")
    parser.add_argument("--write", type=Path, help="also write <path>.json and <path>.md")
    parser.add_argument("--only", default="", help="part of a trace's name, or `stale`")
    given = parser.parse_args()
    commit = read_commit()  # of what runs, whatever is checked out when it has run
    cases = [(name, ranks) for name, (*_, widths) in RECORDINGS.items() for ranks in widths if given.only in name]
    rows = []
    for found in (*(compare(name, ranks) for name, ranks in cases), stale_rows() if given.only in "stale" else ()):
        for row in found:
            rows.append(row)
            print(format_table([row]).splitlines()[-1], file=sys.stderr, flush=True)
    limits = list(limits_of(rows))
    if given.write is not None:
        write_report(given.write, rows, limits, commit)
    return publish("coverage", rows, limits=limits, note=NOTE, commit=commit)


def compare(name: str, ranks: int) -> Iterator[Row]:
    """Every way of missing routes, of one recording at one width."""
    now, before = (Recorded.of(name, ranks, half) for half in (0, 1))
    judge = Judge(now.loads(), now.counts.model, cluster_of(ranks))
    about = {"trace": name, "EP": ranks}
    for policy in ("static", "reactive"):
        yield about | row_of("any", 0.0, policy, [judge.without_records(policy)])
    for share in SHARES:
        draws = [now.loads(now.without_samples(share, draw)) for draw in range(DRAWS if share < 1 else 1)]
        if share < 1:
            yield about | row_of("samples", share, "source", [judge.row(judge.plan(by_source(draws[0])))])
        yield about | row_of("samples", share, "window", [judge.row(judge.plan(one)) for one in draws])
    for share in SHARES[1:]:
        known, seen_BLE = now.loads(now.without_prompts(share)), before.without_prompts(share)
        seen = LoadMatrix(np.maximum(before.loads().load_MLRE - before.loads(seen_BLE).load_MLRE, 0))
        yield about | row_of("prompts", share, "window", [judge.row(judge.plan(known))])
        yield about | row_of("prompts", share, "seen", [judge.row(judge.plan(known, forecast=seen))])
    nothing = nothing_of(judge.live)
    yield about | row_of("forecast", 0.0, "seen", [judge.row(judge.plan(nothing, forecast=before.loads()))])
    if name in FOREIGN:
        foreign = Recorded.of(FOREIGN[name], ranks, 0).loads()
        yield about | row_of("foreign", 0.0, "seen", [judge.row(judge.plan(nothing, forecast=foreign))])


def row_of(missing: str, share: float, estimate: str, found_X: Sequence[Row]) -> Row:
    """One line: means over draws, and the spread of what is kept."""
    kept_X = [found["kept"] for found in found_X]
    return {
        "missing": missing,
        "coverage": share,
        "estimate": estimate,
        "promised": float(np.mean([found["promised"] for found in found_X])),
        "over_static": float(np.mean([found["over_static"] for found in found_X])),
        "kept": float(np.mean(kept_X)),
        "kept_least": min(kept_X),
        "kept_most": max(kept_X),
        "choices": 0.0,
    }


def nothing_of(loads: LoadMatrix) -> LoadMatrix:
    """The same window with no route known."""
    none_MLR = np.zeros(loads.load_MLRE.shape[:3])
    return LoadMatrix(np.zeros_like(loads.load_MLRE), stage=loads.stage, coverage_MLR=none_MLR)


def by_source(loads: LoadMatrix) -> LoadMatrix:
    """The other estimate: each source's known rows scaled up; where it has none, its other micro-steps' mean."""
    assert loads.coverage_MLR is not None, "something is unknown"
    share_MLR1 = loads.coverage_MLR[..., None]
    full = np.where(share_MLR1 > 0, loads.load_MLRE / np.maximum(share_MLR1, 1e-6), 0.0)
    count_LR1 = np.maximum((share_MLR1 > 0).sum(axis=0), 1)
    full = np.where(share_MLR1 > 0, full, full.sum(axis=0) / count_LR1)
    return LoadMatrix(np.rint(full).astype(np.int64))


def stale_rows() -> Iterator[Row]:
    """Train small models with their own loop, and plan later updates with earlier routes."""
    for seed in (0, 1):
        ids_UTLK, offsets = routes_by_update(seed)
        model = ModelShape.preset("gpt-oss-20b").replace(layers=ids_UTLK.shape[2])
        for ranks in (8, 16):
            loads_U = [dealt(Trace(name="", model=model, ids_TLK=ids), offsets, ranks) for ids in ids_UTLK]
            for updates, ids, live in zip(UPDATES, ids_UTLK, loads_U, strict=True):
                judge = Judge(live, model, cluster_of(ranks))
                same_TLK = (ids[..., :, None] == ids_UTLK[0][..., None, :]).any(axis=3)
                about = {"trace": f"small model, seed {seed}", "EP": ranks}
                differing = {"choices": 1.0 - float(same_TLK.mean())}
                found = {"stale": judge.row(judge.plan(loads_U[0])), "reactive": judge.without_records("reactive")}
                for estimate, row in found.items():
                    yield about | row_of(f"{updates} updates", 1.0, estimate, [row]) | differing


def dealt(trace: Trace, offsets: np.ndarray, ranks: int) -> LoadMatrix:
    """Samples dealt to 8 micro-steps and the sources in their order, at 4,096 tokens each."""
    count_BLE = count_samples(trace, offsets)
    samples, layers, experts = count_BLE.shape
    load_MLRE = count_BLE.reshape(8, ranks, samples // 8 // ranks, layers, experts).sum(axis=2).transpose(0, 2, 1, 3)
    factor = MEAN_TOKENS / float(np.diff(offsets).mean())
    return LoadMatrix(np.rint(load_MLRE * factor).astype(np.int64))


def routes_by_update(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """([U, T, L, K] ids of the same samples after each number of updates, [B + 1] where samples begin)."""
    import torch
    import torch.distributed as dist

    from equipoise.launch import Ranks
    from equipoise.rl.config import change, read_config
    from equipoise.rl.learner import warm_up
    from equipoise.rl.model import build_model, open_tokenizer, pack_tokens
    from equipoise.rl.task import open_task
    from equipoise.rl.train import Trainer

    sizes = {"layers": 4, "hidden": 64, "experts": 32, "top_k": 4, "expert_width": 32}
    rollout, update = {"prompts": 64, "samples": 8}, {"mini_batches": 1, "micro_batch": 64}
    config = change(read_config("tiny"), model=sizes, rollout=rollout, update=update, balance={"mode": "off"})
    config = change(config, ranks=1, seed=seed, warmup={"steps": 150})
    torch.set_num_threads(os.cpu_count() or 1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        ranks, model = Ranks.build(ep=1), build_model(config.model, seed=seed)
        task, tokenizer = open_task(config.task), open_tokenizer(config.model)
        warm_up(model, config, ranks, task=task, tokenizer=tokenizer, show=lambda done, loss: None)
        trainer = Trainer(model, config, ranks)
        trainer.step(0)
        assert trainer.experience is not None, "a step was trained"
        samples = trainer.experience.samples
        # What the first rollout recorded, then the same tokens under the weights after each update.
        found = [np.concatenate([sample.ids_TLK for sample in samples])]
        input_T, position_T, *_ = pack_tokens([s.tokens_T for s in samples], [s.num_prompt for s in samples])
        for step in range(1, max(UPDATES) + 1):
            if step in UPDATES:
                with torch.no_grad():
                    _, ids_LTK = trainer.learner.forward(0, input_T, position_T, record=True)
                found.append(ids_LTK.transpose(0, 1).numpy())
            trainer.step(step)
        trainer.close()
    finally:
        dist.destroy_process_group()
    return np.stack(found).astype(np.int64), np.concatenate([[0], np.cumsum([len(s.tokens_T) - 1 for s in samples])])


def limits_of(rows: Sequence[Row]) -> Iterator[Limit]:
    """The promises: most of the gain is left where most is known, and nothing is slower than static without a cause."""
    for missing, share, least in (("samples", 0.95, 90.0), ("samples", 0.5, 75.0), ("forecast", 0.0, 50.0)):
        some = [r for r in rows if (r["missing"], r["coverage"]) == (missing, share) and r["estimate"] != "source"]
        if some:
            worst = min(some, key=lambda row: row["kept_least"])
            where = f"{missing} at {share:.0%}, worst of {len(some)} ({worst['trace']}, EP{worst['EP']})"
            yield Limit(name=f"gain left in %, {where}", value=worst["kept_least"], at_least=least)


def write_report(path: Path, rows: Sequence[Row], limits: Sequence[Limit], commit: str) -> None:
    """Write `<path>.json` and `<path>.md`."""
    said = [
        {"name": x.name, "value": x.value, "at_least": x.at_least, "at_most": x.at_most, "holds": x.holds}
        for x in limits
    ]
    command = f"python -m benchmarks.coverage --write {path}"
    document = {"benchmark": "coverage", "command": command, "commit": commit, "machine": read_machine()}
    document |= {"note": NOTE, "data": sorted({file for file, *_ in RECORDINGS.values()})}
    document |= {"rows": list(rows), "limits": said}
    path.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n")
    text = (__doc__ or "").split("\n\n", 2)[2]
    lines = ["# Plans from incomplete or old routes", "", f"`{command}`, {NOTE}.", ""]
    lines += [f"Commit {document['commit']}, {document['machine']}; traces {', '.join(document['data'])}.", ""]
    lines += ["```", text.strip(), "```", "", "```", format_table(rows), *(say_limit(x) for x in limits), "```"]
    path.with_suffix(".md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())

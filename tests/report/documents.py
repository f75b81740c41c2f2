"""Results to make pages of: of every kind, small or as large as they come, of the real result types where there are."""

import json

import numpy as np

from equipoise.core import Cluster, ModelShape
from equipoise.cost import Profile
from equipoise.loads import generate_counts
from equipoise.sim import analyze_loads
from equipoise.sim.result import (
    Balance,
    BreakEvenCurve,
    Memory,
    Parts,
    PathUse,
    PolicyResult,
    Shown,
    Simulation,
    Sweep,
    SweepPoint,
    TimelineEvent,
    WindowLoads,
    WindowResult,
)
from equipoise.sim.windows import StepSetting

STEPS = {"recompute": 4, "update": 6}
"""Micro-steps of the small result's windows."""


def balance(rng, *, micro_steps, layers, ranks, spread):
    """Ranks that differ by about `spread`."""
    load_MLR = 1000 * (1 + spread * rng.random((micro_steps, layers, ranks)))
    load_MLR = load_MLR.astype(np.int64)
    skew_ML = load_MLR.max(axis=2) / load_MLR.mean(axis=2)
    return Balance(
        skew_M=skew_ML.mean(axis=1),
        busiest_M=load_MLR.max(axis=2).sum(axis=1),
        mean_M=load_MLR.mean(axis=2).sum(axis=1),
        rank_load_MR=load_MLR.sum(axis=1),
        rank_load_LR=load_MLR.sum(axis=0),
    )


def timeline(*, ranks, layers, waits):
    """One micro-step: attention, exchange, experts in every layer, with pulls beside; names as the simulator's are."""
    events = []
    for rank in range(ranks):
        for layer in range(layers):
            start, busy = layer * 1e-3, 4e-4 * (1 + waits * rank / ranks)
            events.append(TimelineEvent(rank, "compute", f"attention {layer}", start, start + 1e-4))
            events.append(TimelineEvent(rank, "all-to-all", f"dispatch {layer}", start + 1e-4, start + 2e-4))
            events.append(TimelineEvent(rank, "compute", f"experts {layer}", start + 2e-4, start + 2e-4 + busy))
            events.append(TimelineEvent(rank, "pull", f"pull from peer {layer}", start, start + 3e-4))
            if rank % 2:
                events.append(TimelineEvent(rank, "return", f"return {layer}", start + 7e-4, start + 8e-4))
    return tuple(events)


def policy(rng, name, *, slots, slow, layers, ranks, drawn, stages=1, steps=STEPS):
    """A step under one policy, `slow` times as slow as the fastest; every pipeline stage has its own ranks."""
    windows = []
    for count in steps.values():
        parts = Parts(compute=0.4 * slow, all_to_all_inside=0.2, all_to_all_across=0.1, attention=0.3)
        parts = parts + Parts(pull=0.002, return_=0.001, publish=0.003, collect=0.003) if slots else parts
        kinds = np.array([0.4, 0.3, 0.3, 0.001, 0.1 * slow, 0.0])
        windows.append(
            WindowResult(
                seconds=parts,
                slowest=0,
                group_s_G=np.array([parts.total]),
                rank_s_CGX=np.broadcast_to(kinds[:, None, None], (6, 1, stages * ranks))
                * (0.9 + 0.1 * rng.random((1, 1, stages * ranks))),
                paths=(PathUse(path="peer", moved_s=0.02, exposed_s=0.002, bytes=2**30),) if slots else (),
                after=balance(rng, micro_steps=count, layers=layers, ranks=ranks, spread=slow - 1),
                byte_RR=rng.integers(2**20, 2**26, size=(ranks, ranks)),
            )
        )
    return PolicyResult(
        policy=name,
        slots=slots,
        windows=tuple(windows),
        memory=Memory(
            experts_bytes=8 * 2**30,
            replicas_bytes=slots * 57 * 10**6,
            received_bytes_X=rng.integers(2**30, 3 * 2**30, size=stages * ranks),
            limit_bytes=80 * 2**30,
        ),
        given=Parts(rollout=3.0, other=0.1),
        timeline=timeline(ranks=ranks, layers=min(drawn, layers // stages), waits=slow - 1),
    )


def swept():
    """A sweep over EP width and slots, with its break-even."""
    points = tuple(
        SweepPoint(
            ep=ep,
            slots=slots,
            micro=None,
            tokens=8192,
            skew=1.5,
            seconds={"static": 2.0, "equipoise": 1.9 - 0.05 * slots - ep / 100, "balanced": 1.5},
        )
        for ep in (8, 16, 32)
        for slots in (0, 1, 2)
    )
    curves = (
        BreakEvenCurve(skew=1.2, worth=0.01, points=((256, -0.02), (1024, 0.005), (4096, 0.03))),
        BreakEvenCurve(skew=2.0, worth=0.01, points=((256, 0.002), (1024, 0.06), (4096, 0.2))),
        BreakEvenCurve(skew=1.01, worth=0.01, points=((256, -0.03), (1024, -0.01), (4096, 0.001))),
    )
    return Sweep(axes={"ep": (8, 16, 32), "slots": (0, 1, 2)}, points=points, curves=curves)


POLICIES = (("static", 0, 1.5), ("eplb-oracle", 1, 1.3), ("equipoise", 1, 1.02), ("balanced", 0, 1.0))


def simulation(
    *, layers=3, ranks=8, experts=16, policies=POLICIES, steps=STEPS, sweep=True, timed=True, drawn=None, stages=1
):
    """A simulation of made-up figures that fit together, as the simulator would write it.

    The timeline holds `drawn` layers, all by default.
    """
    rng = np.random.default_rng(0)
    model = ModelShape.preset("qwen3-30b-a3b", layers=layers, experts=experts, top_k=4)
    shown, drawn = Shown(window=1, micro_step=2, group=0), layers if drawn is None else drawn
    setting = StepSetting(rollout_s=3.0, shown=shown, timeline_layers=drawn if timed else 0, pipeline_stages=stages)
    sizes = {"layers": layers, "ranks": ranks, "stages": stages, "steps": steps, "drawn": drawn if timed else 0}
    return Simulation(
        model=model,
        cluster=Cluster.preset("h100", nodes=max(1, ranks // 8), ranks_per_node=min(8, ranks)),
        profile=Profile.read("h100"),
        setting=setting.to_dict(),
        shown=shown,
        windows=tuple(
            WindowLoads(
                stage=stage,
                micro_steps=count,
                groups=1,
                tokens_per_rank=8192.0,
                load_LE=rng.integers(10, 4000, size=(layers, experts)),
                before=balance(rng, micro_steps=count, layers=layers, ranks=ranks, spread=0.6),
            )
            for stage, count in steps.items()
        ),
        policies=tuple(policy(rng, name, slots=slots, slow=slow, **sizes) for name, slots, slow in policies),
        notes=("Compute and all-to-all do not overlap.", "Links are priced by their published rate."),
        sweep=swept() if sweep else None,
    )


def small_analysis():
    """A real analysis of a small generated step, with a plan and a memory limit that it breaks."""
    from equipoise.cli.options import PackingFlags
    from equipoise.cli.step_loads import count_samples

    model = ModelShape.preset("qwen3-30b-a3b", layers=3, experts=32)
    counts = generate_counts(model, samples=32, mean_tokens=2048)
    windows = count_samples(counts, PackingFlags(schedule="samples:1", ep=8))
    return analyze_loads(windows, model=model, cluster=Cluster.preset("h200", ep=8), memory_gib=0.1)


SETTINGS = 'seed = 3\nranks = 2\n\n[model]\nfamily = "olmoe"\ndevice = "cpu"\n\n[balance]\nmode = "equipoise"\n'


def metrics(step, **others):
    """One step's line, as the training loop writes it."""
    return {
        "step": step,
        "reward": 0.1 * step,
        "right_share": 0.05 * step,
        "skew_before": 1.5,
        "skew_after": 1.02,
        "coverage": 1.0,
        "checked_windows": 2,
        "static_s": 0.4,
        "saved_s": 0.1,
        "bytes": {"peer": 2**20 * (1 + step), "edge": 2**19},
        "waited_s": 0.1,
        "exposed_s": 0.05,
        "rollout_s": 0.8,
        "seconds": 2.0,
        "tokens_per_s": 1500.0,
        **others,
    }


def write_run(folder, steps, *, tail=""):
    folder.mkdir(exist_ok=True)
    (folder / "config.toml").write_text(SETTINGS)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps) + tail)
    return folder


NS_LR = {"static": [[5_000_000, 1_000_000], [2_000_000, 4_000_000]], "equipoise": [[3_000_000] * 2] * 2}


def rank_replay():
    """What a rank replay of one case on two ranks would write."""
    rows = [
        {
            "case": "qwen3, EP 2",
            "stage": stage,
            "policy": policy,
            "skew": 1.3,
            "layer_ms": 1.5,
            "pct measured": pct,
            "pct with all-to-all": pct - 1,
            "pct charged": pct - 2,
            "spread_pct": 0.7,
        }
        for stage in ("forward", "update")
        for policy, pct in (("static", 71.0), ("equipoise", 98.5), ("balanced", 100.0))
    ]
    variants = {name: {"forward_ns_MLR": [ns], "update_ns_MLR": [ns]} for name, ns in NS_LR.items()}
    facts = {"device": "NVIDIA H200", "torch": "2.11.0", "commit": "a" * 40, "note": "medians of 9 runs"}
    cases = [{"name": "qwen3, EP 2", "ranks": 2, "variants": variants}]
    return {"benchmark": "rank replay", **facts, "rows": rows, "limits": [], "cases": cases}

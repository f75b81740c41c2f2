"""The generated workload: reproducible, well-formed, and as uneven as the real traces."""

from pathlib import Path

import numpy as np
import pytest

from equipoise.core import LoadMatrix, ModelShape, RouteCounts, Routes, RoutesError, Schedule
from equipoise.loads.generator import Workload, generate_counts, generate_routes, generate_samples, popularity_DLE
from equipoise.loads.matrix import count_loads
from equipoise.loads.skew import skew

TRACES = Path(__file__).parents[2].parent / "shared" / "data"
QWEN = ModelShape.preset("qwen3-30b-a3b")
SMALL = QWEN.replace(layers=4)


def cosine(a_LE: np.ndarray, b_LE: np.ndarray) -> float:
    """Mean over layers."""
    return float(np.mean((a_LE * b_LE).sum(axis=1) / np.linalg.norm(a_LE, axis=1) / np.linalg.norm(b_LE, axis=1)))


def domains_of(counts: RouteCounts) -> np.ndarray:
    return np.array([int(name.rsplit("domain", 1)[1]) for name in counts.names])


def test_same_seed_same_workload_and_other_seed_other_workload():
    a, b, c = (generate_routes(SMALL, samples=3, mean_tokens=64, seed=seed) for seed in (5, 5, 6))
    assert a == b
    assert a != c
    assert generate_counts(SMALL, samples=3, seed=5) == generate_counts(SMALL, samples=3, seed=5)


def test_a_sample_does_not_depend_on_how_many_follow_it():
    few = list(generate_samples(SMALL, samples=2, mean_tokens=64))
    many = list(generate_samples(SMALL, samples=4, mean_tokens=64))
    assert many[:2] == few


@pytest.mark.parametrize("shape", [(128, 8), (8, 2), (5, 5), (64, 63), (3, 1)], ids=lambda s: f"{s[0]} top {s[1]}")
def test_every_token_has_distinct_ids_and_the_last_one_has_no_row(shape):
    model = QWEN.replace(layers=3, experts=shape[0], top_k=shape[1])
    for sample in generate_samples(model, samples=3, mean_tokens=40):
        assert sample.num_rows == sample.num_tokens - 1
        in_order = np.sort(sample.ids_TLK.astype(int), axis=2)
        assert (np.diff(in_order, axis=2) > 0).all()
        assert in_order.max() < shape[0]


def test_counts_and_routes_follow_the_same_shares():
    figures = dict(samples=1, mean_tokens=60_000, length_sigma=0.0, seed=2)
    counts = generate_counts(SMALL, **figures)
    (sample,) = generate_samples(SMALL, **figures)
    drawn_LE = np.stack([np.bincount(sample.ids_TLK[:, i].ravel(), minlength=128) for i in range(4)])
    assert counts.tokens_B.tolist() == [sample.num_tokens]
    # Both are within a few standard deviations (about 1 % of a mean expert's rows) and the 256 candidates' rounding.
    np.testing.assert_allclose(counts.count_BLE[0] / sample.num_rows, drawn_LE / sample.num_rows, atol=0.02)
    assert cosine(counts.count_BLE[0].astype(float), drawn_LE.astype(float)) > 0.998


def test_counts_are_possible_counts():
    counts = generate_counts(QWEN, samples=10, mean_tokens=50)
    rows_B = counts.tokens_B - 1
    assert (counts.count_BLE.sum(axis=2) == rows_B[:, None] * QWEN.top_k).all()
    assert (counts.count_BLE >= 0).all()
    assert (counts.count_BLE <= rows_B[:, None, None]).all()
    assert (counts.unknown_BL == 1).all()


def test_popularity_falls_as_a_power_of_rank_from_055_to_095():
    share_DLE = popularity_DLE(Workload(model=QWEN))
    exponents = []
    for share_E in share_DLE.reshape(-1, 128):
        tail = np.sort(share_E)[::-1][8:100]
        exponents.append(-np.polyfit(np.log(np.arange(9, 101)), np.log(tail), 1)[0])
    assert 0.549 <= min(exponents) < 0.6
    assert 0.8 < max(exponents) <= 0.951


def test_the_hottest_expert_of_the_worst_layer_takes_8_to_12_percent():
    share_LE = popularity_DLE(Workload(model=QWEN)).mean(axis=0)
    assert 0.05 < popularity_DLE(Workload(model=QWEN)).max(axis=2).mean() < 0.10
    assert 0.08 <= share_LE.max() <= 0.1201


def test_hot_experts_sit_on_neighbouring_ids():
    rank = popularity_DLE(Workload(model=QWEN)).argsort(axis=2).argsort(axis=2).reshape(-1, 128)
    together = np.mean([np.corrcoef(r[:-1], r[1:])[0, 1] for r in rank])
    # 192 layers of 128 experts: a random order stays within 0.02 of its mean, -1/128.
    assert together > 0.05


def test_samples_of_one_domain_are_alike_and_domains_differ():
    counts = generate_counts(QWEN, samples=60, mean_tokens=4000)
    domain_B, count = domains_of(counts), counts.count_BLE.astype(float)
    alike = [cosine(count[a], count[b]) for a in range(60) for b in range(a) if domain_B[a] == domain_B[b]]
    totals = [count[domain_B == d].sum(axis=0) for d in range(4)]
    apart = [cosine(totals[a], totals[b]) for a in range(4) for b in range(a)]
    assert np.mean(alike) == pytest.approx(0.92, abs=0.03)
    assert np.mean(apart) == pytest.approx(0.62, abs=0.06)


def test_lengths_are_log_normal_with_the_mean_asked_for():
    tokens = generate_counts(SMALL, samples=600, mean_tokens=1000, length_sigma=0.6).tokens_B
    assert tokens.mean() == pytest.approx(1000, rel=0.1)
    assert np.log(tokens).std() == pytest.approx(0.6, rel=0.1)
    assert set(generate_counts(SMALL, samples=5, mean_tokens=77, length_sigma=0.0).tokens_B.tolist()) == {77}


def test_popularity_drifts_slowly_with_the_step():
    share = {step: popularity_DLE(Workload(model=QWEN, step=step))[0] for step in (0, 1, 40)}
    near, far = cosine(share[0], share[1]), cosine(share[0], share[40])
    assert 0.98 < near < 1
    assert far < near - 0.1


@pytest.mark.parametrize(
    ("figure", "message"),
    [
        ({"samples": 0}, "samples is 0; it must be from 1 to 16777216"),
        ({"domains": 10**12}, "domains is 1000000000000; it must be from 1 to 4096"),
        ({"mean_tokens": 10**14}, "mean_tokens is 100000000000000; it must be from 2 to 1048576"),
        ({"shared": 1.5}, "shared is 1.5; it must be from 0 to 1"),
        ({"length_sigma": float("nan")}, "length_sigma is nan"),
        ({"rollouts": 0}, "rollouts is 0; it must be from 1 to 16777216"),
        ({"prompt_sigma": 3.1}, "prompt_sigma is 3.1; it must be from 0 to 3"),
    ],
    ids=["samples", "domains", "tokens", "shared", "nan", "rollouts", "prompts"],
)
def test_figures_out_of_range_are_named(figure, message):
    with pytest.raises(RoutesError, match=message):
        generate_counts(SMALL, **figure)


def file_order_loads(ids: np.ndarray, experts: int) -> LoadMatrix:
    """Tokens in file order, micro-steps of 1,024 tokens, remainder dropped."""
    steps, layers = len(ids) // 1024, ids.shape[1]
    cut = ids[: steps * 1024].reshape(steps, 1024, layers, -1)
    load = [[np.bincount(cut[m, :, i].ravel(), minlength=experts) for i in range(layers)] for m in range(steps)]
    return LoadMatrix(np.array(load)[:, :, None, :])


def generated_skew(model: ModelShape, ep: int) -> list[float]:
    """Mean skew of generated micro-steps of 1,024 tokens, one figure per domain."""
    figures = []
    for seed in range(4):
        routes = generate_routes(model, samples=8, domains=1, mean_tokens=1025, length_sigma=0.0, seed=seed)
        schedule = Schedule.of([(m, 0, 1024, m, 0) for m in range(8)], ranks=1)
        figures.append(skew(count_loads(Routes.of(routes.samples, model=model), schedule), ep=ep).mean)
    return figures


@pytest.mark.data
@pytest.mark.parametrize("ep", [8, 16])
@pytest.mark.parametrize(
    ("file", "arrays", "preset"),
    [
        pytest.param(
            "dsv2lite_esft_routes.npz",
            [f"{task}_ids" for task in ("intent", "law", "summary", "translation")],
            "deepseek-v2-lite",
            id="deepseek-v2-lite",
        ),
        pytest.param("gptoss20b_decode_routes.npz", ["ids"], "gpt-oss-20b", id="gpt-oss-20b"),
    ],
)
def test_generated_skew_is_that_of_the_real_traces(file, arrays, preset, ep):
    if not (TRACES / file).exists():
        pytest.skip(f"the real routing traces are not beside the project: no {file} in ../shared/data")
    model = ModelShape.preset(preset)
    traces = np.load(TRACES / file)
    real = [skew(file_order_loads(traces[name], model.experts), ep=ep).mean for name in arrays]
    generated = generated_skew(model, ep)
    # Margin: 10 % beside the range the real traces span, for every generated domain.
    assert min(real) * 0.9 <= min(generated) and max(generated) <= max(real) * 1.1


def test_rollouts_of_a_prompt_share_its_domain_and_its_experts():
    figures = {"samples": 48, "mean_tokens": 2048, "length_sigma": 0.0, "sample_sigma": 0.0, "seed": 5}
    model = ModelShape.preset("qwen3-30b-a3b", layers=2)
    alone = generate_counts(model, **figures)
    asked = generate_counts(model, rollouts=8, prompt_sigma=0.7, **figures)
    domains = [name.rpartition("-")[2] for name in asked.names]
    assert all(len(set(domains[b : b + 8])) == 1 for b in range(0, 48, 8)) and len(set(domains)) > 1
    assert domains[::8] == [name.rpartition("-")[2] for name in alone.names[::8]]
    share_BX = asked.count_BLE.reshape(48, -1) / np.linalg.norm(asked.count_BLE.reshape(48, -1), axis=1)[:, None]
    alike_BB = share_BX @ share_BX.T
    is_same_BB = np.arange(48)[:, None] // 8 == np.arange(48) // 8
    assert alike_BB[is_same_BB].min() > 0.97 > 0.9 > alike_BB[~is_same_BB].max()

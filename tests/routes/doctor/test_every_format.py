"""The doctor on dumps of every format: good ones have no finding, and each broken one exactly its own.

A dump is broken on the wire, not in memory: routes that are wrong in one way are written by the format's own writer
(as another model's where the model forbids them: ids above its experts, other layers, other top-k) and read back.
"""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

from equipoise.core import ModelShape, Routes, RoutesError, SampleRoutes, Segment
from equipoise.routes.doctor import diagnose
from equipoise.routes.registry import FORMATS, stream_recordings
from tests.routes.writers import write_dump

MODEL = ModelShape(
    name="small", experts=64, top_k=4, layer_numbers=(1, 2, 3), hidden_layers=4, hidden=8, expert_width=8
)
MANY = MODEL.replace(experts=300)
TOKENS = 100

# The native store names its model and refuses another one's before anything is decoded.
STORE_REFUSES = {"equipoise": ("decode",)}
# SGLang's payload has no shape: rows that do not divide by the model's cannot be decoded at all.
NO_SHAPE = {"sglang": ("decode",), "sglang-openai": ("decode",)}
# Engines write unsigned ids or zeros, so an unknown row looks like a filler there.
NO_SENTINEL = dict.fromkeys(("vllm", "vllm-http", "sglang", "sglang-openai", "prime-rl"), ("equal-rows",))
# Forms with a row for every token say -1 where the recording stopped.
ROW_PER_TOKEN = dict.fromkeys(("verl", "verl-jagged", "nemo-rl"), ("missing-rows",))
NO_TOKENS = dict.fromkeys(("megatron-trace", "megatron-replay"), ())
CANNOT_HOLD_VERSIONS = ("vllm", "prime-rl", "nemo-rl", "nemo-rl-batch")
DROPS_VERSIONS = dict.fromkeys(("verl", "verl-jagged", "megatron-trace", "megatron-replay"), ())
MARKS_PADDING = ("equipoise", "nemo-rl-batch")


@dataclass(frozen=True)
class Case:
    """Routes that are wrong in one way, and the checks they must fire."""

    name: str
    samples: list[SampleRoutes]
    fires: tuple[str, ...]
    written_as: ModelShape = field(default_factory=lambda: MODEL)
    read_as: ModelShape = field(default_factory=lambda: MODEL)
    otherwise: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Formats in which the same fault shows differently."""
    not_in: tuple[str, ...] = ()
    """Formats that cannot hold the fault: their writer refuses it."""


def draw(model=MODEL, *, samples=4, tokens=TOKENS, experts=None, seed=0):
    """Good samples with T-1 rows of distinct ids, and token ids."""
    rng = np.random.default_rng(seed)
    drawn = []
    for i in range(samples):
        scores = rng.random((tokens - 1, model.layers, experts or model.experts))
        ids_TLK = scores.argpartition(model.top_k, axis=2)[:, :, : model.top_k]
        tokens_T = rng.integers(0, 1000, tokens)
        drawn.append(SampleRoutes(name=f"s{i}", ids_TLK=ids_TLK, num_tokens=tokens, tokens_T=tokens_T))
    return drawn


def broken(change, **fields):
    """Good samples, the second one edited."""
    samples = draw()
    ids_TLK = samples[1].ids_TLK.copy()
    change(ids_TLK)
    samples[1] = replace(samples[1], ids_TLK=ids_TLK, **fields)
    return samples


def put(where, value):
    def change(ids_TLK):
        ids_TLK[where] = value

    return change


def with_missing_rows():
    known_TL = np.ones((TOKENS - 1, MODEL.layers), dtype=bool)
    known_TL[10:13] = False
    return broken(lambda ids: None, known_TL=known_TL)


def with_padding():
    padding_T = np.arange(TOKENS - 1 + 20) >= TOKENS - 1
    filler = np.broadcast_to(np.arange(MODEL.top_k), (20, MODEL.layers, MODEL.top_k))
    return [replace(s, ids_TLK=np.concatenate([s.ids_TLK, filler]), padding_T=padding_T) for s in draw()]


def with_versions(*versions_of_second):
    """One version in all samples but the second, which has the given ones in equal parts."""
    samples = []
    for i, sample in enumerate(draw()):
        versions = versions_of_second if i == 1 else ("7",)
        edges = np.linspace(0, sample.num_rows, len(versions) + 1).astype(int).tolist()
        segments = tuple(
            Segment(start=a, stop=b, weight_version=v) for a, b, v in zip(edges[:-1], edges[1:], versions, strict=True)
        )
        samples.append(replace(sample, segments=segments))
    return samples


def without_tokens(samples):
    return [replace(sample, tokens_T=None) for sample in samples]


def cut_short():
    """The second sample has three more tokens than its rows account for."""
    samples = draw()
    samples[1] = replace(samples[1], num_tokens=TOKENS + 3, tokens_T=np.arange(TOKENS + 3))
    return samples


OTHER_LAYERS = MODEL.replace(layer_numbers=(0, 1))
NO_DENSE = MODEL.replace(layer_numbers=(0, 1, 2, 3))
TOP_3 = MODEL.replace(top_k=3)
PHYSICAL = MODEL.replace(experts=64 + 16)
FOREIGN = MODEL.replace(experts=200)
STOLEN = broken(put(slice(32, 64), draw()[0].ids_TLK[32:64]))

CASES = [
    Case("good", draw(), ()),
    Case("good-without-tokens", without_tokens(draw()), ()),
    Case("good-T-rows", [replace(s, num_tokens=TOKENS - 1, tokens_T=s.tokens_T[:-1]) for s in draw()], ()),
    Case(
        "rows-short",
        cut_short(),
        ("rows-tokens",),
        otherwise={**ROW_PER_TOKEN, **NO_TOKENS, "nemo-rl-batch": ("missing-rows", "padding")},
    ),
    Case("missing-rows", with_missing_rows(), ("missing-rows",), otherwise=NO_SENTINEL),
    Case("zero-rows", broken(put(slice(30, 34), 0)), ("equal-rows",)),
    Case("equal-rows", broken(put((slice(30, 34), 1), 9)), ("equal-rows",)),
    Case("zero-layer", broken(put((slice(None), 1), 0)), ("zero-layers",)),
    Case("dense-layer", draw(NO_DENSE), ("dense-layers",), written_as=NO_DENSE),
    Case(
        "layer-count",
        draw(OTHER_LAYERS),
        ("layer-map",),
        written_as=OTHER_LAYERS,
        # The store names its layers, so that the one the model calls dense is seen too.
        otherwise={**NO_SHAPE, "equipoise": ("layer-map", "dense-layers")},
    ),
    Case("columns", draw(TOP_3), ("top-k",), written_as=TOP_3, otherwise={**STORE_REFUSES, **NO_SHAPE}),
    Case("duplicates", broken(put((8, 1), [3, 5, 3, 7])), ("distinct-ids",)),
    Case("stray-id", broken(put((8, 1, 2), 190)), ("id-range",), written_as=FOREIGN, otherwise=STORE_REFUSES),
    Case("physical-ids", draw(PHYSICAL), ("physical-ids",), written_as=PHYSICAL, otherwise=STORE_REFUSES),
    Case(
        "folded-ids",
        draw(MANY, samples=8, tokens=250, experts=256),
        ("dtype-overflow",),
        written_as=MANY,
        read_as=MANY,
    ),
    Case("stale-rows", STOLEN, ("stale-rows",)),
    Case("stale-rows-without-tokens", without_tokens(STOLEN), ("stale-rows",)),
    Case("padding", with_padding(), ("padding",), not_in=tuple(f.name for f in FORMATS if f.name not in MARKS_PADDING)),
    Case(
        "versions-in-sample",
        with_versions("7", "8"),
        ("versions-in-sample",),
        otherwise=DROPS_VERSIONS,
        not_in=CANNOT_HOLD_VERSIONS,
    ),
    Case(
        "versions-across",
        with_versions("8"),
        ("versions-across",),
        otherwise=DROPS_VERSIONS,
        not_in=CANNOT_HOLD_VERSIONS,
    ),
]


def write(form, samples, model, folder):
    target = folder / f"dump{form.suffixes[0].replace('/', '')}"
    write_dump(Routes.of(samples, model=model), target, format=form.name)
    return target


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_each_fault_fires_its_own_check_in_every_format(case, form, tmp_path):
    if form.name in case.not_in:
        with pytest.raises(RoutesError):
            write(form, case.samples, case.written_as, tmp_path)
        return
    target = write(form, case.samples, case.written_as, tmp_path)
    diagnosis = diagnose(stream_recordings(target, model=case.read_as, format=form.name), model=case.read_as)
    assert diagnosis.fired == case.otherwise.get(form.name, case.fires)
    assert diagnosis.ok == (not diagnosis.fired)
    for name in diagnosis.fired:
        assert diagnosis[name].first_place
        assert diagnosis[name].advice


def test_the_table_of_faults_reaches_every_check_that_a_single_dump_can_fire():
    reached = {check for case in CASES for check in case.fires}
    names = {f.check for f in diagnose([], model=MODEL).findings}
    # Written dumps do not say where the prompt ends; test_prompt.py has engines' own answers, which do.
    assert names - reached == {"decode", "turns", "pairing", "agreement", "token-order", "prompt-rows"}


@pytest.mark.parametrize("form", ["vllm-http", "sglang", "sglang-openai", "prime-rl", "nemo-rl"])
def test_two_samples_of_one_name_are_turns_that_contradict_each_other(form, tmp_path):
    forms = {f.name: f for f in FORMATS}
    parts = []
    for seed in (0, 1):
        target = write(forms[form], without_tokens(draw(samples=1, seed=seed)), MODEL, tmp_path)
        parts.append(target.read_bytes())
    target.write_bytes(b"".join(parts))
    diagnosis = diagnose(stream_recordings(target, model=MODEL, format=form), model=MODEL)
    assert diagnosis.fired == ("turns",)
    assert diagnosis["turns"].first_place == "sample 's0': two turns give token 0 different routes"


@pytest.mark.parametrize("form", ["nemo-rl", "nemo-rl-batch"])
def test_int8_on_the_wire_of_a_model_with_256_experts(form, tmp_path):
    forms = {f.name: f for f in FORMATS}
    target = write(forms[form], draw(), MODEL, tmp_path)
    model = MODEL.replace(experts=256, top_k=4)
    assert diagnose(stream_recordings(target, model=model, format=form), model=model).fired == ("dtype-overflow",)


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_a_truncated_dump_is_a_finding_that_names_the_place(form, tmp_path):
    target = write(form, draw(), MODEL, tmp_path)
    whole = target.read_bytes()
    target.write_bytes(whole[: int(len(whole) * 0.7)])
    try:
        recordings = stream_recordings(target, model=MODEL, format=form.name)
    except RoutesError as error:
        assert str(target) in str(error)
        return
    diagnosis = diagnose(recordings, model=MODEL)
    assert "decode" in diagnosis.fired
    assert diagnosis["decode"].first_place


@pytest.mark.parametrize("second", FORMATS, ids=lambda form: form.name)
def test_recordings_of_two_formats_agree_when_the_tokens_are_the_same(second, tmp_path):
    samples = draw()
    first = Routes.of(samples, model=MODEL)
    write_dump(first, tmp_path / "first.jsonl", format="vllm-http")
    target = write(second, samples, MODEL, tmp_path)
    diagnosis = diagnose(
        stream_recordings(tmp_path / "first.jsonl", model=MODEL),
        model=MODEL,
        second=stream_recordings(target, model=MODEL, format=second.name),
    )
    assert diagnosis.ok, diagnosis.fired
    assert diagnosis["agreement"].rate_L == (1.0, 1.0, 1.0)
    assert diagnosis["agreement"].total == 4 * (TOKENS - 1) * MODEL.layers


@pytest.mark.parametrize("second", FORMATS, ids=lambda form: form.name)
def test_a_trainer_that_lost_the_first_row_is_found_in_every_format(second, tmp_path):
    samples = draw()
    shifted = [replace(s, ids_TLK=np.roll(s.ids_TLK, -1, axis=0)) for s in samples]
    target = write(second, shifted, MODEL, tmp_path)
    write_dump(Routes.of(samples, model=MODEL), tmp_path / "first.jsonl", format="vllm-http")
    diagnosis = diagnose(
        stream_recordings(tmp_path / "first.jsonl", model=MODEL),
        model=MODEL,
        second=stream_recordings(target, model=MODEL, format=second.name),
    )
    assert diagnosis.fired == ("agreement", "token-order")
    assert diagnosis["token-order"].first_place == "the second recording is one row earlier"


def test_ragged_nemo_rl_batches_send_their_padding_to_the_first_experts(tmp_path):
    samples = draw()
    samples[0] = replace(samples[0], ids_TLK=samples[0].ids_TLK[:60], num_tokens=61, tokens_T=samples[0].tokens_T[:61])
    forms = {f.name: f for f in FORMATS}
    target = write(forms["nemo-rl-batch"], samples, MODEL, tmp_path)
    diagnosis = diagnose(stream_recordings(target, model=MODEL), model=MODEL)
    assert diagnosis.fired == ("padding",)
    assert diagnosis["padding"].count == TOKENS - 61


def test_a_diagnosis_is_plain_json():
    document = json.loads(json.dumps(diagnose([], model=MODEL).as_json()))
    assert document["ok"] is False
    assert document["findings"][0]["check"] == "decode"
    assert document["findings"][0]["share"] == 1.0
    with pytest.raises(KeyError, match="no check 'nonsense'; known: decode, rows-tokens"):
        diagnose([], model=MODEL)["nonsense"]


def test_the_page_explains_every_check_and_its_example_runs(capsys):
    page = (Path(__file__).parents[3] / "docs" / "doctor.md").read_text()
    for finding in diagnose([], model=MODEL).findings:
        assert f"| `{finding.check}` |" in page
    example = page.split("```python\n")[1].split("```")[0]
    exec(compile(example, "docs/doctor.md", "exec"), {})
    assert capsys.readouterr().out == "good\n"

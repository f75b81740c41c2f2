"""The snippets of docs/recording.md run, and what they write is read back as the routes that went in."""

import base64
import re
from pathlib import Path
from types import SimpleNamespace as Thing

import numpy as np
import pytest
import torch

import equipoise as eq

PAGE = (Path(__file__).parents[2] / "docs" / "recording.md").read_text()
SNIPPETS = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
MODEL = eq.ModelShape.preset("qwen3-30b-a3b")
LENGTHS = (5, 9)


def sample_rows():
    """[tokens - 1, layers, K] distinct ids of each sample."""
    rng = np.random.default_rng(0)
    size = (sum(LENGTHS), MODEL.layers)
    ids = rng.permuted(np.broadcast_to(np.arange(MODEL.experts), (*size, MODEL.experts)), axis=-1)[..., : MODEL.top_k]
    return [rows[:-1] for rows in np.split(ids, [LENGTHS[0]])]


ROWS = sample_rows()
TOKENS = [list(range(100, 100 + length)) for length in LENGTHS]


def padded(fill, dtype):
    """[samples, longest, layers, K]: a row for every token, `fill` where none was recorded."""
    batch = np.broadcast_to(fill, (len(ROWS), max(LENGTHS), MODEL.layers, MODEL.top_k)).astype(dtype)
    for sample, rows in zip(batch, ROWS, strict=True):
        sample[: len(rows)] = rows
    return torch.from_numpy(batch)


def offline():
    texts = [
        Thing(
            request_id=str(n),
            prompt_token_ids=tokens[:2],
            outputs=[Thing(index=0, token_ids=tokens[2:], routed_experts=rows.astype(np.uint8))],
        )
        for n, (tokens, rows) in enumerate(zip(TOKENS, ROWS, strict=True))
    ]
    return {"outputs": texts}


def served():
    """A native SGLang exchange each; the second starts at token 1."""
    pairs = []
    for start, tokens, rows in zip((0, 1), TOKENS, ROWS, strict=True):
        payload = base64.b64encode(rows[start:].astype("<i4").tobytes()).decode()
        info = {"id": str(start), "routed_experts": payload, "prompt_tokens": 2, "completion_tokens": len(tokens) - 2}
        request = {"input_ids": tokens[:2], "return_routed_experts": True, "routed_experts_start_len": start}
        pairs.append((request, {"meta_info": info, "output_ids": tokens[2:]}))
    return {"exchanges": pairs}


def jagged():
    parts = [torch.from_numpy(np.concatenate([rows, rows[:1] * 0]).astype(np.int16)) for rows in ROWS]
    return {"data": {"routed_experts": torch.nested.nested_tensor(parts, layout=torch.jagged)}}


def batched():
    mask = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    fields = {"routed_experts": padded(0, np.int16), "attention_mask": mask.long(), "input_ids": mask.long()}
    return {"batch": Thing(batch=fields)}


def nemo():
    lengths = torch.tensor(LENGTHS)
    ids = torch.zeros(len(LENGTHS), max(LENGTHS), dtype=torch.long)
    return {
        "train_data": {
            "routed_experts": padded(np.arange(MODEL.top_k), np.int8),
            "input_ids": ids,
            "input_lengths": lengths,
        }
    }


def prime():
    samples = []
    for tokens, rows in zip(TOKENS, ROWS, strict=True):
        filled = np.concatenate([rows, rows[:1] * 0]).astype(np.uint8)
        routes = Thing(data=filled.tobytes(), shape=list(filled.shape), dtype="uint8")
        samples.append(Thing(token_ids=tokens, routed_experts=routes))
    return {"samples": samples}


def megatron():
    from megatron.core.transformer.moe.router_replay import RouterReplay

    routers = [RouterReplay() for _ in range(MODEL.layers)]

    def forward(rows):
        for layer, router in enumerate(routers):
            router.record_indices(torch.from_numpy(rows[:, layer].copy()))

    return {"micro_batches": ROWS, "forward": forward}


CASES = {
    "vllm.npz": offline,
    "responses.jsonl": served,
    "verl.npz": jagged,
    "verl.pt": batched,
    "nemo.pt": nemo,
    "prime.jsonl": prime,
    "replay.pt": megatron,
}


def test_every_snippet_is_run_and_every_file_it_writes_is_checked_by_the_doctor():
    written = [name for code in SNIPPETS for name in re.findall(r'"([\w.]+\.(?:npz|jsonl|pt))"', code)]
    assert written == list(CASES)
    for name in written:
        assert f"equipoise doctor {name} --model" in PAGE


@pytest.mark.parametrize(("name", "code"), zip(CASES, SNIPPETS, strict=True), ids=CASES)
def test_a_snippet_writes_what_is_read_back(name, code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if name == "replay.pt":
        # The class keeps every router of the process; this one's go when the test ends.
        home = "megatron.core.transformer.moe.router_replay.RouterReplay"
        monkeypatch.setattr(f"{home}.global_router_replay_instances", [])
    exec(code, CASES[name]())
    routes = eq.read_routes(Path(name), model=MODEL)
    assert len(routes.samples) == len(ROWS)
    for sample, rows in zip(routes.samples, ROWS, strict=True):
        # Rows before a start offset, of the last token and of padding are there, but not known.
        known = np.ones(sample.ids_TLK.shape[:2], bool) if sample.known_TL is None else sample.known_TL
        first = 1 if (name, len(rows)) == ("responses.jsonl", LENGTHS[1] - 1) else 0
        assert known[first : len(rows)].all() and not known[:first].any()
        assert np.array_equal(sample.ids_TLK[first : len(rows)], rows[first:])

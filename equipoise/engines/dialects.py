"""What vLLM and SGLang are asked for and what they answer: requests, choices, ends, and why there are no routes.

vLLM 0.22 to 0.32 (sources of 0.28 and 0.32 read, of 0.22 the names), POST /inference/v1/generate (0.32: started with
--enable-scale-out):
    token_ids, sampling_params {n, max_tokens, temperature, seed}
    sampling_params.routed_experts_prompt_start    0.22 on: first token with a row; from 0.31 refused outside 0..prompt
    choices[i].token_ids, .routed_experts          0.22 on: base64 of a .npy file; null without the flag, or if the
                                                   request was aborted first
    choices[i].weight_versions                     0.32 on: spans {version, start, end} of the generated tokens
    choices[i].finish_reason                       "abort": cut off, as /pause does before a weight update
  There is no request field that asks for routes: `--enable-return-routed-experts` records all. Up to 0.30 it excludes
  pipeline and context parallelism and every KV connector. From 0.31 (AuxOutput) it needs Model Runner V2 and prefix
  caching, and excludes pipeline and context parallelism, adaptive speculative verification, and the connectors
  Nixl*, MoRIIO and Mooncake.

SGLang 0.5.12 to 0.5.23 (sources of 0.5.18 and 0.5.23 read), POST /generate:
    input_ids, sampling_params {n, max_new_tokens, temperature, sampling_seed}
    return_routed_experts                          needs the server's --enable-return-routed-experts as well
    routed_experts_start_len                       first token with a row, in 0..prompt
    output_ids, meta_info.routed_experts           base64 of raw int32; the key is absent without the flag
    meta_info.weight_versions, .weight_version     0.5.23: spans as vLLM's; before, the version when the answer ended
    meta_info.finish_reason.type                   "abort": cut off
    meta_info.indexer_topk                         the choices of sparse attention, *not* routes; never read
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from equipoise.routes.wire import field, find_field

FLAG = "--enable-return-routed-experts"
AUX_OUTPUT = (0, 31)
"""First vLLM version whose routes are kept by AuxOutput."""
HTTP_ROUTES = (0, 22)
"""First vLLM version that returns routes over HTTP."""

EngineName = Literal["vllm", "sglang"]
Get = Callable[[str], Any]
"""Returns the JSON value at a path of the server, or None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the samples of one prompt are drawn."""

    samples: int
    max_new_tokens: int
    temperature: float = 1.0
    seed: int = 0
    start: int = 0
    """First token whose route is asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """How one engine is spoken to; records are answers with one sample each, and the request beside them."""

    path: str
    form: str
    """Format of `equipoise.routes` that reads its records."""
    ask: Callable[[list[int], Sampling], dict[str, Any]]
    """(prompt, sampling) to the body of a request."""
    split: Callable[[Any, dict[str, Any]], list[dict[str, Any]] | None]
    """(answer, body) to one record per sample, or None if the answer is not this engine's."""
    tokens: Callable[[dict[str, Any]], list[int]]
    """Generated tokens of a record."""
    routes: Callable[[dict[str, Any]], Any]
    """Encoded routes of a record, or None."""
    is_cut: Callable[[dict[str, Any]], bool]
    """Whether the sample was aborted, so that it must be continued."""
    rename: Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]]
    """(record, first) to the record with the first one's id: turns of one sample share it."""
    explain: Callable[[dict[str, Any], Get], str]
    """Say why a finished record has no routes, and what to do."""


def _ask_vllm(prompt: list[int], sampling: Sampling) -> dict[str, Any]:
    params = {
        "n": sampling.samples,
        "max_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "seed": sampling.seed,
    }
    if sampling.start:
        params["routed_experts_prompt_start"] = sampling.start
    return {"token_ids": prompt, "sampling_params": params}


def _split_vllm(answer: Any, body: dict[str, Any]) -> list[dict[str, Any]] | None:
    choices = field(answer, "choices")
    if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
        return None
    ordered = sorted(choices, key=lambda choice: choice.get("index") or 0)
    return [{**answer, "choices": [choice], "request": body} for choice in ordered]


def _explain_vllm(record: dict[str, Any], get: Get) -> str:
    version = find_field("version", get("/version"))
    numbers = _version_numbers(version)
    if numbers and numbers < HTTP_ROUTES:
        return f"vLLM {version} returns no routes over HTTP; use 0.22 or newer, started with {FLAG}"
    if "routed_experts" not in record["choices"][0]:
        return (
            f"the answer has no field routed_experts, which vLLM always sends: a gateway dropped it (or vLLM is older "
            f"than 0.22); ask the server itself, or let the gateway pass all fields. The server needs {FLAG}"
        )
    fix = f"the server returned no routes: start it with `vllm serve MODEL {FLAG}`"
    if numbers and numbers >= AUX_OUTPUT:
        return f"{fix}, prefix caching on and VLLM_USE_V2_MODEL_RUNNER=1 (vLLM {version})"
    if numbers:
        return f"{fix}, without pipeline or context parallelism or a KV connector (vLLM {version})"
    return fix


def _version_numbers(version: Any) -> tuple[int, ...]:
    """Return (major, minor) of a version such as "0.31.0rc1"; empty where it cannot be told."""
    parts = str(version).split(".")[:2]
    return tuple(map(int, parts)) if len(parts) == 2 and all(part.isdigit() for part in parts) else ()


def _ask_sglang(prompt: list[int], sampling: Sampling) -> dict[str, Any]:
    params = {
        "n": sampling.samples,
        "max_new_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "sampling_seed": sampling.seed,
    }
    body = {"input_ids": prompt, "sampling_params": params, "return_routed_experts": True}
    return {**body, "routed_experts_start_len": sampling.start} if sampling.start else body


def _split_sglang(answer: Any, body: dict[str, Any]) -> list[dict[str, Any]] | None:
    answers = answer if isinstance(answer, list) else [answer]
    if not all(isinstance(field(one, "meta_info"), dict) for one in answers):
        return None
    return [{**one, "request": body} for one in answers]


def _explain_sglang(record: dict[str, Any], get: Get) -> str:
    info = get("/server_info") or get("/get_server_info")
    fix = f"start it with `python -m sglang.launch_server --model-path MODEL {FLAG}`"
    is_on = field(info, "enable_return_routed_experts")
    aside = " (its indexer_topk are the choices of sparse attention, not routes)"
    aside = aside if "indexer_topk" in record["meta_info"] else ""
    if is_on is False:
        return f"the server returned no routes{aside}: {fix}"
    if is_on is True:
        return (
            f"the server records routes, but the answer has none{aside}: a gateway dropped return_routed_experts from "
            "the request or meta_info.routed_experts from the answer; ask the server itself, or let it pass all fields"
        )
    return f"the server returned no routes{aside}: {fix}; or a gateway dropped them: then ask the server itself"


DIALECTS: dict[EngineName, Dialect] = {
    "vllm": Dialect(
        path="/inference/v1/generate",
        form="vllm-http",
        ask=_ask_vllm,
        split=_split_vllm,
        tokens=lambda record: list(record["choices"][0].get("token_ids") or ()),
        routes=lambda record: record["choices"][0].get("routed_experts"),
        is_cut=lambda record: record["choices"][0].get("finish_reason") == "abort",
        rename=lambda record, first: {**record, "request_id": first.get("request_id")},
        explain=_explain_vllm,
    ),
    "sglang": Dialect(
        path="/generate",
        form="sglang",
        ask=_ask_sglang,
        split=_split_sglang,
        tokens=lambda record: list(record.get("output_ids") or ()),
        routes=lambda record: record["meta_info"].get("routed_experts"),
        is_cut=lambda record: field(record["meta_info"].get("finish_reason"), "type") == "abort",
        rename=lambda record, first: {**record, "meta_info": {**record["meta_info"], "id": first["meta_info"]["id"]}},
        explain=_explain_sglang,
    ),
}

"""A local server that answers as vLLM 0.28, vLLM 0.32 and SGLang 0.5.23 do, byte for byte but for ids and times."""

import base64
import io
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np


@contextmanager
def served(reply):
    """Yield the address of a server; `reply(path, body)` returns (status, headers, content), body None for a GET."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            self.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def do_GET(self):
            self.answer(None)

        def answer(self, body):
            status, headers, content = reply(self.path, body)
            self.send_response(status)
            for name, value in {"Content-Length": str(len(content)), "Connection": "close", **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)
            self.close_connection = True

        def log_message(self, *words):
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def compact(value):
    """Return JSON as the servers' frameworks write it."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def npy(rows):
    """Return what vLLM puts into `routed_experts`: uint8 up to 256 experts."""
    stream = io.BytesIO()
    np.save(stream, rows.astype(np.uint8), allow_pickle=False)
    return base64.b64encode(stream.getbuffer()).decode("ascii")


def vllm_28(prompt, outputs):
    """`/inference/v1/generate` of 0.28; outputs are dicts: tokens, rows or None, finish."""
    choices = [
        {
            "index": index,
            "logprobs": None,
            "finish_reason": one["finish"],
            "token_ids": one["tokens"],
            "routed_experts": None if one["rows"] is None else npy(one["rows"]),
            "sampling_mask": None,
        }
        for index, one in enumerate(outputs)
    ]
    generated = sum(len(one["tokens"]) for one in outputs)
    usage = {"prompt_tokens": len(prompt), "total_tokens": len(prompt) + generated, "completion_tokens": generated}
    answer = {"request_id": "a1", "model": "m", "created": 1, "choices": choices}
    answer["usage"] = {**usage, "prompt_tokens_details": None}
    return {**answer, "prompt_logprobs": None, "kv_transfer_params": None, "ec_transfer_params": None}


def vllm_32(prompt, outputs):
    """`/inference/v1/generate` of 0.32, with weight versions."""
    old = vllm_28(prompt, outputs)
    choices = [
        {
            "index": choice["index"],
            "finish_reason": choice["finish_reason"],
            "stop_reason": None,
            "token_ids": choice["token_ids"],
            "routed_experts": choice["routed_experts"],
            "sampling_mask": None,
            "weight_versions": one.get("versions"),
            "logprobs": None,
        }
        for choice, one in zip(old["choices"], outputs, strict=True)
    ]
    empty = ("prompt_logprobs", "prompt_token_id_logprobs", "prompt_token_ids", "mm_placeholders", "metrics")
    answer = {"request_id": "a1", "model": "m", "created": 1, "usage": {**old["usage"]}}
    answer["usage"]["completion_tokens_details"] = None
    answer |= dict.fromkeys((*empty, "kv_transfer_params", "ec_transfer_params"))
    return {**answer, "output_mode": "tokens", "choices": choices}


def sglang_523(prompt, outputs):
    """`/generate` of 0.5.23: an object for one sample, else a list."""
    answers = []
    for number, one in enumerate(outputs):
        finish = {"type": "abort", "message": "Abort"} if one["finish"] == "abort" else {"type": one["finish"]}
        versions = one.get("versions")
        meta = {
            "id": f"r{number}",
            "finish_reason": finish,
            "prompt_tokens": len(prompt),
            "weight_version": versions[-1]["version"] if versions else "default",
            "num_retractions": 0,
            "reasoning_tokens": 0,
            "completion_tokens": len(one["tokens"]),
            "cached_tokens": 0,
        }
        meta |= {"weight_versions": versions} if versions else {}
        if one["rows"] is not None:
            meta["routed_experts"] = base64.b64encode(one["rows"].astype("<i4").tobytes()).decode()
        # Sparse attention's choices stand beside the routes, and look like them.
        meta["indexer_topk"] = base64.b64encode(np.arange(16, dtype="<i4").tobytes()).decode()
        answers.append({"text": "", "output_ids": one["tokens"], "meta_info": meta})
    return answers[0] if len(answers) == 1 else answers

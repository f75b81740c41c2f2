"""A server as vLLM 0.22, vLLM 0.32 or SGLang 0.5.23, with a real model behind it that generates and loads weights."""

import base64
import io
import pickle
import threading
from pathlib import Path
from urllib.parse import urlsplit

import torch
from safetensors.torch import load_file
from transformers.core_model_loading import revert_weight_conversion

from equipoise.rl.config import RolloutConfig
from equipoise.rl.rollout import Request, Sampler
from equipoise.rl.task import CharTokenizer, Question
from tests.engines.answers import compact, sglang_523, vllm_28, vllm_32

# What SGLang 0.5.23 lets a pickle of plain tensors name.
ALLOWED = {("torch._utils", "_rebuild_tensor_v2"), ("collections", "OrderedDict")}


class SafePickle(pickle.Unpickler):
    """Reads named tensors, and nothing that could run code."""

    def find_class(self, module, name):
        if (module, name) == ("torch.storage", "_load_from_bytes"):
            return lambda data: torch.load(io.BytesIO(data), weights_only=True)
        if (module, name) in ALLOWED:
            return super().find_class(module, name)
        raise RuntimeError(f"Blocked unsafe global ({module}.{name}) during pickle deserialization")


class Refused(Exception):
    """An answer other than success: status and content."""


class LiveEngine:
    """One engine; `reply` answers requests as `answers.served` passes them."""

    def __init__(self, model, version, *, tp_size=1, dp_size=1):
        """Take a model with its own random weights; `version` is such as "vllm 0.32"."""
        self.kind, self.version = version, "default"
        self.is_paused = self.has_session = self.keeps_version = False
        # Paths in order; the model's weights after each update.
        self.calls, self.held = [], []
        self._info = {"tp_size": tp_size, "dp_size": dp_size, "enable_return_routed_experts": True}
        self._lock = threading.Lock()
        self.model, self._hub = model.eval(), {}
        self._names = revert_weight_conversion(model, dict(model.state_dict())).keys()

    def reply(self, path, body):
        path = urlsplit(path).path
        with self._lock:
            self.calls.append(path)
            try:
                return 200, {}, compact(self._answer(path, body))
            except Refused as refused:
                status, content = refused.args
                return status, {}, compact(content)

    def _answer(self, path, body):
        if path in ("/generate", "/inference/v1/generate"):
            assert not self.is_paused, "a paused engine makes its clients wait"
            return self._generate(body)
        name = ("get" if body is None else "post") + path.replace("/", "_")
        found = getattr(self, f"{name}_{self.kind.split()[0]}", None)
        if found is None or (self.kind == "vllm 0.22" and path in ("/weight_info", "/update_weight_version")):
            raise Refused(404, {"detail": "Not Found"})
        return found(body)

    # vLLM.

    def get_is_paused_vllm(self, body):
        return {"is_paused": self.is_paused}

    def post_pause_vllm(self, body):
        self.is_paused = True
        return {"status": "paused"}

    def post_resume_vllm(self, body):
        self.is_paused = False
        return {"status": "resumed"}

    def post_collective_rpc_vllm(self, body):
        assert body["method"] == "reload_weights" and self.is_paused
        self._load_folder(body["kwargs"]["weights_path"])
        return {"results": [None]}

    def post_update_weight_version_vllm(self, body):
        self._change_version(body)
        return {"success": True, "new_version": body["new_version"]}

    def get_weight_info_vllm(self, body):
        return {"weight_version": self.version}

    # SGLang.

    def get_server_info_sglang(self, body):
        return self._info

    def get_model_info_sglang(self, body):
        return {"weight_version": self.version}

    def post_pause_generation_sglang(self, body):
        assert body == {"mode": "abort"}
        self.is_paused = True
        return {"message": "Generation paused successfully.", "status": "ok"}

    def post_continue_generation_sglang(self, body):
        self.is_paused = False
        return {"message": "Generation continued successfully.", "status": "ok"}

    def post_begin_weight_update_sglang(self, body):
        if self.has_session:
            refuse("a weight-update session is already open; call end_weight_update() first")
        self.has_session, self._hub = True, {}
        return {"success": True, "message": "Success"}

    def post_update_weights_from_tensor_sglang(self, body):
        if not self.has_session:
            refuse("update_weights_from_tensor must run between begin_weight_update() and end_weight_update()")
        payloads = [base64.b64decode(one, validate=True) for one in body["serialized_named_tensors"]]
        assert len(payloads) == self._info["tp_size"] and len(set(payloads)) == 1
        for name, tensor in SafePickle(io.BytesIO(payloads[0])).load():
            self._take(name, tensor)
        self._change_version(body)
        return {"success": True, "message": "Success"}

    def post_end_weight_update_sglang(self, body):
        if not self.has_session:
            refuse("no weight-update session is open; call begin_weight_update() first")
        # An update that was broken off left the session open; a real engine then has a mixture.
        if self._hub.keys() == self._names:
            self._load(self._hub)
        self.has_session = False
        return {"success": True, "message": "Success"}

    def post_update_weights_from_disk_sglang(self, body):
        assert body["load_format"] == "auto" and body["flush_cache"] is True
        self._load_folder(body["model_path"])
        self._change_version(body)
        return {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}

    # The model.

    def _change_version(self, body):
        if not self.keeps_version:
            self.version = body.get("new_version") or body.get("weight_version", self.version)

    def _take(self, name, tensor):
        """Keep one tensor for the load; fused experts are in no checkpoint of the family, so loaders refuse them."""
        if name.endswith((".experts.gate_up_proj", ".experts.down_proj")):
            refuse(f"KeyError: {name!r}")
        self._hub[name] = tensor

    def _load_folder(self, folder):
        self._hub = {}
        for path in sorted(Path(folder).glob("*.safetensors")):
            for name, tensor in load_file(path).items():
                self._take(name, tensor)
        self._load(self._hub)

    def _load(self, hub):
        """Load a checkpoint by transformers' own loader."""
        model, info = type(self.model).from_pretrained(
            None, config=self.model.config, state_dict=hub, output_loading_info=True
        )
        assert not info["missing_keys"] and not info["unexpected_keys"]
        self.model = model.eval()
        self.held.append({name: tensor.clone() for name, tensor in model.state_dict().items()})

    def _generate(self, body):
        prompt, params = body.get("token_ids") or body["input_ids"], body["sampling_params"]
        config = RolloutConfig(
            samples=params["n"],
            max_new_tokens=params.get("max_tokens") or params["max_new_tokens"],
            temperature=params["temperature"],
        )
        tokenizer = CharTokenizer()
        question = Question(prompt=tokenizer.decode(prompt), answer="")
        seed = params.get("seed", params.get("sampling_seed"))
        sampler = Sampler(self.model, config=config, tokenizer=tokenizer)
        found = dict(sampler.generate(Request(step=0, first=0, questions=[question], seed=seed)))
        sampler._routers.unwrap()
        outputs = [
            {
                "tokens": found[index].response_T.tolist(),
                "rows": found[index].ids_TLK,
                "finish": "length",
                "versions": [{"version": self.version, "start": 0, "end": len(found[index].response_T)}],
            }
            for index in range(len(found))
        ]
        form = {"vllm 0.22": vllm_28, "vllm 0.32": vllm_32, "sglang 0.5.23": sglang_523}
        return form[self.kind](prompt, outputs)


def refuse(message):
    raise Refused(400, {"success": False, "message": message})
